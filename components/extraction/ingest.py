"""Brings a user's Criteo files into the lake: `python -m components.extraction.ingest`, the command line.

The work is `ingestion`'s.
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
        prog="python -m components.extraction.ingest",
        description="Reads Criteo files (1TB TSV, Kaggle CSV, Parquet) in order, gives rows times spread over whole "
        "days, and writes the earlier ones to the lake, the later ones to a file to replay. Prints its counts as JSON.",
    )
    parser.add_argument("--data", required=True, type=Path, help="a Criteo file, or a folder of them")
    parser.add_argument(
        "--lake", required=True, help="lake: folder or its URI, made where it is absent; or gs://bucket/prefix"
    )
    parser.add_argument("--last-day", required=True, help="UTC day of the last row, YYYY-MM-DD")
    parser.add_argument("--days", required=True, type=int, help="whole days over which the rows spread")
    parser.add_argument("--max-rows", type=int, default=None, help="rows taken from the beginning; all without it")
    parser.add_argument(
        "--lake-fraction", required=True, type=float, help="share of the rows, the earlier ones, to lake"
    )
    parser.add_argument("--replay", required=True, type=Path, help="Parquet file for the other rows")
    parser.add_argument(
        "--max-malformed-fraction",
        type=float,
        default=0.01,
        help="share of a file's rows that may be malformed and set aside (into <replay>.set_aside.jsonl)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; 0 done, 2 misuse or unusable input, 3 the bucket cannot be reached or written; told on stderr."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from components.extraction.ingestion import IngestSettings, ingest
    from components.extraction.readers.forms import click_log_files
    from components.extraction.times import parse_day
    from components.runtime.errors import ContractError, PermanentError, TemporaryError
    from components.storage.uris import typed_uri

    try:
        settings = IngestSettings(
            last_day=parse_day("last_day", arguments.last_day),
            days=arguments.days,
            max_rows=arguments.max_rows,
            lake_fraction=arguments.lake_fraction,
            max_malformed_fraction=arguments.max_malformed_fraction,
        )
        files = click_log_files(arguments.data)
        summary = ingest(files, lake=typed_uri(arguments.lake), replay=arguments.replay, settings=settings)
    except (ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PermanentError, TemporaryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
