"""Rows of click files, whatever their form: Parquet, or Criteo's text as TSV or CSV, plain or gzip, read by pyarrow.

A text file names its columns in a header in any order (`Id,Label,I1,...`, unknown names are ignored); without one, 40
fields are the label and the features, 39 are the features alone, and 41 have an `Id` first. Extraction reads the same
forms into the lake; it keeps malformed rows apart, whereas scoring stops at the first one and names its line.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from components.contracts.criteo import LABEL, MISSING_CATEGORY
from components.runtime.errors import ContractError, first_line
from inference_client.rows import CRITEO, Columns, FeatureRows, WrongValue, feature_rows, numbers

_BATCH_ROWS = 4096
_BLOCK_BYTES = 1 << 20
_TEXT_NAME = re.compile(r"(day_\d+(\.gz)?|.*\.(tsv|txt|csv)(\.gz)?)$", re.IGNORECASE)
_GZIP_MAGIC = b"\x1f\x8b"


class LabelledRows(NamedTuple):
    """Some rows of a file."""

    features: FeatureRows
    label: NDArray[np.int32]
    """[n] 1 = click; zeros where labels were not requested."""


def row_files(path: Path) -> list[Path]:
    """The files that `path` names: itself, a folder's Parquet files (at any depth), or else its text files.

    Raises:
        ContractError: There are none.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.parquet")) or sorted(
            (each for each in path.iterdir() if each.is_file() and _TEXT_NAME.match(each.name)), key=_natural_order
        )
    if not files or not files[0].exists():
        raise ContractError(f"data {path} does not exist or holds no Parquet, TSV or CSV file")
    return files


def read_rows(files: Sequence[Path], *, labelled: bool = True, columns: Columns = CRITEO) -> Iterator[LabelledRows]:
    """The rows of the files, batch by batch, in order.

    Raises:
        ContractError: A file is of no known form, lacks a column or is damaged, or a value is not of its column's type;
            the message names the file, and the line or row.
    """
    for path in files:
        read = _parquet_batches if _is_parquet(path) else _text_batches
        try:
            yield from read(path, labelled=labelled, columns=columns)
        except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
            raise ContractError(f"data {path} cannot be read: {first_line(error)}") from error


def first_rows(path: Path, num_rows: int, *, columns: Columns = CRITEO) -> FeatureRows:
    """The first rows that `path` holds, at most `num_rows`.

    Raises:
        ContractError: It holds none, or as `read_rows`.
    """
    parts, found = [], 0
    for batch in read_rows(row_files(path), labelled=False, columns=columns):
        parts.append(batch.features)
        found += len(batch.label)
        if found >= num_rows:
            break
    if not found:
        raise ContractError(f"data {path} holds no rows, expected at least 1")
    return concatenated(parts).take(slice(num_rows))


def concatenated(parts: Sequence[FeatureRows]) -> FeatureRows:
    """All rows of the parts, of which there is at least one."""
    return FeatureRows(
        dense=np.concatenate([part.dense for part in parts]),
        categorical=np.concatenate([part.categorical for part in parts]),
    )


def distinct_categories(
    files: Sequence[Path], names: Sequence[str], *, columns: Columns = CRITEO
) -> dict[str, NDArray[np.int64]]:
    """The distinct values of some categorical columns, in rising order, without the missing value."""
    places = [columns.categorical.index(name) for name in names]
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64) for _ in places]
    for batch in read_rows(files, labelled=False, columns=columns):
        found = [np.union1d(known, batch.features.categorical[:, place]) for known, place in zip(found, places)]
    return {name: values[values != MISSING_CATEGORY] for name, values in zip(names, found)}


def _parquet_batches(path: Path, *, labelled: bool, columns: Columns) -> Iterator[LabelledRows]:
    own_names = {name.lower(): name for name in pq.read_schema(path).names}
    wanted = _wanted_columns(path, own_names.keys(), labelled=labelled, columns=columns)
    first_row = 0
    for batch in pq.ParquetFile(path).iter_batches(_BATCH_ROWS, columns=[own_names[n.lower()] for n in wanted]):
        named = {name: batch.column(own_names[name.lower()]) for name in wanted}
        try:
            yield _labelled_rows(named, columns)
        except WrongValue as error:
            raise ContractError(
                f"{path} row {first_row + error.row}: {error.column} is {error.value!r}, expected {error.expected}"
            ) from error
        first_row += batch.num_rows


def _text_batches(path: Path, *, labelled: bool, columns: Columns) -> Iterator[LabelledRows]:
    with _opened(path) as file:
        line = next((line for line in file if line.strip()), b"")
    layout = _layout_of(line.removeprefix(b"\xef\xbb\xbf").decode(errors="replace"), path, columns)
    names = layout.names
    wanted = _wanted_columns(path, [name.lower() for name in names], labelled=labelled, columns=columns)
    # pyarrow leaves empty lines out before it counts the header, which skip_rows would count as a line.
    read = csv.ReadOptions(column_names=names, block_size=_BLOCK_BYTES, use_threads=False)
    lengths: list[tuple[int, int]] = []

    def refuse(row: Any) -> str:
        lengths.append((row.number, row.actual_columns))
        return "error"

    parse = csv.ParseOptions(delimiter=layout.delimiter, quote_char=False, invalid_row_handler=refuse)
    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=wanted)
    header_rows, first_row = int(layout.has_header), 0
    try:
        with _opened(path) as file:
            for batch in csv.open_csv(file, read_options=read, parse_options=parse, convert_options=convert):
                named = dict(zip(wanted, batch.slice(header_rows if first_row == 0 else 0).columns))
                first_row += header_rows if first_row == 0 else 0
                yield _labelled_rows(named, columns)
                first_row += len(named[wanted[0]])
    except WrongValue as error:
        place = f"{path} line {_line_of_row(path, first_row + error.row)}"
        raise ContractError(f"{place}: {error.column} is {error.value!r}, expected {error.expected}") from error
    except pa.ArrowException as error:
        if not lengths:
            raise
        number, length = lengths[0]
        raise ContractError(
            f"{path} line {_line_of_row(path, number - 1)}: {length} columns, expected {len(names)}"
        ) from error


class _Layout(NamedTuple):
    delimiter: str
    names: list[str]
    """Of each field."""
    has_header: bool


def _layout_of(line: str, path: Path, columns: Columns) -> _Layout:
    """How a file writes its rows, by its first line."""
    if not line:
        raise ContractError(f"data {path} is empty, expected Criteo rows")
    line = line.rstrip("\r\n")
    delimiter = "\t" if "\t" in line else ","
    known = {name.lower(): name for name in (LABEL, *columns.names)}
    fields = [field.strip().lower() for field in line.split(delimiter)]
    if known.keys() & set(fields):
        names = [known.get(field, f"field {at}") for at, field in enumerate(fields)]
        wrong = [name for name in columns.names if names.count(name) != 1] + [LABEL] * (names.count(LABEL) > 1)
        if wrong:
            raise ContractError(f"data {path} has a header that names {wrong} not exactly once, expected every feature")
        return _Layout(delimiter, names, has_header=True)
    width = len(columns.names)
    leading = {width: [], width + 1: [LABEL], width + 2: ["field 0", LABEL]}.get(len(fields))
    if leading is None or (len(fields) > width + 1 and delimiter == "\t"):
        raise ContractError(
            f"data {path} is no Criteo file: its first line has {line.count(chr(9)) + 1} tab-separated and "
            f"{line.count(',') + 1} comma-separated columns, expected {width + 1} (label, {len(columns.numeric)} "
            f"integers, {len(columns.categorical)} categories), {width} (no label), a header, or Parquet"
        )
    return _Layout(delimiter, [*leading, *columns.names], has_header=False)


def _wanted_columns(path: Path, lower_names: Any, *, labelled: bool, columns: Columns) -> list[str]:
    if missing := [name for name in columns.names if name.lower() not in lower_names]:
        raise ContractError(f"data {path} lacks columns {missing}, expected {columns.names[0]}..{columns.names[-1]}")
    if labelled and LABEL not in lower_names:
        raise ContractError(f"data {path} lacks column {LABEL}, expected 0 or 1 for each row")
    return [LABEL, *columns.names] if labelled else list(columns.names)


def _labelled_rows(named: dict[str, Any], columns: Columns) -> LabelledRows:
    features = feature_rows({name: values for name, values in named.items() if name != LABEL}, columns)
    label = np.zeros(len(features), dtype=np.int32)
    if LABEL in named:
        values = named[LABEL]
        found = numbers(LABEL, values)
        wrong = ~((found == 0) | (found == 1))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise WrongValue(column=LABEL, row=row, value=values[row].as_py(), expected="0 or 1")
        label = found.astype(np.int32)
    return LabelledRows(features, label)


def _is_parquet(path: Path) -> bool:
    if path.suffix.lower() == ".parquet":
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _opened(path: Path) -> Any:
    with open(path, "rb") as file:
        magic = file.read(len(_GZIP_MAGIC))
    return gzip.open(path, "rb") if magic == _GZIP_MAGIC else open(path, "rb")


def _line_of_row(path: Path, row: int) -> int:
    """Number of the line, counted from 1, that holds a row; the header counts as a row, an empty line does not."""
    with _opened(path) as file:
        lines = (number for number, line in enumerate(file, start=1) if line.strip(b"\r\n"))
        return next(number for at, number in enumerate(lines) if at == row)


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Sorts `day_2` before `day_10`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]
