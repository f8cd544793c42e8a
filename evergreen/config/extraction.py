"""The section `extraction`: which rows of a lake become a dataset.

The settings of a single run, such as the start and end of its window, are flags of the step.
"""

import math
from dataclasses import dataclass

from evergreen.runtime.errors import ContractError, expect

MAX_LATE_DAYS, _MAX_REPLAY_DAYS = 366, 3_660
"""Both settings are limited, because a model's manifest lists every file of these days."""


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """Settings that decide which rows of a window become the dataset.

    Raises:
        ContractError: a value is out of its range.
    """

    holdout_fraction: float = 0.1
    """Share of the window's rows that is held out from training, in (0, 1). The newest rows are
    held out. The training rows and the holdout each contain at least one row. If a baseline was
    trained on some of these rows, the holdout is smaller."""
    max_malformed_fraction: float = 0.01
    """Maximum share of malformed rows in a file, in [0, 1]. If a file has a larger share of
    malformed rows, the file is unfit. Criteo's own files have no malformed rows. The default
    tolerates a torn line or a bad concatenation, and catches a file whose columns have moved."""
    max_conflicting_fraction: float = 0.01
    """Maximum share of conflicting rows, in [0, 1]. Two rows conflict if they have the same request
    id and row number, but different features. Only the newest row of a conflict is used. If the
    share is larger, the step stops, because request id and row number do not identify a row. Copies
    with equal features are not conflicts."""
    max_quarantined_file_fraction: float = 0.1
    """Maximum share of unfit files, in [0, 1], among all files that have rows of the window or late
    rows. A file is unfit if it is corrupt, lacks a column, has a column of another type, or has too
    many malformed rows. The step leaves out an unfit file and names the file. Once an unfit file is
    repaired, a later run trains on its rows. The same limit applies to late-outcome files and to
    the files of replayed days."""
    replay_share: float = 0.0
    """Share of older rows among the training rows, in [0, 1). 0 = only rows of the window are used
    for training."""
    replay_days: int = 7
    """Number of days from which older rows are drawn for training. They are the newest days before
    the window that have rows. The gate also measures the model on older rows, to show what the
    model has forgotten. This measurement reads as many older rows as the holdout has, but at most
    100,000. The number does not depend on `replay_share`. If the setting is 0, no older rows are
    read."""
    full_days: float = 0.0
    """Length of the window in days if the run has no parent. The window ends at `window_end`, or
    after the last row. The length applies if the run does not set `window_start`. 0 = the window
    starts with the first row."""
    late_days: int = 1
    """A late row reached the lake after the parent was trained, but its time is before the parent's
    last row. The value is the maximum age of a late row, in days before the parent's last training
    row. The limit applies only if the run does not set `window_start`. 0 = no late rows."""
    ignore: tuple[str, ...] = ()
    """Patterns of files that are not read, such as `notes/*`. The names are relative to the lake.
    If another file is not a click log, the step stops, because the rows of the file would be
    missing."""
    columns: tuple[str, ...] = ()
    """Features to train on. Empty = all features."""
    attribution_hours: float = 0.0
    """Maximum delay of a click after its row, in hours. Rows that are younger than this delay are
    left to the next run. 0 = labels are final."""

    def __post_init__(self) -> None:
        expect(self, "more than 0 and less than 1", lambda value: 0 < value < 1, "holdout_fraction")
        shares = (
            "max_malformed_fraction",
            "max_conflicting_fraction",
            "max_quarantined_file_fraction",
        )
        expect(self, "0 to 1", lambda value: 0 <= value <= 1, *shares)
        expect(self, "at least 0 and less than 1", lambda value: 0 <= value < 1, "replay_share")
        expect(self, "at least 0", lambda value: value >= 0, "replay_days")
        expect(
            self,
            f"at most {_MAX_REPLAY_DAYS}",
            lambda value: value <= _MAX_REPLAY_DAYS,
            "replay_days",
        )
        expect(
            self,
            f"0 (late rows are left) to {MAX_LATE_DAYS}",
            lambda value: 0 <= value <= MAX_LATE_DAYS,
            "late_days",
        )
        if self.replay_share and not self.replay_days:
            raise ContractError(
                f"replay_share is {self.replay_share} with replay_days 0, expected at least one day"
            )
        expect(
            self, "0 or more", lambda value: 0 <= value < math.inf, "full_days", "attribution_hours"
        )

    @property
    def attribution(self) -> int:
        """Return the setting `attribution_hours` in microseconds."""
        return round(self.attribution_hours * 3_600_000_000)

    def num_replayed(self, num_train_rows: int) -> int:
        """Return the number of older rows that a run adds to its training rows.

        The older rows are the share `replay_share` of all training rows.

        >>> ExtractionSettings(replay_share=0.2).num_replayed(1000)
        250
        """
        return round(num_train_rows * self.replay_share / (1 - self.replay_share))
