"""Operators for NVTabular's graphs: its own, given less to do, and one that counts.

Where the line is: NVTabular plans, executes and types the graphs (`Workflow`, its executor, `Dataset`), and every id
comes out of `Categorify`'s look-up. What is overridden is a method that its operator interface names, for one of three
reasons, said at each: speed (Categorify is handed every distinct value of a column once and not every row: its merge
and sort cost 10 to 20 times the rest), a case that NVTabular 23.8 refuses, or a result that is to be the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from nvtabular import ops
from nvtabular.ops import StatOperator

from components.contracts.features import INDICATOR, Features
from components.contracts.workflow import MISSING_ID, PADDING_ID

FIXED_POINT_BITS = 32
"""Logged values are summed as integers of 2^-32: float32 is exact in them from 2^-8 on, and a sum of integers is the
same in any order."""
_LOW_BITS = 20
_SMALLEST_BITS = 149
"""Every float32 is a whole number of 2^-149."""
_MERGED_AT_A_TIME = 8

Counts = tuple[NDArray[Any], NDArray[np.int64]]
"""Distinct values of a column or a slot, ascending, and how often each occurs; of a bucketed column float32, 12 bytes
for each."""


class Moment(NamedTuple):
    """Of the values of one numeric column before they are scaled."""

    num_values: int
    total: int
    """In units of `unit`; exact, so that it is the same in any order."""
    squares: int
    """In units of `unit` squared; likewise."""
    least: float
    largest: float
    """Both of float32, and infinite where there is no value."""
    unit: float

    def mean_and_std(self) -> tuple[float, float]:
        """Mean and standard deviation (of a sample, n - 1); 0 for the latter of one value.

        The numerator n * squares - total^2 is exact: integers have no rounding.
        """
        n = self.num_values
        variance = (n * self.squares - self.total * self.total) / (n * max(n - 1, 1))
        return self.total / n * self.unit, variance**0.5 * self.unit


Moments = dict[str, Moment]
"""By column."""


class WindowStatistics(StatOperator):  # type: ignore[misc]
    """What a round must know of its rows: how often each slot's categories occur, and the moments of dense columns.

    In place of `Categorify.fit`, which sorts and writes a file per column, and `Normalize.fit`, whose float64 sums
    depend on how rows are divided: partial results of these are merged over partitions and processes without loss.
    """

    def __init__(self, slots: Mapping[str, Sequence[str]], dense: Mapping[str, bool]) -> None:
        """Takes the columns of each slot, and those to sum with whether the values are logarithms."""
        super().__init__()
        self.slots, self.dense = slots, dense
        self.counts: dict[str, Counts] = {}
        self.moments: Moments = {}

    def fit(self, col_selector: Any, ddf: Any) -> Any:
        """The statistics of all partitions, not computed yet; few partial results are held at a time."""
        chunk, merge = dask.delayed(_statistics, pure=False), dask.delayed(merged, pure=False)
        found = [chunk(part, self.slots, self.dense) for part in ddf.to_delayed()]
        while len(found) > 1:
            groups = range(0, len(found), _MERGED_AT_A_TIME)
            found = [merge(found[at : at + _MERGED_AT_A_TIME]) for at in groups]
        return found[0]

    def fit_finalize(self, dask_stats: Any) -> None:
        """Keeps what `fit` computed."""
        self.counts, self.moments = dask_stats

    def clear(self) -> None:
        """Forgets the statistics."""
        self.counts, self.moments = {}, {}

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns as they are."""
        return df[col_selector.names]


def merged(found: list[tuple[dict[str, Counts], Moments]]) -> tuple[dict[str, Counts], Moments]:
    """Statistics of disjoint rows as those of all; at least one."""
    counts = {name: _merged_counts([each[name] for each, _ in found]) for name in found[0][0]}
    return counts, {name: _merged_moments([each[name] for _, each in found]) for name in found[0][1]}


def _statistics(
    df: Any, slots: Mapping[str, Sequence[str]], dense: Mapping[str, bool]
) -> tuple[dict[str, Counts], Moments]:
    counts = {slot: _merged_counts([_counts(df[name].to_numpy()) for name in of]) for slot, of in slots.items()}
    return counts, {name: _moments(df[name].to_numpy(), is_logged=is_logged) for name, is_logged in dense.items()}


def _counts(values: Any) -> Counts:
    places, distinct = _distinct(values)
    counts = np.bincount(places, minlength=len(distinct) + 1)[:-1]
    order = np.argsort(distinct)
    kept = distinct[order] if values.dtype == np.float32 else distinct[order].astype(np.int64)
    return kept, counts[order].astype(np.int64)


def _distinct(values: Any) -> tuple[Any, Any]:
    """Per value, its place among the distinct ones (behind the last where it is missing), and these as they come.

    By Arrow, whose hash table is three times as fast as pandas' (7 to 11 ns a value, 26 to 33 by `factorize`).
    """
    encoded = pa.array(values, from_pandas=True).dictionary_encode()
    distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
    return encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False), distinct


def _merged_counts(found: list[Counts]) -> Counts:
    if len(found) == 1:
        return found[0]
    values, places = np.unique(np.concatenate([values for values, _ in found]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, np.concatenate([counts for _, counts in found]))
    return values, counts


def _merged_moments(found: list[Moment]) -> Moment:
    num_values, total, squares, least, largest, (unit, *_) = zip(*found)
    return Moment(sum(num_values), sum(total), sum(squares), min(least), max(largest), unit)


def _moments(values: Any, *, is_logged: bool) -> Moment:
    values = values.astype(np.float32)
    sums = _logged_sums(values) if is_logged else _exact_sums(values)
    ends = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    return Moment(len(values), *sums, *ends, unit=2.0 ** -(FIXED_POINT_BITS if is_logged else _SMALLEST_BITS))


def _logged_sums(values: NDArray[np.float32]) -> tuple[int, int]:
    """Exact below 2^22 rows: a logged float32 is below 89, so the integer has 39 bits and each partial square 40."""
    fixed = np.rint(values.astype(np.float64) * 2.0**FIXED_POINT_BITS).astype(np.int64)
    high, low = fixed >> _LOW_BITS, fixed & ((1 << _LOW_BITS) - 1)
    squares = int((high * high).sum()) << 2 * _LOW_BITS
    squares += (int((high * low).sum()) << _LOW_BITS + 1) + int((low * low).sum())
    return int(fixed.sum()), squares


def _exact_sums(values: NDArray[np.float32]) -> tuple[int, int]:
    """Sum and sum of squares of any float32, by binary exponent: exact below 2^29 rows.

    A mantissa has 24 bits, half of its square too, and bincount adds in float64, which is exact up to 2^53.
    """
    bits = values.view(np.uint32)
    exponents = ((bits >> 23) & 0xFF).astype(np.int64)
    mantissas = ((bits & 0x7FFFFF) + np.where(exponents > 0, 1 << 23, 0)).astype(np.int64)
    shifts = np.maximum(exponents, 1) - 1
    squares = mantissas * mantissas

    def summed(each: NDArray[np.int64], times: int) -> int:
        return sum(int(part) << times * shift for shift, part in enumerate(np.bincount(shifts, each)))

    total = summed(np.where(values < 0, -mantissas, mantissas), 1)
    return total, (summed(squares >> 24, 2) << 24) + summed(squares & 0xFFFFFF, 2)


def stored_name(name: str) -> str:
    """The name by which Categorify looks a column up.

    It merges tables that have columns `order` and `labels` of their own; no feature's name has a slash.
    """
    return f"/{name}"


class DistinctCategorify(ops.Categorify):  # type: ignore[misc]
    """Categorify that looks up each distinct value of a column once, and gives the rows the ids of their values.

    It also takes a partition in which a column has no value at all, where NVTabular 23.8 raises.
    """

    def __init__(self, vocabularies: dict[str, str], features: Features, *, folder: Path) -> None:
        """Takes the file of each slot, whose category column is named by `stored_name`, what looks up, and the folder.

        The columns are `Features.id_names`; in the place of a list a missing value is padding.
        """
        super().__init__(vocabs={stored_name(slot): path for slot, path in vocabularies.items()}, out_path=str(folder))
        slots = [features.slots[number] for number in features.id_places.slots]
        self.storage_name = {name: stored_name(slot) for name, slot in zip(features.id_names, slots)}
        owners = zip(features.id_names, features.id_features)
        self._absent = {name: PADDING_ID if owner in features.lists else MISSING_ID for name, owner in owners}

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The ids of `df`, int64."""
        ids = {name: self._ids(col_selector, name, df[name]) for name in col_selector.names}
        return pd.DataFrame(ids, index=df.index)

    def _ids(self, col_selector: Any, name: str, column: Any) -> Any:
        places, distinct = _distinct(column.to_numpy())
        ids = np.full(len(distinct) + 1, self._absent[name], dtype=np.int64)
        if len(distinct):
            stored = self.storage_name[name]
            ids[:-1] = super().transform(type(col_selector)([stored]), pd.DataFrame({stored: distinct}))[stored]
        return ids[places]


class KnownBucketize(ops.Bucketize):  # type: ignore[misc]
    """Bucketize that leaves a missing value missing, where NVTabular 23.8 takes it for one of the last bucket."""

    output_dtype = np.float64
    """As of all columns that Categorify is given."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns' buckets."""
        return super().transform(col_selector, df).where(df[col_selector.names].notna())


class RoundedLogOp(ops.LogOp):  # type: ignore[misc]
    """LogOp whose logarithm is float64's, rounded to float32, as `FeatureWorkflow.encode_dense` says why."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns' log(1 + x)."""
        shifted = df[col_selector.names].astype(np.float32) + np.float32(1)
        return np.log(shifted.astype(np.float64)).astype(np.float32)


class Emptied(ops.Operator):  # type: ignore[misc]
    """Makes columns missing in every row: a workflow that excludes them must not depend on what the rows hold there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Takes the names of the columns; others of the selection stay as they are."""
        super().__init__()
        self._names = names

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns, each with its type."""
        empty = {name: df[name] * np.float32(np.nan) for name in col_selector.names if name in self._names}
        return df[col_selector.names].assign(**empty)


class IsMissing(ops.Operator):  # type: ignore[misc]
    """The indicators of columns: 1 where a value is missing, else 0."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """One float32 column for each, named by `features.INDICATOR`."""
        return df[col_selector.names].isna().astype(np.float32).rename(columns=_indicator)

    def column_mapping(self, col_selector: Any) -> dict[str, list[str]]:
        """Which column each comes from, as NVTabular asks."""
        return {_indicator(name): [name] for name in col_selector.names}


def _indicator(name: str) -> str:
    return INDICATOR.format(name=name)
