"""`evergreen incident` records one, `evergreen replay` decides it again. Parses and calls."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from components.runtime.exit_codes import ExitCode, exits_with_code
from components.storage.locations import open_objects
from components.storage.uris import typed_folder, typed_uri
from monitoring.backtest.__main__ import parse_time
from monitoring.backtest.incident import Replayed, digest_of, read_incident, replay
from monitoring.backtest.recording import record
from monitoring.backtest.settings import read_judging


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `REFUSED` = the replay decided otherwise."""
    arguments = _parser().parse_args(argv)
    return int(arguments.call(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evergreen", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    recorded = commands.add_parser("record", help="copy a span of records and what was decided over it into a folder")
    recorded.add_argument("--state", required=True, help="the monitor's state folder")
    recorded.add_argument("--archive", required=True, help="its archive, or the lake: folder or gs://bucket/path")
    recorded.add_argument("--store", required=True, help="model store")
    moment = "ISO 8601 or seconds since the epoch"
    recorded.add_argument(
        "--start", type=parse_time, default=0.0, help=f"{moment} (default: before the first decision)"
    )
    recorded.add_argument("--end", type=parse_time, help="the last decision point (default: the last decision)")
    recorded.add_argument("--out", type=Path, required=True, help="folder to make")
    recorded.set_defaults(call=_record)
    replayed = commands.add_parser("replay", help="decide a recorded incident again and compare")
    replayed.add_argument("incident", type=Path, metavar="INCIDENT", help="folder of the incident")
    replayed.add_argument("--json", action="store_true", help="print JSON")
    replayed.set_defaults(call=_replay)
    return parser


def _record(arguments: argparse.Namespace) -> int:
    state = typed_folder(arguments.state, "--state")
    points = record(
        arguments.out,
        state=state,
        archive=open_objects(typed_uri(arguments.archive)),
        store=typed_folder(arguments.store, "--store"),
        settings=read_judging(state),
        start=arguments.start,
        end=arguments.end,
    )
    print(f"{points} decision points recorded in {arguments.out}")
    return ExitCode.DONE


def _replay(arguments: argparse.Namespace) -> int:
    found = replay(read_incident(arguments.incident))
    differs = found.first_difference
    if arguments.json:
        told = {"points": len(found.lines), "digest": found.digest, "first_difference": differs}
        print(json.dumps({**told, "recorded_digest": digest_of(found.recorded)}, indent=2))
    else:
        _tell(found)
    return ExitCode.DONE if differs is None else ExitCode.REFUSED


def _tell(found: Replayed) -> None:
    for line in found.lines:
        known = json.loads(line)
        print(
            f"{known['time']:.3f}  version {known['version']}  {known['policy']}: {known['action']}: {known['reason']}"
        )
    print(f"{len(found.lines)} decision points, digest {found.digest}")
    differs = found.first_difference
    if differs is None:
        print("every decision is the recorded one")
        return
    print(f"decision {differs + 1} differs from the recorded one:")
    for name, lines in (("recorded", found.recorded), ("replayed", found.lines)):
        print(f"  {name}: {lines[differs] if differs < len(lines) else 'none'}")


if __name__ == "__main__":
    sys.exit(main())
