"""Matured rows and late outcomes as Parquet files: each file whole or absent, each row in exactly one.

In: matured requests and late outcomes of `monitoring.state.store`. Out:
`<archive>/day=YYYY-MM-DD/part-<unique>.parquet` and `<archive>/outcomes/day=YYYY-MM-DD/part-<unique>.parquet`. The day
is that of the prediction, in UTC, or where it is unknown that of the outcome. A ranked list's shadow scores stay in the
log: the arm that served the list chose its rows, and on rows that one model chose, another one looks better than it is
(ten of 200 by an equal model: by 0.04 of AUC). Joining late outcomes to their rows is left to extraction, moving files
to the lake to `monitoring.uploader`.

The order of steps survives a kill: the rows are assigned to a file name (store), the file is written under a temporary
name, flushed and renamed, its folder is flushed, then it is sealed (store). On restart an intended file that exists,
here or among the uploaded, is sealed; one that does not is written again under the same name from the same rows.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.contracts import raw_rows
from evergreen.contracts.raw_rows import microseconds
from evergreen.contracts.records import MAX_ID_CHARACTERS, NO_POSITION, NO_VERSION, Predictions
from evergreen.rows.archived_rows import arrow_schema, write_parquet
from evergreen.runtime.durable import fsync_path, no_checkpoint
from evergreen.runtime.errors import TemporaryError
from monitoring.rows import ArchiveOutcome, Unarchived
from monitoring.state.database import DAY_MICROS, OUTCOME_FOLDER, holds_outcomes
from monitoring.state.store import AHEAD_FOLDER, Store, bytes_of_row

logger = logging.getLogger(__name__)

FILE_BYTES = 48 << 20
"""Of a file's numbers and ids in memory at most, but for a larger part: all of them are in memory several times."""
_OF_ROWS = (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""What is wrong with the rows of a file, or too large; errors of the disk are OSErrors."""

OUTCOME_SCHEMA = arrow_schema(raw_rows.OUTCOME_TYPES)


def build_row_table(requests: Predictions, labels: NDArray[np.uint8], features: Features) -> pa.Table:
    """The rows of these requests, whose labels are [n], in the raw schema and in this order; missing features are null.

    With each optional group of `contracts.raw_rows` that any of the rows has, null in the others.
    """
    sizes, dense, categorical = requests.sizes, requests.dense, requests.categorical
    request = np.repeat(np.arange(len(requests)), sizes)
    columns: dict[str, Any] = {
        raw_rows.LABEL: labels,
        raw_rows.REQUEST_ID: pa.array(requests.ids, pa.string()).take(pa.array(request)),
        raw_rows.ROW: np.arange(len(request)) - requests.starts[request],
        raw_rows.EVENT_TIME: requests.micros[request],
        raw_rows.MODEL_VERSION: requests.versions[request],
        raw_rows.SCORE: requests.scores,
        raw_rows.POSITION: pa.array(requests.positions, mask=requests.positions == NO_POSITION),
        raw_rows.PROPENSITY: pa.array(requests.propensities, mask=np.isnan(requests.propensities)),
    }
    for i, name in enumerate(features.numeric):
        columns[name] = pa.array(np.ascontiguousarray(dense[:, i]), mask=np.isnan(dense[:, i]))
    for i, name in enumerate(features.categorical):
        values = np.ascontiguousarray(categorical[:, i])
        columns[name] = pa.array(values, mask=values == MISSING_CATEGORY)
    for name, (start, stop, _) in zip(features.lists, features.places.lists):
        columns[name] = _list_column(categorical[:, start:stop])
    types = raw_rows.raw_types(features)
    scored = (requests.shadow_versions != NO_VERSION)[request] & (requests.positions == NO_POSITION)
    if scored.any():
        types = types | raw_rows.SHADOW_TYPES
        columns[raw_rows.SHADOW_VERSION] = pa.array(requests.shadow_versions[request], mask=~scored)
        columns[raw_rows.SHADOW_SCORE] = pa.array(requests.shadow_scores, mask=~scored)
    if requests.canary.any():
        types = types | raw_rows.CANARY_TYPES
        columns[raw_rows.CANARY] = requests.canary[request]
    schema = arrow_schema(types)
    arrays = [columns[field.name] for field in schema]
    plain = [each if isinstance(each, pa.Array) else pa.array(each) for each in arrays]
    return pa.table([each.cast(field.type) for each, field in zip(plain, schema)], schema=schema)


def _list_column(places: NDArray[np.int64]) -> pa.Array:
    """The elements of each row, a list<int64> of [n, places]; null where there is none."""
    held = places != MISSING_CATEGORY
    offsets = np.concatenate([[0], np.cumsum(held.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, places[held], mask=pa.array(~held.any(axis=1)))


def build_outcome_table(outcomes: Sequence[ArchiveOutcome], windows: Mapping[str, float]) -> pa.Table:
    """These outcomes in the schema of the contract, in the order given.

    There is at least one; `windows`, those of each event in seconds, 0 where absent, are written beside its outcomes.
    """
    columns = {
        raw_rows.REQUEST_ID: [each.outcome.request_id for each in outcomes],
        raw_rows.ROW: [each.outcome.row for each in outcomes],
        raw_rows.EVENT: [each.outcome.event for each in outcomes],
        raw_rows.OUTCOME_TIME: np.array([microseconds(each.outcome.time) for each in outcomes], np.int64),
        raw_rows.STORED_AT: np.array([microseconds(each.stored_at) for each in outcomes], np.int64),
        raw_rows.WINDOW_SECONDS: np.array([windows.get(each.outcome.event, 0.0) for each in outcomes], np.float64),
    }
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in OUTCOME_SCHEMA], schema=OUTCOME_SCHEMA)


def utc_day(time: float) -> str:
    """The UTC day (YYYY-MM-DD) of the time that is written, which has whole microseconds.

    >>> utc_day(86_399.9), utc_day(86_399.9999999)
    ('1970-01-01', '1970-01-02')
    """
    return _day_name(microseconds(time) // DAY_MICROS)


@lru_cache(maxsize=1000)
def _day_name(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MICROS / 1e6, timezone.utc).strftime("%Y-%m-%d")


UPLOADED_FOLDER = "uploaded"


def marker_path(archive: Path, name: str) -> Path:
    """The uploader's proof that the file `name` (`day=.../part-....parquet`) is in the lake."""
    return archive / UPLOADED_FOLDER / f"{Path(name).name}.json"


class ArchivedPart(NamedTuple):
    """A file that was written."""

    name: str
    num_rows: int
    """Rows or outcomes in it."""


class Archive:
    """The archive in `folder`, whose bookkeeping is in `store`."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        features: Features,
        roll_rows: int,
        roll_seconds: float,
        keep_rows: int,
        windows: Mapping[str, float] | None = None,
        on_set_apart: Callable[[str, int, str], None] | None = None,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Opens the archive and finishes what an interrupted predecessor had begun.

        A file has `roll_rows` rows, fewer where they are wide, and nothing waits longer than `roll_seconds`. The newest
        `keep_rows` archived rows of each version stay in the store for the windows, beside those that the judge has not
        judged yet (document `judge`, `judged_until`). `windows`, those of each event in seconds, are written beside
        late outcomes. `on_set_apart` is called with a file that cannot be made of its rows, their number, and why.

        Raises:
            TemporaryError: the folder cannot be written, or the disk is full.
        """
        self._folder = folder
        self._store = store
        self._features = features
        row_bytes = bytes_of_row(len(features.numeric), len(features.places.slots)) + 4 * MAX_ID_CHARACTERS
        self._roll_rows = max(min(roll_rows, FILE_BYTES // row_bytes), 1)
        self._roll_seconds = roll_seconds
        self._keep_rows = keep_rows
        self._windows, self._checkpoint = windows or {}, checkpoint
        self._on_set_apart = on_set_apart or _log_set_apart
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for pattern in ("day=*/.part-*", f"{OUTCOME_FOLDER}/day=*/.part-*"):
                for torn in folder.glob(pattern):
                    torn.unlink()
        except OSError as error:
            raise TemporaryError(f"archive {folder} cannot be written: {error}") from error
        # Another version of the program may be able to write what one could not.
        for name in store.files("set apart"):
            if not name.startswith(f"{AHEAD_FOLDER}/"):
                store.take_back(name)
        self._finish_intended()

    def roll(self, now: float) -> list[ArchivedPart]:
        """Writes the files that are full or overdue.

        Raises:
            TemporaryError: the disk is full or refuses; the next call goes on where this one stopped.
        """
        self._finish_intended()
        store, written = self._store, list[ArchivedPart]()
        while store.num_unarchived_rows >= self._roll_rows:
            written += self._write_files(store.oldest_unarchived(self._roll_rows), raw_rows.DAY_PARTITION)
        if self._is_overdue(store.oldest_unarchived_at(), now):
            written += self._write_all_rows()
        if self._is_overdue(store.oldest_late_at(), now) or store.num_late(self._roll_rows) >= self._roll_rows:
            written += self._write_all_outcomes()
        return written

    def flush(self) -> list[ArchivedPart]:
        """Writes every matured row and late outcome; errors as `roll`'s."""
        self._finish_intended()
        return self._write_all_rows() + self._write_all_outcomes()

    def waiting_for_upload(self) -> list[str]:
        """Sealed files that the uploader has not moved yet."""
        sealed = self._store.files("sealed")
        uploaded = [name for name in sealed if marker_path(self._folder, name).exists()]
        self._store.mark_uploaded(uploaded)
        return [name for name in sealed if name not in set(uploaded)]

    def first_written(self, names: Sequence[str]) -> float | None:
        """When the first of these files was written, seconds since the epoch; None where none is here any more."""
        times = []
        for name in names:
            with suppress(FileNotFoundError):  # the uploader has just moved it
                times.append((self._folder / name).stat().st_mtime)
        return min(times, default=None)

    def _is_overdue(self, oldest: float | None, now: float) -> bool:
        return oldest is not None and not 0 <= now - oldest < self._roll_seconds  # ahead: the clock was set back

    def _write_all_rows(self) -> list[ArchivedPart]:
        written: list[ArchivedPart] = []
        while rows := self._store.oldest_unarchived(self._roll_rows):
            written += self._write_files(rows, raw_rows.DAY_PARTITION)
        return written

    def _write_all_outcomes(self) -> list[ArchivedPart]:
        written: list[ArchivedPart] = []
        while outcomes := self._store.oldest_late(self._roll_rows):
            written += self._write_files(outcomes, raw_rows.OUTCOME_PARTITION)
        return written

    def _write_files(self, items: Sequence[Unarchived], partition: str) -> list[ArchivedPart]:
        """Writes one file for each day among `items`."""
        written = []
        in_order = sorted(items, key=lambda each: (utc_day(each.time), each.number))
        for day, group in groupby(in_order, lambda each: utc_day(each.time)):
            name = f"{partition.format(day=day)}/part-{uuid4().hex}.parquet"
            self._store.intend_file(name, [each.number for each in group])
            self._checkpoint(f"{_kind_of(name)}.intended")
            written += self._finish_file(name)
        return written

    def _finish_intended(self) -> None:
        """Writes and seals what a predecessor had begun, or this one before the disk refused."""
        while names := self._store.files("intended"):  # one that is divided leaves two others
            for name in names:
                self._finish_file(name)

    def _finish_file(self, name: str) -> list[ArchivedPart]:
        """Make the file `name` unless it is there, or was and is uploaded; then seal it.

        Where the disk is full or refuses, no temporary file is left, and the store keeps the rows.

        Returns:
            The file, or what `_divide` wrote where it cannot be made of its rows.
        """
        path = self._folder / name
        if not marker_path(self._folder, name).exists():
            try:
                if not path.exists():
                    self._write_whole(name)
                # Also where it was there: a predecessor may have ended just after the rename.
                for folder in (path.parent, *path.parent.parents):
                    fsync_path(folder)
                    if folder == self._folder:
                        break
            except OSError as error:
                raise TemporaryError(f"archive file {path} cannot be written: {error}") from error
            except _OF_ROWS as error:
                return self._divide(name, error)
            self._checkpoint(f"{_kind_of(name)}.synced")
        judge = self._store.read_document("judge")
        judged_until = -inf if judge is None else judge.get("judged_until", -inf)
        num_rows = self._store.seal_file(name, keep_rows=self._keep_rows, keep_after=judged_until)
        self._checkpoint(f"{_kind_of(name)}.sealed")
        logger.info("sealed %s", name)
        return [ArchivedPart(name, num_rows)]

    def _divide(self, name: str, error: Exception) -> list[ArchivedPart]:
        """Intend two files in place of one that cannot be made, or set the one apart where it has a single request.

        What one row spoils must not keep the others out of the archive. What is set apart stays in the store and is
        tried again at the next start.
        """
        numbers, half = self._store.numbers_of_file(name), f"{name.rpartition('/')[0]}/part-"
        if len(numbers) == 1 and not holds_outcomes(name) and self._store.split_part(numbers[0]):
            numbers = self._store.numbers_of_file(name)
        if len(numbers) > 1:
            middle = len(numbers) // 2
            parts = {f"{half}{uuid4().hex}.parquet": part for part in (numbers[:middle], numbers[middle:])}
            self._store.split_file(name, parts)
            self._checkpoint(f"{_kind_of(name)}.divided")
            return [written for part in parts for written in self._finish_file(part)]
        self._on_set_apart(name, self._store.set_apart(name), f"{type(error).__name__}: {error}"[:200])
        return []

    def _write_whole(self, name: str) -> None:
        path, kind = self._folder / name, _kind_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.aside")
        try:
            write_parquet(self._build_table(name), temporary)
            self._checkpoint(f"{kind}.written")
            fsync_path(temporary)
            self._checkpoint(f"{kind}.flushed")
            os.rename(temporary, path)
        except (OSError, *_OF_ROWS):
            # On a full disk the torn file would take the room that the next try needs.
            temporary.unlink(missing_ok=True)
            raise
        self._checkpoint(f"{kind}.renamed")

    def _build_table(self, name: str) -> pa.Table:
        if holds_outcomes(name):
            return build_outcome_table(self._store.outcomes_of_file(name), self._windows)
        requests, labels = self._store.rows_of_file(name)
        return build_row_table(requests, labels, self._features)


def _log_set_apart(name: str, number: int, reason: str) -> None:
    logger.error("%s", set_apart_text(name, number, reason))


def set_apart_text(name: str, number: int, reason: str) -> str:
    """Return the sentence about an archive file that cannot be made."""
    kind = "late outcomes" if holds_outcomes(name) else "rows"
    return f"{number} {kind} of {name} cannot be archived and are set apart in the state folder: {reason}"


def _kind_of(name: str) -> str:
    """How the file's checkpoints begin."""
    return "outcomes" if holds_outcomes(name) else "archive"
