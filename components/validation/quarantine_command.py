"""`evergreen quarantine`: lists what rules set aside, and takes rows back.

Rows that are taken back (`replay`) are learnt by the next round beside its window, in spite of the rule, once; see
`quarantine.returning`. A wrong value is not mended so: for that the day is filled anew in the lake.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from components.runtime.errors import ContractError
from components.runtime.people import whoami
from components.storage.uris import typed_folder
from components.validation.quarantine import kept


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="evergreen quarantine", description="Looks after rows that were set aside.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list what each run set aside, by rule, and what was taken back")
    listing.add_argument("--run", default="", help="this run alone")
    listing.add_argument("--json", action="store_true", help="print JSON")
    replay = commands.add_parser("replay", help="take rows back: the next round learns them in spite of the rule")
    replay.add_argument("--run", required=True, help="the run that set them aside")
    replay.add_argument("--rule", default=None, help="only those under this rule (default: all)")
    replay.add_argument("--reason", required=True, help="why")
    replay.add_argument("--who", default=whoami(), help="who takes them back (%(default)s)")
    for each in (listing, replay):
        each.add_argument("--store", required=True, help="model store, folder or its URI")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 done, 2 misuse, 3 a disk failed."""
    arguments = build_parser().parse_args(argv)
    try:
        store = typed_folder(arguments.store, "--store")
        return _list(store, arguments) if arguments.command == "list" else _replay(store, arguments)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


def _list(store: Path, arguments: argparse.Namespace) -> int:
    batches = [kept.read_batch(store, arguments.run)] if arguments.run else kept.read_batches(store)
    back = kept.taken_back(store)
    if arguments.json:
        told = [{**asdict(batch), "taken_back": sorted(back.get(batch.run, set()))} for batch in batches]
        print(json.dumps(told))
        return 0
    for batch in batches:
        print(f"{batch.run}  {batch.time}  {batch.num_rows} rows  {kept.rows_folder(store, batch.run)}")
        for rule, num_rows in batch.num_by_rule.items():
            print(f"    {rule}: {num_rows} rows" + (", taken back" if rule in back.get(batch.run, set()) else ""))
    print(f"{sum(batch.num_rows for batch in batches)} rows of {len(batches)} runs are set aside")
    return 0


def _replay(store: Path, arguments: argparse.Namespace) -> int:
    if not arguments.reason.strip():
        raise ContractError("reason is empty, expected why the rows are taken back")
    line = kept.replay(store, arguments.run, arguments.rule, who=arguments.who, reason=arguments.reason)
    if line is None:
        print("all of them were taken back before; nothing is done twice")
    else:
        print(f"{line.num_rows} rows under {', '.join(line.rules)} will be learnt by the next round")
    return 0


if __name__ == "__main__":
    sys.exit(main())
