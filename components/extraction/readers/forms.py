"""Which form a file of click logs has, by name and content, and which files of a folder are click logs, in order."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from components.contracts.raw_rows import EVENT_TIME, SERVED_BY, WEIGHT, ColumnNames, is_visible, raw_types
from components.contracts.recommender import Recommender
from components.extraction.malformed_rows import MalformedRows
from components.extraction.raw_schema import open_parquet
from components.extraction.readers import criteo
from components.extraction.readers.named import NamedParquet, columns_of, text_file, text_layout
from components.extraction.readers.parquet import RawParquet
from components.extraction.readers.text import blocks
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

    @property
    def has_times(self) -> bool:
        """Whether rows have event times."""

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """Record batches in the lake's schema, in file order; memory is bounded by a batch, not by the file.

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
        raise ContractError(f"{path} does not exist, expected a file of rows or a folder of them")
    others = passed_over(path)
    if others:
        logger.warning("passed over %d files in %s that are no click logs: %s", len(others), path, others[:5])
    files = [path / name for name in _visible_names(path) if name not in others]
    if not files:
        raise ContractError(f"{path} holds no file of rows, expected day_N[.gz], *.tsv, *.txt, *.csv or *.parquet")
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


def find_reader(path: Path, recommender: Recommender, *, with_keys: bool = True) -> Reader:
    """The reader for the form that `path` has.

    Criteo's own forms are read for a recommender with exactly Criteo's features; they have neither times nor weights.
    `with_keys`: whether a user's request ids, rows and times are read; without them they are null.

    Raises:
        ContractError: none of the forms; says what the file looks like.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"PAR1" or path.suffix == ".parquet":
        return _parquet_reader(path, recommender, with_keys=with_keys)
    content = next((block.content for block in blocks(path, block_bytes=_SNIFFED_BYTES)), b"")
    decoded = [line.rstrip(b"\r").decode(errors="backslashreplace") for line in content.split(b"\n")]
    lines = [line for line in decoded if line][:_SNIFFED_LINES]
    if not lines:
        raise ContractError(f"{path} is empty, expected rows")
    layout = text_layout(lines[0], recommender)
    if layout is not None and not _is_criteos(layout.fields, recommender):
        return text_file(path, layout, recommender, with_keys=with_keys)
    is_criteos = criteo.are_its(recommender.features) and not recommender.data.has_weights
    if is_criteos and (reader := criteo.text_file(path, lines)):
        return reader
    found = (
        f"its first line has {lines[0].count(chr(9)) + 1} tab-separated and {lines[0].count(',') + 1} comma-separated"
    )
    if is_criteos:
        raise ContractError(
            f"{path} is no Criteo file: {found} columns, expected {criteo.NUM_TSV_FIELDS} (label, 13 integers, "
            "26 categories), a header with Label, or Parquet"
        )
    if any(map(criteo.layout_of_fields, lines)):
        raise ContractError(
            f"{path} looks like a Criteo file without header, whose columns are {', '.join(criteo.COLUMNS)}; "
            f"recommender {recommender.name} has {', '.join(recommender.features.names)}: expected a header with them"
        )
    raise ContractError(
        f"{path} has no header that names the label {recommender.data.label!r}: {found} columns, expected a header, "
        "or Parquet"
    )


def _is_criteos(names: Sequence[str], recommender: Recommender) -> bool:
    """Whether a file with these columns is read as one of Criteo's forms, which have neither times nor weights."""
    data = recommender.data
    return criteo.are_its(recommender.features) and data.event_time not in names and not data.has_weights


def _parquet_reader(path: Path, recommender: Recommender, *, with_keys: bool) -> Reader:
    schema, features, weighted = open_parquet(path).schema_arrow, recommender.features, recommender.data.has_weights
    raw = set(raw_types(features, weighted=weighted)) - set(SERVED_BY)
    has_raw_names = replace(recommender.data, user=None) == ColumnNames(weight=WEIGHT if weighted else None)
    if has_raw_names and raw <= set(schema.names) and _is_time(schema):
        return RawParquet(path=path, features=features, weighted=weighted, with_words=True)
    if not _is_criteos(schema.names, recommender):
        columns = columns_of(schema.names, recommender, path=path, with_keys=with_keys)
        return NamedParquet(path=path, features=features, columns=columns)
    lower = [name.lower() for name in schema.names]
    if missing := [name for name in criteo.COLUMNS if lower.count(name.lower()) != 1]:
        raise ContractError(f"{path} is no Criteo Parquet file: it lacks the columns {missing}")
    return criteo.CriteoParquet(path=path)


def _is_time(schema: Any) -> bool:
    return bool(pa.types.is_timestamp(schema.field(EVENT_TIME).type))
