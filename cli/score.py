"""`evergreen models score` scores the rows of a user's files on a server.

Files are read as `evergreen data ingest` reads them.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.simulation.__main__ import add_server_flags, client_settings
from evergreen.registry.recommenders import recommender_at
from evergreen.rows.forms import click_log_files, unlabelled_reader
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from inference_client.recommender import RecommenderClient

_ROWS_PER_REQUEST = 4096


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen models score",
        description="Score rows of files, in order and without labels. Print a JSON line for each "
        "row: its file "
        "and line (for Parquet its row), its score and the model's version, or why it is "
        "malformed.",
    )
    add_server_flags(parser)
    parser.add_argument(
        "--data", type=Path, required=True, help="a file of rows, or a folder of files"
    )
    parser.add_argument(
        "--limit", type=int, help="number of rows to read, including malformed ones"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit code is 2 if a row is malformed. The well-formed rows are still scored.
    """
    arguments = build_parser().parse_args(argv)
    if arguments.limit is not None and arguments.limit < 1:
        raise ContractError(f"limit is {arguments.limit}, expected at least 1")
    # Exit quietly when the reader of a pipe such as `... | head` is gone.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    num_malformed = asyncio.run(_score(arguments))
    if num_malformed:
        print(f"{num_malformed} rows are malformed and have no score", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


async def _score(arguments: argparse.Namespace) -> int:
    recommender, settings = recommender_at(arguments.recommender), client_settings(arguments)
    num_malformed, left = 0, arguments.limit
    async with RecommenderClient(
        arguments.server, recommender=recommender, log=None, settings=settings
    ) as client:
        for path in click_log_files(arguments.data):
            for found in unlabelled_reader(path, recommender).numbered():
                part = found if left is None else found.first(left)
                results: dict[int, dict[str, Any]] = {
                    each.line: {"error": each.reason} for each in part.rejected
                }
                for at in range(0, len(part.numbers), _ROWS_PER_REQUEST):
                    batch = part.batch.slice(at, _ROWS_PER_REQUEST)
                    names = [name for name in recommender.features.names if name in part.features]
                    scored = await client.score({name: batch.column(name) for name in names})
                    for number, score in zip(part.numbers[at:].tolist(), scored.scores.tolist()):
                        results[number] = {"score": score, "model_version": scored.model_version}
                for line in sorted(results):
                    print(json.dumps({"file": str(path), "line": line, **results[line]}))
                num_malformed += len(part.rejected)
                left = None if left is None else left - len(results)
                if left == 0:
                    return num_malformed
    return num_malformed


if __name__ == "__main__":
    sys.exit(main())
