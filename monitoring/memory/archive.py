"""Matured rows as Parquet files, each whole or absent, each row in exactly one.

In: matured requests of `monitoring.memory.store`. Out: `<archive>/day=YYYY-MM-DD/part-<unique>.parquet` in the raw
schema of `contracts.criteo`, with its shadow columns where a row of the file was scored in the shadow. A ranked list's
shadow scores stay in the log: the arm that served the list chose its rows, and on rows that one model chose, another
one looks better than it is (ten of 200 by an equal model: by 0.04 of AUC). Moving files to the lake is left to
`monitoring.uploader`.

The order that survives a kill: the rows are given to a file name (store), the file is written aside, flushed and
renamed, then sealed (store). On restart an intended file that exists, here or among the uploaded, is sealed; one that
does not is written again under the same name from the same rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.durable import fsync_path
from components.contracts.records import PredictionBatch, decode
from monitoring.memory.store import ArchiveRow, Store

logger = logging.getLogger(__name__)

UPLOADED_FOLDER = "uploaded"


def _schema(types: dict[str, str]) -> pa.Schema:
    return pa.schema(
        [
            (name, pa.timestamp("us", tz="UTC") if text.startswith("timestamp") else getattr(pa, text)())
            for name, text in types.items()
        ]
    )


SCHEMA = _schema(criteo.RAW_TYPES)
SHADOW_SCHEMA = _schema({**criteo.RAW_TYPES, **criteo.SHADOW_TYPES})
"""Of files with a row that was scored in the shadow; others stay as they were before there were shadows."""


def no_checkpoint(name: str) -> None:
    """Passes; tests put a crash here, at each place that names itself."""


def marker_path(archive: Path, name: str) -> Path:
    """The uploader's proof that the file `name` (`day=.../part-....parquet`) is in the lake."""
    return archive / UPLOADED_FOLDER / f"{Path(name).name}.json"


class Archive:
    """The archive in `folder`, whose bookkeeping is in `store`."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        roll_rows: int,
        roll_seconds: float,
        keep_rows: int,
        checkpoint: Callable[[str], None] = no_checkpoint,
        unique: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        """Opens the archive and finishes what an interrupted predecessor had begun.

        Args:
            folder: Created if missing.
            store: Where the rows are.
            roll_rows: Rows that fill a file.
            roll_seconds: Longest wait of a matured row.
            keep_rows: Archived rows to keep in the store, for the windows.
            checkpoint: Called with the name of each step that a crash may follow.
            unique: A name never used before.
        """
        self._folder, self._store, self._checkpoint, self._unique = folder, store, checkpoint, unique
        self._roll_rows, self._roll_seconds, self._keep_rows = roll_rows, roll_seconds, keep_rows
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("day=*/.part-*"):
            torn.unlink()
        for name in store.files("intended"):
            self._finish(name)

    def roll(self, now: float) -> list[tuple[str, int]]:
        """Writes the files that are full or overdue; (name, rows) of each."""
        written = []
        while self._store.num_unarchived_rows >= self._roll_rows:
            written += self._write_next()
        oldest = self._store.oldest_unarchived_at()
        return written + (self.flush() if oldest is not None and now - oldest >= self._roll_seconds else [])

    def flush(self) -> list[tuple[str, int]]:
        """Writes every matured row; (name, rows) of each file."""
        written: list[tuple[str, int]] = []
        while files := self._write_next():
            written += files
        return written

    def waiting_for_upload(self) -> list[str]:
        """Sealed files that the uploader has not moved yet."""
        sealed = self._store.files("sealed")
        uploaded = [name for name in sealed if marker_path(self._folder, name).exists()]
        self._store.mark_uploaded(uploaded)
        return [name for name in sealed if name not in set(uploaded)]

    def _write_next(self) -> list[tuple[str, int]]:
        """Files of up to `roll_rows` rows, one for each day among them; empty when nothing is left."""
        written = []
        rows = sorted(self._store.oldest_unarchived(self._roll_rows), key=lambda row: (_day(row.time), row.number))
        for day, group in groupby(rows, key=lambda row: _day(row.time)):
            of_day = list(group)
            num_rows = sum(row.num_rows for row in of_day)
            name = f"{criteo.DAY_PARTITION.format(day=day)}/part-{self._unique()}.parquet"
            self._store.intend_file(name, [row.number for row in of_day], num_rows)
            self._checkpoint("archive.intended")
            self._finish(name, of_day)
            written.append((name, num_rows))
        return written

    def _finish(self, name: str, rows: Sequence[ArchiveRow] | None = None) -> None:
        path = self._folder / name
        if not path.exists() and not marker_path(self._folder, name).exists():
            self._write(path, self._store.rows_of_file(name) if rows is None else rows)
        self._store.seal_file(name, keep_rows=self._keep_rows)
        self._checkpoint("archive.sealed")
        logger.info("sealed %s", name)

    def _write(self, path: Path, rows: Sequence[ArchiveRow]) -> None:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            fsync_path(path.parent.parent)
        aside = path.with_name(f".{path.name}.aside")
        pq.write_table(build_table(rows), aside)
        fsync_path(aside)
        self._checkpoint("archive.written_aside")
        os.rename(aside, path)
        self._checkpoint("archive.renamed")
        fsync_path(path.parent)


def build_table(rows: Sequence[ArchiveRow]) -> pa.Table:
    """The rows of these requests in the raw schema, in the order given; missing features are null.

    With the shadow columns if any of the rows has them; see the module.
    """
    batches = [_without_chosen_shadow(batch) for batch in _predictions(rows)]
    sizes = [len(batch) for batch in batches]
    request = np.repeat(np.arange(len(batches)), sizes)
    times = np.array([round(batch.time * 1e6) for batch in batches], np.int64)
    dense = np.concatenate([batch.dense for batch in batches])
    categorical = np.concatenate([batch.categorical for batch in batches])
    columns = {
        criteo.LABEL: np.concatenate([row.labels for row in rows]).astype(np.int32),
        criteo.REQUEST_ID: pa.array([batch.request_id for batch in batches]).take(pa.array(request)),
        criteo.ROW: np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        criteo.EVENT_TIME: times[request],
        criteo.MODEL_VERSION: np.array([batch.model_version for batch in batches], np.int32)[request],
        criteo.SCORE: np.concatenate([batch.scores for batch in batches]),
    }
    for i, name in enumerate(criteo.DENSE):
        columns[name] = pa.array(np.ascontiguousarray(dense[:, i]), mask=np.isnan(dense[:, i]))
    for i, name in enumerate(criteo.CATEGORICAL):
        values = np.ascontiguousarray(categorical[:, i])
        columns[name] = pa.array(values, mask=values == criteo.MISSING_CATEGORY)
    schema = SCHEMA
    if any(batch.shadow_scores is not None for batch in batches):
        columns |= _shadow_columns(batches)
        schema = SHADOW_SCHEMA
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in schema], schema=schema)


def _shadow_columns(batches: Sequence[PredictionBatch]) -> dict[str, Any]:
    versions = [pa.array([batch.shadow_version] * len(batch), pa.int32()) for batch in batches]
    scores = [
        pa.nulls(len(batch), pa.float32()) if batch.shadow_scores is None else pa.array(batch.shadow_scores)
        for batch in batches
    ]
    return {criteo.SHADOW_VERSION: pa.concat_arrays(versions), criteo.SHADOW_SCORE: pa.concat_arrays(scores)}


def _without_chosen_shadow(batch: PredictionBatch) -> PredictionBatch:
    if batch.positions is None or batch.shadow_scores is None:
        return batch
    return replace(batch, shadow_version=None, shadow_scores=None)


def _predictions(rows: Sequence[ArchiveRow]) -> Iterator[PredictionBatch]:
    for row in rows:
        batch = decode(row.payload)
        assert isinstance(batch, PredictionBatch)
        yield batch


def _day(time: float) -> str:
    """The UTC day of the event time that is written, which has whole microseconds."""
    return datetime.fromtimestamp(round(time * 1e6) // 1_000_000, timezone.utc).strftime("%Y-%m-%d")
