"""Which form a file of click logs has, by name and content, and which files of a folder are click logs, in order."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from components.contracts.criteo import RAW_TYPES
from components.contracts.raw_rows import SERVED_BY, is_visible
from components.extraction.malformed_rows import MalformedRows
from components.extraction.raw_schema import CLICK_COLUMNS, open_parquet
from components.extraction.readers.parquet import CriteoParquet, RawParquet
from components.extraction.readers.text import NUM_TSV_FIELDS, CriteoText, TextLayout, blocks
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(day_\d+(\.gz)?|.*\.(tsv|txt|csv)(\.gz)?|.*\.parquet)$", re.IGNORECASE)
_COMPANION = re.compile(r"(readme|license)\b.*", re.IGNORECASE)
"""Criteo's own archives hold these beside the rows."""
_TRAIN, _TEST = re.compile(r"train\b.*", re.IGNORECASE), re.compile(r"test\b.*", re.IGNORECASE)
"""Kaggle's archive holds rows without labels beside those with them."""
_SNIFFED_LINES = 20
_SNIFFED_BYTES = 1 << 16


class Reader(Protocol):
    """One file of click logs, in any form."""

    @property
    def path(self) -> Path:
        """The file."""

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """Record batches in the raw schema, in file order; memory is bounded by a batch, not by the file.

        Columns that the form does not have (request id, event time ...) are null. `malformed` takes the malformed rows,
        and counts every row read.

        Raises:
            ContractError: the file is damaged, or too many of its rows are malformed.
        """


def click_log_files(path: Path) -> list[Path]:
    """The files to read: `path` itself, or the click logs directly in the folder, judged by their names.

    Natural order: `day_2` comes before `day_10`. Names that start with a dot or underscore are unfinished work or
    notes.

    Raises:
        ContractError: there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ContractError(f"{path} does not exist, expected a Criteo file or a folder of them")
    others = passed_over(path)
    if others:
        logger.warning("passed over %d files in %s that are no click logs: %s", len(others), path, others[:5])
    files = [path / name for name in _visible_names(path) if name not in others]
    if not files:
        raise ContractError(f"{path} holds no Criteo file, expected day_N[.gz], *.tsv, *.txt, *.csv or *.parquet")
    return sorted(files, key=lambda p: natural_key(p.name))


def passed_over(path: Path) -> list[str]:
    """Names of the files in the folder `path` that `click_log_files` leaves out; none where `path` is a file."""
    names = _visible_names(path) if path.is_dir() else []
    logs = [name for name in names if _NAME.match(name) and not _COMPANION.match(name)]
    if any(_TRAIN.match(name) for name in logs):
        logs = [name for name in logs if not _TEST.match(name)]
    return sorted(set(names) - set(logs))


def _visible_names(path: Path) -> list[str]:
    return [p.name for p in path.iterdir() if p.is_file() and is_visible(p.name)]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A sort key that compares digits in a name by their value.

    >>> sorted(["day_10", "day_2"], key=natural_key)
    ['day_2', 'day_10']
    """
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def find_reader(path: Path) -> Reader:
    """The reader for the form that `path` has.

    Raises:
        ContractError: none of the forms; says what the file looks like.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"PAR1" or path.suffix == ".parquet":
        return _parquet_reader(path)
    content = next((block.content for block in blocks(path, block_bytes=_SNIFFED_BYTES)), b"")
    decoded = [line.rstrip(b"\r").decode(errors="backslashreplace") for line in content.split(b"\n")]
    lines = [line for line in decoded if line][:_SNIFFED_LINES]
    if not lines:
        raise ContractError(f"{path} is empty, expected Criteo rows")
    if layout := TextLayout.of_header(lines[0], path=path):
        return CriteoText(path=path, layout=layout)
    found = [layout for line in lines if (layout := TextLayout.of_fields(line))]
    if found:
        return CriteoText(path=path, layout=next((each for each in found if each.delimiter == "\t"), found[0]))
    raise ContractError(
        f"{path} is no Criteo file: its first line has {lines[0].count(chr(9)) + 1} tab-separated and "
        f"{lines[0].count(',') + 1} comma-separated columns, expected {NUM_TSV_FIELDS} (label, 13 integers, "
        "26 categories), a header with Label, or Parquet"
    )


def _parquet_reader(path: Path) -> Reader:
    names = open_parquet(path).schema_arrow.names
    if set(RAW_TYPES) - set(SERVED_BY) <= set(names):
        return RawParquet(path=path)
    lower = [name.lower() for name in names]
    if missing := [name for name in CLICK_COLUMNS if lower.count(name.lower()) != 1]:
        raise ContractError(f"{path} is no Criteo Parquet file: it lacks the columns {missing}")
    return CriteoParquet(path=path)
