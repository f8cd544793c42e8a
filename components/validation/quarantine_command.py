"""`evergreen quarantine`: lists what rules quarantined, and takes rows back.

Rows that are taken back (`replay`) are learned by the next round beside its window, in spite of the rule, once; see
`quarantine.ReturningRows`. A wrong value is not repaired this way: for that the day is back-filled in the lake.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from components.runtime.errors import ContractError
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.runtime.people import whoami
from components.storage.uris import typed_folder
from components.validation import quarantine_store


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="evergreen quarantine", description="Lists and replays quarantined rows.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list what each run quarantined, by rule, and what was taken back")
    listing.add_argument("--run", default="", help="this run alone")
    listing.add_argument("--json", action="store_true", help="print JSON")
    replay = commands.add_parser("replay", help="take rows back: the next round learns them in spite of the rule")
    replay.add_argument("--run", required=True, help="the run that quarantined them")
    replay.add_argument("--rule", default=None, help="only those under this rule (default: all)")
    replay.add_argument("--reason", required=True, help="why")
    replay.add_argument("--who", default=whoami(), help="who takes them back (%(default)s)")
    for each in (listing, replay):
        each.add_argument("--store", required=True, help="model store, folder or its URI")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    if arguments.command == "list":
        _list(store, arguments)
    else:
        _replay(store, arguments)
    return ExitCode.DONE


def _list(store: Path, arguments: argparse.Namespace) -> None:
    run = arguments.run
    runs = [quarantine_store.read_quarantined_run(store, run)] if run else quarantine_store.read_quarantined_runs(store)
    replayed = quarantine_store.read_replayed(store)
    if arguments.json:
        back = {kept.run: sorted(rule for run, rule in replayed if run == kept.run) for kept in runs}
        print(json.dumps([{**asdict(kept), "taken_back": back[kept.run]} for kept in runs]))
        return
    for kept in runs:
        print(f"{kept.run}  {kept.time}  {kept.num_rows} rows  {quarantine_store.rows_folder(store, kept.run)}")
        for rule, num_rows in kept.num_by_rule.items():
            print(f"    {rule}: {num_rows} rows" + (", taken back" if (kept.run, rule) in replayed else ""))
    print(f"{sum(kept.num_rows for kept in runs)} rows of {len(runs)} runs are quarantined")


def _replay(store: Path, arguments: argparse.Namespace) -> None:
    if not arguments.reason.strip():
        raise ContractError("reason is empty, expected why the rows are taken back")
    line = quarantine_store.replay_rows(
        store, arguments.run, arguments.rule, who=arguments.who, reason=arguments.reason
    )
    if line is None:
        print("all of them were taken back before; nothing changed")
    else:
        print(f"{line.num_rows} rows under {', '.join(line.rules)} will be learned by the next round")


if __name__ == "__main__":
    sys.exit(main())
