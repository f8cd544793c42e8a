"""`evergreen data quarantine`: list how many rows each run quarantined."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from components.validation.quarantine import read_quarantined_runs, rows_folder
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table
from evergreen.storage.uris import typed_folder

COLUMNS = (
    TableColumn(name="run", is_flexible=True),
    TableColumn(name="time"),
    TableColumn(name="rows", is_number=True),
    TableColumn(name="folder", is_flexible=True),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = CommandParser(prog="evergreen data quarantine", description="Lists quarantined rows.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser(
        "list", help="list the number and the folder of the rows that each run quarantined"
    )
    add_store_flag(listing)
    add_listing_flags(listing)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    runs = read_quarantined_runs(store)
    if arguments.json:
        print(json.dumps([asdict(each) for each in runs]))
        return ExitCode.DONE
    if runs:
        rows = [
            (
                each.run,
                local_time(each.time),
                f"{each.num_rows:,}",
                str(rows_folder(store, each.run)),
            )
            for each in runs
        ]
        print_table(COLUMNS, rows, wide=arguments.wide)
    print(f"{sum(each.num_rows for each in runs)} rows of {len(runs)} runs are quarantined")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
