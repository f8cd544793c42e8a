"""Replaces a past day of the lake by a new version: `evergreen backfill`, the command line.

The work is `backfilling`'s.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """The tool's flags; `--help` is its documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m components.extraction.backfill",
        description="Writes the rows of files (raw Parquet of the day, or Criteo files without times) as the next "
        "version of a day of the lake. Readers take the newest complete version, and beside it files that came to the "
        "day after it was written. Prints its counts as JSON.",
    )
    parser.add_argument("--lake", required=True, help="lake, folder or its URI, or gs://")
    parser.add_argument("--day", required=True, help="the day, UTC, YYYY-MM-DD")
    parser.add_argument("--reason", default="", help="why, kept in the version's marker")
    parser.add_argument(
        "--max-malformed-fraction",
        type=float,
        default=0.01,
        help="share of a file's rows that may be malformed or of another day, and are set aside",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file, or a folder of Criteo files")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; 0 done, 2 misuse or unusable input, 3 the lake cannot be reached or written; told on stderr."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from components.extraction.backfilling import BackfillSettings, backfill
    from components.extraction.readers.forms import click_log_files
    from components.extraction.times import parse_day
    from components.runtime.errors import ContractError, PermanentError, TemporaryError
    from components.storage.uris import typed_uri

    try:
        settings = BackfillSettings(
            day=parse_day("day", arguments.day),
            reason=arguments.reason,
            max_malformed_fraction=arguments.max_malformed_fraction,
        )
        files = [file for path in arguments.files for file in click_log_files(path)]
        done = backfill(files, lake=typed_uri(arguments.lake), settings=settings)
    except (ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PermanentError, TemporaryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(json.dumps({"day": arguments.day, **done._asdict()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
