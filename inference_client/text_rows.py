"""Rows of Criteo text files: TSV, the Kaggle challenge's CSV or TSV, each with or without label, plain or gzip.

Forms are told by their first line: a header names its columns in any order (`Id,Label,I1,...`, unknown names are passed
over), and without one 40 fields are label, 13 integers and 26 categories; 39 are those without label, and 41 have an
`Id` first. Fields are `contracts.criteo`'s to read. A bad line is an error with its number: whoever asks for scores
wants one for every line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import (
    CATEGORICAL,
    DENSE,
    EXPECTED_TEXT,
    FEATURES,
    LABEL,
    NUM_TSV_FIELDS,
    parse_category,
    parse_integer,
)
from components.runtime.errors import ContractError

_CANONICAL = {name.lower(): name for name in (LABEL, *FEATURES)}
_MAX_KNOWN = 1 << 20
"""Parsed texts remembered before they are forgotten: a click log repeats itself."""
_GZIP_MAGIC = b"\x1f\x8b"


class Layout(NamedTuple):
    """How a file writes a row."""

    delimiter: str
    places: dict[str, int]
    """Field of each column that it has."""
    num_fields: int
    has_header: bool


Batch = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32]]


def read_text_rows(path: Path, *, labelled: bool, batch_rows: int) -> Iterator[Batch]:
    """Dense [n, 13], categorical [n, 26] and labels [n] (zeros unless `labelled`), batch by batch.

    Raises:
        ContractError: not a Criteo text file, a damaged gzip stream, or a bad line, which is named by its number.
    """
    layout: Layout | None = None
    parser = _Parser(labelled)
    rows: list[list[float]] = []
    for number, line in _lines(path):
        if layout is None:
            layout = layout_of(line, path)
            if labelled and LABEL not in layout.places:
                raise ContractError(f"data {path} lacks column {LABEL}, expected 0 or 1 for each row")
            if layout.has_header:
                continue
        fields = line.split(layout.delimiter)
        if len(fields) != layout.num_fields:
            raise ContractError(f"{path} line {number}: {len(fields)} columns, expected {layout.num_fields}")
        rows.append(parser.row(fields, layout, f"{path} line {number}"))
        if len(rows) == batch_rows:
            yield _batch(rows)
            rows = []
    if layout is None:
        raise ContractError(f"data {path} is empty, expected Criteo rows")
    if rows:
        yield _batch(rows)


def layout_of(line: str, path: Path) -> Layout:
    """The layout that a file's first line tells.

    Raises:
        ContractError: no form that is known, or a header that lacks a feature or names one twice.
    """
    delimiter = "\t" if "\t" in line else ","
    fields = [field.strip().lower() for field in line.split(delimiter)]
    if _CANONICAL.keys() & set(fields) - {""}:
        names = [_CANONICAL.get(field, "") for field in fields]
        wrong = [name for name in FEATURES if names.count(name) != 1] + [LABEL] * (names.count(LABEL) > 1)
        if wrong:
            raise ContractError(f"data {path} has a header that names {wrong} not exactly once, expected every feature")
        return Layout(delimiter, {name: at for at, name in enumerate(names) if name}, len(fields), True)
    leading = {NUM_TSV_FIELDS - 1: (), NUM_TSV_FIELDS: (LABEL,), NUM_TSV_FIELDS + 1: ("", LABEL)}.get(len(fields))
    if leading is None or (len(fields) > NUM_TSV_FIELDS and delimiter == "\t"):
        raise ContractError(
            f"data {path} is no Criteo file: its first line has {line.count(chr(9)) + 1} tab-separated and "
            f"{line.count(',') + 1} comma-separated columns, expected {NUM_TSV_FIELDS} (label, 13 integers, "
            f"26 categories), {NUM_TSV_FIELDS - 1} (no label), a header, or Parquet"
        )
    names = [*leading, *FEATURES]
    return Layout(delimiter, {name: at for at, name in enumerate(names) if name}, len(fields), False)


class _Parser:
    """Parses rows, remembering what texts mean."""

    def __init__(self, labelled: bool) -> None:
        self._columns = (LABEL, *FEATURES) if labelled else FEATURES
        self._labelled = labelled
        integers = _Meanings(parse_integer)
        categories = _Meanings(parse_category)
        self._meanings = {LABEL: _Meanings(_parse_label), **dict.fromkeys(DENSE, integers)}
        self._meanings |= dict.fromkeys(CATEGORICAL, categories)

    def row(self, fields: list[str], layout: Layout, place: str) -> list[float]:
        """Label, 13 integers, 26 categories: a category is below 2^32, which a float holds exactly."""
        values = [] if self._labelled else [0.0]
        for name in self._columns:
            text = fields[layout.places[name]]
            try:
                values.append(self._meanings[name][text])
            except ContractError:
                raise ContractError(f"{place}: {name} is {text!r}, expected {EXPECTED_TEXT[name]}") from None
        return values


class _Meanings(dict[str, float]):
    """Texts and their values; one that is new is parsed."""

    def __init__(self, parse: Callable[[str], float]) -> None:
        super().__init__()
        self._parse = parse

    def __missing__(self, text: str) -> float:
        if len(self) >= _MAX_KNOWN:
            self.clear()
        self[text] = self._parse(text)
        return self[text]


def _parse_label(text: str) -> float:
    if text not in ("0", "1"):
        raise ContractError(f"label is {text!r}")
    return float(text)


def _batch(rows: list[list[float]]) -> Batch:
    values = np.array(rows, dtype=np.float64)
    first = 1 + len(DENSE)
    return values[:, 1:first].astype(np.float32), values[:, first:].astype(np.int64), values[:, 0].astype(np.int32)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not empty."""
    try:
        with _opened(path) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removesuffix(b"\n").removesuffix(b"\r")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line:
                    yield number, line.decode(errors="backslashreplace")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ContractError(f"data {path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise ContractError(f"data {path} cannot be read: {error.strerror}") from error


def _opened(path: Path) -> gzip.GzipFile | BufferedReader:
    with open(path, "rb") as file:
        magic = file.read(len(_GZIP_MAGIC))
    return gzip.open(path, "rb") if magic == _GZIP_MAGIC else open(path, "rb")
