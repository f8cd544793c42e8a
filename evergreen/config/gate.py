"""The section `gate`: what a candidate must achieve before it is released."""

from dataclasses import dataclass

from evergreen.runtime.errors import expect


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """Limits that a candidate must meet."""

    min_auc: float = 0.6
    """AUC threshold of the gate: the minimum AUC of a released model."""
    max_auc_loss: float = 0.002
    """Maximum difference by which the candidate's AUC may be below the champion's AUC
    (non-inferiority margin)."""
    max_slice_loss: float = 0.02
    """Maximum relative increase of the log loss in each slice, compared with the champion. The
    slices are all rows, each hour of the day, each position, the rows with new categories, and each
    of the five most frequent values of a column. A row belongs to the slice of each element of its
    lists. Slices therefore overlap, and the tests are corrected for the number of slices."""
    max_calibration_factor: float = 1.5
    """Maximum ratio of expected to observed clicks, and of observed to expected clicks."""

    def __post_init__(self) -> None:
        expect(
            self, "a number in [0, 1]", lambda value: 0.0 <= value <= 1.0, "min_auc", "max_auc_loss"
        )
        expect(self, "a number from 0", lambda value: value >= 0.0, "max_slice_loss")
        expect(self, "a number from 1", lambda value: value >= 1.0, "max_calibration_factor")
