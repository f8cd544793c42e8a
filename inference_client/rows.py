"""Feature rows: from columns by name to the matrices that the model takes, with errors that name column, row and value.

The names are those of the recommender's features. Reading files is left to `row_files`; which tensors the server takes
is stated in `contracts.serving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts.features import MAX_CATEGORY, MISSING_CATEGORY, Features
from components.contracts.recommender import nearest
from components.runtime.errors import ContractError

_A_NUMBER = "a finite number, or None for missing"
_A_CATEGORY = f"a whole number from 0 to {MAX_CATEGORY}, or None for missing"
_MAX_DIGITS = len(str(MAX_CATEGORY))


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Rows of raw features in the model's order."""

    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, c], -1 = missing."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dense)

    def take(self, selection: Any) -> FeatureRows:
        """The rows that a NumPy index selects."""
        return FeatureRows(dense=self.dense[selection], categorical=self.categorical[selection])

    def filled_from(self, context: FeatureRows) -> FeatureRows:
        """These rows, with the values of the one row of `context` where they have none."""
        return FeatureRows(
            dense=np.where(np.isnan(self.dense), context.dense, self.dense),
            categorical=np.where(self.categorical == MISSING_CATEGORY, context.categorical, self.categorical),
        )


RowsByName: TypeAlias = Any
"""A dict of columns (lists or arrays), a list of rows (dicts), or an Arrow table or batch, which mypy does not know."""


class WrongValue(ContractError):
    """A value that its column does not take."""

    def __init__(self, *, column: str, row: int, value: object, expected: str) -> None:
        super().__init__(f"column {column}, row {row} is {value!r}, expected {expected}")
        self.column = column
        self.row = row
        self.value = value
        self.expected = expected


def feature_rows(rows: RowsByName | FeatureRows, features: Features, *, may_lack_columns: bool = False) -> FeatureRows:
    """`rows` as matrices of their own, which later changes of the caller's arrays do not reach.

    A numeric value is a number, a category a whole number, which may be written as text; None and NaN are missing.

    Args:
        rows: See `RowsByName`; `FeatureRows` are copied as they are.
        features: The columns, in the model's order.
        may_lack_columns: Whether a column may be absent, and is then missing in every row.

    Raises:
        ContractError: A column is unknown or absent, columns differ in length, or a value is not of its column's type;
            the message names column, row and value.

    >>> shop = Features(numeric=("price", "age"), categorical=("item",))
    >>> found = feature_rows({"price": [1.5, None], "item": ["255", 7]}, shop, may_lack_columns=True)
    >>> found.dense[:, 0].tolist(), found.categorical[:, 0].tolist()
    ([1.5, nan], [255, 7])
    >>> feature_rows([{"price": 1.5, "itme": 7}], shop, may_lack_columns=True)
    Traceback (most recent call last):
    ...
    components.runtime.errors.ContractError: rows have a column 'itme', which is no feature, expected item
    """
    if isinstance(rows, FeatureRows):
        _check_widths(rows, features)
        return FeatureRows(dense=np.array(rows.dense), categorical=np.array(rows.categorical))
    named = _columns_by_name(rows)
    absent = [name for name in features.names if name not in named]
    if len(named) > len(features.names) - len(absent):
        unknown = next(name for name in named if name not in features.names)
        raise ContractError(f"rows have a column {unknown!r}, which is no feature{nearest(unknown, features.names)}")
    if absent and not may_lack_columns:
        raise ContractError(f"rows lack columns {absent}, expected {', '.join(features.names)}")
    lengths = {name: len(values) for name, values in named.items()}
    num_rows = next(iter(lengths.values()), 0)
    for name, length in lengths.items():
        if length != num_rows:
            raise ContractError(f"column {name} has {length} rows, expected {num_rows} as column {next(iter(lengths))}")
    dense = np.full((num_rows, len(features.numeric)), np.nan, dtype=np.float32)
    categorical = np.full((num_rows, len(features.categorical)), MISSING_CATEGORY, dtype=np.int64)
    for i, name in enumerate(features.numeric):
        if name in named:
            dense[:, i] = numbers(name, named[name])
    for i, name in enumerate(features.categorical):
        if name in named:
            categorical[:, i] = categories(name, named[name])
    return FeatureRows(dense=dense, categorical=categorical)


def numbers(name: str, values: Any) -> NDArray[np.float32]:
    """The float32 values [n] of a numeric column, NaN = missing.

    Raises:
        WrongValue: A value is no number.
    """
    # NumPy takes a fifth of Arrow's time for the few values of a request; Arrow finds what is wrong with others.
    plain = _numpy_array(values, missing=np.nan)
    if plain is not None and plain.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            plain = plain.astype(np.float32)
        if not np.isinf(plain).any():
            return plain
    array = _arrow_array(name, values, expected=_A_NUMBER)
    if not any(is_type(array.type) for is_type in _TYPES_OF_NUMBERS):
        row, value = _first_value(array.to_pylist(), lambda value: True)
        raise WrongValue(column=name, row=row, value=value, expected=_A_NUMBER)
    found: NDArray[np.float32] = array.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if np.isinf(found).any():
        row = int(np.flatnonzero(np.isinf(found))[0])
        raise WrongValue(column=name, row=row, value=array[row].as_py(), expected=_A_NUMBER)
    return found


def categories(name: str, values: Any) -> NDArray[np.int64]:
    """The int64 values [n] of a categorical column, -1 = missing.

    Raises:
        WrongValue: A value is no category.
    """
    if (plain := _plain_categories(values)) is not None:
        return plain
    array = _arrow_array(name, values, expected=_A_CATEGORY)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        # Each distinct text is parsed once: a click log repeats itself.
        encoded = array.fill_null("").dictionary_encode()
        meanings = _parsed_categories(encoded.dictionary.to_pylist())
        if meanings is None:
            row, text = _first_value(array.to_pylist(), lambda text: _parsed_categories([text]) is None)
            raise WrongValue(column=name, row=row, value=text, expected=_A_CATEGORY)
        found_texts: NDArray[np.int64] = meanings[encoded.indices.to_numpy()]
        return found_texts
    try:
        found: NDArray[np.int64] = array.cast(pa.int64()).fill_null(MISSING_CATEGORY).to_numpy()
    except pa.ArrowException:
        row, value = _first_value(array.to_pylist(), lambda value: isinstance(value, float) and value % 1 != 0)
        raise WrongValue(column=name, row=row, value=value, expected=_A_CATEGORY) from None
    outside = (found < MISSING_CATEGORY) | (found > MAX_CATEGORY)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise WrongValue(column=name, row=row, value=int(found[row]), expected=_A_CATEGORY)
    return found


_TYPES_OF_NUMBERS = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)


def _check_widths(rows: FeatureRows, features: Features) -> None:
    found = (rows.dense.shape[1], rows.categorical.shape[1])
    expected = (len(features.numeric), len(features.categorical))
    if found != expected:
        raise ContractError(
            f"rows have {found[0]} numeric and {found[1]} categorical columns, expected {expected[0]} and {expected[1]}"
        )


def _columns_by_name(rows: Any) -> Mapping[str, Any]:
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return {name: rows.column(name) for name in rows.schema.names}
    if isinstance(rows, Mapping):
        for name, values in rows.items():
            if isinstance(values, str) or not hasattr(values, "__len__"):
                raise ContractError(f"column {name} is {values!r}, expected a list or an array with a value per row")
        return rows
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}
    raise ContractError(f"rows are a {type(rows).__name__}, expected a dict of columns, a list of dicts or a table")


def _numpy_array(values: Any, *, missing: float) -> NDArray[Any] | None:
    """The values [n] with `missing` in place of None; None where NumPy has no type for them."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return None
    try:
        array = np.asarray(values)
        if array.dtype == object:
            array = np.asarray([missing if value is None else value for value in values])
    except (ValueError, OverflowError):
        return None
    return array if array.ndim == 1 else None


def _plain_categories(values: Any) -> NDArray[np.int64] | None:
    """The values where they are integers in range or their texts; None where they need a closer look."""
    array = _numpy_array(values, missing=MISSING_CATEGORY)
    if array is None or not len(array):
        return None
    if array.dtype.kind == "i" and array.min() >= MISSING_CATEGORY and array.max() <= MAX_CATEGORY:
        return array.astype(np.int64)
    if array.dtype.kind == "U" and all(value is None or isinstance(value, str) for value in values):
        return _parsed_categories([value or "" for value in values])
    return None


def _parsed_categories(texts: list[str]) -> NDArray[np.int64] | None:
    """The value of each text's decimal digits, empty texts as missing; None where one of them is no category.

    >>> _parsed_categories(["68", "", "7"]).tolist()
    [68, -1, 7]
    """
    found = np.full(len(texts), MISSING_CATEGORY, dtype=np.int64)
    for place, text in enumerate(texts):
        if text:
            if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and int(text) <= MAX_CATEGORY):
                return None
            found[place] = int(text)
    return found


def _arrow_array(name: str, values: Any, *, expected: str) -> Any:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError):
        texts_and_numbers = [value for value in values if value is not None]
        if expected is _A_CATEGORY and all(isinstance(value, str | int) for value in texts_and_numbers):
            return pa.array([str(value) if isinstance(value, int) else value for value in values])
        row, value = _first_value(values, lambda value: not isinstance(value, int | float))
        raise WrongValue(column=name, row=row, value=value, expected=expected) from None


def _first_value(values: Any, is_wrong: Any) -> tuple[int, object]:
    """Row and value of the first value that is not None and wrong; of the first row if none is."""
    for row, value in enumerate(values):
        if value is not None and is_wrong(value):
            return row, value
    return 0, values[0]
