"""How far each feature has moved from the rows that the champion's line learnt from, and which moves to believe.

Judged against all kept windows merged (`kept_windows`). All tests of a window (`column_tests`) are adjusted together by
Benjamini and Hochberg's procedure: at most `false_alarm_rate` of the features called drifted are called so by chance,
and where nothing moved that is the probability of any. A feature is called drifted if a test is significant so and its
effect is at least the setting's: by significance a small window does not alarm on its noise, by effect a large one not
on nothing. What a window is too small to see is stated with every feature as `detectable`.

A change that the champion learnt already is not told again: where the newest kept window would have shown the effect
and does not differ from these rows.

Rows of a request that are alike are corrected for; rows of one user in several requests, of one hour or of one day are
taken for independent requests. Where they are not, alarms are more frequent than the rate says.

The distances are TFDV's, for people who know them; nothing is decided by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from components.contracts import criteo
from components.drift_statistics.chance import adjusted
from components.validation.column_tests import ColumnTests, Tested, compare_columns
from components.validation.kept_windows import KeptWindows
from components.validation.settings import ValidationSettings
from components.validation.windows import WindowSummary

L_INFINITY = "L_INFTY"
JENSEN_SHANNON = "JENSEN_SHANNON_DIVERGENCE"


class _Judged(NamedTuple):
    """A feature's tests with their adjusted p-values."""

    tests: ColumnTests
    q_values: dict[str, float]
    """By test; those that could be made."""
    changes: tuple[str, ...]
    """Tests that are significant and whose effect matters."""

    def named(self, name: str) -> Tested:
        return next(test for test in self.tests.tests if test.name == name)


def measure_drift(
    now: WindowSummary,
    kept: KeptWindows,
    settings: ValidationSettings,
    *,
    distances: Mapping[str, float | None] | None = None,
) -> list[dict[str, Any]]:
    """One entry per feature that both sides judge, in column order, as `manifests.ValidationReport.drift` describes.

    Args:
        now: These rows.
        kept: What they are compared with.
        settings: What an effect must be to matter, and the rate of false alarms.
        distances: TFDV's, by feature; absent where TFDV has none.
    """
    judged = _judge(now, kept.merged, settings)
    newest = _judge(now, kept.newest, settings) if len(kept.windows) > 1 else {}
    entries = []
    for name, feature in judged.items():
        learnt = name in newest and _is_learnt(feature, newest[name])
        sides = (now, kept.merged)
        entries.append(_entry(name, feature, sides, learnt, (distances or {}).get(name)))
    return entries


def _judge(now: WindowSummary, before: WindowSummary, settings: ValidationSettings) -> dict[str, _Judged]:
    names = [name for name in criteo.FEATURES if name in now.columns and name in before.columns]
    # What is detectable supposes that nothing else changed: then the first rejection needs Bonferroni's level.
    level = settings.false_alarm_rate / max(sum(3 if name in criteo.DENSE else 2 for name in names), 1)
    tests = {
        name: compare_columns(now.columns[name], before.columns[name], (now, before), settings, level) for name in names
    }
    made = [(name, test) for name in names for test in tests[name].tests if test.p_value is not None]
    q_values = adjusted([test.p_value for _, test in made if test.p_value is not None])
    by_feature: dict[str, dict[str, float]] = {name: {} for name in names}
    for (name, test), q_value in zip(made, q_values):
        by_feature[name][test.name] = q_value
    rate = settings.false_alarm_rate
    return {
        name: _Judged(
            tests[name],
            by_feature[name],
            tuple(t.name for t in tests[name].tests if t.matters and by_feature[name].get(t.name, 1.0) <= rate),
        )
        for name in names
    }


def _is_learnt(against_all: _Judged, against_newest: _Judged) -> bool:
    """Whether the newest window would have shown every change, and shows none."""
    if not against_all.changes or against_newest.changes:
        return False
    known = {test.name for test in against_newest.tests.tests}
    return all(
        name in known and against_newest.named(name).detectable <= abs(against_all.named(name).effect.value)
        for name in against_all.changes
    )


def _entry(
    name: str,
    feature: _Judged,
    sides: tuple[WindowSummary, WindowSummary],
    learnt: bool,
    distance: float | None,
) -> dict[str, Any]:
    known = {test.name: test for test in feature.tests.tests}
    shown = known.get("values")
    drifted = bool(feature.changes) and not learnt
    columns = [window.columns[name] for window in sides]
    missing = [column.missing.rows / column.rows if column.rows else None for column in columns]
    moved = feature.tests.moved
    # Adjusted ones tie, at 1 above all: the smaller p-value tells more then.
    decisive = min(
        feature.changes or feature.q_values, key=lambda of: (feature.q_values[of], known[of].p_value), default=None
    )
    return {
        "feature": name,
        "measure": L_INFINITY if name in criteo.CATEGORICAL else JENSEN_SHANNON,
        "distance": distance,
        "threshold": shown.floor if shown else None,
        "severity": "warn" if drifted else "info",
        "num_rows_now": columns[0].present,
        "num_rows_before": columns[1].present,
        "new_value_share": feature.tests.new_share,
        "moved_value": None
        if moved is None
        else {
            "value": str(moved.value),
            "share_before": moved.rows_before / columns[1].present,
            "share_now": moved.rows_now / columns[0].present,
        },
        "effect": shown.effect.value if shown else None,
        "effect_low": shown.effect.low if shown else None,
        "effect_high": shown.effect.high if shown else None,
        "p_value": known[decisive].p_value if decisive else None,
        "q_value": feature.q_values[decisive] if decisive else None,
        "detectable": shown.detectable if shown else None,
        "design_effect": shown.design if shown else None,
        "missing_now": missing[0],
        "missing_before": missing[1],
        "divergence": feature.tests.divergence,
        "mean_shift": _finite(known["mean"].effect.value) if "mean" in known else None,
        "changes": list(feature.changes),
        "learnt": learnt,
        "drifted": drifted,
    }


def _finite(value: float) -> float | None:
    """None for the shift between two columns of one value each, which has no standard deviations."""
    return value if math.isfinite(value) else None
