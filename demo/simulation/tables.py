"""Precompute one table per column, which makes drawing rows fast.

A table contains the distribution of its column and the planted effect of every value. `simulator`
chooses the tables, converts effects to probabilities, and applies drift.

The columns have the shape of real Criteo rows (missing shares, tails, cardinalities). Cardinalities
are reduced for a laptop to at most 20,000 distinct values. The shares of planted variance define
which columns matter. Most of the variance is in columns with few, frequent categories. A model can
therefore adapt to a change after some ten thousand training rows.
"""

from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import (
    CATEGORICAL,
    CRITEO_RECOMMENDER,
    DENSE,
    NUM_CATEGORICAL,
    NUM_DENSE,
)

RECOMMENDER = CRITEO_RECOMMENDER
"""Recommender of simulated rows, unless another recommender with the same features is given."""


@dataclass(frozen=True)
class SimulatedDenseColumn:
    """Parameters of a heavy-tailed integer column.

    A value is floor(exp(mu + sigma z)) + minimum, where z is standard normal. A value above the
    maximum is replaced by the maximum.
    """

    missing: float
    """Share of rows without a value. Two columns with equal shares lack their values in the same
    rows, as in the real log."""
    minimum: int
    median: int
    p99: int
    maximum: int
    variance: float
    """Share of the planted logit's variance."""


@dataclass(frozen=True)
class SimulatedCategoryColumn:
    """Column of hashed categories: one most frequent value, then a Zipf distribution."""

    missing: float
    cardinality: int
    top_share: float
    """Share of the most frequent value among the values that are not missing."""
    exponent: float
    """Zipf exponent of the other values, fitted so that 6,400 rows have about as many distinct
    values as real rows."""
    variance: float


DENSE_COLUMNS: dict[str, SimulatedDenseColumn] = {
    "I1": SimulatedDenseColumn(0.436, 0, 1, 41, 173, 0.02),
    "I2": SimulatedDenseColumn(0.0, -2, 2, 2082, 7864, 0.015),
    "I3": SimulatedDenseColumn(0.227, 0, 6, 354, 21636, 0.005),
    "I4": SimulatedDenseColumn(0.247, 0, 4, 43, 166, 0.01),
    "I5": SimulatedDenseColumn(0.037, 0, 2671, 290220, 1_600_000, 0.02),
    "I6": SimulatedDenseColumn(0.235, 0, 35, 1543, 5139, 0.015),
    "I7": SimulatedDenseColumn(0.044, 0, 3, 194, 1658, 0.02),
    "I8": SimulatedDenseColumn(0.001, 0, 8, 48, 756, 0.005),
    "I9": SimulatedDenseColumn(0.044, 0, 42, 1189, 7463, 0.005),
    "I10": SimulatedDenseColumn(0.436, 0, 0, 3, 7, 0.005),
    "I11": SimulatedDenseColumn(0.044, 0, 1, 24, 79, 0.02),
    "I12": SimulatedDenseColumn(0.765, 0, 0, 17, 98, 0.005),
    "I13": SimulatedDenseColumn(0.247, 0, 4, 67, 773, 0.01),
}

CATEGORY_COLUMNS: dict[str, SimulatedCategoryColumn] = {
    "C1": SimulatedCategoryColumn(0.0, 1000, 0.50, 1.7, 0.04),
    "C2": SimulatedCategoryColumn(0.0, 500, 0.12, 0.95, 0.08),
    "C3": SimulatedCategoryColumn(0.034, 20000, 0.04, 0.7, 0.004),
    "C4": SimulatedCategoryColumn(0.034, 16000, 0.05, 0.8, 0.004),
    "C5": SimulatedCategoryColumn(0.0, 120, 0.68, 1.9, 0.04),
    "C6": SimulatedCategoryColumn(0.12, 12, 0.40, 2.0, 0.05),
    "C7": SimulatedCategoryColumn(0.0, 6000, 0.02, 0.75, 0.004),
    "C8": SimulatedCategoryColumn(0.0, 200, 0.60, 1.95, 0.03),
    "C9": SimulatedCategoryColumn(0.0, 3, 0.89, 0.3, 0.01),
    "C10": SimulatedCategoryColumn(0.0, 15000, 0.24, 0.9, 0.004),
    "C11": SimulatedCategoryColumn(0.0, 3000, 0.04, 0.8, 0.004),
    "C12": SimulatedCategoryColumn(0.034, 18000, 0.04, 0.75, 0.004),
    "C13": SimulatedCategoryColumn(0.0, 2400, 0.04, 0.8, 0.004),
    "C14": SimulatedCategoryColumn(0.0, 26, 0.35, 0.9, 0.17),
    "C15": SimulatedCategoryColumn(0.0, 4000, 0.04, 0.85, 0.004),
    "C16": SimulatedCategoryColumn(0.034, 17000, 0.04, 0.8, 0.004),
    "C17": SimulatedCategoryColumn(0.0, 10, 0.46, 1.2, 0.16),
    "C18": SimulatedCategoryColumn(0.0, 1800, 0.05, 0.85, 0.004),
    "C19": SimulatedCategoryColumn(0.46, 1500, 0.30, 1.2, 0.01),
    "C20": SimulatedCategoryColumn(0.46, 4, 0.50, 0.3, 0.02),
    "C21": SimulatedCategoryColumn(0.034, 20000, 0.04, 0.7, 0.004),
    "C22": SimulatedCategoryColumn(0.77, 10, 0.35, 1.55, 0.01),
    "C23": SimulatedCategoryColumn(0.0, 15, 0.43, 1.2, 0.16),
    "C24": SimulatedCategoryColumn(0.034, 9000, 0.05, 0.95, 0.004),
    "C25": SimulatedCategoryColumn(0.46, 80, 0.25, 1.3, 0.02),
    "C26": SimulatedCategoryColumn(0.46, 9000, 0.07, 0.9, 0.004),
}

INTERACTIONS: tuple[tuple[str, str, float], ...] = (
    ("C6", "C9", 0.01),
    ("C20", "C22", 0.01),
    ("C1", "C25", 0.01),
)
"""Pairs of columns with their share of variance. Each pair of categories has a weight. Categories
are folded into a few buckets."""
INTERACTION_BUCKETS = 8

DRIFT_COLUMNS = ("C2", "C14", "C17", "C23")
"""Columns with most of the signal. A rotation of their weights has the largest effect."""

assert tuple(DENSE_COLUMNS) == DENSE
assert tuple(CATEGORY_COLUMNS) == CATEGORICAL

_QUANTILES = 1 << 16
_Z_99 = 2.3263478740408408
_CANDIDATE_ORDERS = 32


@dataclass(frozen=True)
class DenseTable:
    """Values of an integer column at 2^16 quantiles, with the effect of each value.

    A random 16-bit index selects the value and the effect for one row.
    """

    missing: float
    values: NDArray[np.float32]
    effects: NDArray[np.float32]
    missing_effect: np.float32

    @classmethod
    def build(
        cls, column: SimulatedDenseColumn, *, slope: float, missing_effect: float
    ) -> "DenseTable":
        """Build the table of an integer column.

        The effect is linear in log(1 + value - minimum), with variance of about `slope`^2. `slope`
        is signed.
        """
        mu = np.log(column.median - column.minimum + 0.5)
        sigma = (np.log(column.p99 - column.minimum + 0.5) - mu) / _Z_99
        drawn = np.floor(np.exp(mu + sigma * _normal_quantiles())) + column.minimum
        values = np.minimum(drawn, column.maximum)
        logged = np.log1p(values - column.minimum)
        effects = slope * (logged - logged.mean()) / logged.std()
        return cls(
            column.missing,
            values.astype(np.float32),
            effects.astype(np.float32),
            np.float32(missing_effect),
        )


class Alias(NamedTuple):
    """Walker's alias table for drawing from a discrete distribution.

    Each draw needs one random index and one uniform number.
    """

    keep: NDArray[np.float32]
    other: NDArray[np.int32]

    @classmethod
    def build(cls, probabilities: NDArray[np.float64]) -> "Alias":
        """Build the table of `probabilities`, which sum to 1 (Vose 1991)."""
        n = len(probabilities)
        scaled = (probabilities * n).tolist()
        keep, other = [1.0] * n, list(range(n))
        small = [i for i, p in enumerate(scaled) if p < 1.0]
        large = [i for i, p in enumerate(scaled) if p >= 1.0]
        while small and large:
            low, high = small.pop(), large[-1]
            keep[low], other[low] = scaled[low], high
            scaled[high] -= 1.0 - scaled[low]
            if scaled[high] < 1.0:
                small.append(large.pop())
        return cls(np.array(keep, dtype=np.float32), np.array(other, dtype=np.int32))

    def draw(self, n: int, random: Generator) -> NDArray[np.int32]:
        """Draw indices [n]."""
        index = random.integers(0, len(self.keep), n, dtype=np.int32)
        moved = random.random(n, dtype=np.float32) >= self.keep[index]
        return np.where(moved, self.other[index], index)


@dataclass(frozen=True)
class CategoryTable:
    """Frequency, 32-bit hash and planted weight of each category in a column.

    The last entry of `keys` and `weights` is for the missing value.
    """

    missing: float
    frequencies: NDArray[np.float64]
    """Share of each category among the rows that have a value."""
    keys: NDArray[np.int64]
    weights: NDArray[np.float32]
    spread: float
    """Standard deviation of the weight over rows."""
    salt: int
    alias: Alias

    @classmethod
    def build(
        cls, column: SimulatedCategoryColumn, spread: float, random: Generator
    ) -> "CategoryTable":
        """Build the table of `column` with weights drawn from `random`."""
        ranks = np.arange(1, column.cardinality, dtype=np.float64)
        rest = ranks**-column.exponent
        # Zipf-Mandelbrot distribution: increase the offset of the ranks until no other category has
        # a larger share than `top_share`.
        while (1.0 - column.top_share) * rest[0] / rest.sum() > column.top_share:
            ranks += 1.0
            rest = ranks**-column.exponent
        frequencies = np.concatenate(
            [[column.top_share], (1.0 - column.top_share) * rest / rest.sum()]
        )
        salt = int(random.integers(0, 1 << 32))
        weights = random.normal(size=column.cardinality + 1)
        shares = np.append(frequencies * (1.0 - column.missing), column.missing)
        return cls(
            missing=column.missing,
            frequencies=frequencies,
            keys=np.append(hashed(np.arange(len(frequencies)), salt), MISSING_CATEGORY),
            weights=(_standardised(weights, shares) * spread).astype(np.float32),
            spread=spread,
            salt=salt,
            alias=Alias.build(frequencies / frequencies.sum()),
        )

    @property
    def row_shares(self) -> NDArray[np.float64]:
        """Share of each category among all rows. The missing value is the last entry."""
        return np.append(self.frequencies * (1.0 - self.missing), self.missing)

    def rotated(self, random: Generator) -> "CategoryTable":
        """Return a table with the same categories and frequencies, but with permuted weights.

        Several random permutations are drawn. The permutation with the lowest absolute correlation
        to the old weights is used. With few categories, a single random permutation can have a high
        positive or negative correlation.
        """
        shares, old = self.row_shares, self.weights.astype(np.float64)
        best, best_relation = old, np.inf
        for _ in range(_CANDIDATE_ORDERS):
            dealt = _standardised(random.permutation(old), shares) * self.spread
            relation = abs(float((shares * old * dealt).sum()))
            if relation < best_relation:
                best, best_relation = dealt, relation
        return replace(self, weights=best.astype(np.float32))

    def with_new_categories(self, count: int, share: float, random: Generator) -> "CategoryTable":
        """Return the column with `count` new categories.

        `share` is the share of the new categories among the rows with a value.
        """
        rest = np.arange(1, count + 1, dtype=np.float64) ** -1.0
        frequencies = np.concatenate([self.frequencies * (1.0 - share), share * rest / rest.sum()])
        fresh = random.normal(size=count) * max(self.spread, 1e-9)
        weights = np.concatenate([self.weights[:-1], fresh, self.weights[-1:]])
        alias = Alias.build(frequencies / frequencies.sum())
        keys = np.append(hashed(np.arange(len(frequencies)), self.salt), MISSING_CATEGORY)
        return replace(
            self,
            frequencies=frequencies,
            weights=weights.astype(np.float32),
            keys=keys,
            alias=alias,
        )


class TableRows(NamedTuple):
    """Rows drawn from a set of tables."""

    dense: NDArray[np.float32]
    """[n, 13], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, 26], -1 = missing."""
    effects: NDArray[np.float32]
    """[n] sum of each row's planted effects."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables of all columns of a simulator."""

    dense: list[DenseTable]
    """One table per integer column."""
    categories: list[CategoryTable]
    """One table per categorical column."""
    interactions: list[tuple[int, int, NDArray[np.float32]]]
    """Pairs of interacting columns. Each entry has the positions of two columns and a flat array of
    weights, [buckets * buckets]."""

    def draw(self, n: int, random: Generator) -> TableRows:
        """Draw `n` independent rows."""
        effects = np.zeros(n, dtype=np.float32)
        present_of: dict[float, NDArray[np.bool_]] = {}

        def present(missing: float) -> NDArray[np.bool_]:
            if missing not in present_of:
                present_of[missing] = random.random(n, dtype=np.float32) >= missing
            return present_of[missing]

        dense = np.empty((n, NUM_DENSE), dtype=np.float32)
        for i, dense_table in enumerate(self.dense):
            at = random.integers(0, 1 << 16, n, dtype=np.uint16)
            values, value_effects = dense_table.values[at], dense_table.effects[at]
            if dense_table.missing:
                has = present(dense_table.missing)
                values = np.where(has, values, np.float32(np.nan))
                value_effects = np.where(has, value_effects, dense_table.missing_effect)
            dense[:, i] = values
            effects += value_effects
        categorical = np.empty((n, NUM_CATEGORICAL), dtype=np.int64)
        buckets: list[NDArray[np.int32]] = []
        for i, table in enumerate(self.categories):
            index = table.alias.draw(n, random)
            if table.missing:
                index = np.where(present(table.missing), index, np.int32(len(table.frequencies)))
            categorical[:, i] = table.keys[index]
            effects += table.weights[index]
            buckets.append(index % INTERACTION_BUCKETS)
        for a, b, weights in self.interactions:
            effects += weights[buckets[a] * INTERACTION_BUCKETS + buckets[b]]
        return TableRows(dense, categorical, effects)


def _standardised(weights: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale the weights to mean 0 and variance 1 over rows, whatever the seed."""
    centred = weights - (weights * shares).sum()
    standard: NDArray[np.float64] = centred / np.sqrt((shares * centred**2).sum())
    return standard


def hashed(indices: NDArray[np.int64], salt: int) -> NDArray[np.int64]:
    """Hash distinct indices in [0, 2^32) to distinct 32-bit values.

    The hash is murmur3's finalizer, which is a bijection.
    """
    x = indices.astype(np.uint32) ^ np.uint32(salt)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x.astype(np.int64)


@cache
def _normal_quantiles() -> NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)])
