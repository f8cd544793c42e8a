"""The section `preprocessing`: how rows are encoded."""

import math
from dataclasses import dataclass
from typing import Literal

from evergreen.runtime.errors import expect

_MICROSECONDS_PER_DAY = 86_400_000_000


@dataclass(frozen=True, kw_only=True)
class PreprocessingSettings:
    """Settings of the encoding.

    Raises:
        ContractError: a number is out of its range.
    """

    engine: Literal["numpy", "nvtabular"] = "numpy"
    """Engine that encodes the rows. `numpy` and `nvtabular` write the same bytes (see
    docs/guides/preprocess.md)."""
    frequency_threshold: int = 5
    """Frequency threshold: minimum count of a category in the training rows, summed over runs,
    before it gets its own id. At least 1."""
    category_ttl_days: float = 0.0
    """A category loses its id or its count if it occurs in no window for this number of days. 0 =
    categories never expire."""
    max_candidates: int = 1_000_000
    """Maximum number of candidates per column. A candidate is a category without an id, whose count
    is saved for the next run. The least frequent categories are dropped first. If counts are equal,
    the categories that occurred longest ago are dropped first, and then the categories with higher
    numbers. A category needs 24 bytes of memory."""
    partition_rows: int = 250_000
    """Rows that a process has in memory at a time, and rows per output file. A Parquet row group
    with more rows is not split."""
    processes: int = 0
    """Processes of this machine that share the rows. 0 = one per core, at most
    `forked.MAX_PROCESSES`. The number of processes does not change the result."""
    negative_rate: float = 1.0
    """Share of the training rows without a click that are used for training, in (0, 1]. Scores are
    corrected for this downsampling. The holdout is never downsampled."""

    def __post_init__(self) -> None:
        expect(
            self, "at least 1", lambda value: value >= 1, "frequency_threshold", "partition_rows"
        )
        expect(self, "at least 0", lambda value: value >= 0, "max_candidates", "processes")
        expect(
            self,
            "at most 1,000,000,000",
            lambda value: value <= 10**9,
            "frequency_threshold",
            "max_candidates",
        )
        expect(self, "at most 100,000,000", lambda value: value <= 10**8, "partition_rows")
        expect(self, "at most 1024", lambda value: value <= 1024, "processes")
        expect(self, "more than 0 and at most 1", lambda value: 0 < value <= 1, "negative_rate")
        expect(self, "0 (never) or more", lambda value: 0 <= value < math.inf, "category_ttl_days")

    @property
    def ttl(self) -> int:
        """Return `category_ttl_days` in microseconds, rounded up.

        Rounding down could give 0, which means that categories never expire.
        """
        return math.ceil(self.category_ttl_days * _MICROSECONDS_PER_DAY)
