"""The section `extraction`: which rows of a lake become a dataset.

Settings of a single run, such as the two ends of its window, are flags of the step.
"""

import math
from dataclasses import dataclass

from evergreen.runtime.errors import ContractError, expect

MAX_LATE_DAYS, MAX_REPLAY_DAYS = 366, 3_660
"""Each model names the files of so many days."""


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """Settings of the dataset that a window becomes.

    Raises:
        ContractError: a value is out of its range.
    """

    holdout_fraction: float = 0.1
    """Share of the window's rows, the newest ones, kept from training; in (0, 1). Each side gets one at least. Fewer
    are kept where a rival learned some of them."""
    max_malformed_fraction: float = 0.01
    """Share of a file's rows that may be malformed before the file is unfit to read; in [0, 1]. Criteo's own files have
    none; 1 % tolerates a torn line or a bad concatenation, and stops at a file whose columns have moved."""
    max_conflicting_fraction: float = 0.01
    """Share of the rows that may have the request and row of another row with other features before the step stops; in
    [0, 1]. Of such rows the newest counts, and the others are left out. A larger share means that request and row do
    not name one row. Copies of equal features do not count."""
    max_quarantined_file_fraction: float = 0.1
    """Share of the files with rows of the window, late ones included, that may be unfit to read before the step stops,
    in [0, 1]. A file is unfit if it is corrupt, lacks a column, has one of another type, or has too many malformed
    rows. The step leaves an unfit file out and names it. A later run learns its rows once it is mended. The same share
    applies to the files of late outcomes, and to those of replayed days."""
    replay_share: float = 0.0
    """Share of older rows among the rows that training will learn from, in [0, 1); 0 = the window alone."""
    replay_days: int = 7
    """Days before the window, the newest that have rows, from which old rows are drawn: those to replay, and as many
    as the window's holdout (100,000 at most) for measuring what is remembered, whatever `replay_share` is. 0 = none is
    read: measured over six days of 300,000 rows, in one file each, the reading took 3.5 s of a core (not
    measured again since 2026-11-23)."""
    full_days: float = 0.0
    """Days that the window of a round without a parent has, counted back from its end, where the run's `window_start`
    does not say; 0 = from the first row."""
    late_days: int = 1
    """Days before the last row that the parent learned of which rows are learned, too, that came to the lake later,
    where `window_start` does not say; 0 = none."""
    pass_over: tuple[str, ...] = ()
    """Patterns of names below the lake that are not read, such as `notes/*`. Any other file that has no place in a lake
    stops the step, because its rows would be missing."""
    columns: tuple[str, ...] = ()
    """Features to learn from; empty = all."""
    attribution_hours: float = 0.0
    """Hours after a row in which its click may still come: younger rows are left for the next round; 0 = labels are
    final."""

    def __post_init__(self) -> None:
        expect(self, "more than 0 and less than 1", lambda value: 0 < value < 1, "holdout_fraction")
        shares = ("max_malformed_fraction", "max_conflicting_fraction", "max_quarantined_file_fraction")
        expect(self, "0 to 1", lambda value: 0 <= value <= 1, *shares)
        expect(self, "at least 0 and less than 1", lambda value: 0 <= value < 1, "replay_share")
        expect(self, "at least 0", lambda value: value >= 0, "replay_days")
        expect(self, f"at most {MAX_REPLAY_DAYS}", lambda value: value <= MAX_REPLAY_DAYS, "replay_days")
        expect(
            self, f"0 (late rows are left) to {MAX_LATE_DAYS}", lambda value: 0 <= value <= MAX_LATE_DAYS, "late_days"
        )
        if self.replay_share and not self.replay_days:
            raise ContractError(f"replay_share is {self.replay_share} with replay_days 0, expected at least one day")
        expect(self, "0 or more", lambda value: 0 <= value < math.inf, "full_days", "attribution_hours")

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
