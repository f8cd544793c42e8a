"""Which form a file has, by name and content; and which files of a folder are click logs, in order."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from components.contracts.criteo import NUM_TSV_FIELDS, RAW_TYPES, is_visible
from components.extraction.raw_schema import CLICK_COLUMNS, open_parquet
from components.extraction.readers.blocks import blocks
from components.extraction.readers.criteo_parquet import CriteoParquet
from components.extraction.readers.criteo_tsv import CriteoTsv
from components.extraction.readers.kaggle import Kaggle, is_header, layout_of_header, layout_without_header
from components.extraction.readers.raw_parquet import RawParquet
from components.extraction.readers.reader import Reader
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(day_\d+(\.gz)?|.*\.(tsv|txt|csv)(\.gz)?|.*\.parquet)$", re.IGNORECASE)
_COMPANION = re.compile(r"(readme|license)\b.*", re.IGNORECASE)
"""Criteo's own archives hold these beside the rows."""
_SNIFFED_LINES = 20
_SNIFFED_BYTES = 1 << 16


def click_log_files(path: Path) -> list[Path]:
    """The files to read: `path` itself, or those directly in the folder whose name is one of a click log.

    Natural order: `day_2` comes before `day_10`. Names that start with a dot or underscore are someone's unfinished
    work or notes.

    Raises:
        ContractError: there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ContractError(f"{path} does not exist, expected a Criteo file or a folder of them")
    visible = [p for p in path.iterdir() if p.is_file() and is_visible(p.name)]
    files = [p for p in visible if _NAME.match(p.name) and not _COMPANION.match(p.name)]
    if passed_over := sorted(p.name for p in visible if p not in files):
        logger.warning("passed over %d files in %s that are no click logs: %s", len(passed_over), path, passed_over[:5])
    if not files:
        raise ContractError(f"{path} holds no Criteo file, expected day_N[.gz], *.tsv, *.txt, *.csv or *.parquet")
    return sorted(files, key=lambda p: natural_key(p.name))


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts digits in a name by their value."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def find_reader(path: Path) -> Reader:
    """The reader of the form that `path` has.

    Raises:
        ContractError: none of the forms; says what the file looks like.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"PAR1" or path.suffix == ".parquet":
        return _parquet_reader(path)
    lines = _first_lines(path)
    if not lines:
        raise ContractError(f"{path} is empty, expected Criteo rows")
    if is_header(lines[0]):
        return Kaggle(path=path, layout=layout_of_header(lines[0], path=path))
    if any(line.count("\t") + 1 == NUM_TSV_FIELDS for line in lines):
        return CriteoTsv(path=path)
    for line in lines:
        if "\t" not in line and (layout := layout_without_header(line.count(",") + 1)):
            return Kaggle(path=path, layout=layout)
    raise ContractError(
        f"{path} is no Criteo file: its first line has {lines[0].count(chr(9)) + 1} tab-separated and "
        f"{lines[0].count(',') + 1} comma-separated columns, expected {NUM_TSV_FIELDS} (label, 13 integers, "
        "26 categories), a header with Label, or Parquet"
    )


def _first_lines(path: Path) -> list[str]:
    content = next((b.content for b in blocks(path, block_bytes=_SNIFFED_BYTES)), b"")
    lines = [line.rstrip(b"\r").decode(errors="backslashreplace") for line in content.split(b"\n")]
    return [line for line in lines if line][:_SNIFFED_LINES]


def _parquet_reader(path: Path) -> Reader:
    file = open_parquet(path)
    names = file.schema_arrow.names
    if set(RAW_TYPES) <= set(names):
        return RawParquet(path=path)
    lower = [name.lower() for name in names]
    if missing := [name for name in CLICK_COLUMNS if lower.count(name.lower()) != 1]:
        raise ContractError(f"{path} is no Criteo Parquet file: it lacks the columns {missing}")
    return CriteoParquet(path=path)
