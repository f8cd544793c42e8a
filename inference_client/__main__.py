"""Command line of the inference client: score a file, replay traffic, simulate a lake, drift a world.

Parses, calls, and turns errors into exit codes: 0 done, 2 misuse or bad input, 3 the server or the log failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from components.contracts.errors import ContractError, PermanentError, TemporaryError

if TYPE_CHECKING:
    from inference_client.traffic import Traffic

DONE, MISUSE, FAILED = 0, 2, 3


def build_parser() -> argparse.ArgumentParser:
    """The command line; importing it needs the standard library only."""
    parser = argparse.ArgumentParser(prog="python -m inference_client", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_score(commands.add_parser("score", help="score the rows of a Parquet file; prints a JSON line per row"))
    _add_replay(commands.add_parser("replay", help="send traffic at a stated rate and publish records"))
    _add_simulate(commands.add_parser("simulate", help="write a lake of rows of a new synthetic world"))
    _add_drift(commands.add_parser("drift", help="write a drifted copy of a world"))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    command: Callable[[argparse.Namespace], None] = options.run_command
    try:
        command(options)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSE
    except (TemporaryError, PermanentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return DONE


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run_command=_score)
    parser.add_argument("--server", required=True, help="host:port of Triton's gRPC endpoint")
    parser.add_argument("--data", type=Path, required=True, help="Parquet file (or folder) with I1..I13 and C1..C26")
    parser.add_argument("--limit", type=int, help="score the first rows only")
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help="per request; short ones harm Triton")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run_command=_replay)
    parser.description = (
        "Commands on standard input, one a line: drift, rate N, stop. End of standard input means stop, so the replay "
        "ends with its parent; keep it open."
    )
    parser.add_argument("--server", required=True, help="host:port of Triton's gRPC endpoint")
    parser.add_argument("--log", required=True, help="sqlite:////absolute/path.db, or sqlite:///relative/path.db")
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--world", type=Path, help="JSON of the world to draw from")
    rows.add_argument("--data", type=Path, help="labelled Parquet file (or folder), replayed once in order")
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
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help="per request; short ones harm Triton")
    parser.add_argument("--run-name", help="names the replay in request ids; random without it")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run_command=_simulate)
    parser.add_argument("--lake", type=Path, required=True, help="folder that gets day=YYYY-MM-DD partitions")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--days", type=int, required=True)
    parser.add_argument("--last-day", type=date.fromisoformat, required=True, help="YYYY-MM-DD")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--world", type=Path, required=True, help="JSON file to write the world to")
    parser.add_argument("--click-rate", type=float, default=0.25)
    parser.add_argument("--bayes-auc", type=float, default=0.80, help="best AUC that any model could reach")


def _add_drift(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run_command=_drift)
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


def _score(options: argparse.Namespace) -> None:
    from inference_client.client import ClientSettings
    from inference_client.scoring import score_file

    if options.limit is not None and options.limit < 1:
        raise ContractError(f"limit is {options.limit}, expected at least 1")
    settings = ClientSettings(deadline_seconds=options.deadline_seconds)
    score_file(options.server, options.data, sys.stdout, settings=settings, limit=options.limit)


def _replay(options: argparse.Namespace) -> None:
    from uuid import uuid4

    from inference_client.client import ClientSettings
    from inference_client.replay import ReplaySettings
    from inference_client.session import SessionSettings, run_session

    session = SessionSettings(
        server=options.server,
        log_url=options.log,
        seed=options.seed,
        stats_path=options.stats,
        summary_path=options.summary,
        run=options.run_name or f"replay-{uuid4().hex[:12]}",
    )
    replay = ReplaySettings(
        rate=options.rate,
        rows_per_request=options.rows_per_request,
        label_delay_seconds=options.label_delay_seconds,
        max_rows=options.max_rows,
        max_in_flight=options.max_in_flight,
        max_consecutive_failures=options.max_consecutive_failures,
    )
    client = ClientSettings(deadline_seconds=options.deadline_seconds, max_in_flight=options.max_in_flight)
    summary = run_session(session, replay, client, lambda: _traffic(options))
    print(json.dumps({"requests": summary["requests"], "rows": summary["rows"], "outcomes": summary["outcomes"]}))


def _traffic(options: argparse.Namespace) -> Traffic:
    import numpy as np

    from inference_client.simulation.world import World
    from inference_client.traffic import FileTraffic, WorldTraffic

    if options.data:
        if options.drifted_world:
            raise ContractError("--drifted-world goes with --world, expected --drift-columns with --data")
        return FileTraffic(options.data, drift_columns=options.drift_columns, seed=options.seed)
    if options.drift_columns:
        raise ContractError("--drift-columns goes with --data, expected --drifted-world with --world")
    drifted = World.load(options.drifted_world) if options.drifted_world else None
    return WorldTraffic(World.load(options.world), drifted, np.random.default_rng([options.seed, 9]))


def _simulate(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from inference_client.simulation.lake import write_lake
    from inference_client.simulation.world import World

    world = World.create(options.seed, click_rate=options.click_rate, bayes_auc=options.bayes_auc)
    report = write_lake(
        world,
        options.lake,
        rows=options.rows,
        days=options.days,
        last_day=options.last_day,
        seed=options.seed,
    )
    world.save(options.world)
    print(json.dumps(asdict(report)))


def _drift(options: argparse.Namespace) -> None:
    import numpy as np

    from inference_client.simulation.world import Drift, World, measured_bayes_auc

    world = World.load(options.world)
    plain = Drift(seed=options.seed)
    columns = plain.columns if options.columns is None else options.columns
    fresh = columns[:2] if options.new_category_columns is None else options.new_category_columns
    drift = Drift(
        seed=options.seed,
        columns=columns,
        new_category_columns=fresh,
        new_category_share=options.new_category_share,
        dense_shift=options.dense_shift,
    )
    drifted = world.drifted(drift)
    drifted.save(options.output)
    sample = drifted.draw(50_000, np.random.default_rng([options.seed, 10]))
    print(json.dumps({"columns": columns, "new_category_columns": fresh, "bayes_auc": measured_bayes_auc(sample)}))


if __name__ == "__main__":
    sys.exit(main())
