"""One-class labels, columns without values, and jumps of the missing share."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from components.contracts import criteo
from components.validation.rules.catalogue import INFO, Finding
from components.validation.rules.judging import Judging
from components.validation.summarize import CERTAIN_ROWS, by_feature, missing_share, num_missing, num_rows, num_values


def judge_values(
    now: Any, before: Any | None, judging: Judging, *, excluded: Container[str] = (), optional: Container[str] = ()
) -> list[Finding]:
    """The rules on one-class labels, columns without values and jumps of the missing share.

    Args:
        now: Statistics of these rows.
        before: Of the champion's; None in a first run.
        judging: Actions and thresholds.
        excluded: Features that the run left out; nothing is said of them.
        optional: Features that need have no value in any row, by the schema.
    """
    rows = num_rows(now)
    if not rows:
        return []
    features, features_before = by_feature(now), by_feature(before) if before is not None else {}
    found = _judge_label(features.get(criteo.LABEL), rows, judging)
    for name in criteo.FEATURES:
        if name not in features or name in excluded:
            continue
        if num_values(features[name]):
            found += _judge_missing_share(name, features[name], features_before.get(name), judging)
        else:
            earlier = (features_before.get(name), before is None)
            found += _judge_empty(name, *earlier, rows, judging, optional=name in optional)
    return found


def _judge_label(label: Any, rows: int, judging: Judging) -> list[Finding]:
    if label is None:
        return []
    if not num_values(label):
        return judging.find(criteo.LABEL, "rule", "label_invalid", f"label is missing in all {rows} rows")
    numbers = label.num_stats
    if numbers.min == numbers.max:
        text = f"label is {numbers.min:g} in all {rows} rows, expected both classes: nothing can be learned from them"
        return judging.find(criteo.LABEL, "rule", "label_one_class", text)
    return []


def _judge_empty(
    name: str, before: Any, first_run: bool, rows: int, judging: Judging, *, optional: bool
) -> list[Finding]:
    known = num_values(before)
    text = f"{name} has no value in any of {rows} rows"
    if first_run:
        return judging.find(name, "rule", "column_empty_by_chance", text)
    if not known:
        return judging.find(name, "rule", "column_empty", f"{text}, as before", at_most=INFO)
    rows_before = known + num_missing(before)
    expected = known * rows / rows_before
    text = f"{text}, had values in {known} of {rows_before} rows before: {expected:.0f} were expected"
    if optional:
        return judging.find(name, "rule", "column_empty", f"{text}; the schema calls it optional", at_most=INFO)
    return judging.find(name, "rule", "column_empty" if expected >= CERTAIN_ROWS else "column_empty_by_chance", text)


def _judge_missing_share(name: str, now: Any, before: Any, judging: Judging) -> list[Finding]:
    share_now, share_before = missing_share(now), missing_share(before)
    if share_now is None or share_before is None:
        return []
    if abs(share_now - share_before) <= judging.settings.missing_share_jump:
        return []
    text = f"{name} is missing in {share_now:.1%} of the rows, was in {share_before:.1%}"
    return judging.find(name, "rule", "missing_share", text)
