"""The flags of the client's commands; importing this needs the standard library only."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

from components.storage.uris import typed_uri

_SERVER = "host:port of Triton's gRPC endpoint, or dns:///name:port for all replicas behind a name"
_DEADLINE = "per request, retries included"
_ROWS = "Parquet, TSV or CSV file of Criteo rows, plain or gzip, or a folder of them"
_PLAN = "model repository (folder or gs:// URI) whose traffic plan is followed; without it the one model is asked"


def add_score(parser: argparse.ArgumentParser) -> None:
    """Of `score`."""
    parser.add_argument("--server", required=True, help=_SERVER)
    parser.add_argument("--data", type=Path, required=True, help=_ROWS)
    parser.add_argument("--limit", type=int, help="score the first rows only")
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help=_DEADLINE)


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Of `replay`."""
    parser.description = (
        "Commands on standard input, one a line: drift, rate N, stop. End of standard input means stop, so the replay "
        "ends with its parent; keep it open."
    )
    parser.add_argument("--server", required=True, help=_SERVER)
    parser.add_argument(
        "--log",
        required=True,
        help="sqlite:////absolute/path.db, sqlite:///relative/path.db, pubsub://project/topic or kafka://host:port/topic",
    )
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--world", type=Path, help="JSON of the world to draw from")
    rows.add_argument("--data", type=Path, help=f"{_ROWS}, with labels; replayed once in order")
    parser.add_argument("--drifted-world", type=Path, help="JSON of the world that `drift` switches to")
    parser.add_argument("--drift-columns", type=_names, default=(), help="with --data: columns to permute, as C1,C5")
    parser.add_argument("--rate", type=float, required=True, help="rows per second")
    parser.add_argument("--rows-per-request", type=int, default=64)
    parser.add_argument("--label-delay-seconds", type=float, default=1.5, help="mean; exponential, at most 4 times it")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stats", type=Path, required=True, help="JSON lines, one per second")
    parser.add_argument("--summary", type=Path, required=True, help="JSON, written at the end")
    parser.add_argument("--max-rows", type=int, help="stop after this many rows")
    parser.add_argument("--max-in-flight", type=int, default=16, help="requests at once")
    parser.add_argument("--max-consecutive-failures", type=int, default=20, help="then give up with exit code 3")
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help=_DEADLINE)
    parser.add_argument("--plan", type=typed_uri, help=_PLAN)
    parser.add_argument("--run-name", help="names the replay in request ids, must be new to the log; random without it")


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Of `rank`."""
    parser.add_argument("--server", required=True, help=_SERVER)
    parser.add_argument("--context", type=Path, required=True, help="file of rows, one of which is the context")
    parser.add_argument("--context-row", type=int, default=0, help="which row of it, from 0")
    parser.add_argument("--candidates", type=Path, required=True, help="file of rows; the context fills what they lack")
    parser.add_argument("--k", type=int, required=True, help="places of the list")
    parser.add_argument("--key", help="whose list it is; the same key meets the same model of a traffic plan")
    parser.add_argument("--session-id", help="names the list in the log, to which it must be new; random without it")
    parser.add_argument("--log", help="where to publish the list; nowhere without it")
    parser.add_argument("--plan", type=typed_uri, help=_PLAN)
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help=_DEADLINE)


def add_load(parser: argparse.ArgumentParser) -> None:
    """Of `load`."""
    parser.add_argument("--server", required=True, help=_SERVER)
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--world", type=Path, help="JSON of the world to draw from")
    rows.add_argument("--data", type=Path, help=f"{_ROWS}; repeated")
    loop = parser.add_mutually_exclusive_group(required=True)
    loop.add_argument("--rate", type=float, help="open loop: requests per second, whatever the server does")
    loop.add_argument("--concurrency", type=int, help="closed loop: callers, each waiting for its answer")
    parser.add_argument("--arrivals", choices=("poisson", "even"), default="poisson", help="of the open loop")
    parser.add_argument("--rows-per-request", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured")
    parser.add_argument("--warm-up-seconds", type=float, default=1.0, help="before; not measured")
    parser.add_argument("--max-in-flight", type=int, default=512, help="open loop: requests at once; others wait")
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help=_DEADLINE)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of rows drawn")
    parser.add_argument("--json", type=Path, help="file to write the report to")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Of `simulate`."""
    parser.add_argument(
        "--lake", type=typed_uri, required=True, help="folder, its URI or gs://bucket/path that gets day partitions"
    )
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--days", type=int, required=True)
    parser.add_argument("--last-day", type=date.fromisoformat, required=True, help="YYYY-MM-DD")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--world", type=Path, required=True, help="JSON file to write the world to")
    parser.add_argument("--click-rate", type=float, default=0.25)
    parser.add_argument("--bayes-auc", type=float, default=0.80, help="best AUC that any model could reach")


def add_drift(parser: argparse.ArgumentParser) -> None:
    """Of `drift`."""
    parser.add_argument("--world", type=Path, required=True, help="JSON of the world before")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write the drifted world to")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--columns", type=_names, help="columns whose weights rotate; default: those that matter most")
    parser.add_argument("--new-category-columns", type=_names, help="columns that get new categories")
    parser.add_argument("--new-category-share", type=float, default=0.1, help="of the rows of those columns")
    parser.add_argument("--dense-shift", type=_shifts, default={}, help="covariate shift, as I5=0.5,I7=-0.2")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _shifts(text: str) -> dict[str, float]:
    return {name: float(shift) for name, _, shift in (part.partition("=") for part in _names(text))}
