"""Which rows a round learns: the window, the watermark behind it, late rows, and rows whose label is not final.

This module holds the semantics of rounds and reads no rows; `lake` applies it to files, `extract` says which judge.

- Watermark: without an explicit window a round begins after the newest row that its parent learned. The rows that
  judged the parent are newer, so this round learns them. A round that failed, or that validation or the gate refused,
  becomes nobody's parent, so the next round reads its rows again. Without a parent a round begins with the lake's first
  row, or `full_days` before its end.
- Late rows: a row at or before the watermark that arrives in a file which the parent's line has not seen. The
  parent's manifest names the files of the newest days (`Model.files`); so every row is newer than the watermark, or
  in a seen file, or late. A file belongs to one day, and all of its rows up to the watermark are late, or none.
  Back-filled versions are not late: a window or replay learns them again. Unseen files of older days than `late_days`
  are left: they are counted and named, and stay unseen, so that a later round can learn them.
- Clock: rows ahead of the clock by more than a tolerance are in no window, and no watermark comes from them. A later
  round reads them when their time has come.
- Maturity: a row is mature once it is `attribution_hours` old, counted back from the window's end; a younger row
  without a click may still get one. So the window ends where younger rows begin, and the next round reads them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path

from components.extraction.lake_files import base_name
from evergreen.config.features import Features
from evergreen.contracts.manifests import Model
from evergreen.contracts.raw_rows import DAY_PARTITION
from evergreen.registry import models as model_store
from evergreen.rows.times import DAY_MICROS, TimeSpan, day_span, parse_day, parse_time, to_iso
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again
from evergreen.storage.objects import ObjectInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeenFiles:
    """What one line of models saw of the days before its watermark."""

    watermark: int
    """Newest row that it learned, microseconds since the epoch."""
    by_day: Mapping[date, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by name, of the days considered whose files are known; no row of another day is late."""
    unknown: tuple[date, ...] = ()
    """Days considered whose files nobody recorded."""
    record: Mapping[date, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by name, of all days that were recorded. A day after the first of them that is not here had no files."""
    left_before: int
    """Rows before this time, microseconds since the epoch, are not learned in this round, whichever file has them."""
    learned: Mapping[date, Mapping[str, int | None]] = field(default_factory=dict)
    """Files that the line left out as unfit, by day and name: the time up to which it has learned their rows,
    microseconds since the epoch; None = it learned none."""
    begins_anew: bool = False
    """Whether the lake's files count as seen from this round on, as after a window that somebody asked for."""

    @property
    def read(self) -> TimeSpan:
        """The times up to the watermark."""
        return TimeSpan(None, self.watermark + 1)

    def not_learned(self, day: date, file: ObjectInfo) -> TimeSpan:
        """Return the times of the day of which the line has not learned rows of a file that it has not seen."""
        learned = self.learned.get(day, {}).get(base_name(file))
        return day_span(day).clipped(TimeSpan(None if learned is None else learned + 1, None))

    def was_quarantined(self, name: str) -> bool:
        """Return whether the line left out the lake's file of this name before."""
        folder, _, base = name.rpartition("/")
        return any(DAY_PARTITION.format(day=day) == folder and base in names for day, names in self.learned.items())

    def left(self, day: date, files: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Those of a day's files that the line has not seen and this round leaves, all or some of their rows."""
        if (
            not self.record
            or day < min(self.record)
            or day_span(day).clipped(TimeSpan(None, self.left_before)).is_empty
        ):
            return []
        return [file for file in files if base_name(file) not in self.record.get(day, {})]

    def late(self, day: date, files: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Those of a day's files that the line has not seen. One that was changed since is not among them."""
        return [file for file in files if base_name(file) not in self.by_day[day]] if day in self.by_day else []

    def warn(self, days: Mapping[date, Iterable[ObjectInfo]]) -> None:
        """Logs what cannot be known, and which of the files of `days` were changed since they were seen."""
        if self.unknown:
            logger.warning(
                "which files of %s the parent's line has seen is not known: no row of them counts as late",
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


def seen_files(parent: Model | None, late_days: int, *, start: str = "") -> SeenFiles | None:
    """Return what the parent's line saw of the days that a round asks about, or None without a parent.

    Args:
        parent: The model that the round continues.
        late_days: Days before the watermark's of which late rows are learned; 0 = none are.
        start: The window's start that was asked for; with one no row is late. Empty = after the watermark.

    Raises:
        ContractError: the model's manifest names no time, or something else than days.
    """
    if parent is None:
        return None
    newest = watermark(parent)
    source = f"files of model {parent.model_id}"
    known = {parse_day(source, day): files for day, files in parent.files.items()}
    learned = {
        parse_day(source, day): {name: parse_time(source, time) if time else None for name, time in files.items()}
        for day, files in parent.unread_files.items()
    }
    asked = days_asked(newest, late_days) if late_days and not start else []
    recorded = [day for day in asked if known and day >= min(known)]
    left_before = day_span(asked[0]).start if asked else parse_time("window_start", start) if start else newest + 1
    assert left_before is not None
    return SeenFiles(
        watermark=newest,
        by_day={day: known.get(day, {}) for day in recorded},
        unknown=tuple(day for day in asked if day not in recorded),
        record=known,
        learned=learned,
        left_before=left_before,
        begins_anew=bool(start),
    )


def resolve_window(
    *,
    start: str,
    end: str,
    parent: Model | None,
    full_days: float = 0.0,
    attribution: int = 0,
    newest: Callable[[], int | None] = lambda: None,
) -> TimeSpan:
    """The window [start, end).

    It ends `attribution` before its requested end, or before the end of the lake: younger rows are left for the next
    round. A row's age counts from there and not from this machine's clock, so a retry reads the same rows.

    Args:
        start: ISO 8601, inclusive; empty = after the last row that `parent` learned.
        end: ISO 8601, exclusive; empty = to the last row.
        parent: The model that the round continues; looked at only where `start` does not say.
        full_days: Length of the window of a round without a parent, counted back from its end, where `start` does not
            say; 0 = from the first row.
        attribution: Microseconds after which a row's label is final.
        newest: Time of the newest row, microseconds since the epoch, None where there is none. Asked only where the
            window depends on it, since it may cost a transfer.

    Raises:
        ContractError: a time is not ISO 8601, or the window is empty by its bounds.
    """
    days = full_days if not start and parent is None else 0.0
    requested = parse_time("window_end", end) if end else None
    if requested is None and (days or attribution) and (newest_row := newest()) is not None:
        requested = newest_row + 1
    last = None if requested is None else requested - attribution
    first = parse_time("window_start", start) if start else None
    if days:
        first = None if last is None else last - round(days * DAY_MICROS)
    elif not start and parent:
        first = watermark(parent) + 1
    window = TimeSpan(first, last)
    if window.is_empty and attribution:
        raise ContractError(
            f"window {window} holds no mature row: of rows up to {to_iso(requested or 0)} those of the last "
            f"{attribution / DAY_MICROS * 24:g} hours (attribution_hours) are left for the next round"
        )
    if window.is_empty:
        raise ContractError(f"window {window} is empty, expected its start before its end")
    return window


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """The stored models that the round's candidate is compared with, found once for all steps of the run."""

    parent: Model | None = None
    """The model that it continues."""
    champion: Model | None = None
    """The model that it must beat."""

    @property
    def models(self) -> list[Model]:
        """Each once."""
        return list({model.model_id: model for model in (self.parent, self.champion) if model}.values())

    @property
    def learned(self) -> int | None:
        """Time of the newest row that one of them learned, microseconds since the epoch; None without any."""
        return max(map(watermark, self.models), default=None)


NO_RIVALS = Rivals()


def find_rivals(store: Path, *, parent: str, champion: str, features: Features) -> Rivals:
    """The models that `parent` (`current`, `none` or a model's id) and `champion` (a released one's) name.

    Raises:
        ContractError: a model is unknown, its manifest is corrupt, the parent learned a column of `features` as another
            kind, or the champion takes a column that is not among `features`, so that it cannot be judged on the same
            rows.
    """
    continued = model_store.parent(store, parent)
    if continued is not None:
        features.expect_continues(continued.recommender.features, parent=continued.model_id)
    release = model_store.champion(store, champion)
    found = model_store.stored_model(store, release.model_id, role="champion") if release else None
    if found is not None and (lost := features.places_lost(found.recommender.features)):
        raise ContractError(
            f"columns {lost} of the champion {found.model_id} are none of this run's, so that it cannot be judged on "
            f"the same rows; to judge without it, {run_again('-p champion=none' if continued else FROM_SCRATCH)}"
        )
    return Rivals(parent=continued, champion=found)


def expect_past(rivals: Rivals, ahead_from: int) -> None:
    """Check that no model learned a row that is ahead of the clock, after which no row would be new.

    Args:
        rivals: The models that the run continues and compares with.
        ahead_from: The first time that is ahead of the clock, microseconds since the epoch.

    Raises:
        ContractError: one did. The message says how to go on.
    """
    for model in rivals.models:
        if (newest := watermark(model)) >= ahead_from:
            raise ContractError(
                f"model {model.model_id} learned rows up to {to_iso(newest)}, later than {to_iso(ahead_from)}, "
                f"ahead of the clock: no row would be newer until then; to train without it, {run_again(FROM_SCRATCH)}"
            )


def watermark(model: Model) -> int:
    """Time of the newest row that the model learned, microseconds since the epoch.

    Raises:
        ContractError: the manifest holds no time.
    """
    return parse_time(f"last_learned_time of model {model.model_id}", model.last_learned_time)
