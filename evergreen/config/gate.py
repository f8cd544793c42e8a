"""The section `gate`: what a candidate must achieve to be released."""

from dataclasses import dataclass

from evergreen.runtime.errors import expect


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """Limits that a candidate must meet."""

    min_auc: float = 0.6
    """AUC that a model needs to be released at all."""
    max_auc_loss: float = 0.002
    """AUC by which the candidate may trail the champion (non-inferiority margin)."""
    max_slice_loss: float = 0.02
    """Part by which the candidate's log loss may exceed the champion's in any slice: all rows, an hour of the day, a
    position, rows with new categories, or those with one of the five most frequent values of a column. A row belongs to
    the slice of each element of its lists, so slices overlap, for which the number of tests is corrected."""
    max_calibration_factor: float = 1.5
    """Factor by which expected clicks may exceed, or fall short of, observed ones."""

    def __post_init__(self) -> None:
        expect(self, "a number in [0, 1]", lambda value: 0.0 <= value <= 1.0, "min_auc", "max_auc_loss")
        expect(self, "a number from 0", lambda value: value >= 0.0, "max_slice_loss")
        expect(self, "a number from 1", lambda value: value >= 1.0, "max_calibration_factor")
