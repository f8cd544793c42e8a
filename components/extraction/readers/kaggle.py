"""The Kaggle form: CSV or TSV with the header `Id,Label,I1..I13,C1..C26`, or CSV without one.

With a header, columns are found by name in any case and any order, and unknown ones (`Id`) are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contracts.criteo import LABEL, NUM_TSV_FIELDS
from components.extraction.raw_schema import CLICK_COLUMNS
from components.extraction.readers.fields import Layout, read_rows
from components.extraction.set_aside import SetAside
from components.runtime.errors import ContractError

_BY_LOWER_CASE = {name.lower(): name for name in CLICK_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Kaggle:
    """One file of that form."""

    path: Path
    layout: Layout

    def batches(self, set_aside: SetAside) -> Iterator[Any]:
        """See `Reader.batches`."""
        return read_rows(self.path, self.layout, set_aside)


def is_header(line: str) -> bool:
    """Whether `line` names columns, the label among them."""
    return LABEL in _names(line, delimiter_of(line))


def delimiter_of(line: str) -> str:
    """Tab where there is one, else comma."""
    return "\t" if "\t" in line else ","


def layout_of_header(line: str, *, path: Path) -> Layout:
    """The layout that a header line states.

    Raises:
        ContractError: a Criteo column is missing or named twice.
    """
    delimiter = delimiter_of(line)
    names = _names(line, delimiter)
    if missing := [name for name in CLICK_COLUMNS if names.count(name.lower()) != 1]:
        raise ContractError(f"{path} has a header that names {missing} not exactly once, expected every Criteo column")
    columns = tuple(_BY_LOWER_CASE.get(name, f"field {i}") for i, name in enumerate(names))
    return Layout(delimiter=delimiter, columns=columns, has_header=True)


def layout_without_header(num_fields: int) -> Layout | None:
    """The layout of a CSV without header by its number of fields: with `Id` first or without; else None."""
    if num_fields not in (NUM_TSV_FIELDS, NUM_TSV_FIELDS + 1):
        return None
    columns = CLICK_COLUMNS if num_fields == NUM_TSV_FIELDS else ("id", *CLICK_COLUMNS)
    return Layout(delimiter=",", columns=columns, has_header=False)


def _names(line: str, delimiter: str) -> list[str]:
    return [name.strip().lower() for name in line.split(delimiter)]
