"""Criteo's text files: TSV without a header (1TB, Kaggle), CSV or TSV with a header (re-issues).

Each row has a label, 13 integers and 26 categories of up to 8 hex digits. Rows have no times. The
files can be read only for a recommender with exactly these features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evergreen.config.features import Features
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.raw_rows import LABEL
from evergreen.rows.lines import Dialect
from evergreen.rows.text import Chunk, Head, TextRows
from evergreen.rows.values import LABELS, ValueRule, matching
from evergreen.runtime.errors import ContractError

COLUMNS = (LABEL, *CRITEO.names)
"""Criteo's columns, in the order of its files without a header."""
_INTEGER_PATTERN = r"^-?[0-9]{1,18}(\.0*)?$"
"""Pattern of an integer as text. The suffix `.0` is accepted, because pandas writes it in an
integer column with missing values. Integers have at most 18 digits, so they fit an int64."""
_HEX_PATTERN = r"^[0-9a-fA-F]{1,8}$"
"""Pattern of a category as text."""


def are_its(features: Features) -> bool:
    """Return whether these are Criteo's features.

    Criteo's formats are read only for recommenders with these features.
    """
    return features == CRITEO


@dataclass(frozen=True, kw_only=True)
class CriteoRows:
    """Rows of a file in one of Criteo's formats. It implements `forms.FileRows`."""

    rows: TextRows
    columns: dict[str, str]
    """Name that each raw column has in the file."""

    @property
    def path(self) -> Path:
        """See `forms.FileRows.path`."""
        return self.rows.path

    @property
    def names(self) -> tuple[str, ...]:
        """See `forms.FileRows.names`."""
        return self.rows.names

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """See `forms.FileRows.chunks`."""
        return self.rows.chunks(wanted)


def criteo_rows(path: Path, head: Head, rows: TextRows, *, labelled: bool = True) -> CriteoRows:
    """Return the rows of a text file in one of Criteo's formats.

    Args:
        path: The file.
        head: First lines of the file.
        rows: The same file, opened as delimited text with a header.
        labelled: Whether rows must have a label. If False, the header may lack the label.

    Raises:
        ContractError: The file has none of the formats, or its header lacks a Criteo column or has
            a column twice.
    """
    names = [name.lower() for name in rows.names]
    if LABEL in names or (not labelled and COLUMNS[1].lower() in names):
        wanted = COLUMNS if labelled else COLUMNS[1:]
        if missing := [name for name in wanted if names.count(name.lower()) != 1]:
            raise ContractError(
                f"{path} lacks the Criteo columns {missing} or has them twice, expected each "
                "Criteo column once in the header"
            )
        known = {name.lower(): name for name in COLUMNS}
        return CriteoRows(
            rows=rows, columns={known[n]: own for n, own in zip(names, rows.names) if n in known}
        )
    if any(line.count("\t") + 1 == len(COLUMNS) for line in head.lines[:20]):
        dialect = Dialect(delimiter="\t", num_fields=len(COLUMNS), has_quotes=False)
        return CriteoRows(
            rows=replace(rows, names=COLUMNS, dialect=dialect),
            columns={name: name for name in COLUMNS},
        )
    raise ContractError(
        f"{path} is not a Criteo file: its first line has {head.lines[0].count(chr(9)) + 1} "
        "tab-separated and "
        f"{head.lines[0].count(',') + 1} comma-separated columns, expected {len(COLUMNS)} (label, "
        "13 integers, "
        "26 categories), or a header with Label"
    )


def parse_hex(texts: Any) -> Any:
    """Return the categories (int64) that hex texts represent.

    A text that is not 1 to 8 hex digits becomes null.

    >>> parse_hex(pa.array(["ff", "0x1f", None])).to_pylist()
    [255, None, None]
    """
    return pc.binary_join_element_wise("0x", matching(texts, _HEX_PATTERN), "").cast(pa.int64())


def _parse_integers(texts: Any) -> Any:
    return matching(texts, _INTEGER_PATTERN).cast(pa.float64()).cast(pa.float32())


def _no_typed(column: Any) -> Any:
    raise pa.ArrowTypeError(f"{column.type} is not a text type")


_INTEGERS = ValueRule(
    type=pa.float32(), expected="an integer or nothing", of_text=_parse_integers, of_typed=_no_typed
)
_HEX = ValueRule(
    type=pa.int64(), expected="1 to 8 hex digits or nothing", of_text=parse_hex, of_typed=_no_typed
)
RULES = {
    LABEL: LABELS,
    **dict.fromkeys(CRITEO.numeric, _INTEGERS),
    **dict.fromkeys(CRITEO.categorical, _HEX),
}
"""Parsing rule of each column."""
