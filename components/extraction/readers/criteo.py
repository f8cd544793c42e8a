"""Criteo's own text files: TSV without header (Criteo 1TB, Kaggle), CSV or TSV with one (its re-issues).

Rows have a label, 13 integers and 26 categories of up to 8 hex digits, and no times. Only a recommender with exactly
these features reads them.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from components.contracts.criteo import CRITEO
from components.contracts.features import Features
from components.contracts.raw_rows import LABEL
from components.extraction.raw_schema import raw_schema
from components.extraction.readers.text import TextColumn, TextFile, TextLayout, matching
from components.runtime.errors import ContractError

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
    layout = layout_of_header(lines[0], path=path) or next(filter(None, map(layout_of_fields, lines)), None)
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
    is_its = line.count("\t") + 1 == NUM_TSV_FIELDS
    return TextLayout(delimiter="\t", fields=COLUMNS, has_header=False) if is_its else None


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
