"""A parent's table laid out for the vocabularies of this round: rows keep their bits, new ids start afresh.

Written chunk by chunk, so that no table is held in memory, however large. Which parent is meant, and whether it fits,
is `parent`'s; what changed in the vocabularies is `contracts.vocabulary_changes`'.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.model_files import RowChunk, StoredModel, write_model_chunks
from components.contracts.sparse_files import ROWS_PER_CHUNK, slot_offsets, slots_of
from components.contracts.vocabulary_changes import vocabulary_changes
from components.contracts.workflow import FIRST_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from components.runtime.errors import PermanentError

Tables = list[NDArray[np.float32]]
"""Vectors, then Adam's m and v where they are kept, each [n, dim]."""


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Which rows of a table laid out for one workflow come from where in the table of the workflow before."""

    before: list[int]
    """Slot sizes."""
    now: list[int]
    entered: NDArray[np.int64]
    """Rows of now that start as their slot's out-of-vocabulary row, ascending."""
    cleared: NDArray[np.int64]
    """Rows of now that are tombstones, ascending."""

    @classmethod
    def between(cls, before: FeatureWorkflow, now: FeatureWorkflow) -> RowPlan:
        """The plan from `before` to `now`.

        Raises:
            ContractError: an id means another category than before; see `vocabulary_changes`.
        """
        offsets = slot_offsets(now.slot_sizes)
        changes = vocabulary_changes(before, now)
        tombstones = [FIRST_ID + np.flatnonzero(v == TOMBSTONE) for v in now.vocabularies]
        return cls(
            before=before.slot_sizes,
            now=now.slot_sizes,
            entered=np.concatenate([offset + change.entered for offset, change in zip(offsets, changes)]),
            cleared=np.concatenate([offset + ids for offset, ids in zip(offsets, tombstones)]),
        )

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the earlier table's keys; ascending keys have ascending rows, since slots keep their order."""
        shifts = slot_offsets(self.now) - slot_offsets(self.before)
        return keys + shifts[slots_of(keys, self.before)]


def grow(stored: StoredModel, plan: RowPlan, into: Path) -> None:
    """Writes the model `stored`, laid out by `plan`, into the folder `into`.

    An id whose category lives on keeps its row and its moments, bit for bit, and so do the reserved ids and the dense
    parameters: rows of such ids alone are scored as before. An id that got its category now starts with its slot's
    out-of-vocabulary row, by which that category was scored until now, and with zero moments: nothing was observed of
    it alone. A tombstone's row and moments are zero, as is the row of a key that the files lack.

    Args:
        stored: The parent's files; keys in any order.
        plan: From the workflow that it was trained with to this round's.
        into: An empty folder; its disk needs room for the table twice where the parent's keys do not ascend.

    Raises:
        ContractError: one of the parent's files is damaged.
        PermanentError: a file cannot be written.
    """
    kept = stored.has_embedding_moments
    with tempfile.TemporaryDirectory(prefix=".growing-", dir=into) as scratch:
        write_model_chunks(
            into,
            stored.config,
            num_rows=sum(plan.now),
            dense=stored.dense(),
            dense_moments=stored.dense_moments(),
            chunks=_grown(_in_order(stored, sum(plan.before), Path(scratch)), plan, stored.config.embedding_dim, kept),
            with_moments=kept,
        )


def _grown(chunks: Iterator[RowChunk], plan: RowPlan, dim: int, with_moments: bool) -> Iterator[RowChunk]:
    """All rows of now, in order."""
    num_rows, next_row = sum(plan.now), 0
    oov = np.zeros((len(plan.now), dim), np.float32)
    for chunk in chunks:
        rows = plan.rows_of(chunk.keys)
        tables = [chunk.vectors, *(chunk.moments or ())]
        for start, piece in _pieces(rows, tables, next_row, int(rows[-1]) + 1):
            yield _finished(start, piece, plan, oov)
        next_row = int(rows[-1]) + 1
    nothing = [np.zeros((0, dim), np.float32)] * (3 if with_moments else 1)
    for start, piece in _pieces(np.zeros(0, np.int64), nothing, next_row, num_rows):
        yield _finished(start, piece, plan, oov)


def _pieces(rows: NDArray[np.int64], tables: Tables, start: int, stop: int) -> Iterator[tuple[int, Tables]]:
    """Rows `start` to `stop` in pieces: `tables` at the rows `rows`, zero elsewhere; each piece with its first row."""
    for first in range(start, stop, ROWS_PER_CHUNK):
        last = min(first + ROWS_PER_CHUNK, stop)
        low, high = np.searchsorted(rows, [first, last])
        piece = [np.zeros((last - first, table.shape[1]), np.float32) for table in tables]
        for laid, table in zip(piece, tables):
            laid[rows[low:high] - first] = table[low:high]
        yield first, piece


def _finished(first: int, piece: Tables, plan: RowPlan, oov: NDArray[np.float32]) -> RowChunk:
    """The piece with its new and its cleared rows; the out-of-vocabulary rows that it holds go to `oov`, [26, dim]."""
    last = first + len(piece[0])
    oov_rows = slot_offsets(plan.now) + OOV_ID
    inside = (oov_rows >= first) & (oov_rows < last)
    oov[inside] = piece[0][oov_rows[inside] - first]
    entered, cleared = (r[slice(*np.searchsorted(r, [first, last]))] for r in (plan.entered, plan.cleared))
    for table in piece:
        table[entered - first] = 0
        table[cleared - first] = 0
    # A slot's out-of-vocabulary row lies before all its categories, so it has been met by now.
    piece[0][entered - first] = oov[slots_of(entered, plan.now)]
    moments = (piece[1], piece[2]) if len(piece) > 1 else None
    return RowChunk(keys=np.arange(first, last), vectors=piece[0], moments=moments)


def _in_order(stored: StoredModel, num_rows: int, scratch: Path) -> Iterator[RowChunk]:
    """The parent's chunks in ascending order of keys.

    HugeCTR writes keys in the order of its hash table: such rows are laid in place in files below `scratch`, which are
    mapped, so that the system may write them out whenever memory is short.
    """
    if stored.rows.ascending:
        yield from stored.chunks(ROWS_PER_CHUNK)
        return
    shape = (num_rows, stored.config.embedding_dim)
    names = ["vectors", "m", "v"] if stored.has_embedding_moments else ["vectors"]
    tables = [_mapped(scratch / name, shape) for name in names]
    for chunk in stored.chunks(ROWS_PER_CHUNK):
        for table, values in zip(tables, [chunk.vectors, *(chunk.moments or ())]):
            table[chunk.keys] = values
    for first in range(0, num_rows, ROWS_PER_CHUNK):
        rows = [np.array(table[first : first + ROWS_PER_CHUNK]) for table in tables]
        moments = (rows[1], rows[2]) if len(rows) > 1 else None
        yield RowChunk(keys=np.arange(first, first + len(rows[0])), vectors=rows[0], moments=moments)


def _mapped(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Zeros over a new file, all of whose room is taken here: a page without room would end the process unsaid."""
    num_bytes = 4 * shape[0] * shape[1]
    try:
        with open(path, "wb+") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped: NDArray[np.float32] = np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        raise PermanentError(f"file {path} cannot have {num_bytes} bytes: {error.strerror or error}") from error
    return mapped
