"""Write matured rows and late outcomes to Parquet files.

The input is matured requests and late outcomes from `monitoring.state.store`. The output is
`<archive>/day=YYYY-MM-DD/part-<unique>.parquet` and
`<archive>/outcomes/day=YYYY-MM-DD/part-<unique>.parquet`. Every file is complete or absent, and
every row is in exactly one file. The day is the UTC day of the prediction, or of the outcome if the
prediction is unknown. Extraction joins late outcomes to their rows, and `monitoring.uploader` moves
the files to the lake.

Shadow scores of a ranked list are not archived. The serving model selected the rows of the list,
and on selected rows every other model appears better than it is. One measurement used lists of the
ten best of 200 rows. On these lists, the AUC of a model that is as good as the serving model was
higher by 0.04.

The steps have this order, so that a killed process loses no row:

1. The state records which rows belong to a new file, with the status `intended`.
2. The file is written under a temporary name, flushed and renamed, and its folder is flushed.
3. The state changes the status of the file to `sealed`.

After a restart, if an intended file exists here or was uploaded, the state marks it as `sealed`.
Any other intended file is written again under the same name from the same rows.
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
from monitoring.state.store import AHEAD_FOLDER, StateStore, bytes_of_row

logger = logging.getLogger(__name__)

_FILE_BYTES = 48 << 20
"""Maximum bytes of numbers and ids in one file, unless a single part is larger. While a file is
written, several copies of its rows are in memory."""
_OF_ROWS = (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""Errors caused by the rows of a file, or by their size. Disk errors are OSErrors."""

OUTCOME_SCHEMA = arrow_schema(raw_rows.OUTCOME_TYPES)


def build_row_table(
    requests: Predictions, labels: NDArray[np.uint8], features: Features
) -> pa.Table:
    """Convert requests to a table in the raw schema, in the given order.

    Missing features are null. An optional group of columns (`contracts.raw_rows`) is present if at
    least one row has it. Rows without the group have null in its columns.

    Args:
        requests: Requests with n rows.
        labels: Label of each row, shape [n].
        features: Columns of the recommender.
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
    for name, (start, stop, _) in zip(features.lists, features.positions.lists):
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


def _list_column(positions: NDArray[np.int64]) -> pa.Array:
    """Convert [n, slots] element ids to a list<int64> column. Empty rows are null."""
    is_present = positions != MISSING_CATEGORY
    offsets = np.concatenate([[0], np.cumsum(is_present.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(
        offsets, positions[is_present], mask=pa.array(~is_present.any(axis=1))
    )


def _build_outcome_table(
    outcomes: Sequence[ArchiveOutcome], windows: Mapping[str, float]
) -> pa.Table:
    """Convert outcomes to a table in the contract's schema, in the given order.

    Args:
        outcomes: At least one outcome.
        windows: Window in seconds of each kind of event. The window of the outcome's kind is stored
            with each outcome. 0 is stored for a kind of event without a window.
    """
    columns = {
        raw_rows.REQUEST_ID: [each.outcome.request_id for each in outcomes],
        raw_rows.ROW: [each.outcome.row for each in outcomes],
        raw_rows.EVENT: [each.outcome.event for each in outcomes],
        raw_rows.OUTCOME_TIME: np.array(
            [microseconds(each.outcome.time) for each in outcomes], np.int64
        ),
        raw_rows.STORED_AT: np.array([microseconds(each.stored_at) for each in outcomes], np.int64),
        raw_rows.WINDOW_SECONDS: np.array(
            [windows.get(each.outcome.event, 0.0) for each in outcomes], np.float64
        ),
    }
    return pa.table(
        [pa.array(columns[field.name]).cast(field.type) for field in OUTCOME_SCHEMA],
        schema=OUTCOME_SCHEMA,
    )


def _utc_day(time: float) -> str:
    """Return the UTC day (YYYY-MM-DD) of a time after rounding to whole microseconds.

    >>> _utc_day(86_399.9), _utc_day(86_399.9999999)
    ('1970-01-01', '1970-01-02')
    """
    return _day_name(microseconds(time) // DAY_MICROS)


@lru_cache(maxsize=1000)
def _day_name(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MICROS / 1e6, timezone.utc).strftime("%Y-%m-%d")


UPLOADED_FOLDER = "uploaded"


def marker_path(archive: Path, name: str) -> Path:
    """Return the path of a file's marker, which proves that the file is in the lake.

    The uploader writes the marker. `name` is an archive file name such as
    `day=.../part-....parquet`.
    """
    return archive / UPLOADED_FOLDER / f"{Path(name).name}.json"


class ArchivedPart(NamedTuple):
    """A new archive file."""

    name: str
    num_rows: int
    """Number of rows or outcomes."""


class Archive:
    """The archive in `folder`, tracked by `store`."""

    def __init__(
        self,
        folder: Path,
        store: StateStore,
        *,
        features: Features,
        roll_rows: int,
        roll_seconds: float,
        keep_rows: int,
        windows: Mapping[str, float] | None = None,
        on_set_apart: Callable[[str, int, str], None] | None = None,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Open the archive and finish the files that an interrupted predecessor had begun.

        Args:
            folder: Folder of the archive.
            store: The monitor's state.
            features: Columns of the recommender.
            roll_rows: Number of rows after which a file is written. A file has fewer rows if its
                rows are wide.
            roll_seconds: Maximum time in seconds until a row or an outcome is written to a file.
            keep_rows: Number of archived rows, newest first, that stay in the state to fill each
                version's window. Rows after `decided_until` in the document `evaluator` also stay,
                because no decision covers them yet.
            windows: Window of each event in seconds, stored beside late outcomes.
            on_set_apart: Called with the name of a file that cannot be written, its number of rows,
                and the reason.
            checkpoint: Called with the name of each step that a crash may follow.

        Raises:
            TemporaryError: The folder cannot be written, or the disk is full.
        """
        self._folder = folder
        self._store = store
        self._features = features
        row_bytes = (
            bytes_of_row(len(features.numeric), len(features.positions.slots))
            + 4 * MAX_ID_CHARACTERS
        )
        self._roll_rows = max(min(roll_rows, _FILE_BYTES // row_bytes), 1)
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
        # A newer version of the program may be able to write the files that were set apart.
        for name in store.files("set apart"):
            if not name.startswith(f"{AHEAD_FOLDER}/"):
                store.retry_file(name)
        self._finish_intended()

    def roll(self, now: float) -> list[ArchivedPart]:
        """Write the files that are full or overdue.

        Raises:
            TemporaryError: The disk is full or a write failed. The next call writes the remaining
                files.
        """
        self._finish_intended()
        store, written = self._store, list[ArchivedPart]()
        while store.num_unarchived_rows >= self._roll_rows:
            written += self._write_files(
                store.oldest_unarchived(self._roll_rows), raw_rows.DAY_PARTITION
            )
        if self._is_overdue(store.oldest_unarchived_at(), now):
            written += self._write_all_rows()
        if (
            self._is_overdue(store.oldest_late_at(), now)
            or store.num_late(self._roll_rows) >= self._roll_rows
        ):
            written += self._write_all_outcomes()
        return written

    def flush(self) -> list[ArchivedPart]:
        """Write every matured row and late outcome. Raises the errors of `roll`."""
        self._finish_intended()
        return self._write_all_rows() + self._write_all_outcomes()

    def waiting_for_upload(self) -> list[str]:
        """Return the sealed files that the uploader has not moved yet."""
        sealed = self._store.files("sealed")
        uploaded = [name for name in sealed if marker_path(self._folder, name).exists()]
        self._store.mark_uploaded(uploaded)
        return [name for name in sealed if name not in set(uploaded)]

    def first_written(self, names: Sequence[str]) -> float | None:
        """Return when the oldest of the named files was written, in seconds since the epoch.

        Returns None if all files were moved away.
        """
        times = []
        for name in names:
            with suppress(
                FileNotFoundError
            ):  # the file is missing, because the uploader has just moved it
                times.append((self._folder / name).stat().st_mtime)
        return min(times, default=None)

    def _is_overdue(self, oldest: float | None, now: float) -> bool:
        return (
            oldest is not None and not 0 <= now - oldest < self._roll_seconds
        )  # the difference is negative if the clock was set back

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
        """Write the items to files, one file for each day."""
        written = []
        in_order = sorted(items, key=lambda each: (_utc_day(each.time), each.number))
        for day, group in groupby(in_order, lambda each: _utc_day(each.time)):
            name = f"{partition.format(day=day)}/part-{uuid4().hex}.parquet"
            self._store.intend_file(name, [each.number for each in group])
            self._checkpoint(f"{_kind_of(name)}.intended")
            written += self._finish_file(name)
        return written

    def _finish_intended(self) -> None:
        """Write and seal the files that a predecessor or a failed write left unfinished."""
        while names := self._store.files("intended"):  # `_divide` adds two intended files
            for name in names:
                self._finish_file(name)

    def _finish_file(self, name: str) -> list[ArchivedPart]:
        """Write the file `name` unless it exists or was uploaded, then seal it.

        If the disk is full or a write fails, no temporary file remains and the state keeps the
        rows.

        Returns:
            The archived file, or the files from `_divide` if the rows cannot be written.
        """
        path = self._folder / name
        if not marker_path(self._folder, name).exists():
            try:
                if not path.exists():
                    self._write_whole(name)
                # Flush an existing file too, because a predecessor may have ended just after the
                # rename.
                for folder in (path.parent, *path.parent.parents):
                    fsync_path(folder)
                    if folder == self._folder:
                        break
            except OSError as error:
                raise TemporaryError(f"archive file {path} cannot be written: {error}") from error
            except _OF_ROWS as error:
                return self._divide(name, error)
            self._checkpoint(f"{_kind_of(name)}.synced")
        evaluator = self._store.read_document("evaluator")
        decided_until = -inf if evaluator is None else evaluator.get("decided_until", -inf)
        num_rows = self._store.seal_file(name, keep_rows=self._keep_rows, keep_after=decided_until)
        self._checkpoint(f"{_kind_of(name)}.sealed")
        logger.info("sealed %s", name)
        return [ArchivedPart(name, num_rows)]

    def _divide(self, name: str, error: Exception) -> list[ArchivedPart]:
        """Replace a file that could not be written by two smaller files, and write these files.

        One bad row must not block the other rows. If the file has only one request or outcome, it
        is set apart. The rows of a file that is set apart stay in the state, and the write is
        retried at the next start.
        """
        numbers, half = self._store.numbers_of_file(name), f"{name.rpartition('/')[0]}/part-"
        if len(numbers) == 1 and not holds_outcomes(name) and self._store.split_part(numbers[0]):
            numbers = self._store.numbers_of_file(name)
        if len(numbers) > 1:
            middle = len(numbers) // 2
            parts = {
                f"{half}{uuid4().hex}.parquet": part
                for part in (numbers[:middle], numbers[middle:])
            }
            self._store.split_file(name, parts)
            self._checkpoint(f"{_kind_of(name)}.divided")
            return [written for part in parts for written in self._finish_file(part)]
        self._on_set_apart(
            name, self._store.set_apart(name), f"{type(error).__name__}: {error}"[:200]
        )
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
            # On a full disk, the incomplete file would take the space that the next attempt needs.
            temporary.unlink(missing_ok=True)
            raise
        self._checkpoint(f"{kind}.renamed")

    def _build_table(self, name: str) -> pa.Table:
        if holds_outcomes(name):
            return _build_outcome_table(self._store.outcomes_of_file(name), self._windows)
        requests, labels = self._store.rows_of_file(name)
        return build_row_table(requests, labels, self._features)


def _log_set_apart(name: str, number: int, reason: str) -> None:
    logger.error("%s", set_apart_text(name, number, reason))


def set_apart_text(name: str, number: int, reason: str) -> str:
    """Format the message about an archive file that cannot be written."""
    kind = "late outcomes" if holds_outcomes(name) else "rows"
    return (
        f"{number} {kind} of {name} cannot be archived and are set apart in the state folder: "
        f"{reason}"
    )


def _kind_of(name: str) -> str:
    """Return the prefix for the names of the file's checkpoints."""
    return "outcomes" if holds_outcomes(name) else "archive"
