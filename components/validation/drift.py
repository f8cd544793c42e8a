"""How far each feature, and the click rate, moved from the rows that the champion's line learned from.

Compared with all kept windows merged. Each feature of both (`windows.ColumnSummary`) is tested by its values, its mean
and its missing share: p-values of 'nothing changed', corrected for rows of a request that are alike, and effects with
95 % intervals. All tests of a window are adjusted together by Benjamini and Hochberg's procedure: at most
`false_alarm_rate` of the features reported as drifted are so by chance, and if nothing moved that is the probability of
any report. A feature drifted if a test is significant and its effect reaches the setting: significance keeps small
windows from alarming on noise, the effect keeps large ones from alarming on nothing. What a window is too small to show
is stated with every feature as `detectable`.

A change that the champion has already learned is not reported again: if its newest kept window would have shown the
effect and does not differ from these rows.

The cells to compare are chosen by both windows' rows together: if one chose them alone, its luck would look like a
change of the other (`contracts.reference_statistics` has the measurement). Means are of bucket numbers: like the value
up to 10, like its logarithm beyond, so that no tail outweighs the rest. Rows of one user in several requests, of one
hour or of one day count as independent requests. If they are not, alarms are more frequent than the rate says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.config.validation import ValidationSettings
from components.contracts.words import ShownValues
from components.drift_statistics import (
    MIN_EXPECTED,
    Clustered,
    Effect,
    adjusted,
    chi_square_tail,
    comparison_design,
    correlations,
    detectable_mean,
    detectable_share,
    divergence,
    divergence_of_shift,
    homogeneity,
    mean_design,
    own_designs,
    proportion,
    share_change,
    with_few,
)
from components.validation.windows import (
    NUM_BUCKETS,
    ColumnSummary,
    Ints,
    KeptWindows,
    RowTotal,
    WindowSummary,
    find_sums,
)

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


@dataclass(frozen=True, kw_only=True)
class DriftEntry:
    """One feature's change. A number that is undefined is None."""

    feature: str
    drifted: bool
    learned: bool
    """The changes are those of the champion's newest window too."""
    changes: tuple[str, ...]
    """Tests (`values`, `mean`, `missing`) that found a change."""
    effect: float | None
    """Change of the share that changed most relative to its threshold, or, of a numeric column, Jensen-Shannon
    divergence in bits less what chance adds."""
    effect_low: float | None
    effect_high: float | None
    """95 % interval."""
    threshold: float | None
    """Effect from which on it matters."""
    detectable: float | None
    """Smallest effect that these rows would probably have shown."""
    design_effect: float | None
    """Rows that are worth one independent row."""
    p_value: float | None
    q_value: float | None
    """Of the decisive test; adjusted for all tests of the window."""
    divergence: float | None
    mean_shift: float | None
    """In standard deviations."""
    moved_value: MovedValue | None
    new_value_share: float | None
    """Share of rows whose category is certainly new."""
    missing_now: float | None
    missing_before: float | None
    num_rows_now: int
    num_rows_before: int
    """Rows that have a value; of the elements of a list, elements."""


@dataclass(frozen=True, kw_only=True)
class LabelShift:
    """Change of the click rate. Rows of a request that are alike count as fewer, in interval and p-value."""

    rate_now: float
    rate_before: float
    difference: float
    low: float
    high: float
    """95 % interval of the difference."""
    p_value: float | None
    design_effect: float
    num_rows_now: int
    num_rows_before: int
    newest: "LabelShift | None" = None
    """The same against the champion's newest window; None if that is the only one."""


def measure_drift(
    now: WindowSummary, kept: KeptWindows, settings: ValidationSettings, *, shown: ShownValues
) -> list[DriftEntry]:
    """One entry per feature that both sides judge, in column order.

    `kept` has at least one window.
    """
    compared = _compare_windows(now, kept.merged, settings, shown=shown)
    newest = _compare_windows(now, kept.newest, settings, shown=shown) if len(kept.windows) > 1 else {}
    entries = []
    for name, feature in compared.items():
        learned = name in newest and _is_learned(feature, newest[name])
        entries.append(_make_entry(name, feature, (now, kept.merged), learned=learned))
    return entries


class _ComparedFeature(NamedTuple):
    """A feature's tests with their adjusted p-values."""

    tests: ColumnTests
    q_values: dict[str, float]
    """By test; those that could be made."""
    changes: tuple[str, ...]
    """Tests that are significant and whose effect matters."""


def _compare_windows(
    now: WindowSummary, before: WindowSummary, settings: ValidationSettings, *, shown: ShownValues
) -> dict[str, _ComparedFeature]:
    names = [name for name in now.columns if name in before.columns]
    rate = settings.false_alarm_rate
    # What is detectable assumes that nothing else changed: then the first rejection needs Bonferroni's level.
    level = rate / max(sum(2 if now.columns[name].values is not None else 3 for name in names), 1)
    tests = {
        name: ColumnComparison(
            now=now.columns[name],
            before=before.columns[name],
            windows=(now, before),
            settings=settings,
            level=level,
            text_of=partial(shown.text, name),
        ).compare()
        for name in names
    }
    p_values = {(name, test.name): test.p_value for name in names for test in tests[name].tests}
    made = {key: p_value for key, p_value in p_values.items() if p_value is not None}
    q_values: dict[str, dict[str, float]] = {name: {} for name in names}
    for (name, test_name), q_value in zip(made, adjusted(list(made.values()))):
        q_values[name][test_name] = q_value
    return {
        name: _ComparedFeature(
            tests[name],
            q_values[name],
            tuple(t.name for t in tests[name].tests if t.matters and q_values[name].get(t.name, 1.0) <= rate),
        )
        for name in names
    }


def _is_learned(against_all: _ComparedFeature, against_newest: _ComparedFeature) -> bool:
    """Whether the newest window would have shown every change, and shows none."""
    if not against_all.changes or against_newest.changes:
        return False
    pairs = [(against_all.tests.find(name), against_newest.tests.find(name)) for name in against_all.changes]
    return all(change and newest and newest.detectable <= abs(change.effect.value) for change, newest in pairs)


def _make_entry(name: str, feature: _ComparedFeature, windows: WindowPair, *, learned: bool) -> DriftEntry:
    p_values = {test.name: test.p_value for test in feature.tests.tests}
    # Adjusted p-values tie, mostly at 1; then the smaller unadjusted one says more.
    decisive = min(
        feature.changes or feature.q_values, key=lambda test: (feature.q_values[test], p_values[test]), default=None
    )
    values, mean = feature.tests.find("values"), feature.tests.find("mean")
    now, before = (window.columns[name] for window in windows)
    return DriftEntry(
        feature=name,
        drifted=bool(feature.changes) and not learned,
        learned=learned,
        changes=feature.changes,
        effect=values.effect.value if values else None,
        effect_low=values.effect.low if values else None,
        effect_high=values.effect.high if values else None,
        threshold=values.floor if values else None,
        detectable=values.detectable if values else None,
        design_effect=values.design if values else None,
        p_value=p_values[decisive] if decisive else None,
        q_value=feature.q_values[decisive] if decisive else None,
        divergence=feature.tests.divergence,
        # Between two columns of one value each there are no standard deviations.
        mean_shift=mean.effect.value if mean and math.isfinite(mean.effect.value) else None,
        moved_value=feature.tests.moved,
        new_value_share=feature.tests.new_share,
        missing_now=now.missing.rows / now.rows if now.rows else None,
        missing_before=before.missing.rows / before.rows if before.rows else None,
        num_rows_now=now.present,
        num_rows_before=before.present,
    )


def measure_label_shift(now: WindowSummary, kept: KeptWindows) -> LabelShift | None:
    """The change of the click rate; None if a side has no rows.

    A fall is often labels that have not all arrived. What it means is left to `judge`.
    """
    newest = _compare_click_rates(now, kept.newest) if len(kept.windows) > 1 else None
    return _compare_click_rates(now, kept.merged, newest)


def _compare_click_rates(
    now: WindowSummary, before: WindowSummary, newest: LabelShift | None = None
) -> LabelShift | None:
    n, m = now.rows, before.rows
    if not n or not m:
        return None
    design = design_of_totals(now.clicks, before.clicks, (now, before))
    effect = share_change(now.clicks.rows, n, b=before.clicks.rows, m=m, design=design)
    assert effect is not None
    return LabelShift(
        rate_now=now.clicks.rows / n,
        rate_before=before.clicks.rows / m,
        difference=effect.value,
        low=effect.low,
        high=effect.high,
        p_value=proportion(now.clicks.rows, n, b=before.clicks.rows, m=m, design=design),
        design_effect=design,
        num_rows_now=n,
        num_rows_before=m,
        newest=newest,
    )
