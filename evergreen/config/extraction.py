"""The section `extraction`: which rows of a lake become a dataset.

The settings of a single run, such as the start and end of its window, are flags of the step.
"""

import math
from dataclasses import dataclass

from evergreen.runtime.errors import ContractError, expect

MAX_LATE_DAYS, _MAX_REPLAY_DAYS = 366, 3_660
"""A model lists every file of these days, so their number is limited."""


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """Settings of the dataset that is extracted from a window.

    Raises:
        ContractError: a value is out of its range.
    """

    holdout_fraction: float = 0.1
    """Share of the window's rows that is held out from training, in (0, 1). The newest rows are
    held out. Training and holdout each get at least one row. The holdout is smaller if a baseline
    was trained on some of its rows."""
    max_malformed_fraction: float = 0.01
    """Maximum share of malformed rows in a file, in [0, 1]. A file with a larger share is unfit to
    read. Criteo's own files have no malformed rows. The default tolerates a torn line or a bad
    concatenation, and catches a file whose columns have moved."""
    max_conflicting_fraction: float = 0.01
    """Maximum share of conflicting rows, in [0, 1]. Rows conflict if they have the same request and
    row number but different features. The newest of them is used, and the others are left out. The
    step stops at a larger share, because request and row number then do not identify a row. Copies
    with equal features do not count."""
    max_quarantined_file_fraction: float = 0.1
    """Maximum share of unfit files among the files with rows of the window, including late rows, in
    [0, 1]. A file is unfit if it is corrupt, lacks a column, has a column of another type, or has
    too many malformed rows. The step leaves an unfit file out and names it. A later run trains on
    its rows once the file is fixed. The same share applies to the files of late outcomes and to the
    files of replayed days."""
    replay_share: float = 0.0
    """Share of older rows among the training rows, in [0, 1). 0 = only rows of the window."""
    replay_days: int = 7
    """Number of days before the window from which older rows are drawn: the newest days that have
    rows. The rows are used for training, and for measuring what the model still remembers. The
    number of rows for measuring is that of the holdout, at most 100,000, whatever `replay_share`
    is. 0 = no older row is read."""
    full_days: float = 0.0
    """Length in days of the window of a run without a parent, counted back from its end. It applies
    if the run does not set `window_start`. 0 = from the first row."""
    late_days: int = 1
    """Late rows: those that reached the lake after the parent was trained, and whose time is before
    the parent's last row. This is their maximum age in days before that last row. It applies if the
    run does not set `window_start`. 0 = no late rows."""
    pass_over: tuple[str, ...] = ()
    """Patterns of file names relative to the lake that are not read, such as `notes/*`. Any other
    unexpected file stops the step, because its rows would be missing."""
    columns: tuple[str, ...] = ()
    """Features to train on. Empty = all."""
    attribution_hours: float = 0.0
    """Hours after a row in which its click may still arrive. Younger rows are left for the next
    run. 0 = labels are final."""

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
        """Return `attribution_hours` in microseconds."""
        return round(self.attribution_hours * 3_600_000_000)

    def num_replayed(self, num_train_rows: int) -> int:
        """Return the number of old rows that make up `replay_share` of all training rows.

        >>> ExtractionSettings(replay_share=0.2).num_replayed(1000)
        250
        """
        return round(num_train_rows * self.replay_share / (1 - self.replay_share))
