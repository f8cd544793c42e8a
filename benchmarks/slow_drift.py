"""Simulate slow drift: properties change continuously, as a pure function of time.

`simulator.Drift` simulates a sudden change. At any hour, a `DriftingSimulator` gives a
`SimulatorSnapshot`, which draws rows with their true click probability. These properties change:

- Planted weights of some columns: a fixed part plus a part that follows a stationary
  Ornstein-Uhlenbeck process with a given half-life. At a lag of t hours, the autocorrelation of the
  second part is 2^(-t / half-life).
- Popularity of their categories: the logarithm of the frequency follows another Ornstein-Uhlenbeck
  process.
- Categories: new categories appear at a constant rate, are most popular when they are new, and
  fade.

Bias and strength are adjusted so that the click rate and the spread of the logit stay constant. A
model therefore loses quality with age only because its knowledge is outdated. Seeds and the hour
determine everything, and a snapshot does not depend on earlier snapshots.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.simulated_effects import effects_of
from demo.simulation.simulator import (
    SimulatedRows,
    Simulator,
    bias_for,
    drawn_rows,
    expected_auc,
    sigmoid,
)
from demo.simulation.tables import DRIFT_COLUMNS, Alias, CategoryTable, Tables, hashed
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import CATEGORICAL

_CALIBRATION_ROWS = 20_000
_LIVES = 8
"""A new category is removed after this number of half-lives. Its popularity is then 1 / 256 of the
initial popularity."""


@dataclass(frozen=True, kw_only=True)
class SlowDrift:
    """Settings of the drift."""

    seed: int
    columns: tuple[str, ...] = DRIFT_COLUMNS
    """Categorical columns that drift: their planted weights and the frequencies of their categories
    change."""
    half_life_hours: float = 12.0
    """Hours after which the autocorrelation of weights and popularities is one half."""
    moving_share: float = 0.07
    """Share of the planted weights' variance that follows the drift, in [0, 1]. The other part of
    the variance is constant. With the other defaults, a perfect model without retraining loses one
    point of AUC (0.01) within a day. Within two days, it loses 1.2 points."""
    popularity_spread: float = 0.3
    """Standard deviation over time of the logarithm of a category's frequency. 0 means constant
    frequencies."""
    new_category_columns: tuple[str, ...] = DRIFT_COLUMNS[:2]
    """Columns in which new categories appear. These columns must not be part of an interaction."""
    new_categories_per_hour: float = 1.0
    """Number of new categories per hour in each column of `new_category_columns`."""
    new_category_share: float = 0.05
    """Share of rows that have a new category in these columns. The popularity of new categories
    decreases with their age."""
    new_category_half_life_hours: float = 12.0
    """Half-life of the popularity of a new category, in hours."""
    step_minutes: float = 15.0
    """Length of a step, within which all properties are constant."""


@dataclass(frozen=True, kw_only=True)
class SimulatorSnapshot:
    """State of the simulator during one step."""

    hours: float
    """Start of the step in hours."""
    tables: Tables
    strength: float
    bias: float
    bayes_auc: float
    """Bayes-optimal AUC at this time."""

    def draw(self, n: int, random: Generator) -> SimulatedRows:
        """Return `n` independent rows."""
        return drawn_rows(self.tables, n, random, strength=self.strength, bias=self.bias)

    def probability_of(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the click probabilities [n] of the rows, as if they were drawn at this time.

        No model of this time can score better than these probabilities. On later rows, their AUC
        can be lower, and drift is then the only cause.
        """
        return sigmoid(self.strength * effects_of(self.tables, dense, categorical) + self.bias)


@dataclass(frozen=True, kw_only=True)
class DriftingSimulator:
    """Simulator of slow drift."""

    simulator: Simulator
    """Simulator with the fixed part of the weights and the mean of the frequencies."""
    drift: SlowDrift

    def at(self, hours: float) -> SimulatorSnapshot:
        """Return the snapshot at `hours` (0 or more) after the start.

        From hour 0, the drift is a stationary process.
        """
        tables = self.tables_at(hours)
        effects = tables.draw(_CALIBRATION_ROWS, self._calibration()).effects.astype(np.float64)
        strength = self.simulator.strength * self._mean_spread / float(effects.std())
        bias = bias_for(strength * effects, self.simulator.click_rate)
        return SimulatorSnapshot(
            hours=self._step_at(hours) * self.drift.step_minutes / 60.0,
            tables=tables,
            strength=strength,
            bias=bias,
            bayes_auc=expected_auc(sigmoid(strength * effects + bias)),
        )

    def tables_at(self, hours: float) -> Tables:
        """Return the tables of all columns at that time, without strength and bias.

        This function leaves out the calibration of strength and bias, which takes nine tenths of
        the time of `at`.
        """
        return replace(self.simulator.tables, categories=self._categories(self._step_at(hours)))

    def _step_at(self, hours: float) -> int:
        # Times are multiples of a quarter of an hour. A rounding error must not move a time into
        # the previous step.
        return math.floor(hours * 60.0 / self.drift.step_minutes + 1e-9)

    def _calibration(self) -> Generator:
        """Return a generator that yields the same random numbers for every hour.

        Bias and strength are computed from a random sample. With equal random numbers, they change
        only with the drift.
        """
        return np.random.default_rng([self.simulator.seed, 5])

    @cached_property
    def _mean_spread(self) -> float:
        effects = self.simulator.tables.draw(_CALIBRATION_ROWS, self._calibration()).effects
        return float(effects.astype(np.float64).std())

    def _categories(self, step: int) -> list[CategoryTable]:
        tables = list(self.simulator.tables.categories)
        for number, name in enumerate(CATEGORICAL):
            if name in self.drift.columns:
                tables[number] = self._moved(tables[number], number, step)
            if name in self.drift.new_category_columns:
                tables[number] = self._with_arrivals(tables[number], number, step)
        return tables

    def _moved(self, table: CategoryTable, number: int, step: int) -> CategoryTable:
        """Return the column with the weights and frequencies of that step."""
        drift = self.drift
        decay = 0.5 ** (drift.step_minutes / 60.0 / drift.half_life_hours)
        path = ornstein_uhlenbeck(
            [drift.seed, 11, number], count=len(table.weights), step=step, decay=decay
        )
        moving = (
            _orthogonal_to(path, table.weights.astype(np.float64) / table.spread, table.row_shares)
            * table.spread
        )
        weights = (
            math.sqrt(1.0 - drift.moving_share) * table.weights
            + math.sqrt(drift.moving_share) * moving
        )
        popularity = ornstein_uhlenbeck(
            [drift.seed, 12, number], count=len(table.frequencies), step=step, decay=decay
        )
        frequencies = table.frequencies * np.exp(drift.popularity_spread * popularity)
        frequencies /= frequencies.sum()
        alias = Alias.build(frequencies)
        return replace(
            table, weights=weights.astype(np.float32), frequencies=frequencies, alias=alias
        )

    def _with_arrivals(self, table: CategoryTable, number: int, step: int) -> CategoryTable:
        """Add new categories to the column. They have a constant share of the rows."""
        drift, hours = self.drift, step * self.drift.step_minutes / 60.0
        if drift.new_category_share == 0.0 or drift.new_categories_per_hour == 0.0:
            return table
        life, rate = drift.new_category_half_life_hours, drift.new_categories_per_hour
        # Category number k appears in the k-th interval of 1 / rate hours. Category 0 appears
        # `_LIVES` half-lives before the simulation starts.
        numbers = range(math.floor(hours * rate), math.floor((hours + _LIVES * life) * rate) + 1)
        drawn = [np.random.default_rng([drift.seed, 13, number, k]) for k in numbers]
        ages = np.array(
            [hours + _LIVES * life - (k + r.random()) / rate for k, r in zip(numbers, drawn)]
        )
        weights = np.array([r.normal() for r in drawn]) * table.spread
        alive = (ages >= 0.0) & (ages < _LIVES * life)
        if not alive.any():
            return table
        popularity = 0.5 ** (ages[alive] / life)
        share = drift.new_category_share
        frequencies = np.concatenate(
            [table.frequencies * (1.0 - share), share * popularity / popularity.sum()]
        )
        keys = hashed(len(table.frequencies) + np.array(numbers)[alive], table.salt)
        return replace(
            table,
            frequencies=frequencies,
            keys=np.concatenate([table.keys[:-1], keys, [MISSING_CATEGORY]]),
            weights=np.concatenate([table.weights[:-1], weights[alive], table.weights[-1:]]).astype(
                np.float32
            ),
            alias=Alias.build(frequencies / frequencies.sum()),
        )


def ornstein_uhlenbeck(
    seed: list[int], *, count: int, step: int, decay: float
) -> NDArray[np.float64]:
    """Return `count` independent stationary processes [count] at `step`, counted from 0.

    The processes have mean 0 and variance 1. x_0 is standard normal, and x_k = decay x_(k-1) +
    sqrt(1 - decay^2) e_k with standard normal e_k. At equal steps, an Ornstein-Uhlenbeck process
    has this form. The autocorrelation of the process at lag k is decay^k.
    """
    random = np.random.default_rng(seed)
    # Draw random numbers for all steps, in the order of the steps. Two steps then share the numbers
    # up to the earlier step, so they are on the same path.
    first, shocks = random.normal(size=count), random.normal(size=(step, count))
    decays = decay ** np.arange(step - 1, -1, -1.0)
    path: NDArray[np.float64] = decay**step * first + math.sqrt(1.0 - decay**2) * (decays @ shocks)
    return path


def _orthogonal_to(
    path: NDArray[np.float64], fixed: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Make the weights in `path` uncorrelated with the weights in `fixed`, with mean 0 over rows.

    The result is scaled so that its expected variance over rows is 1. `fixed` has mean 0 and
    variance 1 over rows, so the variances of the fixed and the moving part add up. The map is
    linear and constant in time, so it preserves the autocorrelation of the process.
    """
    path = path - shares @ path
    path = path - fixed * (shares @ (fixed * path))
    left = 1.0 - float((shares**2 * (1.0 + fixed**2)).sum())
    scaled: NDArray[np.float64] = path / math.sqrt(left)
    return scaled
