"""Convert rows from named columns to the model's input matrices.

The column names are the names of the recommender's features. Error messages contain column, row and
value. `contracts.serving` defines the server's tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import (
    MAX_CATEGORY,
    MISSING_CATEGORY,
    Features,
    ListOptions,
    category_of,
)
from evergreen.config.reader import nearest
from evergreen.contracts.raw_rows import FINITE, is_infinite, placed_lists
from evergreen.contracts.values import (
    EXACT_BELOW,
    EXACT_FLOATS,
    NoCategory,
    is_missing,
    text_of_value,
)
from evergreen.runtime.errors import ContractError

_A_NUMBER = f"{FINITE}, or None for missing"
_SCALARS = (str, int, float, type(None))
_LARGEST = float(np.finfo(np.float32).max)
_WHOLE_TYPES = ("int8", "int16", "int32", "int64")
"""Arrow's names of the types that can contain category ids directly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Rows of raw features in the model's order."""

    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, positions], see `Features.positions`. -1 = missing."""

    def __len__(self) -> int:
        return len(self.dense)

    def take(self, selection: Any) -> "FeatureRows":
        """Return the rows that a NumPy index selects."""
        return FeatureRows(dense=self.dense[selection], categorical=self.categorical[selection])

    def filled_from(self, context: "FeatureRows", features: Features) -> "FeatureRows":
        """Return a copy in which values of the single row `context` replace missing values.

        A list counts as one value, and is replaced as a whole.
        """
        lacking = self.categorical == MISSING_CATEGORY
        for start, stop, _ in features.positions.lists:
            lacking[:, start:stop] = lacking[:, start:stop].all(axis=1, keepdims=True)
        return FeatureRows(
            dense=np.where(np.isnan(self.dense), context.dense, self.dense),
            categorical=np.where(lacking, context.categorical, self.categorical),
        )


RowsByName: TypeAlias = Any
"""Rows as a dict of columns (lists or arrays), a list of rows (dicts), or an Arrow table or batch.
mypy has no types for Arrow."""


class WrongValue(ContractError):
    """Value that is invalid for its column."""

    def __init__(self, *, column: str, row: int, value: object, expected: str) -> None:
        super().__init__(f"column {column}, row {row} is {value!r}, expected {expected}")
        self.column = column
        self.row = row
        self.value = value
        self.expected = expected


def feature_rows(
    rows: RowsByName | FeatureRows, features: Features, *, may_lack_columns: bool = False
) -> FeatureRows:
    """Convert rows to new matrices, which later changes of the caller's arrays do not affect.

    A numeric value is a number. A category is a whole number, a whole number as text, or a boolean.
    A feature with string categories accepts any text. Missing values are None, NaN, pandas' NA, and
    some texts such as the empty text (`contracts.values`). The value of a list feature is a list or
    an array of categories. None counts as an empty list.

    Args:
        rows: Rows by column name. An object of type `FeatureRows` is copied unchanged.
        features: Features of the recommender.
        may_lack_columns: Whether absent columns count as missing in every row. If a feature is
            served with a fixed value, its column may always be absent.

    Raises:
        ContractError: a column is unknown or absent, columns differ in length, or a value is
            invalid for its column. The message contains column, row and value.

    >>> shop = Features(numeric=("price", "age"), categorical=("item",))
    >>> found = feature_rows({"price": [1.5, None], "item": ["255", 7]}, shop, may_lack_columns=True)
    >>> found.dense[:, 0].tolist(), found.categorical[:, 0].tolist()
    ([1.5, nan], [255, 7])
    >>> feature_rows([{"price": 1.5, "itme": 7}], shop, may_lack_columns=True)
    Traceback (most recent call last):
    ...
    evergreen.runtime.errors.ContractError: rows have a column 'itme', which is not a feature, expected item
    """  # noqa: E501
    if isinstance(rows, FeatureRows):
        _check_widths(rows, features)
        return FeatureRows(dense=np.array(rows.dense), categorical=np.array(rows.categorical))
    named = _columns_by_name(rows)
    absent = [name for name in features.names if name not in named]
    if len(named) > len(features.names) - len(absent):
        unknown = next(name for name in named if name not in features.names)
        raise ContractError(
            f"rows have a column {unknown!r}, which is not a "
            f"feature{nearest(unknown, features.names)}"
        )
    if not may_lack_columns and (lacking := [name for name in absent if name in features.needed]):
        raise ContractError(f"rows lack columns {lacking}, expected {', '.join(features.names)}")
    lengths = {name: len(values) for name, values in named.items()}
    num_rows = next(iter(lengths.values()), 0)
    for name, length in lengths.items():
        if length != num_rows:
            raise ContractError(
                f"column {name} has {length} rows, expected {num_rows}, the number of rows "
                f"of column {next(iter(lengths))}"
            )
    dense = np.full((num_rows, len(features.numeric)), np.nan, dtype=np.float32)
    categorical = np.full(
        (num_rows, len(features.position_names)), MISSING_CATEGORY, dtype=np.int64
    )
    for i, name in enumerate(features.numeric):
        if name in named:
            dense[:, i] = numbers(name, named[name])
    string_features = features.string_features
    for i, name in enumerate(features.categorical):
        if name in named:
            categorical[:, i] = categories(name, named[name], is_string=name in string_features)
    for name, (start, stop, _) in zip(features.lists, features.positions.lists):
        if name in named:
            options = features.list_options_of(name)
            categorical[:, start:stop] = _elements(
                name, named[name], options, is_string=name in string_features
            )
    return FeatureRows(dense=dense, categorical=categorical)


def numbers(name: str, values: Any) -> NDArray[np.float32]:
    """Return the float32 values [n] of a numeric column. NaN = missing.

    Raises:
        WrongValue: a value is not a number.
    """
    plain = _numpy_array(values, missing=np.nan)
    if plain is not None and plain.dtype.kind in "bfiu":
        with np.errstate(over="ignore"):
            found = plain.astype(np.float32)
        if not is_infinite(found).any():
            return found
    found = np.empty(len(values), dtype=np.float32)
    for row, value in enumerate(values.to_pylist() if _is_arrow(values) else values):
        plain_value = _plain_value(value)
        if is_missing(plain_value):
            found[row] = np.nan
        elif isinstance(plain_value, int | float) and abs(plain_value) <= _LARGEST:
            found[row] = plain_value
        else:
            raise WrongValue(column=name, row=row, value=plain_value, expected=_A_NUMBER)
    return found


def categories(
    name: str, values: Any, *, is_string: bool = False, exact_below: int | None = None
) -> NDArray[np.int64]:
    """Return the category ids [n] of a column's values. Missing values are -1.

    `features.CategoricalOptions` describes the ids.

    Args:
        name: Name of the column, for errors.
        values: List or array.
        is_string: Whether the categories of the column are strings.
        exact_below: See `contracts.values.EXACT_BELOW`. None = derived from the type of `values`.

    Raises:
        WrongValue: a value is not a category.
    """
    if (plain := _plain_categories(values)) is not None:
        return plain
    of_column = exact_below or EXACT_BELOW.get(_type_name(values), EXACT_FLOATS)
    # Convert each distinct value once, because click logs contain many repetitions.
    found: dict[Any, int] = {}
    result = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values.to_pylist() if _is_arrow(values) else values):
        plain_value = _plain_value(value)
        key = (type(value), plain_value if isinstance(plain_value, _SCALARS) else None)
        if key not in found:
            limit = (
                EXACT_BELOW.get(str(value.dtype), of_column)
                if isinstance(value, np.generic)
                else of_column
            )
            try:
                word = text_of_value(plain_value, is_string=is_string, exact_below=limit)
            except NoCategory as error:
                raise WrongValue(
                    column=name, row=row, value=plain_value, expected=error.expected
                ) from None
            found[key] = MISSING_CATEGORY if word is None else category_of(word)
        result[row] = found[key]
    return result


def _elements(
    name: str, values: Any, options: ListOptions, *, is_string: bool
) -> NDArray[np.int64]:
    """Return the first elements of a column's lists, [n, `options.max`], padded with -1."""
    lists = values.to_pylist() if _is_arrow(values) else values
    taken: list[Any] = []
    for row, value in enumerate(lists):
        if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1):
            taken.append(value)
        elif is_missing(value):
            taken.append(())
        else:
            raise WrongValue(
                column=name, row=row, value=value, expected="a list, or None for no element"
            )
    sizes = [len(each) for each in taken]
    try:
        elements = categories(
            name,
            [each for value in taken for each in value],
            is_string=is_string,
            exact_below=EXACT_BELOW.get(_type_name(values)),
        )
    except WrongValue as error:
        row = int(np.searchsorted(np.cumsum(sizes), error.row, side="right"))
        raise WrongValue(
            column=name, row=row, value=error.value, expected=f"elements to be {error.expected}"
        ) from None
    held = elements != MISSING_CATEGORY
    num_held = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[held], minlength=len(sizes))
    return placed_lists(elements[held], num_held, options)


def _plain_value(value: object) -> object:
    """Convert NumPy's scalars to Python's scalars.

    Times stay unchanged, because `item` would convert them to integers.
    """
    if isinstance(value, np.datetime64 | np.timedelta64):
        return None if np.isnat(value) else value
    return value.item() if isinstance(value, np.generic) else value


def _check_widths(rows: FeatureRows, features: Features) -> None:
    found = (rows.dense.shape[1], rows.categorical.shape[1])
    expected = (len(features.numeric), len(features.position_names))
    if found != expected:
        raise ContractError(
            f"rows have {found[0]} numeric and {found[1]} categorical columns, expected "
            f"{expected[0]} and {expected[1]}"
        )


def _columns_by_name(rows: Any) -> Mapping[str, Any]:
    if _is_arrow(rows):
        return {name: rows.column(name) for name in rows.schema.names}
    if isinstance(rows, Mapping):
        for name, values in rows.items():
            if (
                isinstance(values, _NO_COLUMNS)
                or not hasattr(values, "__len__")
                or getattr(values, "ndim", 1) == 0
            ):
                raise ContractError(
                    f"column {name} is {values!r}, expected a list or an array with a value per row"
                )
        return rows
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes | bytearray):
        for at, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ContractError(f"row {at} is {row!r}, expected a dict of features")
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}
    raise ContractError(
        f"rows are a {type(rows).__name__}, expected a dict of columns, a list of dicts or a table"
    )


_NO_COLUMNS = (str, bytes, bytearray, Mapping, set, frozenset)
"""Types that have a length, but are not accepted as the values of a column."""


def _type_name(values: Any) -> str:
    """Return the name of the type of an array's values, or an empty text for other objects."""
    if not _is_arrow(values):
        return str(getattr(values, "dtype", ""))
    return str(
        getattr(values.type, "value_type", values.type)
    )  # the value type of a dictionary or list type


def _numpy_array(values: Any, *, missing: float) -> NDArray[Any] | None:
    """Return the values [n] with `missing` instead of None, or None if NumPy cannot store them."""
    try:
        array = np.asarray(values)
        if array.dtype == object:
            array = np.asarray([missing if value is None else value for value in values])
    except (ValueError, OverflowError, TypeError):
        return None
    return array if array.ndim == 1 else None


def _plain_categories(values: Any) -> NDArray[np.int64] | None:
    """Return the values as category ids if all are None or whole numbers in range, else None."""
    if _is_arrow(values):
        if str(values.type) not in _WHOLE_TYPES:
            return None
        num_missing, array = (
            values.null_count,
            values.cast("int64").fill_null(MISSING_CATEGORY).to_numpy(),
        )
    else:
        found = _numpy_array(values, missing=MISSING_CATEGORY)
        if found is None or found.dtype.kind not in "iu":
            return None
        num_missing = (
            0 if isinstance(values, np.ndarray) else sum(value is None for value in values)
        )
        array = found.astype(np.int64)
    is_plain = array.max(initial=0) <= MAX_CATEGORY and np.count_nonzero(array < 0) == num_missing
    return array if is_plain else None


def _is_arrow(values: Any) -> bool:
    """Return whether `values` is an object of pyarrow, which need not be installed."""
    return type(values).__module__.partition(".")[0] == "pyarrow"
