"""Replay traffic, simulate a lake, or drift the simulated users.

This module contains only the command line. `evergreen.runtime.exit_codes` maps errors to exit
codes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from evergreen.config.reader import make_settings, read_flags
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.uris import typed_uri

if TYPE_CHECKING:
    from demo.simulation.traffic import Traffic
    from evergreen.config.spec import Recommender
    from inference_client.scoring import ClientSettings


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with the standard library only."""
    parser = CommandParser(prog="evergreen simulate", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run_command, add_arguments, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(run_command=run_command)
        add_arguments(command)
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    options = build_parser().parse_args(argv)
    log_as_text("%(asctime)s %(levelname)s %(message)s")
    command: Callable[[argparse.Namespace], None] = options.run_command
    command(options)
    return 0


def add_server_flags(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add the flags for the server, its recommender and the connection."""
    described = (
        "model registry, or a copy of its file recommender/N.json, which describes the columns of "
        "the rows"
    )
    parser.add_argument("--recommender", type=Path, required=is_required, help=described)
    server = (
        "host:port of Triton's gRPC endpoint, or dns:///name:port for all replicas behind a name"
    )
    parser.add_argument("--server", required=True, help=server)
    parser.add_argument("--deadline-seconds", help="per request, retries included")
    parser.add_argument(
        "--tls", action="store_true", help="encrypt, and check the server's certificate"
    )
    for flag, text in (
        ("--ca-file", "PEM file of the CA certificates; default: gRPC's own"),
        ("--certificate-file", "PEM file of the client's certificate"),
        ("--key-file", "PEM file of the client's private key"),
        ("--token-file", "file with a token, sent as `authorization: Bearer TOKEN`"),
    ):
        parser.add_argument(flag, help=f"with --tls: {text}")


def client_settings(options: argparse.Namespace) -> "ClientSettings":
    """Return the client's settings from the flags that `add_server_flags` added."""
    from inference_client.scoring import ClientSettings

    return make_settings(ClientSettings, **read_flags(ClientSettings, options))


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Commands on standard input, one a line: drift, stop. The replay stops at the end of "
        "standard input, so keep standard input open."
    )
    add_server_flags(parser, is_required=False)
    plan = (
        "model repository (folder or gs:// URI) with the traffic plan to follow; default: the "
        "recommender's one model"
    )
    parser.add_argument("--plan", type=typed_uri, help=plan)
    parser.add_argument(
        "--log",
        required=True,
        help="sqlite:////absolute/path.db, sqlite:///relative/path.db, pubsub://project/topic or "
        "kafka://host:port/topic",
    )
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--simulator", type=Path, help="JSON file of the simulator to draw from")
    rows.add_argument(
        "--data",
        type=Path,
        help="Parquet file of labelled rows, or a folder of them; replayed once",
    )
    parser.add_argument(
        "--drifted-simulator",
        type=Path,
        help="with --simulator: JSON file of the simulator after `drift`",
    )
    parser.add_argument(
        "--drift-columns",
        type=_split_names,
        default=(),
        help="with --data: columns that `drift` changes, such as price,shop",
    )
    parser.add_argument(
        "--keep-requests",
        action="store_true",
        help="with --data: send rows with the same request_id as one request, of at most "
        "--rows-per-request rows",
    )
    parser.add_argument("--rate", required=True, help="rows per second")
    parser.add_argument("--rows-per-request", help="default: 64")
    parser.add_argument(
        "--label-delay-seconds",
        help="mean delay of a click, exponential up to 4 times the mean (default: 1.5)",
    )
    parser.add_argument("--seed", type=int, required=True, help="seed of rows, clicks and delays")
    parser.add_argument("--stats", type=Path, required=True, help="JSON lines, one per second")
    parser.add_argument("--summary", type=Path, required=True, help="JSON, written at the end")
    parser.add_argument("--max-rows", help="stop after this many rows")
    parser.add_argument(
        "--max-consecutive-failures",
        help="number of consecutive failures after which the replay ends with exit code 3 "
        "(default: 20)",
    )


def _replay_traffic(options: argparse.Namespace) -> None:
    import asyncio
    from uuid import uuid4

    from demo.simulation.replay import ReplayProcess, ReplaySettings, run_replay

    recommender = _sent_recommender(options)
    process = ReplayProcess(
        server=options.server,
        recommender=recommender,
        log_url=options.log,
        seed=options.seed,
        stats_path=options.stats,
        summary_path=options.summary,
        run=f"replay-{uuid4().hex[:12]}",
        plan_uri=options.plan,
    )
    settings = make_settings(ReplaySettings, **read_flags(ReplaySettings, options))
    client = client_settings(options)
    summary = asyncio.run(
        run_replay(process, _open_traffic(options, recommender), settings, client_settings=client)
    )
    print(
        json.dumps(
            {
                "requests": summary["requests"],
                "rows": summary["rows"],
                "outcomes": summary["outcomes"],
            }
        )
    )


def _sent_recommender(options: argparse.Namespace) -> "Recommender":
    """Return the recommender whose rows are sent.

    Return the recommender whose rows are sent, by default the simulator's.
    """
    from demo.simulation.tables import RECOMMENDER
    from evergreen.registry.recommenders import recommender_at

    if options.recommender is None and options.data:
        raise ContractError(
            "--recommender is absent, expected the recommender of the rows in --data"
        )
    found = RECOMMENDER if options.recommender is None else recommender_at(options.recommender)
    if options.simulator and found.features != RECOMMENDER.features:
        raise ContractError(
            f"recommender {found.name} has the columns {', '.join(found.features.names)}, expected "
            f"the simulator's columns {', '.join(RECOMMENDER.features.names)}"
        )
    return found


def _open_traffic(options: argparse.Namespace, recommender: "Recommender") -> "Traffic":
    import numpy as np

    from demo.simulation.simulator import Simulator
    from demo.simulation.traffic import FileTraffic, SimulatedTraffic

    if options.data:
        if options.drifted_simulator:
            raise ContractError(
                "--drifted-simulator is given with --data, expected --drift-columns"
            )
        return FileTraffic(
            options.data,
            recommender,
            drift_columns=options.drift_columns,
            seed=options.seed,
            keeps_requests=options.keep_requests,
        )
    if options.drift_columns:
        raise ContractError(
            "--drift-columns is given with --simulator, expected --drifted-simulator"
        )
    if options.keep_requests:
        raise ContractError(
            "--keep-requests is given with --simulator, expected --data: only rows of a file are "
            "grouped into requests"
        )
    drifted = Simulator.load(options.drifted_simulator) if options.drifted_simulator else None
    return SimulatedTraffic(
        Simulator.load(options.simulator), drifted, np.random.default_rng([options.seed, 9])
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lake",
        type=typed_uri,
        required=True,
        help="lake for the rows: folder, its URI or gs://bucket/path",
    )
    parser.add_argument("--rows", type=int, required=True, help="number of rows")
    parser.add_argument(
        "--days", type=int, required=True, help="number of days over which the rows are spread"
    )
    parser.add_argument(
        "--last-day", type=date.fromisoformat, required=True, help="last day, YYYY-MM-DD"
    )
    parser.add_argument("--seed", type=int, required=True, help="random seed")
    parser.add_argument("--simulator", type=Path, required=True, help="JSON file for the simulator")


def _simulate_lake(options: argparse.Namespace) -> None:
    from demo.simulation.simulator import Simulator, write_lake

    simulator = Simulator.create(options.seed)
    size = {
        "rows": options.rows,
        "days": options.days,
        "last_day": options.last_day,
        "seed": options.seed,
    }
    report = write_lake(simulator, options.lake, **size)
    simulator.save(options.simulator)
    print(json.dumps(asdict(report)))


def _add_drift(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulator",
        type=Path,
        required=True,
        help="JSON file of the simulator without the new drift",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file for the drifted simulator"
    )
    parser.add_argument("--seed", type=int, required=True, help="random seed")


def _drift_simulator(options: argparse.Namespace) -> None:
    from demo.simulation.simulator import Drift, Simulator

    drift = Drift(seed=options.seed)
    Simulator.load(options.simulator).drifted(drift).save(options.output)
    print(
        json.dumps({"columns": drift.columns, "new_category_columns": drift.new_category_columns})
    )


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_COMMANDS: dict[
    str, tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None], str]
] = {
    "traffic": (_replay_traffic, _add_replay, "send traffic at a given rate and publish records"),
    "lake": (_simulate_lake, _add_simulate, "write a lake of simulated rows"),
    "drift": (_drift_simulator, _add_drift, "write a drifted copy of a simulator"),
}


if __name__ == "__main__":
    sys.exit(main())
