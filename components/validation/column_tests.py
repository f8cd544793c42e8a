"""Tests of one feature of two windows: its values, its mean, its missing share; with effect and detectable effect.

In: two `windows.ColumnSummary`s of a column. Out: p-values of 'nothing changed', corrected for rows of a request that
are alike (`drift_statistics.clustered`), and effects with 95 % intervals. Which tests count is decided with all
features' tests together, in `drift`.

The cells to compare are chosen by both windows' rows together: if one chose them alone, its luck would look like a
change of the other (`contracts.reference_statistics` has the measurement). Means are of bucket numbers: like the value
up to 10, like its logarithm beyond, so that no tail outweighs the rest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.drift_statistics.chance import MIN_EXPECTED, chi_square_tail, homogeneity, mean_design, proportion
from components.drift_statistics.clustered import Clustered, comparison_design, correlations, own_designs, with_few
from components.drift_statistics.effects import (
    Effect,
    detectable_mean,
    detectable_share,
    divergence,
    divergence_of_shift,
    share_change,
)
from components.validation.rules import ValidationSettings
from components.validation.windows import NUM_BUCKETS, ColumnSummary, Ints, RowTotal, WindowSummary, find_sums

LEAST_SHARE_CHANGE = 0.002
"""Least change of one category's share that counts, however rare the category was."""
KNOWN_FACTOR = 4
"""A value has its own cell if its rows are this many times what the summaries may lack of it."""
CERTAIN_ROWS = 10
"""Expected independent rows from which on absence is no accident (e^-10)."""

Floats = NDArray[np.float64]
WindowPair = tuple[WindowSummary, WindowSummary]
"""The window now, and the one before."""


@dataclass(frozen=True, kw_only=True)
class ColumnTest:
    """One test of one feature."""

    name: str
    """`values`, `mean` or `missing`."""
    p_value: float | None
    """None if a side lacks the rows that it needs."""
    effect: Effect
    """Of `values` of a category: the absolute change of the share that changed most relative to its floor; of `values`
    of a dense column: Jensen-Shannon divergence in bits; of `mean`: its shift in standard deviations; of `missing`: the
    change of the share."""
    floor: float
    """Least size of the effect that matters."""
    matters: bool
    """Whether the effect has that size."""
    detectable: float
    """Smallest effect that would probably have been found (`effects.POWER`)."""
    design: float
    """Design effect of the comparison: rows that are worth one independent row."""


@dataclass(frozen=True, kw_only=True)
class MovedValue:
    """The category whose share changed most, relative to its floor."""

    value: str | None
    """As people are shown it (`ShownValues.text`); None of a column of users."""
    share_before: float
    share_now: float


class ColumnTests(NamedTuple):
    """All tests of one feature."""

    tests: tuple[ColumnTest, ...]
    divergence: float | None = None
    """Jensen-Shannon divergence in bits less what chance adds; None if a side has no values."""
    moved: MovedValue | None = None
    new_share: float | None = None
    """Share of the rows with a value whose category is new with certainty; None for a dense column."""

    def find(self, name: str) -> ColumnTest | None:
        """The test of that name; None if it was not made."""
        return next((test for test in self.tests if test.name == name), None)


_NO_EFFECT = Effect(0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class ColumnComparison:
    """One column in two windows, and how it is judged."""

    now: ColumnSummary
    before: ColumnSummary
    windows: WindowPair
    settings: ValidationSettings
    """How large an effect must be to matter."""
    level: float
    """p-value below which a change counts, for what is detectable."""
    text_of: Callable[[int], str | None]
    """How people are shown a category."""

    def compare(self) -> ColumnTests:
        """All tests that can be made."""
        if not self.now.present or not self.before.present:
            return ColumnTests((self._test_missing(),))
        if self.now.values is None or self.before.values is None:
            values = self._test_buckets()
            return ColumnTests((values, self._test_mean(), self._test_missing()), values.effect.value)
        return self._test_categories()

    def _make_test(
        self, name: str, p_value: float | None, effect: Effect, *, floor: float, detectable: float, design: float
    ) -> ColumnTest:
        """A test whose variance was estimated from the independent rows of the smaller sample, less one."""
        n, m = (column.rows if name == "missing" else column.present for column in (self.now, self.before))
        return ColumnTest(
            name=name,
            p_value=with_few(p_value, min(n, m) / design - 1),
            effect=effect,
            floor=floor,
            matters=abs(effect.value) >= floor,
            detectable=detectable,
            design=design,
        )

    def _test_missing(self) -> ColumnTest:
        parts = (_part_with_column(self.now, self.windows[0]), _part_with_column(self.before, self.windows[1]))
        n, m = parts[0].rows, parts[1].rows
        a, b = self.now.missing.rows, self.before.missing.rows
        design = design_of_totals(self.now.missing, self.before.missing, parts)
        share, least = (a + b) / max(n + m, 1), max(n, 1)
        return self._make_test(
            "missing",
            proportion(a, n, b=b, m=m, design=design),
            share_change(a, n, b=b, m=m, design=design) or _NO_EFFECT,
            floor=self.settings.missing_drift,
            detectable=detectable_share(share, n=least, m=max(m, 1), design=design, level=self.level),
            design=design,
        )

    # -- dense columns

    def _test_buckets(self) -> ColumnTest:
        now, before = self.now, self.before
        designs, mean = _cell_designs(_cells_of(now, now.sums), _cells_of(before, before.sums))
        shift = detectable_mean(now.present, before.present, design=mean, level=self.level)
        return self._make_test(
            "values",
            homogeneity(now.counts, before.counts, designs),
            divergence(now.counts, before.counts, designs) or _NO_EFFECT,
            floor=self.settings.numeric_drift,
            detectable=divergence_of_shift(shift),
            design=mean,
        )

    def _test_mean(self) -> ColumnTest:
        places = np.arange(NUM_BUCKETS)
        beyond = possible = weighed = 0.0
        means = []
        for column in (self.now, self.before):
            mean = float(column.counts @ places) / column.present
            variance = max(float(column.counts @ places**2) / column.present - mean**2, 0.0)
            means.append(mean)
            weighed += variance * column.present
            if column.present_requests >= 2:
                squares = column.place_squares - 2 * mean * column.place_products + mean**2 * column.present_sizes
                squares *= column.present_requests / (column.present_requests - 1)
                beyond += squares - variance * column.present
                possible += variance * (column.present_sizes - column.present)
        n, m = self.now.present, self.before.present
        deviation = math.sqrt(weighed / (n + m))
        correlation = np.array([min(max(beyond / possible, 0.0), 1.0) if possible > 0 else 1.0])
        samples = (_cells_of(self.now, self.now.sums), _cells_of(self.before, self.before.sums))
        design = float(comparison_design(correlation, *samples)[0])
        error = math.sqrt(design * (1 / n + 1 / m))
        shift = (means[0] - means[1]) / deviation if deviation else (0.0 if means[0] == means[1] else math.inf)
        return self._make_test(
            "mean",
            chi_square_tail(min((shift / error) ** 2, 1e6), 1),
            Effect(shift, shift - 1.96 * error, shift + 1.96 * error),
            floor=self.settings.mean_drift,
            detectable=detectable_mean(n, m, design=design, level=self.level),
            design=design,
        )

    # -- categorical columns

    def _test_categories(self) -> ColumnTests:
        values, samples, own = _choose_cells(self.now, self.before)
        designs, mean = _cell_designs(*samples)
        a, b = samples[0].counts, samples[1].counts
        n, m = self.now.present, self.before.present
        difference = (divergence(a, b, designs) or _NO_EFFECT).value
        # The last cell holds the others.
        share_now, share_before = a[:-1] / n, b[:-1] / m
        relative = np.maximum(self.settings.categorical_drift_relative * share_before, LEAST_SHARE_CHANGE)
        floors = np.minimum(self.settings.categorical_drift, relative)
        ratios = np.where(own, np.abs(share_now - share_before) / floors, -1.0)
        change, floor, moved, reach = _NO_EFFECT, self.settings.categorical_drift, None, 1.0
        if len(ratios) and ratios.max() >= 0:
            worst = int(ratios.argmax())
            design, floor = float(designs[worst]), float(floors[worst])
            change = _without_sign(share_change(int(a[worst]), n, b=int(b[worst]), m=m, design=design) or _NO_EFFECT)
            moved = MovedValue(
                value=self.text_of(int(values[worst])),
                share_before=float(share_before[worst]),
                share_now=float(share_now[worst]),
            )
            share = float((a + b)[worst] / (n + m))
            reach = detectable_share(share, n=n, m=m, design=design, level=self.level)
        p_value = homogeneity(a, b, designs)
        test = self._make_test("values", p_value, change, floor=floor, detectable=reach, design=mean)
        if difference >= self.settings.numeric_drift:
            test = replace(test, matters=True)
        new = _count_new(a[:-1], b[:-1], designs[:-1], ratio=n / m, floor=self.before.floor)
        return ColumnTests((test, self._test_missing()), difference, moved, new / n)


def _part_with_column(column: ColumnSummary, window: WindowSummary) -> WindowSummary:
    """The part of the window that has the column, assuming that all its parts' requests are alike."""
    if column.rows == window.rows:
        return window
    share = column.rows / window.rows
    requests, sizes = math.ceil(window.requests * share), math.ceil(window.sizes * share)
    return replace(window, rows=column.rows, requests=requests, sizes=sizes)


def design_of_totals(now: RowTotal, before: RowTotal, windows: WindowPair) -> float:
    """Design effect of the difference of two shares of all rows."""
    samples = [
        Clustered(
            counts=np.array([total.rows]),
            squares=np.array([float(total.squares)]),
            products=np.array([float(total.products)]),
            rows=window.rows,
            sizes=window.sizes,
            requests=window.requests,
        )
        for total, window in zip((now, before), windows)
    ]
    # Shares of 0 and 1 say nothing about their correlation: the worst is assumed, whole requests.
    correlation, _ = correlations((samples[0], samples[1]))
    return float(comparison_design(correlation, samples[0], samples[1])[0])


def _choose_cells(
    now: ColumnSummary, before: ColumnSummary
) -> tuple[Ints, tuple[Clustered, Clustered], NDArray[np.bool_]]:
    """The values that are known well enough, both samples with a last cell for the others, and which are frequent.

    Frequent ones come first, most frequent first; the rare ones, which the tests take together, in the order of their
    values. In the order of their rows they would come sample by sample: if a value was in one request alone, its rows
    are that request's, and requests of the two samples may differ in size (measured: requests of 64 rows against
    requests of 40 to 64 were called drift in six columns of a world that stood still).
    """
    assert now.values is not None
    assert before.values is not None
    values = np.union1d(now.values, before.values)
    sums = [find_sums(values, now.values, now.sums), find_sums(values, before.values, before.sums)]
    known = sums[0][:, 0] + sums[1][:, 0] >= KNOWN_FACTOR * (now.floor + before.floor)
    values, sums = values[known], [each[known] for each in sums]
    frequent, expected = _are_frequent(_cells_of(now, sums[0]), _cells_of(before, sums[1]))
    order = np.lexsort((values, np.where(frequent, -expected, 0.0)))
    samples = (_cells_of(now, sums[0][order], others=1), _cells_of(before, sums[1][order], others=1))
    return values[order], samples, frequent[order]


def _are_frequent(now: Clustered, before: Clustered) -> tuple[NDArray[np.bool_], Floats]:
    """Which cells expect `MIN_EXPECTED` independent rows in the smaller sample, and how many each expects."""
    correlation, _ = correlations((now, before))
    own = own_designs(correlation, now, before)
    sizes = (now.rows / own[0], before.rows / own[1])
    rows = now.counts / own[0] + before.counts / own[1]
    expected = rows * np.minimum(*sizes) / (sizes[0] + sizes[1])
    return expected >= MIN_EXPECTED, expected


def _without_sign(effect: Effect) -> Effect:
    if effect.value < 0:
        effect = Effect(-effect.value, -effect.high, -effect.low)
    return Effect(effect.value, max(effect.low, 0.0), effect.high)


def _count_new(now: Ints, before: Ints, designs: Floats, *, ratio: float, floor: int) -> float:
    """Rows of categories that were absent although their rows now, less 4 standard errors, promised 10 rows there."""
    needed = (CERTAIN_ROWS * designs + 2 * floor) * ratio
    certain = (before == 0) & (now - 4 * np.sqrt(now * designs) >= needed)
    return float(now[certain].sum())


def _cells_of(column: ColumnSummary, sums: Ints, *, others: int = 0) -> Clustered:
    """The column's rows in cells of `sums` [k, 3], with as many more cells for the rest (0 or 1)."""
    rest = np.full(others, column.present - int(sums[:, 0].sum()))
    unknown = np.full(others, np.nan)
    return Clustered(
        counts=np.concatenate([sums[:, 0], rest]),
        squares=np.concatenate([sums[:, 1].astype(np.float64), unknown]),
        products=np.concatenate([sums[:, 2].astype(np.float64), unknown]),
        rows=column.present,
        sizes=column.present_sizes,
        requests=column.present_requests,
    )


def _cell_designs(now: Clustered, before: Clustered) -> tuple[Floats, float]:
    """Design effect of each cell, and their mean."""
    correlation, _ = correlations((now, before))
    designs = comparison_design(correlation, now, before)
    both = now.counts + before.counts
    return designs, mean_design(both, designs)[0] if len(designs) > 1 and both.max() < both.sum() else float(designs[0])
