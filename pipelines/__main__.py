"""The `evergreen` command line: parses, and calls the room that does the work.

Commands of other rooms (monitor, replay, ...) replace this process by `python -m <room>` with the rest of the line, so
each room's flags are said once, there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from pipelines.cluster_commands import add_compile, add_submit, run_compile, run_submit
from pipelines.local.environments import REPOSITORY, python_of

logger = logging.getLogger(__name__)

ROOMS = {
    "monitor": ("monitoring", (), "watch the click log, decide when to retrain"),
    "uploader": ("monitoring.uploader", (), "move archived records into the lake"),
    "log": ("components.logs", (), "check the record log; list or replay its dead letters"),
    "simulate": ("inference_client", ("simulate",), "write a lake of simulated clicks"),
    "drift": ("inference_client", ("drift",), "write a drifted copy of a simulated world"),
    "traffic": ("inference_client", ("replay",), "send traffic to Triton and log predictions and clicks"),
    "backtest": ("monitoring.backtest", (), "would these policies have fired over an archive's records?"),
    "scale": ("k8s.scaling", (), "try the autoscaler without a cluster: simulate it over a trace of requests"),
    "incident": ("monitoring.backtest.incident_command", (), "record a span of the monitor's records and decisions"),
    "replay": ("monitoring.backtest.incident_command", ("replay",), "decide a recorded incident again, and compare"),
    "rank": ("inference_client", ("rank",), "rank rows of a file for one context"),
    "load": ("inference_client", ("load",), "put a stated load on a server and report latencies, errors and rates"),
    "score": ("inference_client", ("score",), "score rows of a file"),
    "schema": (
        "components.validation.schema_command",
        (),
        "show the schema that rows are judged by, compare two, accept a new one",
    ),
    "quarantine": (
        "components.validation.quarantine_command",
        (),
        "list the rows that rules set aside; take them back into the next round",
    ),
    "ingest": ("components.extraction.ingest", (), "turn Criteo files into a lake"),
    "backfill": ("components.extraction.backfill", (), "replace a past day of the lake by a new version of it"),
    "lineage": ("components.extraction.lineage", (), "which model saw which version of which day"),
    "verify": ("components.deployment.verify", (), "prove offline that a version answered as it was released"),
    "canary": ("components.deployment.canary", (), "give a new version a growing share of traffic, or take it back"),
    "watchdog": ("components.deployment.watchdog", (), "ask every server golden rows; reload what answers wrongly"),
    "rollback": ("components.deployment.rollback", (), "make an earlier version live again"),
    "promote": ("components.deployment.promote", (), "make a model live that the gate refused, on your word"),
}
ENVIRONMENT_OF_ROOM = {"schema": "validation"}
"""Rooms that need packages of another environment than this one's."""


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="evergreen", description="Keeps a recommender's click model fresh.")
    commands = parser.add_subparsers(dest="command", required=True)

    _add_demo(commands)
    add_compile(commands)

    run = commands.add_parser("run", help="run the compiled pipeline on this machine")
    run.add_argument("--package", type=Path, required=True, help="compiled pipeline")
    run.add_argument("--folder", type=Path, required=True, help="holds lake, store, work, repository, logs")
    run.add_argument("--request", type=Path, help="retrain request (JSON) to run for")
    _add_parameters(run)

    _add_parameters(add_submit(commands))

    _add_journal(commands)
    _add_model(commands.add_parser("model", help="look into one stored model"))

    for name, (_, _, summary) in ROOMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="turn the whole loop once on this machine")
    demo.add_argument("--data", type=Path, help="Criteo file or folder to use instead of simulated clicks")
    demo.add_argument("--folder", type=Path, default=Path("build/demo"), help="where everything is written")
    demo.add_argument("--rows", type=int, default=400_000, help="rows of the first lake, or most rows read of --data")
    demo.add_argument("--seed", type=int, default=7, help="seed of the simulated world")
    demo.add_argument(
        "--log",
        default="sqlite",
        help="record log: sqlite, pubsub (Google's emulator, where installed) or kafka (librdkafka's mock cluster)",
    )
    demo.add_argument(
        "--drift-columns",
        default="",
        help="with --data: category columns whose values are permuted, comma-separated (default: the short ones)",
    )


def _add_journal(commands: Any) -> None:
    models = commands.add_parser("models", help="list every release, rollback and promotion: who, when, why, hashes")
    live_at = commands.add_parser("live-at", help="tell which version was live at a time")
    live_at.add_argument("time", metavar="TIME", help="ISO 8601, UTC where it has no zone; or now")
    for parser in (models, live_at):
        parser.add_argument("--store", required=True, help="model store, folder or its URI")
        parser.add_argument("--json", action="store_true", help="print JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    inspect = actions.add_parser(
        "inspect", help="print rows per slot, norms, dense parameters, optimizer state, hashes"
    )
    inspect.add_argument("folder", type=Path, help="folder of a model in the store, or bare weights with --config")
    inspect.add_argument("--config", type=Path, help="JSON with `config` and `slot_sizes`, such as another model.json")


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="pipeline parameter, such as min_auc=0.7 or accept_inconclusive=true (repeatable)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 done, 1 refused, 2 misuse, 3 failed, 130 stopped by Ctrl-C.

    Python's own code for an unforeseen error is 1, which here means that a gate said no: so those are caught too.
    """
    line = list(sys.argv[1:] if argv is None else argv)
    if line and line[0] in ROOMS:
        module, words, _ = ROOMS[line[0]]
        python = _python_of(line[0])
        os.execv(python, [python, "-m", module, *words, *line[1:]])
    arguments = build_parser().parse_args(line)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        return _call(arguments)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PermanentError, TemporaryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        logger.exception("%s ended with an unforeseen error", arguments.command)
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 3


def _python_of(room: str) -> str:
    """The interpreter that runs a room's commands: this one, or another environment's, which must have been built."""
    if room not in ENVIRONMENT_OF_ROOM:
        return sys.executable
    python = python_of(ENVIRONMENT_OF_ROOM[room])
    if not python.exists():
        print(f"error: {room} needs {python}, which is absent; `make environments` builds it", file=sys.stderr)
        raise SystemExit(2)
    # The environment does not hold our code; the working folder stays the user's.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return str(python)


def _call(arguments: argparse.Namespace) -> int:
    if arguments.command == "demo":
        from pipelines.local.demo import DemoSettings, run_demo

        settings = DemoSettings(
            folder=arguments.folder.resolve(),
            data=arguments.data.resolve() if arguments.data else None,
            rows=arguments.rows,
            seed=arguments.seed,
            log=arguments.log,
            drift_columns=tuple(filter(None, arguments.drift_columns.split(","))),
        )
        return run_demo(settings)
    if arguments.command == "compile":
        return run_compile(arguments)
    if arguments.command == "run":
        from components.contracts.retrain_request import RetrainRequest
        from pipelines.local.run import EXIT_CODES, LocalFolders, run_once
        from pipelines.package import read_parameters

        request = RetrainRequest.read(arguments.request) if arguments.request else None
        folders = LocalFolders(root=arguments.folder.resolve())
        parameters = read_parameters(arguments.package, arguments.parameter)
        outcome = run_once(arguments.package, folders, parameters, request)
        print(f"{outcome.state} at {outcome.step}: {outcome.reason}")
        return EXIT_CODES[outcome.state]
    if arguments.command == "submit":
        return run_submit(arguments)
    if arguments.command == "model":
        from pipelines.model_report import print_inspection

        return print_inspection(arguments.folder, arguments.config)
    return _tell_journal(arguments)


def _tell_journal(arguments: argparse.Namespace) -> int:
    from components.storage.uris import typed_folder
    from pipelines.models import print_live_at, print_models

    store = typed_folder(arguments.store, "--store")
    if arguments.command == "live-at":
        print_live_at(store, arguments.time, as_json=arguments.json)
    else:
        print_models(store, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
