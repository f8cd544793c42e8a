"""Quarantined rows in the model registry, and `evergreen data quarantine`, which lists them.

The quarantined rows are in the registry, because the step's folder is removed with the work folder.
Each run that quarantined rows has a folder `<store>/quarantine/runs/<run>` with `quarantine.json`
and `rows/*.parquet` (raw columns and `quarantine_reason`). Only `cli.forget` removes quarantined
rows, namely those of a forgotten user. The number of rows in `quarantine.json` still includes the
removed rows. The lake does not change, so it still contains the quarantined rows.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from evergreen.registry.runs import run_folder
from evergreen.runtime.durable import whole_directory
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table
from evergreen.storage.uris import typed_folder

_MANIFEST = "quarantine.json"


@dataclass(frozen=True, kw_only=True)
class QuarantinedRun:
    """The rows that one run quarantined."""

    run: str
    time: str
    num_rows: int


def quarantine_folder(store: Path) -> Path:
    """Return the folder of all quarantined rows."""
    return store / "quarantine"


def rows_folder(store: Path, run: str) -> Path:
    """Return the folder of the rows that `run` quarantined."""
    return quarantine_folder(store) / "runs" / run_folder(store, run).name / "rows"


def keep_quarantined(store: Path, run: str, rows: Path, *, num_rows: int) -> Path:
    """Copy the Parquet files in `rows` into the registry, and return their folder.

    Files of an earlier try of the run are replaced.
    """
    final = rows_folder(store, run)
    kept = QuarantinedRun(run=run, time=datetime.now(timezone.utc).isoformat(), num_rows=num_rows)
    with whole_directory(final.parent, replace=True) as folder:
        shutil.copytree(rows, folder / final.name)
        (folder / _MANIFEST).write_text(json.dumps(asdict(kept), indent=2) + "\n", encoding="utf-8")
    return final


def forget_quarantined(store: Path, run: str) -> None:
    """Remove the rows that an earlier try of `run` quarantined."""
    shutil.rmtree(rows_folder(store, run).parent, ignore_errors=True)


def _read_quarantined_runs(store: Path) -> list[QuarantinedRun]:
    """Return the quarantined rows of every run, oldest first.

    Raises:
        ContractError: A manifest cannot be read.
    """
    found = []
    for path in (quarantine_folder(store) / "runs").glob(f"[!.]*/{_MANIFEST}"):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found.append(
                QuarantinedRun(
                    **{each.name: document[each.name] for each in fields(QuarantinedRun)}
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ContractError(f"{path} cannot be read: {error!r}") from error
    return sorted(found, key=lambda kept: (kept.time, kept.run))


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
        "list", help="list how many rows each run quarantined, and where they lie"
    )
    listing.add_argument("--store", required=True, help="folder or URI of the registry")
    add_listing_flags(listing)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    runs = _read_quarantined_runs(store)
    if arguments.json:
        print(json.dumps([asdict(kept) for kept in runs]))
        return ExitCode.DONE
    if runs:
        rows = [
            (
                kept.run,
                local_time(kept.time),
                f"{kept.num_rows:,}",
                str(rows_folder(store, kept.run)),
            )
            for kept in runs
        ]
        print_table(COLUMNS, rows, wide=arguments.wide)
    print(f"{sum(kept.num_rows for kept in runs)} rows of {len(runs)} runs are quarantined")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
