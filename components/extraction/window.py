"""Which rows a round learns: the window, the watermark behind it, late rows, and rows whose label is not final.

This module holds the semantics of rounds and reads no rows: `lake` applies it to files, `extract` to tables.

- Watermark: without an explicit window a round begins after the champion's newest row read. A round that failed, or
  that validation or the gate refused, leaves no champion, so the next round reads its rows again.
- Late rows: a row at or before the watermark that arrives in a file which the champion's line has not seen. The
  champion's manifest names the files of the newest days (`Model.files`); so every row is newer than the watermark, or
  in a seen file, or late. A file belongs to one day, and all of its rows up to the watermark are late, or none.
  Back-filled versions are not late: a window or replay learns them again.
- Maturity: a row is mature once it is `attribution_hours` old, counted back from the window's end; a younger row
  without a click may still get one (the delayed feedback of Chapelle 2014, "Modeling delayed feedback in display
  advertising"). Younger rows are handled by policy:
  - `leave`: the window ends where they begin, and the next round reads them.
  - `weight`: a row of age a with a click is kept, and one without is kept with probability w(a), so that the kept
    rows' odds of a click are those of mature rows. With p the click rate and F(a) the share of clicks known by age a,
    a row shows a click with probability pF and none with 1 - pF; p / (1 - p) = pF / (w (1 - pF)) gives
    w = F(1 - p) / (1 - pF). p and F are estimated from the window's mature rows. For rows whose own rate q differs
    from p, the odds are off by a factor of about 1 - (q - p)(1 - F).
  - `keep`: they are kept as they are.
  With `weight` and `keep` the watermark is the newest row read, young or not: no later window reads these rows again.
  Held-out rows are always mature: the gate must not judge by labels that are not final.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts.criteo import EVENT_TIME, LABEL, REQUEST_ID, ROW
from components.contracts.manifests import Model
from components.contracts.row_hash import row_identities, uniforms
from components.extraction.day_versions import base_name
from components.extraction.times import DAY_MICROS, TimeSpan, parse_day, parse_time, to_iso
from components.runtime.errors import ContractError
from components.storage.objects import ObjectInfo
from components.storage.uris import local_path
from components.store import models as model_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeenFiles:
    """What one line of models saw of the days before its watermark."""

    watermark: int
    """Newest row that it read, microseconds since the epoch."""
    by_day: Mapping[date, Mapping[str, int]]
    """Bytes by name, of the days considered whose files are known; no row of another day is late."""
    unknown: tuple[date, ...] = ()
    """Days considered whose files nobody recorded."""

    @property
    def read(self) -> TimeSpan:
        """The times up to the watermark."""
        return TimeSpan(None, self.watermark + 1)

    def late(self, day: date, files: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Those of a day's files that the line has not seen. One that was changed since is not among them."""
        return [file for file in files if base_name(file) not in self.by_day[day]] if day in self.by_day else []

    def warn(self, days: Mapping[date, Iterable[ObjectInfo]]) -> None:
        """Logs what cannot be known, and which of the files of `days` were changed since they were seen."""
        if self.unknown:
            logger.warning(
                "which files of %s the champion's line has seen is not known: no row of them counts as late",
                ", ".join(map(str, self.unknown)),
            )
        for day, files in days.items():
            for file in files:
                size = self.by_day[day].get(base_name(file), file.size)
                if size != file.size:
                    logger.warning(
                        "%s has %d bytes, expected the %d that it had when rows up to %s were learned: what was "
                        "changed is not learned, new rows belong in new files",
                        file.name, file.size, size, to_iso(self.watermark),
                    )  # fmt: skip


def days_asked(newest: int, late_days: int) -> list[date]:
    """The days of which late rows are learned: that of the row at `newest` (microseconds), and `late_days` before it.

    >>> [str(day) for day in days_asked(3 * 86_400_000_000, 1)]
    ['1970-01-03', '1970-01-04']
    """
    last = date(1970, 1, 1) + timedelta(days=newest // DAY_MICROS)
    return [last - timedelta(days=back) for back in range(late_days, -1, -1)]


def seen_files(accepted: Model | None, late_days: int) -> SeenFiles | None:
    """What the champion's line saw of the days that a round asks about; None where it asks about none.

    Args:
        accepted: The champion's model, whose watermark the window begins after; None = there is none, or another
            window was asked for.
        late_days: Days before the watermark's; 0 = late rows are not learned.

    Raises:
        ContractError: the model's manifest names no time, or something else than days.
    """
    if accepted is None or not late_days:
        return None
    newest = watermark(accepted)
    known = {parse_day(f"files of model {accepted.model_id}", day): files for day, files in accepted.files.items()}
    asked = days_asked(newest, late_days)
    return SeenFiles(
        watermark=newest,
        by_day={day: known[day] for day in asked if day in known},
        unknown=tuple(day for day in asked if day not in known),
    )


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
class LateClickDelays:
    """How long clicks took to be known, as `LateClicks` records while it joins them."""

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


class ImmatureRows:
    """Thins the rows of a window that are not mature, by an estimate from its mature rows; see the module's `weight`.

    Rows come in time order: all mature ones before the first young one. A click that was in its row's file, and not
    reported later, counts as known from the start: an archive that waits shows a young row no sooner.
    """

    def __init__(self, mature_before: int, delays: LateClickDelays) -> None:
        """Takes the time from which on rows are young, and where the delays of late clicks are recorded."""
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
            ContractError: the mature rows do not suffice to estimate how long clicks take.
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
                f"reported after their rows, expected at least {MIN_CLICKS} and some reported later: how long clicks "
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


def resolve_window(
    *,
    start: str,
    end: str,
    accepted: Model | None,
    days: float = 0.0,
    maturity: Maturity = ALL_FINAL,
    newest: Callable[[], int | None] = lambda: None,
) -> TimeSpan:
    """The window [start, end).

    Where younger rows are left for the next round, the window ends `maturity.attribution` before its end as asked for,
    or before the end of the lake: a row's age counts from there, not from this machine's clock, so a try that is
    repeated later reads the same.

    Args:
        start: ISO 8601, inclusive; empty = after the last row of `accepted`, or from the first row without one.
        end: ISO 8601, exclusive; empty = to the last row.
        accepted: The champion's model; looked at only where neither `start` nor `days` says.
        days: Length of the window, counted back from its end; 0 = `start` says.
        maturity: When a row's label is final.
        newest: Time of the newest row, microseconds since the epoch, None where there is none. Asked only where the
            window depends on it, since it may cost a transfer.

    Raises:
        ContractError: a time is not ISO 8601, `days` contradicts `start` or is no length of time, or the window is
            empty by its bounds.
    """
    if not (math.isfinite(days) and days >= 0):
        raise ContractError(f"window_days is {days}, expected 0 (window_start says) or more")
    if days and start:
        raise ContractError(f"window_days is {days} with window_start {start!r}, expected one of the two")
    asked = last = parse_time("window_end", end) if end else None
    if asked is None and (days or maturity.attribution):
        last = newest()
        asked = last = None if last is None else last + 1
    if last is not None and maturity.leaves:
        last -= maturity.attribution
    first = parse_time("window_start", start) if start else None
    if days:
        first = None if last is None else last - round(days * DAY_MICROS)
    elif not start and accepted:
        first = watermark(accepted) + 1
    window = TimeSpan(first, last)
    if window.is_empty and asked != last:
        raise ContractError(
            f"window {window} holds no mature row: of rows up to {to_iso(asked or 0)} those of the last "
            f"{maturity.attribution_hours:g} hours (attribution_hours) are left for the next round"
        )
    if window.is_empty:
        raise ContractError(f"window {window} is empty, expected its start before its end")
    return window


def accepted_model(store: Path, champion: str) -> Model | None:
    """The model behind the champion (`current`, `none` or a released model's id); None where there is none.

    Raises:
        ContractError: the champion is unknown, or its manifest is damaged.
    """
    release = model_store.champion(store, champion)
    return Model.read(local_path(release.model_uri) / Model.MANIFEST) if release else None


def watermark(model: Model) -> int:
    """Time of the newest row that was read for the model, microseconds since the epoch.

    Raises:
        ContractError: the manifest holds no time.
    """
    return parse_time(f"last_event_time of model {model.model_id}", model.last_event_time)
