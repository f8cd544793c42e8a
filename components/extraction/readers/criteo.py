"""Criteo's own files: TSV without header (Criteo 1TB), CSV or TSV with one (Kaggle), Parquet of its columns.

Rows have a label, 13 integers and 26 categories of up to 8 hex digits, and no times. Only a recommender with exactly
these features reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from components.contracts.criteo import CRITEO
from components.contracts.features import Features
from components.contracts.raw_rows import LABEL
from components.extraction.raw_schema import (
    BATCH_ROWS,
    MalformedRows,
    find_malformed,
    nan_to_null,
    open_parquet,
    raw_batch,
    raw_schema,
    record_malformed,
    without_rows,
)
from components.extraction.readers.text import TextColumn, TextFile, TextLayout, matching
from components.runtime.errors import ContractError
from components.store.archived_rows import reading_parquet

COLUMNS = (LABEL, *CRITEO.names)
"""What Criteo publishes, in the order of its files without header."""
NUM_TSV_FIELDS = len(COLUMNS)
INTEGER_PATTERN = r"^-?[0-9]{1,18}(\.0*)?$"
"""An integer as text: `.0` because pandas writes an integer column with missing values so; 18 digits fit an int64."""
HEX_PATTERN = r"^[0-9a-fA-F]{1,8}$"
"""A category as text."""
_SCHEMA = raw_schema(CRITEO)


def are_its(features: Features) -> bool:
    """Whether these are Criteo's features, for which alone its forms are read."""
    return features == CRITEO


def text_file(path: Path, lines: list[str]) -> TextFile | None:
    """The reader of a text file that begins with these lines; None if it is none of Criteo's.

    Raises:
        ContractError: it has a header that lacks a Criteo column, or names it twice.
    """
    layout = layout_of_header(lines[0], path=path)
    if layout is None:
        found = [each for line in lines if (each := layout_of_fields(line))]
        layout = next((each for each in found if each.delimiter == "\t"), found[0] if found else None)
    return TextFile(path=path, layout=layout, columns=TEXT_COLUMNS, schema=_SCHEMA) if layout else None


def layout_of_header(line: str, *, path: Path) -> TextLayout | None:
    """The layout that a header line states; None if the line is no header.

    Columns may be named in any case and any order; unknown ones (`Id`) are ignored.

    Raises:
        ContractError: a Criteo column is missing or named twice.
    """
    delimiter = "\t" if "\t" in line else ","
    names = [name.strip().lower() for name in line.split(delimiter)]
    if LABEL not in names:
        return None
    if missing := [name for name in COLUMNS if names.count(name.lower()) != 1]:
        raise ContractError(f"{path} has a header that names {missing} not exactly once, expected every Criteo column")
    known = {name.lower(): name for name in COLUMNS}
    fields = tuple(known.get(name, f"field {i}") for i, name in enumerate(names))
    return TextLayout(delimiter=delimiter, fields=fields, has_header=True)


def layout_of_fields(line: str) -> TextLayout | None:
    """The layout of a file without header, judged by a line's number of fields; None if it is none of Criteo's."""
    if line.count("\t") + 1 == NUM_TSV_FIELDS:
        return TextLayout(delimiter="\t", fields=COLUMNS, has_header=False)
    num_fields = 0 if "\t" in line else line.count(",") + 1
    if num_fields not in (NUM_TSV_FIELDS, NUM_TSV_FIELDS + 1):
        return None
    fields = COLUMNS if num_fields == NUM_TSV_FIELDS else ("id", *COLUMNS)
    return TextLayout(delimiter=",", fields=fields, has_header=False)


def parse_hex(distinct: Any) -> Any:
    """The int64 values of categories (binary array); null where a value is not 1 to 8 hex digits.

    >>> parse_hex(pa.array([b"ff", b"0x1f", None])).to_pylist()
    [255, None, None]
    """
    return pc.binary_join_element_wise("0x", matching(distinct, HEX_PATTERN), "").cast(pa.int64())


def _parse_integers(distinct: Any) -> Any:
    return matching(distinct, INTEGER_PATTERN).cast(pa.float64()).cast(pa.float32())


TEXT_COLUMNS = {
    LABEL: TextColumn(LABEL, lambda texts: matching(texts, "^[01]$").cast(pa.int32()), "0 or 1", is_required=True),
    **{name: TextColumn(name, _parse_integers, "an integer or nothing", is_required=False) for name in CRITEO.numeric},
    **{
        name: TextColumn(name, parse_hex, "1 to 8 hex digits or nothing", is_required=False)
        for name in CRITEO.categorical
    },
}


@dataclass(frozen=True, kw_only=True)
class CriteoParquet:
    """One Parquet file with Criteo's columns, named in any case, and no time."""

    path: Path
    has_times: bool = False
    """See `Reader.has_times`."""

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`."""
        file = open_parquet(self.path)
        names = {name.lower(): name for name in file.schema_arrow.names}
        wanted = [names[name.lower()] for name in COLUMNS]
        first_row = 1
        with reading_parquet(self.path):
            for found in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                columns, reasons = self._parse(found.select(wanted))
                batch = raw_batch(columns, _SCHEMA)
                for at, reason in find_malformed(batch, CRITEO).items():
                    reasons.setdefault(at, reason)
                record_malformed(found, reasons, path=self.path, first_row=first_row, malformed=malformed)
                first_row += found.num_rows
                malformed.count(self.path, found.num_rows)
                yield without_rows(batch, reasons)

    def _parse(self, found: Any) -> tuple[dict[str, Any], dict[int, str]]:
        columns: dict[str, Any] = {}
        reasons: dict[int, str] = {}
        for name, values in zip(COLUMNS, found.columns):
            if name in CRITEO.categorical:
                columns[name] = self._hashes(name, values, reasons)
            else:
                columns[name] = self._numbers(name, values)
        return columns, reasons

    def _numbers(self, name: str, values: Any) -> Any:
        if pa.types.is_null(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            target = _SCHEMA.field(name).type
            if name == LABEL and pa.types.is_floating(values.type):
                values = nan_to_null(values)
            numbers = values.cast(target, safe=name == LABEL)
            return nan_to_null(numbers) if pa.types.is_floating(target) else numbers
        raise ContractError(f"{self.path} has {name} of type {values.type}, expected numbers")

    def _hashes(self, name: str, values: Any, reasons: dict[int, str]) -> Any:
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_null(values.type):
            return values.cast(pa.int64())
        if values.type == pa.int32():
            return values.view(pa.uint32()).cast(pa.int64())
        if pa.types.is_integer(values.type) and values.type != pa.uint64():
            return values.cast(pa.int64())
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise ContractError(f"{self.path} has {name} of type {values.type}, expected integers or hex strings")
        encoded = values.cast(pa.string()).cast(pa.binary()).dictionary_encode()
        hashes = parse_hex(encoded.dictionary).take(encoded.indices)
        # An empty string is missing, as an empty field of the TSV is.
        wrong = pc.and_(hashes.is_null(), pc.greater(pc.fill_null(pc.binary_length(values), 0), 0))
        for at in pc.indices_nonzero(wrong).to_pylist():
            reasons.setdefault(at, f"{name} is {values[at].as_py()!r}, expected 1 to 8 hex digits or nothing")
        return hashes
