"""Comparison of two table profiles, column by column: effects, intervals, p-values and drift.

Validation compares a run's rows with the training rows of the champion's lineage. The monitor
compares served rows with the model's training rows. Each column that both tables have is tested for
a change of its values and of its missing share. Tests of the mean and of the outliers are optional.
The null hypothesis is that nothing has changed. The p-values are corrected for dependent rows of a
request. Each effect has a 95 % interval.

All p-values of a comparison are adjusted together by Benjamini and Hochberg's procedure. This
procedure limits the expected share of false alarms among the drifted columns to
`false_discovery_rate`. If nothing has changed, `false_discovery_rate` is the probability of any
alarm. A column has drifted if a test is significant and its effect reaches the threshold in the
settings. The significance avoids alarms on noise in small samples, and the effect size avoids
alarms on negligible changes in large samples. For each test, `detectable` is the smallest effect
that a sample of this size can detect.

The cells are chosen either from the rows of both samples together, or from other rows
(`reference`). If the rows of one sample alone determined the cells, the noise of that sample would
look like a change of the other sample. Means are computed from bucket numbers, so that extreme
values do not dominate. Bucket numbers are linear up to 10 and logarithmic beyond. Rows of one user
in several requests count as independent, and so do rows of one hour or of one day. If these rows
are dependent, the rate of false alarms is higher than `false_discovery_rate`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from evergreen.config.drift import DriftThresholds
from evergreen.contracts.category_texts import ShownValues
from evergreen.statistics.column_profile import (
    ColumnProfile,
    Ints,
    RowTotal,
    TableProfile,
    find_sums,
)
from evergreen.statistics.two_sample import (
    MIN_EXPECTED,
    Clustered,
    Effect,
    adjusted,
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

_MIN_SHARE_CHANGE = 0.002
"""Minimum relevant change of a category's share, even for a very rare category."""
_KNOWN_FACTOR = 4
"""A value gets its own cell if its row count is at least this multiple of the count's maximum error
(`floor`)."""
_CERTAIN_ROWS = 10
"""A value counts as certainly new if at least this number of independent rows was expected, but
none was found. The probability of this by chance is e^-10."""
_OTHERS = "other values"
"""Displayed name of the cell in which all values are counted that have no own cell."""
_VALUES, _MEAN, _MISSING, _OUTLIERS = "values", "mean", "missing", "outliers"
"""Names of the tests."""
_MIN_FLOOR = 1e-12
"""Value that replaces a minimum relevant effect of 0. With this value, any significant change is
relevant."""

_Floats = NDArray[np.float64]


class Outliers(NamedTuple):
    """Bounds outside which values of numeric columns are outliers.

    Outliers are tested separately, and are excluded from a column's values.
    """

    bounds: Mapping[str, tuple[int, int]]
    """Range of the buckets without outliers, by column: the number of its first bucket, and the
    number of the bucket after its last one."""
    floor: float
    """Minimum relevant increase of the share of outliers."""


# -- results


@dataclass(frozen=True, kw_only=True)
class MovedValue:
    """The category whose share changed most, relative to its threshold."""

    value: str | None
    """Displayed text (`ShownValues.text`). None if the column identifies users."""
    share_before: float
    share_now: float


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column's change. A number that is undefined is None."""

    feature: str
    """Name of a feature or of the score. The length of a list also has a name
    (`features.LENGTH`)."""
    drifted: bool
    """Whether the column has drifted: a test of values, mean or missing share is significant with a
    relevant effect. If the model was already trained on the change (`is_trained_on`), the column
    has not drifted."""
    outlying: bool
    """Whether the share of outliers has increased significantly. Usual causes are a broken unit,
    sensor or join."""
    is_trained_on: bool = False
    """Whether the champion's newest training window already has the same changes."""
    changes: tuple[str, ...]
    """Names of the tests (`values`, `mean`, `missing`, `outliers`) that are significant with a
    relevant effect."""
    effect: float | None
    """Size of the change of the column's values. For a categorical column, the effect is the change
    of one category's share. Of all categories, this category changed most relative to its
    threshold. For a numeric column, the effect is the Jensen-Shannon divergence in bits, minus the
    divergence that chance adds."""
    effect_low: float | None
    effect_high: float | None
    """Upper end of the effect's 95 % interval."""
    threshold: float | None
    """Minimum relevant effect."""
    detectable: float | None
    """Smallest effect that a test of these rows would probably have detected."""
    design_effect: float | None
    """Number of rows that are equivalent to one independent row."""
    excess: float
    """Largest effect in `changes`, divided by the minimum relevant effect of the test. 0 if
    `changes` is empty. Reports sort columns by this ratio."""
    p_value: float | None
    q_value: float | None
    """q-value of the test with the strongest evidence, adjusted for all tests of the comparison."""
    divergence: float | None
    mean_shift: float | None
    """Shift of the mean in standard deviations. None if means are not compared."""
    moved_value: MovedValue | None
    new_value_share: float | None
    """Share of rows whose category is certainly new, among the rows with a value. None if the
    column is numeric."""
    missing_now: float | None
    missing_before: float | None
    outliers_now: float | None
    """Share of outliers among the values. None if the column is categorical, or if outliers are not
    separated."""
    outliers_before: float | None
    num_rows_now: int
    num_rows_before: int
    """Number of rows with a value. For a list, the number of elements."""


@dataclass(frozen=True, kw_only=True)
class ColumnTest:
    """One test of one column."""

    name: str
    p_value: float | None
    """p-value of the hypothesis of no change. None if one of the samples has too few rows."""
    effect: Effect
    """Effect of the test. For `values` of a categorical column, the effect is the absolute change
    of one category's share. The category is the one with the largest change relative to its
    threshold. For `values` of a numeric column, the effect is the Jensen-Shannon divergence in
    bits. For `mean`, the effect is the shift in standard deviations. For `missing` and `outliers`,
    the effect is the change of their share."""
    floor: float
    """Minimum relevant effect."""
    matters: bool
    """Whether the effect is at least `floor`."""
    detectable: float
    """Smallest effect that the test would probably have detected (`two_sample.POWER`)."""
    design: float
    """Design effect of the comparison: the number of rows equivalent to one independent row."""


class ColumnTests(NamedTuple):
    """Results of all tests of one column."""

    tests: tuple[ColumnTest, ...]
    divergence: float | None = None
    """Jensen-Shannon divergence in bits, minus the divergence that chance adds. None if one of the
    samples has no values."""
    moved: MovedValue | None = None
    new_share: float | None = None
    outliers: tuple[float, float] | None = None
    """Share of outliers among the values, in the tested sample and in the earlier sample."""

    def find(self, name: str) -> ColumnTest | None:
        """Return the test with this name, or None if the test was not made."""
        return next((test for test in self.tests if test.name == name), None)


@dataclass(frozen=True, kw_only=True)
class ComparedColumn:
    """Result of comparing one column of two tables, with adjusted p-values."""

    now: ColumnProfile
    before: ColumnProfile
    tests: ColumnTests
    q_values: dict[str, float]
    """Adjusted p-values by test. A test that was not possible has no entry."""
    changes: tuple[str, ...]
    """Names of the tests that are significant and have a relevant effect."""

    def is_trained_on(self, newest: "ComparedColumn") -> bool:
        """Return whether the newest training window already contains the changes of this column.

        The result is True if the compared rows do not differ from the newest window, and if the
        window is large enough to detect each change.

        Args:
            newest: Comparison of the same rows with the newest training window.
        """
        if not self.changes or newest.changes:
            return False
        pairs = [(self.tests.find(name), newest.tests.find(name)) for name in self.changes]
        return all(
            change and new and new.detectable <= abs(change.effect.value) for change, new in pairs
        )

    def entry(self, name: str, *, is_trained_on: bool = False) -> ColumnDrift:
        """Return the result of the column under the name `name`."""
        found = {test.name: test for test in self.tests.tests}
        # Adjusted p-values are often equal. Most adjusted p-values are 1. Among equal adjusted
        # p-values, the smallest unadjusted p-value decides.
        decisive = min(
            self.changes or self.q_values,
            key=lambda test: (self.q_values[test], found[test].p_value),
            default=None,
        )
        values, mean, (outliers_now, outliers_before) = (
            found.get(_VALUES),
            found.get(_MEAN),
            self.tests.outliers or _NONE,
        )
        excesses = [
            abs(found[each].effect.value) / max(found[each].floor, _MIN_FLOOR)
            for each in self.changes
        ]
        now, before = self.now, self.before
        return ColumnDrift(
            feature=name,
            drifted=bool(set(self.changes) - {_OUTLIERS}) and not is_trained_on,
            outlying=_OUTLIERS in self.changes,
            is_trained_on=is_trained_on,
            changes=self.changes,
            effect=values.effect.value if values else None,
            effect_low=values.effect.low if values else None,
            effect_high=values.effect.high if values else None,
            threshold=values.floor if values else None,
            detectable=values.detectable if values else None,
            design_effect=values.design if values else None,
            # If each sample has a single value in a column, the standard deviation is 0. If the
            # standard deviation is 0, the shift of the mean is infinite.
            excess=max((each for each in excesses if math.isfinite(each)), default=0.0),
            p_value=found[decisive].p_value if decisive else None,
            q_value=self.q_values[decisive] if decisive else None,
            divergence=self.tests.divergence,
            mean_shift=mean.effect.value if mean and math.isfinite(mean.effect.value) else None,
            moved_value=self.tests.moved,
            new_value_share=self.tests.new_share,
            missing_now=now.missing.rows / now.rows if now.rows else None,
            missing_before=before.missing.rows / before.rows if before.rows else None,
            outliers_now=outliers_now,
            outliers_before=outliers_before,
            num_rows_now=now.present,
            num_rows_before=before.present,
        )


_NONE = (None, None)
_NO_EFFECT = Effect(0.0, 0.0, 0.0)


# -- comparison


def compare_tables(
    now: TableProfile,
    before: TableProfile,
    thresholds: DriftThresholds,
    *,
    mean_drift: float | None = None,
    outliers: Outliers | None = None,
    shown: ShownValues | None = None,
) -> dict[str, ComparedColumn]:
    """Compare all columns that both tables have, in the order of the table `now`.

    Args:
        now: The rows to test.
        before: The earlier rows, with which `now` is compared.
        thresholds: Minimum relevant effects and the false discovery rate.
        mean_drift: Minimum relevant shift of a numeric column's mean, in standard deviations. None
            = no test of means.
        outliers: Bounds outside which values count as outliers. None = outliers are not separated.
        shown: Texts for the display of categories. None = the results contain no texts of values.
    """
    names, rate = (
        [name for name in now.columns if name in before.columns],
        thresholds.false_discovery_rate,
    )
    more = (mean_drift is not None) + (outliers is not None)
    num_tests = sum(2 if now.columns[name].values is not None else 2 + more for name in names)
    tests = {
        name: _Comparison(
            now=now.columns[name],
            before=before.columns[name],
            tables=(now, before),
            thresholds=thresholds,
            # The detectable effect is computed for a table in which a single column changed. To be
            # reported, the p-value of this column must then be below the Bonferroni level.
            level=rate / max(num_tests, 1),
            mean_drift=mean_drift,
            bounds=outliers.bounds.get(name) if outliers else None,
            outlier_floor=outliers.floor if outliers else 0.0,
            text_of=partial(shown.text, name) if shown else _no_text,
        ).compare()
        for name in names
    }
    p_values = {(name, test.name): test.p_value for name in names for test in tests[name].tests}
    made = {key: p_value for key, p_value in p_values.items() if p_value is not None}
    q_values: dict[str, dict[str, float]] = {name: {} for name in names}
    for (name, test_name), q_value in zip(made, adjusted(list(made.values()))):
        q_values[name][test_name] = q_value
    return {
        name: ComparedColumn(
            now=now.columns[name],
            before=before.columns[name],
            tests=tests[name],
            q_values=q_values[name],
            changes=tuple(
                t.name
                for t in tests[name].tests
                if t.matters and q_values[name].get(t.name, 1.0) <= rate
            ),
        )
        for name in names
    }


def _no_text(value: int) -> None:
    """Return None for every category, so that its text is hidden."""


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """One column of two tables, and the parameters of its comparison."""

    now: ColumnProfile
    before: ColumnProfile
    tables: tuple[TableProfile, TableProfile]
    thresholds: DriftThresholds
    level: float
    """Significance level of a test, from which the detectable effect is computed."""
    mean_drift: float | None
    bounds: tuple[int, int] | None
    outlier_floor: float
    text_of: Callable[[int], str | None]

    def compare(self) -> ColumnTests:
        """Run all tests for which the two profiles have the data."""
        if not self.now.present or not self.before.present:
            return ColumnTests((self._test_missing(),))
        if self.now.values is not None and self.before.values is not None:
            return self._test_categories()
        samples = (_cells_of(self.now, self.now.sums), _cells_of(self.before, self.before.sums))
        designs, mean = _cell_designs(*samples)
        inner = slice(*self.bounds) if self.bounds else slice(None)
        values = self._test_buckets(inner, designs, mean)
        tests = [values, self._test_missing()]
        shares = None
        if self.mean_drift is not None:
            tests.insert(1, self._test_mean(self.mean_drift, samples))
        if self.bounds:
            test, shares = self._test_outliers(inner, designs, mean)
            tests.append(test)
        return ColumnTests(tuple(tests), values.effect.value, outliers=shares)

    def _make_test(
        self,
        name: str,
        p_value: float | None,
        effect: Effect,
        *,
        floor: float,
        detectable: float,
        design: float,
    ) -> ColumnTest:
        """Return a test of one hypothesis.

        The degrees of freedom are one less than the number of independent rows in the smaller
        sample.
        """
        n, m = (
            column.rows if name == _MISSING else column.present
            for column in (self.now, self.before)
        )
        # A decrease of outliers is not a fault.
        size = effect.value if name == _OUTLIERS else abs(effect.value)
        return ColumnTest(
            name=name,
            p_value=with_few(p_value, min(n, m) / design - 1),
            effect=effect,
            floor=floor,
            matters=size >= max(floor, _MIN_FLOOR),
            detectable=detectable,
            design=design,
        )

    def _test_missing(self) -> ColumnTest:
        parts = (
            _part_with_column(self.now, self.tables[0]),
            _part_with_column(self.before, self.tables[1]),
        )
        n, m = parts[0].rows, parts[1].rows
        change = compare_totals(self.now.missing, self.before.missing, parts)
        share = (self.now.missing.rows + self.before.missing.rows) / max(n + m, 1)
        return self._make_test(
            _MISSING,
            change.p_value,
            change.effect or _NO_EFFECT,
            floor=self.thresholds.missing_drift,
            detectable=detectable_share(
                share, n=max(n, 1), m=max(m, 1), design=change.design, level=self.level
            ),
            design=change.design,
        )

    # -- numeric columns

    def _test_buckets(self, inner: slice, designs: _Floats, mean: float) -> ColumnTest:
        a, b = self.now.counts[inner], self.before.counts[inner]
        n, m = max(int(a.sum()), 1), max(int(b.sum()), 1)
        return self._make_test(
            _VALUES,
            homogeneity(a, b, designs[inner]),
            divergence(a, b, designs[inner]) or _NO_EFFECT,
            floor=self.thresholds.numeric_drift,
            detectable=divergence_of_shift(detectable_mean(n, m, design=mean, level=self.level)),
            design=mean,
        )

    def _test_outliers(
        self, inner: slice, designs: _Floats, mean: float
    ) -> tuple[ColumnTest, tuple[float, float]]:
        """Test the share of values outside the inner buckets.

        The test uses the largest design effect of the outer buckets.
        """
        n, m = self.now.present, self.before.present
        a, b = n - int(self.now.counts[inner].sum()), m - int(self.before.counts[inner].sum())
        outside = self.now.counts + self.before.counts > 0
        outside[inner] = False
        design = float(designs[outside].max()) if outside.any() else mean
        share = (a + b) / (n + m)
        test = self._make_test(
            _OUTLIERS,
            proportion(a, n, b=b, m=m, design=design),
            share_change(a, n, b=b, m=m, design=design) or _NO_EFFECT,
            floor=self.outlier_floor,
            detectable=detectable_share(share, n=n, m=m, design=design, level=self.level),
            design=design,
        )
        return test, (a / n, b / m)

    def _test_mean(self, floor: float, samples: tuple[Clustered, Clustered]) -> ColumnTest:
        buckets = np.arange(len(self.now.counts))
        beyond = possible = weighed = 0.0
        means = []
        for column in (self.now, self.before):
            mean = float(column.counts @ buckets) / column.present
            variance = max(float(column.counts @ buckets**2) / column.present - mean**2, 0.0)
            means.append(mean)
            weighed += variance * column.present
            if column.present_requests >= 2:
                squares = (
                    column.bucket_squares
                    - 2 * mean * column.bucket_products
                    + mean**2 * column.present_sizes
                )
                squares *= column.present_requests / (column.present_requests - 1)
                beyond += squares - variance * column.present
                possible += variance * (column.present_sizes - column.present)
        n, m = self.now.present, self.before.present
        deviation = math.sqrt(weighed / (n + m))
        correlation = np.array([min(max(beyond / possible, 0.0), 1.0) if possible > 0 else 1.0])
        design = float(comparison_design(correlation, *samples)[0])
        error = math.sqrt(design * (1 / n + 1 / m))
        shift = (
            (means[0] - means[1]) / deviation
            if deviation
            else (0.0 if means[0] == means[1] else math.inf)
        )
        return self._make_test(
            _MEAN,
            float(special.chdtrc(1, min((shift / error) ** 2, 1e6))),
            Effect(shift, shift - 1.96 * error, shift + 1.96 * error),
            floor=floor,
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
        share_now, share_before = a / n, b / m
        relative = np.maximum(
            self.thresholds.categorical_drift_relative * share_before, _MIN_SHARE_CHANGE
        )
        floors = np.minimum(self.thresholds.categorical_drift, relative)
        # The last cell contains all other values. The relative change is not used for the last
        # cell, because that cell mixes many values.
        floors[-1] = self.thresholds.categorical_drift
        floors = np.maximum(floors, _MIN_FLOOR)
        ratios = np.where(
            np.append(own, a[-1] + b[-1] > 0), np.abs(share_now - share_before) / floors, -1.0
        )
        worst = int(ratios.argmax())
        change, floor, moved, reach = _NO_EFFECT, self.thresholds.categorical_drift, None, 1.0
        if ratios[worst] >= 0:
            design, floor = float(designs[worst]), float(floors[worst])
            change = _without_sign(
                share_change(int(a[worst]), n, b=int(b[worst]), m=m, design=design) or _NO_EFFECT
            )
            moved = MovedValue(
                value=_OTHERS if worst == len(values) else self.text_of(int(values[worst])),
                share_before=float(share_before[worst]),
                share_now=float(share_now[worst]),
            )
            share = float((a + b)[worst] / (n + m))
            reach = detectable_share(share, n=n, m=m, design=design, level=self.level)
        test = self._make_test(
            _VALUES, homogeneity(a, b, designs), change, floor=floor, detectable=reach, design=mean
        )
        if difference >= max(self.thresholds.numeric_drift, _MIN_FLOOR):
            test = replace(test, matters=True)
        new = _count_new(a[:-1], b[:-1], designs[:-1], ratio=n / m, floor=self.before.floor)
        return ColumnTests((test, self._test_missing()), difference, moved, new / n)


def _part_with_column(column: ColumnProfile, table: TableProfile) -> TableProfile:
    """Estimate the profile of the rows in which the column exists.

    All requests are assumed to be alike.
    """
    if column.rows == table.rows:
        return table
    share = column.rows / max(table.rows, 1)
    requests, sizes = math.ceil(table.requests * share), math.ceil(table.sizes * share)
    return replace(table, rows=column.rows, requests=requests, sizes=sizes)


class ShareComparison(NamedTuple):
    """Comparison of the shares of rows that have a property in two samples."""

    effect: Effect | None
    """Difference of the shares, with its 95 % interval. None if a sample has no rows."""
    p_value: float | None
    """p-value of the hypothesis of no change. None if a sample has no rows."""
    design: float
    """Design effect: the number of rows equivalent to one independent row."""


def compare_totals(
    now: RowTotal, before: RowTotal, tables: tuple[TableProfile, TableProfile]
) -> ShareComparison:
    """Compare two tables by their share of rows with some property, such as a click.

    Args:
        now: Rows of the first table with the property.
        before: Rows of the second table with the property.
        tables: The two tables.
    """
    n, m = tables[0].rows, tables[1].rows
    design = _design_of_totals(now, before, tables)
    return ShareComparison(
        effect=share_change(now.rows, n, b=before.rows, m=m, design=design),
        p_value=proportion(now.rows, n, b=before.rows, m=m, design=design),
        design=design,
    )


def _design_of_totals(
    now: RowTotal, before: RowTotal, tables: tuple[TableProfile, TableProfile]
) -> float:
    """Return the design effect for comparing the shares of rows of two samples."""
    samples = [
        Clustered(
            counts=np.array([total.rows]),
            squares=np.array([float(total.squares)]),
            products=np.array([float(total.products)]),
            rows=table.rows,
            sizes=table.sizes,
            requests=table.requests,
        )
        for total, table in zip((now, before), tables)
    ]
    # If the share is 0 or 1, the correlation cannot be estimated. In this case, all rows of a
    # request are assumed to be equal, which is the worst case.
    correlation, _ = correlations((samples[0], samples[1]))
    return float(comparison_design(correlation, samples[0], samples[1])[0])


def _choose_cells(
    now: ColumnProfile, before: ColumnProfile
) -> tuple[Ints, tuple[Clustered, Clustered], NDArray[np.bool_]]:
    """Choose the values that get their own cell, and count the rows of each cell.

    A value gets its own cell only if its counts are reliable. Both samples have a last cell for all
    other values.

    Frequent values come first, in descending order of frequency. Rare values follow in numeric
    order, and the tests merge rare values into groups. Rare values are not sorted by their number
    of rows. With this order, a group would contain mostly values of one sample, if the requests of
    the samples differ in size. The reason is that a value that occurs in one request has as many
    rows as this request. In a test, one sample had requests of 64 rows, and the other sample had
    requests of 40 to 64 rows. With this order, the tests reported drift in six columns of unchanged
    traffic.

    Returns:
        Three results: the values, the rows of both samples in each cell, and a mask of the frequent
            values.
    """
    assert now.values is not None
    assert before.values is not None
    values = np.union1d(now.values, before.values)
    sums = [find_sums(values, now.values, now.sums), find_sums(values, before.values, before.sums)]
    known = sums[0][:, 0] + sums[1][:, 0] >= _KNOWN_FACTOR * (now.floor + before.floor)
    values, sums = values[known], [each[known] for each in sums]
    frequent, expected = _are_frequent(_cells_of(now, sums[0]), _cells_of(before, sums[1]))
    order = np.lexsort((values, np.where(frequent, -expected, 0.0)))
    samples = (
        _cells_of(now, sums[0][order], others=1),
        _cells_of(before, sums[1][order], others=1),
    )
    return values[order], samples, frequent[order]


def _are_frequent(now: Clustered, before: Clustered) -> tuple[NDArray[np.bool_], _Floats]:
    """Return which cells are frequent, and the expected number of independent rows in each cell.

    A cell is frequent if at least `MIN_EXPECTED` independent rows are expected in the smaller
    sample.
    """
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


def _count_new(now: Ints, before: Ints, designs: _Floats, *, ratio: float, floor: int) -> float:
    """Count the rows of categories that are certainly new.

    A category is certainly new if it was absent although at least `_CERTAIN_ROWS` rows of it were
    expected. The expected number is estimated from the category's rows in `now`, minus 4 standard
    errors.
    """
    needed = (_CERTAIN_ROWS * designs + 2 * floor) * ratio
    certain = (before == 0) & (now - 4 * np.sqrt(now * designs) >= needed)
    return float(now[certain].sum())


def _cells_of(column: ColumnProfile, sums: Ints, *, others: int = 0) -> Clustered:
    """Count the column's rows in each cell.

    If `others` is 1, an additional last cell contains all other rows.

    Args:
        column: The column.
        sums: Sums of the cells, [k, 3].
        others: Number of additional cells for other values, 0 or 1.
    """
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


def _cell_designs(now: Clustered, before: Clustered) -> tuple[_Floats, float]:
    """Return the design effect of each cell, and the mean of these design effects."""
    correlation, _ = correlations((now, before))
    designs = comparison_design(correlation, now, before)
    both = now.counts + before.counts
    return designs, mean_design(both, designs)[0] if len(
        designs
    ) > 1 and both.max() < both.sum() else float(designs[0])
