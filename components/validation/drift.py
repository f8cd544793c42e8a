"""How far each feature, and the click rate, moved from the rows that the champion's line learned from.

Compared with all kept windows merged. All tests of a window (`column_tests`) are adjusted together by Benjamini and
Hochberg's procedure: at most `false_alarm_rate` of the features reported as drifted are so by chance, and if nothing
moved that is the probability of any report. A feature drifted if a test is significant and its effect reaches the
setting: significance keeps small windows from alarming on noise, the effect keeps large ones from alarming on nothing.
What a window is too small to show is stated with every feature as `detectable`.

A change that the champion has already learned is not reported again: if its newest kept window would have shown the
effect and does not differ from these rows.

The likeness of rows of one request is corrected for; rows of one user in several requests, of one hour or of one day
count as independent requests. If they are not, alarms are more frequent than the rate says.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from components.contracts.words import ShownValues
from components.drift_statistics.chance import adjusted, proportion
from components.drift_statistics.effects import share_change
from components.validation.column_tests import ColumnComparison, ColumnTests, MovedValue, WindowPair, design_of_totals
from components.validation.rules import ValidationSettings
from components.validation.windows import KeptWindows, WindowSummary


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
