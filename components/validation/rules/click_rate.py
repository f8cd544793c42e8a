"""What a change of the click rate means: a finding where it is large, and no chance, against all that was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.contracts import criteo
from components.validation.rules.catalogue import Finding
from components.validation.rules.judging import Judging


def judge_click_rate(label: Mapping[str, Any] | None, judging: Judging) -> list[Finding]:
    """A finding where the rate left both the merged windows' and the newest one's by more than the factor and chance.

    Args:
        label: As `label_shift.measure_label_shift` gives it.
        judging: Actions and thresholds.
    """
    if label is None:
        return []
    sides = [side for side in (label, label["newest"]) if side is not None]
    if not all(_is_shift(side, judging) for side in sides):
        return []
    text = (
        f"the share of clicks is {label['rate_now']:.2%}, was {label['rate_before']:.2%} (change {label['low']:+.2%} "
        f"to {label['high']:+.2%}): look for labels that have not arrived"
    )
    return judging.find(criteo.LABEL, "rule", "click_rate", text)


def _is_shift(side: Mapping[str, Any], judging: Judging) -> bool:
    factor = judging.settings.click_rate_factor
    inside = side["rate_before"] / factor <= side["rate_now"] <= side["rate_before"] * factor
    return not inside and side["p_value"] <= judging.settings.false_alarm_rate
