"""What a round must know of its rows: how often each slot's categories occur, and the moments of numeric columns.

Of distinct values counts, of numbers sums of integers: statistics of parts of the rows are merged without loss, so they
are the same bits however the rows are divided. Which values are counted is the engines'.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.preprocessing.raw_partitions import place_columns
from evergreen.config.features import Features

UNIT = 2.0**-149
"""Every float32 is a whole number of these, and a sum of integers is the same in any order."""

Counts = tuple[NDArray[Any], NDArray[np.int64]]
"""Distinct values of a column or a slot, ascending, and how often each occurs; of a bucketed column float32, 12 bytes
for each."""


class Moment(NamedTuple):
    """Of the values of one numeric column before they are scaled."""

    num_values: int
    total: int
    """In units of `UNIT`; exact."""
    squares: int
    """In units of `UNIT` squared; likewise."""
    least: float
    largest: float
    """Both of float32, and infinite where there is no value."""

    def mean_and_std(self) -> tuple[float, float]:
        """Mean and standard deviation (of a sample, n - 1); 0 for the latter of one value.

        The numerator n * squares - total^2 is exact: integers have no rounding.
        """
        n = self.num_values
        variance = (n * self.squares - self.total * self.total) / (n * max(n - 1, 1))
        return self.total / n * UNIT, variance**0.5 * UNIT


Moments = dict[str, Moment]
"""By column."""

Statistics = tuple[dict[str, Counts], Moments]
"""Counts by slot, of a bucketed column those of its values, clipped; moments of every other column that is fitted."""


def statistics_of(rows: Any, features: Features, numbers: Mapping[str, NDArray[np.float32]]) -> Statistics:
    """The statistics of a partition.

    `rows` are as `raw_partitions.read_partition` gives them; `numbers` are what `engines.EncodingEngine.unscaler` gives
    of the numeric columns that are fitted.
    """
    slots: dict[int, list[Any]] = {slot: [] for slot in features.places.slots}
    for place, slot in zip(place_columns(rows, features).values(), features.places.slots):
        slots[slot].append(_counts(place))
    counts = {features.slots[slot]: _merged_counts(found) for slot, found in slots.items()}
    bucketed = {
        name: _counts(pa.array(values, from_pandas=True))
        for name, values in numbers.items()
        if name in features.bucketed
    }
    return counts | bucketed, {n: _moments(values) for n, values in numbers.items() if n not in bucketed}


def merged(found: list[Statistics]) -> Statistics:
    """Statistics of disjoint rows as those of all; at least one."""
    counts = {name: _merged_counts([each[name] for each, _ in found]) for name in found[0][0]}
    return counts, {name: _merged_moments([each[name] for _, each in found]) for name in found[0][1]}


def _counts(values: Any) -> Counts:
    """Of an Arrow array, whose hash table is three times as fast as pandas'; null is not counted."""
    distinct, counts = (each.to_numpy() for each in values.drop_null().value_counts().flatten())
    order = np.argsort(distinct)
    return distinct[order], counts[order]


def _merged_counts(found: list[Counts]) -> Counts:
    if len(found) == 1:
        return found[0]
    values, places = np.unique(np.concatenate([values for values, _ in found]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, np.concatenate([counts for _, counts in found]))
    return values, counts


def _merged_moments(found: list[Moment]) -> Moment:
    num_values, total, squares, least, largest = zip(*found)
    return Moment(sum(num_values), sum(total), sum(squares), min(least), max(largest))


def _moments(values: NDArray[np.float32]) -> Moment:
    ends = float(values.min(initial=np.inf)) + 0.0, float(values.max(initial=-np.inf)) + 0.0  # -0.0 is 0.0
    return Moment(len(values), *_exact_sums(values), *ends)


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
