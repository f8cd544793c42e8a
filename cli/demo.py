"""`evergreen demo` runs the loop on this machine, and `evergreen open` serves a finished demo."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    parser = CommandParser(prog="evergreen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    arguments = build_parser().parse_args(argv)
    log_as_text("%(asctime)s %(name)s %(message)s")
    return _run_open(arguments) if arguments.command == "open" else _run_demo(arguments)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="run the complete loop once on this machine")
    demo.add_argument(
        "--data",
        type=Path,
        help="your file of rows, or a folder of them, instead of simulated clicks",
    )
    demo.add_argument(
        "--recommender",
        type=Path,
        help="with --data: file that describes the rows (default: Criteo's for Criteo's files, "
        "else a draft)",
    )
    demo.add_argument("--folder", type=Path, default=Path("build/demo"), help="folder to write to")
    demo.add_argument(
        "--rows",
        type=int,
        default=250_000,
        help="rows of the first lake, or maximum rows read from --data",
    )
    demo.add_argument("--seed", type=int, default=7, help="seed of the simulator")
    demo.add_argument(
        "--log",
        default="sqlite",
        help="record log: sqlite, pubsub (Google's emulator, if installed) or kafka (librdkafka's "
        "mock cluster)",
    )
    demo.add_argument(
        "--drift-columns",
        default="",
        help=(
            "with --data: comma-separated columns whose values change their meaning (default: "
            "numeric columns and "
            "columns with few categories)"
        ),
    )

    opened = commands.add_parser(
        "open", help="serve a finished demo again, with its status page, until Ctrl-C"
    )
    opened.add_argument(
        "folder", type=Path, nargs="?", default=Path("build/demo"), help="folder of the demo"
    )


def _run_demo(arguments: argparse.Namespace) -> int:
    from demo.demo import run_demo
    from demo.plan import DemoSettings

    settings = DemoSettings(
        folder=arguments.folder.resolve(),
        data=arguments.data.resolve() if arguments.data else None,
        recommender=arguments.recommender.resolve() if arguments.recommender else None,
        rows=arguments.rows,
        seed=arguments.seed,
        log=arguments.log,
        drift_columns=tuple(filter(None, arguments.drift_columns.split(","))),
    )
    return run_demo(settings)


def _run_open(arguments: argparse.Namespace) -> int:
    from demo.demo import open_demo

    return open_demo(arguments.folder.resolve())


if __name__ == "__main__":
    raise SystemExit(main())
