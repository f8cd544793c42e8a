"""What a lake's file holds otherwise than agreed: columns that are no numbers any more, and such as nobody agreed on.

Rows leave extraction in the raw schema: a feature that became text is cast where it can be, and a column that nobody
knows is not read. So the step after this one cannot see either; it is told by `RawDataset.foreign_columns`. A column
that is absent, or cannot be cast, ends this step (`readers.raw_parquet`).
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from components.contracts import criteo

NUMBERS = (criteo.LABEL, *criteo.FEATURES)


class ForeignColumn(NamedTuple):
    """One column of one file."""

    column: str
    arrow_type: str
    """In the file."""
    expected: str | None
    """Type in the raw schema; None for a column that is not in it."""
    file: str
    """The first file that has it so."""


def find_foreign_columns(schema: Any, path: Path, unread: Container[str] = ()) -> list[ForeignColumn]:
    """The foreign columns of a file with that Arrow schema, in its order; features in `unread` are not judged.

    Numbers of another width, whole numbers among floats and label as a boolean are what was agreed on.
    """
    found = []
    for field in schema:
        if field.name not in criteo.KNOWN_COLUMNS:
            found.append(ForeignColumn(field.name, str(field.type), None, str(path)))
        elif field.name in NUMBERS and field.name not in unread and not _is_number(field.type):
            expected = criteo.RAW_TYPES[field.name]
            found.append(ForeignColumn(field.name, str(field.type), expected, str(path)))
    return found


def _is_number(found: Any) -> bool:
    values = found.value_type if pa.types.is_dictionary(found) else found
    # A column without any value is written as null by pandas: nothing is retyped by it.
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return any(is_of(values) for is_of in kinds)
