"""The rows on which a run trains: the window, the watermark, late rows, and immature rows.

This module defines which rows belong to a run and reads no rows. `components.extraction.lake` reads
the files, and `components.extraction.extract` selects the holdout.

- Watermark: without an explicit window, a run begins after its parent's newest training row. The
  parent's holdout rows are newer, so this run trains on them. If a run fails, or validation or the
  gate refuses it, its model does not become a parent. The next run then reads the same rows again.
  Without a parent, a run begins with the lake's first row, or `full_days` before its end.
- Late rows: rows at or before the watermark in a file that the parent's lineage has not seen. The
  parent's manifest names the files of the newest days (`Model.files`). Every row is therefore newer
  than the watermark, in a seen file, or late. A file belongs to one day. If a file was not seen,
  all of its rows up to the watermark are late. Back-filled versions are not late, because a later
  window or replay reads them again. Unseen files of days older than `late_days` are counted and
  named. Unseen files of older days stay unseen, so that a later run can train on them.
- Clock: rows ahead of the clock by more than a tolerance are in no window and do not move the
  watermark. A later run reads these rows once the clock has passed their time.
- Maturity: a row is mature if it is at least `attribution_hours` old at the requested end of the
  window. A younger row without a click may still get a click. The window therefore ends before the
  younger rows, and the next run reads them.
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
from evergreen.registry import models as registry
from evergreen.rows.times import DAY_MICROS, TimeSpan, day_span, parse_day, parse_time, to_iso
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again
from evergreen.storage.objects import ObjectInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeenFiles:
    """The files that a lineage has seen on the days before its watermark."""

    watermark: int
    """Time of the newest training row, microseconds since the epoch."""
    by_day: Mapping[date, Mapping[str, int]] = field(default_factory=dict)
    """Sizes in bytes by file name, for the days that are searched for late rows and whose files are
    known. Rows of other days are never late."""
    unknown: tuple[date, ...] = ()
    """Days that would be searched for late rows, but whose files were not recorded."""
    record: Mapping[date, Mapping[str, int]] = field(default_factory=dict)
    """Sizes in bytes by file name, for all recorded days. If a day after the first recorded day is
    absent, the day had no files."""
    left_before: int
    """Time in microseconds since the epoch. Rows before this time are left out of this run."""
    learned: Mapping[date, Mapping[str, int | None]] = field(default_factory=dict)
    """Files that the lineage left out as unfit, by day and name. The value is the time of the
    newest row of the file that was used for training, microseconds since the epoch. The value is
    None if no row was used."""
    begins_anew: bool = False
    """Whether this run ignores the parent's record of seen files and starts a new record, for
    example after an explicit window."""

    @property
    def read(self) -> TimeSpan:
        """Return the span of all times up to the watermark."""
        return TimeSpan(None, self.watermark + 1)

    def not_learned(self, day: date, file: ObjectInfo) -> TimeSpan:
        """Return the part of the day of which no row in this unseen file was used for training."""
        learned = self.learned.get(day, {}).get(base_name(file))
        return day_span(day).clipped(TimeSpan(None if learned is None else learned + 1, None))

    def was_quarantined(self, name: str) -> bool:
        """Return whether the lineage left out the file of this name before."""
        folder, _, base = name.rpartition("/")
        return any(
            DAY_PARTITION.format(day=day) == folder and base in names
            for day, names in self.learned.items()
        )

    def left(self, day: date, files: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Return a day's unseen files whose rows this run leaves out, entirely or partly."""
        if (
            not self.record
            or day < min(self.record)
            or day_span(day).clipped(TimeSpan(None, self.left_before)).is_empty
        ):
            return []
        return [file for file in files if base_name(file) not in self.record.get(day, {})]

    def late(self, day: date, files: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Return a day's unseen files.

        A file that was changed after the lineage had seen it is not returned.
        """
        return (
            [file for file in files if base_name(file) not in self.by_day[day]]
            if day in self.by_day
            else []
        )

    def warn(self, days: Mapping[date, Iterable[ObjectInfo]]) -> None:
        """Log the days with unknown files, and the seen files of `days` that changed later."""
        if self.unknown:
            logger.warning(
                "which files of %s the parent's line has seen is not known: no row of them counts "
                "as late",
                ", ".join(map(str, self.unknown)),
            )
        for day, files in days.items():
            for file in files:
                size = self.by_day[day].get(base_name(file), file.size)
                if size != file.size:
                    logger.warning(
                        "%s has %d bytes, expected the %d that it had when rows up to %s were "
                        "learned: what was changed is not learned, new rows belong in new files",
                        file.name,
                        file.size,
                        size,
                        to_iso(self.watermark),
                    )


def days_asked(newest: int, late_days: int) -> list[date]:
    """Return the days to search for late rows: the day of `newest`, and `late_days` before it.

    `newest` is in microseconds since the epoch.

    >>> [str(day) for day in days_asked(3 * 86_400_000_000, 1)]
    ['1970-01-03', '1970-01-04']
    """
    last = date(1970, 1, 1) + timedelta(days=newest // DAY_MICROS)
    return [last - timedelta(days=back) for back in range(late_days, -1, -1)]


def seen_files(parent: Model | None, late_days: int, *, start: str = "") -> SeenFiles | None:
    """Return the files that the parent's lineage has seen, or None without a parent.

    Args:
        parent: Model that the run continues.
        late_days: Number of days before the watermark's day that are searched for late rows. 0 =
            none.
        start: Requested start of the window. If the start is given, no row is late. Empty = after
            the watermark.

    Raises:
        ContractError: the model's manifest contains an invalid time or day.
    """
    if parent is None:
        return None
    newest = watermark(parent)
    source = f"files of model {parent.model_id}"
    known = {parse_day(source, day): files for day, files in parent.files.items()}
    learned = {
        parse_day(source, day): {
            name: parse_time(source, time) if time else None for name, time in files.items()
        }
        for day, files in parent.unread_files.items()
    }
    asked = days_asked(newest, late_days) if late_days and not start else []
    recorded = [day for day in asked if known and day >= min(known)]
    left_before = (
        day_span(asked[0]).start
        if asked
        else parse_time("window_start", start)
        if start
        else newest + 1
    )
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
    """Return the window [start, end) of a run.

    The window ends `attribution` before its requested end, or before the end of the lake. The next
    run reads the younger rows. A row's age is counted from that end and not from this machine's
    clock, so a retry reads the same rows.

    Args:
        start: ISO 8601, inclusive. Empty = after the parent's last training row.
        end: ISO 8601, exclusive. Empty = to the last row.
        parent: Model that the run continues. Used only if `start` is empty.
        full_days: Length of the window in days if there is neither a start nor a parent. 0 = from
            the first row.
        attribution: Microseconds after which a row's label is final.
        newest: Function that returns the time of the newest row, microseconds since the epoch, or
            None. The function is called only if the window depends on its result, because it may
            download a file.

    Raises:
        ContractError: a time is not ISO 8601, or the window is empty.
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
            f"window {window} holds no mature row: of rows up to {to_iso(requested or 0)} those of "
            f"the last {attribution / DAY_MICROS * 24:g} hours (attribution_hours) are left for "
            "the next round"
        )
    if window.is_empty:
        raise ContractError(f"window {window} is empty, expected its start before its end")
    return window


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The stored models that a run's candidate is compared with.

    All steps of the run use the same models.
    """

    parent: Model | None = None
    """Model that the candidate continues."""
    champion: Model | None = None
    """Model that the candidate must beat."""

    @property
    def models(self) -> list[Model]:
        """Return parent and champion, or only one model if they are the same."""
        return list(
            {model.model_id: model for model in (self.parent, self.champion) if model}.values()
        )

    @property
    def learned(self) -> int | None:
        """Return the time of the models' newest training row, in microseconds since the epoch.

        Returns None without models.
        """
        return max(map(watermark, self.models), default=None)


NO_BASELINES = Baselines()


def find_baselines(store: Path, *, parent: str, champion: str, features: Features) -> Baselines:
    """Find the parent and the champion of a run.

    Args:
        store: Folder of the model registry.
        parent: `current`, `none`, or a model's id.
        champion: `current`, `none`, or a released model's id.
        features: Features of the run's recommender.

    Raises:
        ContractError: a model is unknown, its manifest is corrupt, the parent uses a column of
            `features` as another kind, or the champion needs a column that is not in `features`.
    """
    continued = registry.parent(store, parent)
    if continued is not None:
        features.expect_continues(continued.recommender.features, parent=continued.model_id)
    release = registry.champion(store, champion)
    found = registry.stored_model(store, release.model_id, role="champion") if release else None
    if found is not None and (lost := features.places_lost(found.recommender.features)):
        raise ContractError(
            f"columns {lost} of the champion {found.model_id} are none of this run's, so that it "
            "cannot be compared on the same rows; to compare without it, "
            f"{run_again('-p champion=none' if continued else FROM_SCRATCH)}"
        )
    return Baselines(parent=continued, champion=found)


def expect_past(baselines: Baselines, ahead_from: int) -> None:
    """Check that no model was trained on a row that is ahead of the clock.

    After such a row, no later row would be newer than the watermark.

    Args:
        baselines: Models that the run continues and compares with.
        ahead_from: First time that is ahead of the clock, microseconds since the epoch.

    Raises:
        ContractError: a model was trained on such a row. The message says how to continue.
    """
    for model in baselines.models:
        if (newest := watermark(model)) >= ahead_from:
            raise ContractError(
                f"model {model.model_id} learned rows up to {to_iso(newest)}, later than "
                f"{to_iso(ahead_from)}, ahead of the clock: no row would be newer until then; to "
                f"train without it, {run_again(FROM_SCRATCH)}"
            )


def watermark(model: Model) -> int:
    """Return the time of the model's newest training row, microseconds since the epoch.

    Raises:
        ContractError: the manifest contains an invalid time.
    """
    return parse_time(f"last_learned_time of model {model.model_id}", model.last_learned_time)
