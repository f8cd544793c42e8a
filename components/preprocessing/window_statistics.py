"""Statistics of a run's rows: counts of each slot's categories, and moments of numeric columns.

Counts and sums are integers, so statistics of parts of the rows merge without loss. The result has
the same bits for every division of the rows. The engines decide which values are counted.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.preprocessing.raw_partitions import position_columns
from evergreen.config.features import Features

_UNIT = 2.0**-149
"""Every float32 is an integer multiple of this unit, so sums are exact and do not depend on the
order."""

_Counts = tuple[NDArray[Any], NDArray[np.int64]]
"""Distinct values of a column or slot, ascending, and the number of rows with each. Values of a
bucketed column are float32, so each entry takes 12 bytes."""


class _Moment(NamedTuple):
    """Moments of one numeric column before it is scaled."""

    num_values: int
    total: int
    """Exact sum of the values, in multiples of `_UNIT`."""
    squares: int
    """Exact sum of the squares, in multiples of `_UNIT` squared."""
    least: float
    largest: float
    """Largest value. `least` and `largest` are float32 values. The smallest and largest value are
    infinite if the column has no value."""

    def mean_and_std(self) -> tuple[float, float]:
        """Return the mean and the sample standard deviation (n - 1).

        The standard deviation of a single value is 0. The numerator n * squares - total^2 is exact,
        because integers are not rounded.
        """
        n = self.num_values
        variance = (n * self.squares - self.total * self.total) / (n * max(n - 1, 1))
        return self.total / n * _UNIT, variance**0.5 * _UNIT


Moments = dict[str, _Moment]
"""Moments by column name."""

Statistics = tuple[dict[str, _Counts], Moments]
"""Counts by slot, and moments by column. For a bucketed column, the clipped values are counted. All
other fitted columns have moments."""


def statistics_of(
    rows: Any, features: Features, numbers: Mapping[str, NDArray[np.float32]]
) -> Statistics:
    """Return the statistics of a partition.

    Args:
        rows: Record batch of `raw_partitions.read_partition`.
        features: The recommender's features.
        numbers: Numeric columns to fit, as `engines.EncodingEngine.unscaler` computes them.
    """
    slots: dict[int, list[Any]] = {slot: [] for slot in features.positions.slots}
    for values, slot in zip(position_columns(rows, features).values(), features.positions.slots):
        slots[slot].append(_counts(values))
    counts = {features.slots[slot]: _merged_counts(found) for slot, found in slots.items()}
    bucketed = {
        name: _counts(pa.array(values, from_pandas=True))
        for name, values in numbers.items()
        if name in features.bucketed
    }
    return counts | bucketed, {
        n: _moments(values) for n, values in numbers.items() if n not in bucketed
    }


def merged(found: list[Statistics]) -> Statistics:
    """Merge the statistics of disjoint sets of rows. `found` must not be empty."""
    counts = {name: _merged_counts([each[name] for each, _ in found]) for name in found[0][0]}
    return counts, {
        name: _merged_moments([each[name] for _, each in found]) for name in found[0][1]
    }


def _counts(values: Any) -> _Counts:
    """Count the distinct values of an Arrow array, without nulls.

    Arrow's hash table is three times as fast as the hash table of pandas.
    """
    distinct, counts = (each.to_numpy() for each in values.drop_null().value_counts().flatten())
    order = np.argsort(distinct)
    return distinct[order], counts[order]


def _merged_counts(found: list[_Counts]) -> _Counts:
    if len(found) == 1:
        return found[0]
    values, inverse = np.unique(
        np.concatenate([values for values, _ in found]), return_inverse=True
    )
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, inverse, np.concatenate([counts for _, counts in found]))
    return values, counts


def _merged_moments(found: list[_Moment]) -> _Moment:
    num_values, total, squares, least, largest = zip(*found)
    return _Moment(sum(num_values), sum(total), sum(squares), min(least), max(largest))


def _moments(values: NDArray[np.float32]) -> _Moment:
    # Adding 0.0 turns -0.0 into 0.0.
    ends = float(values.min(initial=np.inf)) + 0.0, float(values.max(initial=-np.inf)) + 0.0
    return _Moment(len(values), *_exact_sums(values), *ends)


def _exact_sums(values: NDArray[np.float32]) -> tuple[int, int]:
    """Return the exact sum of float32 values, and the exact sum of their squares.

    There must be fewer than 2^29 rows.

    Values with equal binary exponents are added together. A mantissa has 24 bits, so its square has
    up to 48 bits. The upper 24 bits and the lower 24 bits of the squares are added separately.
    `bincount` adds in float64, which is exact up to 2^53.
    """
    bits = values.view(np.uint32)
    exponents = ((bits >> 23) & 0xFF).astype(np.int64)
    mantissas = ((bits & 0x7FFFFF) + np.where(exponents > 0, 1 << 23, 0)).astype(np.int64)
    shifts = np.maximum(exponents, 1) - 1
    squares = mantissas * mantissas

    def summed(each: NDArray[np.int64], times: int) -> int:
        return sum(
            int(part) << times * shift for shift, part in enumerate(np.bincount(shifts, each))
        )

    total = summed(np.where(values < 0, -mantissas, mantissas), 1)
    return total, (summed(squares >> 24, 2) << 24) + summed(squares & 0xFFFFFF, 2)
