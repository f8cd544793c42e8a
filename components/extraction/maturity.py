"""Labels that are not final: a row whose click may still come counts as one without, which makes clicks look rare.

The delayed feedback of Chapelle 2014 ("Modeling delayed feedback in display advertising"). A row is mature once it is
`attribution_hours` old, counted back from the window's end. What becomes of younger rows:

- `leave`: the window ends where they begin, and the next round, which starts after the last row read, reads them.
- `weight`: of age a, a row with a click is kept, and one without is kept with probability w(a), so that the kept rows'
  odds of a click are those of mature rows. With p the rate of clicks and F(a) the share of clicks known by age a, a row
  shows a click with probability pF and none with 1 - pF; p / (1 - p) = pF / (w (1 - pF)) gives
  w = F(1 - p) / (1 - pF). A row is so kept with probability F(a) in all: what is too young to tell much, counts
  little. p and F are those of the window's mature rows. For rows whose own rate q differs from p, kept odds are
  q / (1 - q) times (1 - q)(1 - pF) / ((1 - p)(1 - qF)), which for rates of some per cent is about 1 - (q - p)(1 - F).
- `keep`: nothing is done about them.

With `weight` and `keep` the watermark is the newest row read, young or not: no later window reads the young rows again,
and a click that comes after their round is learnt only where they are drawn to be replayed.

Whatever it is, held-out rows are mature: the gate shall not judge by labels that are not final.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts.criteo import EVENT_TIME, LABEL, REQUEST_ID, ROW
from components.contracts.row_hash import row_identities, uniforms
from components.extraction.times import DAY_MICROS
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

LEAVE, WEIGHT, KEEP = "leave", "weight", "keep"
MIN_CLICKS = 100
"""Mature clicks that an estimate needs: F(a) has a standard error of at most 0.05 then, p of a tenth of itself."""
_SALT = 0x1A7E1ABE15
"""Another than that of preprocessing's thinning, so that a row's two chances are independent."""


@dataclass(frozen=True, kw_only=True)
class Maturity:
    """When a label is final, and what becomes of rows whose is not.

    Raises:
        ContractError: the hours are negative or no number, or the policy is unknown.
    """

    attribution_hours: float = 0.0
    """Hours after a row in which its click may still come; 0 = every label is final."""
    immature_rows: str = LEAVE

    def __post_init__(self) -> None:
        """Refuses what is no policy."""
        if not (math.isfinite(self.attribution_hours) and self.attribution_hours >= 0):
            raise ContractError(f"attribution_hours is {self.attribution_hours}, expected 0 (labels are final) or more")
        if self.immature_rows not in (LEAVE, WEIGHT, KEEP):
            raise ContractError(f"immature_rows is {self.immature_rows!r}, expected {LEAVE}, {WEIGHT} or {KEEP}")

    @property
    def attribution(self) -> int:
        """The hours in microseconds."""
        return round(self.attribution_hours * DAY_MICROS / 24)

    @property
    def leaves(self) -> bool:
        """Whether the window ends before the rows that are not mature."""
        return bool(self.attribution) and self.immature_rows == LEAVE

    @property
    def weights(self) -> bool:
        """Whether young rows are thinned."""
        return bool(self.attribution) and self.immature_rows == WEIGHT


ALL_FINAL = Maturity()


@dataclass
class ClickDelays:
    """How long clicks took to be known, as `LateClicks` tells while it joins them."""

    known_by: int
    """Microseconds since the epoch. Clicks that became known later are as yet unknown: a row's age counts to here."""
    _times: list[NDArray[np.int64]] = field(default_factory=list)
    _delays: list[NDArray[np.float64]] = field(default_factory=list)

    def saw(self, times: NDArray[np.int64], known_at: NDArray[np.float64]) -> None:
        """Takes event times of rows that a late click made 1, and when it was known; microseconds, [n]."""
        self._times.append(times)
        self._delays.append(known_at - times)

    def of_rows_before(self, end: int) -> NDArray[np.float64]:
        """Delays of the late clicks on rows older than `end`, ascending; at least 0, whatever the clocks said."""
        nothing = np.zeros(0)
        times = np.concatenate([nothing, *self._times])
        delays = np.concatenate([nothing, *self._delays])
        return np.sort(np.maximum(delays[times < end], 0.0))


class YoungRows:
    """Thins the rows of a window that are not mature, by what its mature rows tell; see the module's `weight`.

    Rows come in time order: all mature ones before the first young one. A click that was in its row's file, and not
    told of later, counts as known from the start: whoever archives rows after a while shows a young row no sooner.
    """

    def __init__(self, mature_before: int, delays: ClickDelays) -> None:
        """Takes the time from which on rows are young, and where the delays of late clicks are told."""
        self._mature_before, self._delays = mature_before, delays
        self._num_rows = self._num_clicks = 0
        self._rate: float | None = None
        self._late: NDArray[np.float64] = np.zeros(0)

    def count(self, mature: Any) -> None:
        """Takes mature rows."""
        assert self._rate is None, "mature rows come before young ones"
        self._num_rows += mature.num_rows
        self._num_clicks += int(mature.column(LABEL).to_numpy().sum())

    def thinned(self, young: Any) -> Any:
        """The kept rows of a table of young ones: the same in every try.

        Raises:
            ContractError: the mature rows before do not tell how long clicks take.
        """
        if self._rate is None:
            self._estimate()
        ages = self._delays.known_by - young.column(EVENT_TIME).cast(pa.int64()).to_numpy()
        identities = row_identities(young.column(REQUEST_ID).combine_chunks(), young.column(ROW).to_numpy())
        clicked = young.column(LABEL).to_numpy() == 1
        return young.filter(pa.array(clicked | (uniforms(identities, _SALT) < self.keep_probabilities(ages))))

    def keep_probabilities(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """w(a) of rows without a click, [n], for ages in microseconds."""
        assert self._rate is not None
        in_time = np.searchsorted(self._late, ages, side="right")
        known = (self._num_clicks - len(self._late) + in_time) / self._num_clicks
        kept: NDArray[np.float64] = known * (1 - self._rate) / (1 - self._rate * known)
        return kept

    def _estimate(self) -> None:
        self._late = self._delays.of_rows_before(self._mature_before)
        if self._num_clicks < MIN_CLICKS or not len(self._late):
            raise ContractError(
                f"the window's {self._num_rows} mature rows have {self._num_clicks} clicks, {len(self._late)} of them "
                f"told of after their rows, expected at least {MIN_CLICKS} and some told of later: how long clicks "
                "take cannot be estimated; lengthen the window, or set immature_rows to leave or keep"
            )
        self._rate = self._num_clicks / self._num_rows
        logger.info(
            "click rate of %d mature rows %.4f; half of the late %d clicks were known after %.2f hours",
            self._num_rows,
            self._rate,
            len(self._late),
            float(np.median(self._late)) / DAY_MICROS * 24,
        )
