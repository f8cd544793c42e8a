"""Sample of the columns of a click log, with their distinct values and kinds.

`open_rows` reads the rows, and the rules of `evergreen.rows` define the meaning of a value. For
each column, the sample stores the distinct values. The sample also stores the index of each row's
value. The needed memory is therefore limited by the number of sampled rows.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.rows.archived_rows import is_list
from evergreen.rows.forms import open_rows
from evergreen.rows.lines import LineCounts, Rejected
from evergreen.rows.values import (
    CATEGORIES,
    LABELS,
    NUMBERS,
    is_bytes,
    is_text,
    missing_texts,
    plain,
)
from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import roc_auc

SAMPLE_ROWS = 1_000_000
"""Maximum number of rows to read. Reading begins at the start of the file."""
MAX_BYTES = 1 << 30
"""Maximum memory of the sampled columns in bytes. Reading stops when the sample exceeds this
size."""
_NUM_EXAMPLES = 3
"""Maximum number of rejected lines that are displayed."""
INTEGER, FLOAT, BOOLEAN, TIME, TEXT, OTHER = "integer", "float", "boolean", "time", "text", "other"
"""Kinds of columns. A column of floats that are all whole numbers is `INTEGER`, because pandas
writes integers with missing values as floats."""
TOLERATED = 0.01
"""Maximum share of rows whose value is not of the column's kind. Rows with a value of another kind
are malformed. Extraction has the same limit for the share of malformed rows."""
ELEMENT_END = "\x1f"
"""Separator for the elements of a Parquet list that is stored as a text."""
_EXACT = 2.0**53
_ZERO_LED = r"^\s*[+-]?0[0-9]+\s*$"
_NEARLY_WHOLE = r"^\s*[+-]?[0-9]+(\.0*)?\s*$"
_DIGITS = r"^\s*[+-]?[0-9]+\s*$"


@dataclass(frozen=True, kw_only=True)
class SampledColumn:
    """One column of the sampled rows."""

    name: str
    type: str
    """Arrow type of the column in the file. In text files, every column has the type `TEXT`."""
    values: Any
    """Arrow array of the distinct values. Lists of a Parquet file are texts with `ELEMENT_END`
    between the elements."""
    codes: NDArray[np.int32] = field(repr=False)
    """For each row, the position of its value in `values`, or -1 if the row has no value."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the sample."""
        return len(self.codes)

    @property
    def is_list(self) -> bool:
        """Return whether the column's type in the file is a list."""
        return self.type.startswith("list<")

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Return for each of `values` the number of rows with this value."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values)).astype(np.int64)

    @cached_property
    def is_present(self) -> NDArray[np.bool_]:
        """Return whether each of `values` is present. Some texts mean that a value is missing."""
        if self.kind_of_type == OTHER:
            return np.ones(len(self.values), bool)
        if is_text(self.values.type):
            return ~_mask(missing_texts(self.values))
        if pa.types.is_floating(self.values.type):
            return ~_mask(pc.is_nan(self.values))
        return np.ones(len(self.values), bool)

    def rows_with(self, mask: NDArray[np.bool_]) -> int:
        """Return the number of rows that have one of the selected values.

        Args:
            mask: Whether each of `values` is selected. Missing values are never selected.
        """
        return int(self.counts[mask & self.is_present].sum())

    @cached_property
    def num_present(self) -> int:
        """Return the number of rows with a value."""
        return self.rows_with(np.ones(len(self.values), bool))

    @property
    def missing(self) -> float:
        """Return the share of rows without a value."""
        return 1 - self.num_present / max(self.num_rows, 1)

    @cached_property
    def missing_texts(self) -> tuple[str, ...]:
        """Return the texts that represent missing values in this column, most frequent first."""
        at = np.flatnonzero(~self.is_present & (self.counts > 0))
        at = at[np.argsort(-self.counts[at], kind="stable")]
        return tuple(word for i in at.tolist() if (word := shown(self.values[i]).strip()))

    @cached_property
    def distinct(self) -> int:
        """Return the number of distinct values, not counting missing ones."""
        return int((self.is_present & (self.counts > 0)).sum())

    @cached_property
    def example(self) -> str:
        """Return the first value, shortened, or an empty text if there is none."""
        at = np.flatnonzero(self.is_present)
        return shown(self.values[int(at[0])]) if len(at) else ""

    @cached_property
    def kind_of_type(self) -> str:
        """Return the kind of column that the type in the file implies.

        A column of type `TEXT` can have any kind.
        """
        found = self.values.type
        if is_text(found):
            return TEXT
        if pa.types.is_boolean(found):
            return BOOLEAN
        if pa.types.is_timestamp(found) or pa.types.is_date(found):
            return TIME
        if pa.types.is_integer(found):
            return INTEGER
        return FLOAT if pa.types.is_floating(found) or pa.types.is_decimal(found) else OTHER

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """Return each of `values` as a number, or NaN if it is not a number."""
        if self.kind_of_type in (OTHER, TIME):
            return np.full(len(self.values), np.nan)
        if self.kind_of_type == BOOLEAN:
            return np.asarray(self.values.to_numpy(zero_copy_only=False), np.float64)
        if self.kind_of_type != TEXT:
            return np.asarray(
                self.values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            )
        is_number = NUMBERS.parse(self.values).values.is_valid()
        texts = pc.if_else(
            is_number, pc.utf8_trim_whitespace(self.values), pa.scalar(None, self.values.type)
        )
        found: NDArray[np.float64] = texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return found

    @cached_property
    def is_boolean(self) -> NDArray[np.bool_]:
        """Return whether each of `values` is a boolean."""
        if self.kind_of_type != TEXT:
            return np.full(len(self.values), self.kind_of_type == BOOLEAN)
        return _matching(self.values, r"(?i)^\s*(true|false)\s*$")

    @cached_property
    def is_zero_led(self) -> NDArray[np.bool_]:
        """Return whether each of `values` is a text of digits with a leading zero.

        A conversion to a number would remove the leading zeros.
        """
        return (
            _matching(self.values, _ZERO_LED)
            if self.kind_of_type == TEXT
            else np.zeros(len(self.values), bool)
        )

    @cached_property
    def is_whole(self) -> NDArray[np.bool_]:
        """Return whether each of `values` is a whole number or has leading zeros.

        A number that is too large to be exact is not a whole number.
        """
        if self.kind_of_type not in (TEXT, INTEGER, FLOAT):
            return np.zeros(len(self.values), bool)
        if self.kind_of_type != TEXT:
            return _mask(CATEGORIES.parse(self.values).values.is_valid())
        # The parsing rule is slow, because it parses each text separately. In most columns, no text
        # is a number, so there is nothing to parse.
        found = _matching(self.values, _NEARLY_WHOLE)
        found[found] = _mask(
            CATEGORIES.parse(self.values.filter(pa.array(found))).values.is_valid()
        )
        return found | self.is_zero_led

    @cached_property
    def is_long_float(self) -> NDArray[np.bool_]:
        """Return whether each of `values` is a float of at least 2^53.

        Above 2^53, several whole numbers are represented by the same float.
        """
        with np.errstate(invalid="ignore"):
            large = np.isfinite(self.numbers) & (np.abs(self.numbers) >= _EXACT) & ~self.is_whole
        return large & ~_matching(self.values, _DIGITS) if self.kind_of_type == TEXT else large

    @cached_property
    def labels(self) -> NDArray[np.int8]:
        """Return each of `values` as a label, 0 or 1, or -1 if it is not a label."""
        if self.kind_of_type in (OTHER, TIME) or self.is_list:
            return np.full(len(self.values), -1, np.int8)
        found: NDArray[np.int8] = (
            LABELS.parse(self.values).values.fill_null(-1).to_numpy().astype(np.int8)
        )
        return found

    @cached_property
    def kind(self) -> str:
        """Return the kind of the column.

        The share of values of other kinds is at most `TOLERATED`.
        """
        found = self.kind_of_type
        if self.is_list or found in (BOOLEAN, TIME, INTEGER, OTHER) or not self.num_present:
            return found if found != TEXT or self.num_present else OTHER
        for kind, mask in self._masks.items():
            if self.num_unfit(mask) <= TOLERATED * self.num_rows:
                return kind
        return found

    @cached_property
    def _masks(self) -> dict[str, NDArray[np.bool_]]:
        """Return, for each kind, which of `values` belong to the kind.

        The first kind that fits is the kind of the column.
        """
        is_number = np.isfinite(self.numbers)
        if self.kind_of_type == TEXT:
            # Whole numbers with more than 64 bits are treated as ids. Two different ids could
            # become the same float.
            is_number &= self.is_whole | ~_matching(self.values, _DIGITS)
        return {BOOLEAN: self.is_boolean, INTEGER: self.is_whole, FLOAT: is_number}

    def num_unfit(self, mask: NDArray[np.bool_]) -> int:
        """Return the number of rows whose value is present and not selected."""
        return self.num_present - self.rows_with(mask)

    @cached_property
    def is_fitting(self) -> NDArray[np.bool_]:
        """Return whether each of `values` is of the column's kind."""
        found = self._masks.get(self.kind) if not self.is_list else None
        return self.is_present if found is None else found & self.is_present

    @cached_property
    def unfit_example(self) -> str:
        """Return the first value that does not have the column's kind, or an empty text."""
        at = np.flatnonzero(self.is_present & ~self.is_fitting)
        return shown(self.values[int(at[0])]) if len(at) else ""

    @cached_property
    def bounds(self) -> tuple[Any, Any] | None:
        """Return the minimum and the maximum of the values, for display.

        Returns None if the kind has no order.
        """
        if self.kind == TIME and len(self.values):
            found = pc.min_max(self.values)
            return shown(found["min"]), shown(found["max"])
        if self.kind not in (INTEGER, FLOAT) or not self.is_fitting.any():
            return None
        low, high = (
            float(self.numbers[self.is_fitting].min()),
            float(self.numbers[self.is_fitting].max()),
        )
        if self.kind == FLOAT:
            return low, high
        if max(-low, high) < _EXACT:
            return int(low), int(high)
        exact = [
            _exact(value) for value in self.values.filter(pa.array(self.is_fitting)).to_pylist()
        ]
        return min(exact), max(exact)

    def row_values(self, of_values: NDArray[Any], absent: Any) -> NDArray[Any]:
        """Return an array with the number that belongs to the value of each row.

        Args:
            of_values: Number for each distinct value, in the order of `values`.
            absent: Number for rows without a value.
        """
        if not len(of_values):
            return np.full(self.num_rows, absent)
        return np.where(self.codes >= 0, of_values[self.codes], absent)

    @property
    def groups(self) -> NDArray[np.int32]:
        """Return the index of each row's value, or -1 for a missing value."""
        numbers = np.where(self.is_present, np.arange(len(self.values)), -1).astype(np.int32)
        found: NDArray[np.int32] = self.row_values(numbers, np.int32(-1)).astype(np.int32)
        return found


@dataclass(frozen=True, kw_only=True)
class ColumnSample:
    """First rows of one file."""

    path: Path
    num_rows: int
    is_whole: bool
    """Whether the sample has all rows of the file."""
    counts: LineCounts
    """Counts of the lines read so far."""
    rejected: tuple[Rejected, ...]
    """First rejected lines."""
    columns: tuple[SampledColumn, ...]
    unnamed: tuple[int, ...] = ()
    """Positions of the columns without a name, counted from 1. Columns without a name are not in
    `columns`."""


def read_sample(path: Path, *, rows: int = SAMPLE_ROWS, max_bytes: int = MAX_BYTES) -> ColumnSample:
    """Read the first rows of a file.

    For each column, the result has the distinct values, and the index of the value of each row.

    Args:
        path: The file, in any format that `open_rows` reads.
        rows: Maximum rows to read.
        max_bytes: Maximum memory of the columns in bytes. Reading stops when this limit is
            exceeded.

    Raises:
        ContractError: The file cannot be read, has no header, has no rows, or has two columns with
            the same name.
    """
    try:
        source = open_rows(path)
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror or error}") from error
    names = [name for name in dict.fromkeys(source.names) if name]
    coders = [Coder() for _ in names]
    counts, rejected, num_rows, is_whole = LineCounts(), list[Rejected](), 0, True
    for chunk in source.chunks(names):
        taken = chunk.rows.slice(0, rows - num_rows)
        num_rows += taken.num_rows
        counts.add(chunk.counts)
        rejected += chunk.rejected[: _NUM_EXAMPLES - len(rejected)]
        if taken.num_rows:
            for coder, column in zip(coders, taken.columns):
                coder.add(column)
        is_whole = taken.num_rows == chunk.rows.num_rows
        if not is_whole or sum(coder.num_bytes for coder in coders) > max_bytes:
            is_whole = False
            break
    if not num_rows:
        reason = (
            f": {counts.rejected:,} lines are rejected, first {rejected[0].reason}"
            if rejected
            else ""
        )
        raise ContractError(f"{path} contains no rows, expected rows below its header{reason}")
    sample = ColumnSample(
        path=path,
        num_rows=num_rows,
        is_whole=is_whole,
        counts=counts,
        rejected=tuple(rejected),
        columns=tuple(coder.column(name) for name, coder in zip(names, coders)),
        unnamed=tuple(number for number, name in enumerate(source.names, 1) if not name),
    )
    _check_header(sample)
    if twice := sorted(
        {name for name in source.names if name and list(source.names).count(name) > 1}
    ):
        raise ContractError(f"{path} names the columns {twice} twice, expected each once")
    return sample


class Coder:
    """Collector of a column that is read in chunks.

    The collector stores each distinct value once. For each row, the collector stores only the index
    of the row's value.
    """

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._type = TEXT
        self.num_bytes = 0
        """Memory in bytes that the added rows need."""

    def add(self, column: Any) -> None:
        """Add the next rows of the column, an Arrow array of any type."""
        values = plain(column)
        self._type = TEXT if is_text(values.type) else str(values.type)
        if is_bytes(column.type) and pc.any(pc.match_substring(values, "\ufffd")).as_py():
            self._type, values = (
                "bytes that are not UTF-8 text",
                pa.nulls(len(values), pa.string()),
            )
        if is_list(values.type):
            values = _joined(values)
            if values is None:
                values = pa.nulls(len(column), pa.string())
            else:
                self._type = (
                    f"list<{'integer' if pa.types.is_integer(column.type.value_type) else TEXT}>"
                )
        elif (
            pa.types.is_null(values.type)
            or pa.types.is_nested(values.type)
            or _is_unknown(values.type)
        ):
            values = pa.nulls(len(values), pa.string())
        elif pa.types.is_decimal(values.type) or pa.types.is_large_string(values.type):
            values = values.cast(pa.string())
        encoded = values.dictionary_encode()
        self.num_bytes += encoded.nbytes
        self._parts.append(encoded)

    def column(self, name: str) -> SampledColumn:
        """Return the column that consists of all added rows."""
        kind = self._parts[-1].type if self._parts else pa.dictionary(pa.int32(), pa.string())
        parts = [part if part.type == kind else part.cast(kind) for part in self._parts]
        chunks = pa.chunked_array(parts, kind)
        encoded = chunks.unify_dictionaries().combine_chunks()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        return SampledColumn(name=name, type=self._type, values=encoded.dictionary, codes=codes)


def _is_unknown(found: Any) -> bool:
    types = pa.types
    known = (
        types.is_integer,
        types.is_floating,
        types.is_decimal,
        types.is_boolean,
        types.is_timestamp,
        types.is_date,
    )
    return not is_text(found) and not any(is_of(found) for is_of in known)


def _joined(lists: Any) -> Any:
    """Convert each list of whole numbers or texts to a single text.

    A list without elements becomes null.

    Returns None for lists of other types.
    """
    if pa.types.is_fixed_size_list(lists.type):
        lists = lists.cast(pa.list_(lists.type.value_type))
    if not (pa.types.is_integer(lists.type.value_type) or is_text(lists.type.value_type)):
        return None
    texts = lists.cast(pa.list_(pa.string()))
    elements = texts.flatten().fill_null("")
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(texts).fill_null(0).to_numpy())])
    whole = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements)
    joined = pc.binary_join(whole, ELEMENT_END)
    return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)


def _exact(value: Any) -> int:
    return value if isinstance(value, int) else int(str(value).strip().partition(".")[0])


def shown(scalar: Any) -> str:
    """Return the first 40 characters of a value of an Arrow array, for display."""
    try:
        value = scalar.as_py()
    except ValueError:  # Python has no type for times in nanoseconds
        value = scalar.cast(pa.string())
    return str(value).replace(ELEMENT_END, "|")[:40]


def counted(number: int, what: str) -> str:
    """Return a number and its noun as text, in the singular or plural.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _mask(booleans: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = booleans.to_numpy(zero_copy_only=False)
    return found.astype(bool)


def _matching(texts: Any, pattern: str) -> NDArray[np.bool_]:
    return _mask(pc.fill_null(pc.match_substring_regex(texts, pattern), False))


# -- header check


_NUMBER_NAME = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_TIME_NAME = re.compile(r"\d{4}[-/]\d{2}[-/]\d{2}([T ].*)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{8,}", re.ASCII)
_NUM_INSPECTED = 10_000


def _check_header(sample: ColumnSample) -> None:
    """Check that the first line of a file is a header, not a row."""
    if not sample.columns:
        raise ContractError(
            f"{sample.path} names no column, expected a header with the columns' names"
        )
    like_values = [column.name for column in sample.columns if _is_like_its_values(column)]
    times = [column.name for column in sample.columns if _TIME_NAME.fullmatch(column.name)]
    of_times = [name for name in times if name in like_values]
    if len(like_values) == len(sample.columns) or of_times:
        name = (of_times or like_values)[0]
        raise ContractError(
            f"{sample.path} has no header: its first line begins with {sample.columns[0].name!r}, "
            f"and {name!r} looks "
            "like a value of its column; expected a first line with the columns' names"
        )


def _is_like_its_values(column: SampledColumn) -> bool:
    name = column.name
    if _NUMBER_NAME.fullmatch(name):
        return True
    values = [str(each) for each in islice(_texts(column.values), _NUM_INSPECTED)]
    if name in values:
        return True
    if _TIME_NAME.fullmatch(name):
        return any(_TIME_NAME.fullmatch(value) for value in values[:100])
    shape, others = _shape(name), [_shape(value) for value in values[:100]]
    return any(map(str.isdigit, name)) and bool(others) and all(other == shape for other in others)


def _texts(values: Any) -> Iterator[str]:
    return (shown(value) for value in values)


def _shape(text: str) -> str:
    """Return the pattern of a text: one character stands for each run of digits or letters.

    >>> _shape("u17"), _shape("68fd1e64")
    ('a9', 'hex 8')
    """
    if _HEX.fullmatch(text):
        return f"hex {len(text)}"
    return re.sub(r"\d+", "9", re.sub(r"[A-Za-z]+", "a", text))


# -- columns from which the label can be predicted without other columns


_MIN_PER_LABEL = 20
"""Minimum number of rows of each label for the check whether a column alone predicts the label."""
DECIDING_AUC = 0.99
"""Maximum AUC that a feature may have when it is used alone. A column with a higher AUC is not used
as a feature, because it was recorded after the label or is the label itself."""


def deciding_auc(column: SampledColumn, labels: NDArray[np.int8]) -> float | None:
    """Return the AUC of a column that is used alone to predict the label.

    The result is the largest of three AUCs. For the first AUC, rows are ordered by the column's
    numbers, ascending or descending. For the second AUC, rows are ordered by whether a value is
    present. For the third AUC, rows are ordered by the share of clicks among the rows with the same
    value. The shares are computed from a random half of the rows and applied to the other half, so
    that values that occur once have no effect. Returns None if there are too few rows.

    Args:
        column: The column.
        labels: Label of each row, 0 or 1. Rows with the label -1 are ignored.
    """
    known = labels >= 0
    is_click = labels == 1
    num_clicks, num_others = int(is_click.sum()), int((known & ~is_click).sum())
    if min(num_clicks, num_others) < _MIN_PER_LABEL:
        return None
    groups = column.groups
    orders = [_auc_of_scores((groups >= 0).astype(np.float64)[known], is_click[known])]
    if column.kind in (INTEGER, FLOAT):
        numbers = column.row_values(np.where(column.is_present, column.numbers, np.nan), np.nan)
        there = known & np.isfinite(numbers)
        if min((is_click & there).sum(), (there & ~is_click).sum()) >= _MIN_PER_LABEL:
            orders.append(_auc_of_scores(numbers[there], is_click[there]))
    half = np.random.default_rng(0).random(len(labels)) < 0.5
    by_value = [
        _auc_by_value(groups, is_click, fitted=known & part, applied=known & ~part)
        for part in (half, ~half)
    ]
    return float(max(min(by_value), *(max(auc, 1 - auc) for auc in orders)))


def _auc_by_value(
    groups: NDArray[np.int32],
    is_click: NDArray[np.bool_],
    *,
    fitted: NDArray[np.bool_],
    applied: NDArray[np.bool_],
) -> float:
    size = int(groups.max(initial=-1)) + 2
    rows = np.bincount(groups[fitted] + 1, minlength=size)
    clicks = np.bincount(groups[fitted] + 1, weights=is_click[fitted], minlength=size)
    rate = clicks.sum() / max(rows.sum(), 1)
    scores = np.where(rows > 0, clicks / np.maximum(rows, 1), rate)
    return _auc_of_scores(scores[groups[applied] + 1], is_click[applied])


def _auc_of_scores(scores: NDArray[np.float64], is_click: NDArray[np.bool_]) -> float:
    """Return the AUC of the scores, or 0.5 if all rows have the same label."""
    auc = roc_auc(is_click, scores)
    return 0.5 if auc is None else auc


class RepeatedKeys(NamedTuple):
    """Number of rows that repeat the key of another row."""

    num_copies: int
    """Number of rows whose key occurred in another row. One row of each key is the original and is
    not counted."""
    num_conflicting: int
    """Number of copies whose content differs from the last row with the same key."""


def find_copies(key: Sequence[SampledColumn], content: Sequence[SampledColumn]) -> RepeatedKeys:
    """Count the rows that repeat the key of another row.

    Rows that repeat a key but differ in content are also counted separately.

    Args:
        key: Columns that identify a row, at least one.
        content: Columns that should be equal in all rows with the same key. If `content` is empty,
            rows are compared by `key` alone, and two missing values are equal.
    """
    has_key = np.ones(key[0].num_rows, bool)
    for column in key if content else ():
        has_key &= column.groups >= 0  # a row with a missing key value is assumed to be unique
    if not has_key.any():
        return RepeatedKeys(0, 0)
    keys = np.unique(_combinations(key)[has_key], return_inverse=True)[1]
    contents = _combinations([*key, *content])[has_key]
    num_keys = int(keys.max()) + 1
    newest = np.zeros(num_keys, np.int64)
    newest[keys] = np.arange(len(keys))  # NumPy uses the last assignment if an index occurs twice
    return RepeatedKeys(len(keys) - num_keys, int((contents != contents[newest[keys]]).sum()))


def _combinations(columns: Sequence[SampledColumn]) -> NDArray[np.int64]:
    """Return a number for each row. Rows have the same number if they are equal in all columns."""
    found = np.zeros(columns[0].num_rows, np.int64)
    for column in columns:
        size = len(column.values) + 1
        _, found = np.unique(
            found * size + (column.groups.astype(np.int64) + 1), return_inverse=True
        )
    return found.astype(np.int64)
