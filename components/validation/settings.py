"""The thresholds by which validation judges: flags of the step, and settings of its rules, under the same names.

What each threshold is compared with is described where it is used: in `judge` and `column_tests`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from components.runtime.errors import ContractError


def _threshold(default: float, meaning: str) -> float:
    """A field with the sentence that the command line shows for its flag."""
    threshold: float = field(default=default, metadata={"meaning": meaning})
    return threshold


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Thresholds of judgement. None of them blocks by default.

    Raises:
        ContractError: a threshold is out of range.
    """

    categorical_drift: float = _threshold(
        0.02, "change of one category's share that counts as drift, if it is not explained by chance"
    )
    categorical_drift_relative: float = _threshold(
        0.5, "the same relative to the share that the category had; the smaller of the two applies, down to 0.002"
    )
    numeric_drift: float = _threshold(
        0.003, "Jensen-Shannon divergence in bits, beyond what chance adds, that counts as drift"
    )
    mean_drift: float = _threshold(
        0.1, "shift of an integer column's mean, in standard deviations of its bucket number, that counts as drift"
    )
    missing_drift: float = _threshold(0.02, "change of a column's share of missing values that counts as drift")
    new_value_share: float = _threshold(
        0.05, "largest share of rows with a category unknown to the champion that passes without a warning"
    )
    missing_share_jump: float = _threshold(
        0.5, "largest change of a column's share of missing values that passes without a warning"
    )
    click_rate_factor: float = _threshold(
        2.0, "how many times larger or smaller the share of clicks may become without a warning"
    )
    false_alarm_rate: float = _threshold(
        0.05, "share of the features reported as drifted that may be reported by chance (false discovery rate)"
    )
    skew_share: float = _threshold(
        0.001, "largest share of rows, joined between training and serving, whose value may differ"
    )
    range_factor: float = _threshold(
        10.0, "how many times the extremes of the first run a later value may be (used when the schema is inferred)"
    )

    def __post_init__(self) -> None:
        """Refuses thresholds that no measurement can meet."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("click_rate_factor", "range_factor"):
                if not 1 <= value < float("inf"):
                    raise ContractError(f"{each.name} is {value}, expected a finite number of at least 1")
            elif not 0 < value <= 1:
                raise ContractError(f"{each.name} is {value}, expected a number in (0, 1]")
