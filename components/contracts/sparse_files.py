"""HugeCTR's sparse model folder and its Adam state: one key and one vector per row, read and written in chunks of rows.

Joins both training backends, which write them, to whoever reads a model; used through `contracts.model_files`. Layout
as HugeCTR 24.06 writes it for one GPU, little endian, no headers: `key` int64 (id + slot offset), `emb_vector` float32
[rows, dim], `slot_id` uint64 (LocalizedSlot embeddings only), row r of each for key r of the file; the state is Adam's
m, then v. Our keys ascend, and row r of our state, [rows, dim], is key r's.

HugeCTR's own saves are laid out otherwise: keys and vectors come in the order of its hash table, so in any, but the
state is the memory itself, the whole workspace [max_vocabulary_size, dim] in the order in which the keys were first
seen, rows beyond them unused. Nothing in the folder joins the two, so such a state is refused here; whoever gave
HugeCTR the keys knows their order (`training.hugectr.saving`). A folder for HugeCTR to load is written row by row,
since loading sees the keys in the order of the file. Nor is the state of several GPUs read: each keeps rows of its own,
and nothing in the file tells how many there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.flat_files import get, is_kept, opened, require_size, size_of, sized_file
from components.runtime.errors import ContractError

Moments = tuple[NDArray[np.float32], NDArray[np.float32]]

KEY_FILE = "key"
VECTOR_FILE = "emb_vector"
SLOT_FILE = "slot_id"
ROWS_PER_CHUNK = 16_384
"""1 MiB of vectors of width 16, so that a chunk stays in the processor's cache: 2.6 million rows with state were read
in 17 ms so, in 46 ms by 65,536 rows (page cache, one core)."""
ADAM_STATES = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class RowChunk:
    """Some rows of the table."""

    keys: NDArray[np.int64]
    """[n], id + offset of its slot."""
    vectors: NDArray[np.float32]
    """[n, dim]."""
    moments: Moments | None = None
    """Adam's m and v, each [n, dim]."""


def max_vocabulary_size(workspace_mb: int, dim: int, states: int = ADAM_STATES) -> int:
    """Rows that a HugeCTR workspace holds per GPU, each a vector and `states` optimizer vectors.

    >>> max_vocabulary_size(267, 16)
    1458176
    """
    return (workspace_mb << 20) // ((1 + states) * 4 * dim)


def workspace_mb(num_rows: int, dim: int, states: int = ADAM_STATES) -> int:
    """The smallest workspace, in MiB per GPU, that holds `num_rows`.

    >>> workspace_mb(1_458_176, 16), workspace_mb(1_458_177, 16)
    (267, 268)
    """
    return -(-num_rows * (1 + states) * 4 * dim >> 20)


def slot_offsets(slot_sizes: list[int]) -> NDArray[np.int64]:
    """The key of each slot's id 0, [slots]: the sizes before it, summed.

    >>> slot_offsets([3, 5, 2])
    array([0, 3, 8])
    """
    return np.cumsum([0, *slot_sizes[:-1]])


def slots_of(keys: NDArray[np.int64], slot_sizes: list[int]) -> NDArray[np.int64]:
    """The slot of each key, [n]."""
    return np.searchsorted(np.cumsum(slot_sizes), keys, side="right")


def write_rows(
    folder: Path,
    state_path: Path,
    chunks: Iterable[RowChunk],
    *,
    num_rows: int,
    dim: int,
    with_moments: bool,
    slot_sizes: list[int] | None = None,
    state_rows: int | None = None,
) -> None:
    """Writes the sparse folder and, `with_moments`, the state; holds one chunk at a time.

    Args:
        folder: The sparse folder.
        state_path: The state's file.
        chunks: Rows in ascending order of keys, `num_rows` in all.
        num_rows: Number of rows.
        dim: Width of a vector.
        with_moments: Whether to write Adam's state, which each chunk must then hold.
        slot_sizes: Number of ids per slot, to write `slot_id` for a LocalizedSlot embedding; None writes none.
        state_rows: Rows of each state table, `max_vocabulary_size` for a file that HugeCTR is to load; rows beyond
            `num_rows` are zero. None = `num_rows`.

    Raises:
        ContractError: the chunks are not as said.
        PermanentError: a file has not the size that was written to it.
    """
    capacity = num_rows if state_rows is None else state_rows
    if capacity < num_rows:
        raise ContractError(f"optimizer state has {capacity} rows, expected at least the {num_rows} of the table")
    width, written, last = 4 * dim, 0, -1
    with ExitStack() as stack:
        keys = stack.enter_context(sized_file(folder / KEY_FILE, 8 * num_rows))
        vectors = stack.enter_context(sized_file(folder / VECTOR_FILE, width * num_rows))
        slots = stack.enter_context(sized_file(folder / SLOT_FILE, 8 * num_rows)) if slot_sizes is not None else None
        state = None
        if with_moments:
            state = stack.enter_context(sized_file(state_path, ADAM_STATES * width * capacity))
            state.extend(ADAM_STATES * width * capacity)
        for chunk in chunks:
            last = _require_chunk(chunk, dim, last, with_moments)
            keys.put(chunk.keys, "<i8")
            vectors.put(chunk.vectors, "<f4")
            if slots is not None and slot_sizes is not None:
                slots.put(slots_of(chunk.keys, slot_sizes), "<u8")
            if state is not None and chunk.moments is not None:
                for number, moment in enumerate(chunk.moments):
                    state.put(moment, "<f4", at=width * (number * capacity + written))
            written += len(chunk.keys)
        if written != num_rows:
            raise ContractError(f"chunks hold {written} rows, expected {num_rows}")


def _require_chunk(chunk: RowChunk, dim: int, last: int, with_moments: bool) -> int:
    """Refuses a chunk that does not fit; answers its last key."""
    shape = (len(chunk.keys), dim)
    if chunk.vectors.shape != shape:
        raise ContractError(f"chunk of {shape[0]} keys has vectors of shape {chunk.vectors.shape}, expected {shape}")
    if with_moments and chunk.moments is None:
        raise ContractError("chunk has no embedding moments, expected them as for the other rows")
    if chunk.moments is not None and any(moment.shape != shape for moment in chunk.moments):
        raise ContractError(f"embedding moments have shapes {[m.shape for m in chunk.moments]}, expected {shape}")
    if (np.diff(chunk.keys, prepend=last) <= 0).any():
        raise ContractError(f"keys after {last} do not ascend, expected each above the one before")
    return int(chunk.keys[-1]) if len(chunk.keys) else last


@dataclass(frozen=True, kw_only=True)
class SparseFiles:
    """A sparse folder whose sizes, keys and slots were checked, and its state; see `open_rows`."""

    folder: Path
    state_path: Path
    dim: int
    num_rows: int
    state_rows: int | None
    """Rows of each state table, at least `num_rows`; None = there is no state."""
    ascending: bool
    """Whether the keys ascend, as ours do."""

    @property
    def state_fault(self) -> str | None:
        """Why no row of the state can be given to a key; None where it can, and where there is no state."""
        if self.ascending or self.state_rows in (None, self.num_rows):
            return None
        return (
            f"optimizer state {self.state_path} holds a whole workspace of {self.state_rows} rows, but the "
            f"{self.num_rows} keys of {self.folder / KEY_FILE} do not ascend: HugeCTR saved both itself, expected a "
            "folder that the training step wrote, or one without this state"
        )

    def chunks(self, rows_per_chunk: int = ROWS_PER_CHUNK, *, moments: bool = True) -> Iterator[RowChunk]:
        """The rows in file order, with their moments where there is state and `moments` are wanted.

        Raises:
            ContractError: a file has shrunk since it was checked; the state is wanted and has a `state_fault`.
        """
        if moments and self.state_fault:
            raise ContractError(self.state_fault)
        width = 4 * self.dim
        with ExitStack() as stack:
            keys = stack.enter_context(opened(self.folder / KEY_FILE))
            vectors = stack.enter_context(opened(self.folder / VECTOR_FILE))
            capacity = self.state_rows if moments else None
            state = stack.enter_context(opened(self.state_path)) if capacity is not None else None
            for start in range(0, self.num_rows, rows_per_chunk):
                count = min(rows_per_chunk, self.num_rows - start)
                both = None
                if state is not None and capacity is not None:
                    first, second = (
                        get(state, (count, self.dim), "<f4", at=width * (number * capacity + start))
                        for number in range(ADAM_STATES)
                    )
                    both = (first, second)
                yield RowChunk(
                    keys=get(keys, (count,), "<i8", at=8 * start),
                    vectors=get(vectors, (count, self.dim), "<f4", at=width * start),
                    moments=both,
                )


def open_rows(folder: Path, state_path: Path, dim: int, slot_sizes: list[int]) -> SparseFiles:
    """The sparse folder, after checking all sizes and reading its keys (8 bytes a row), not its vectors.

    Raises:
        ContractError: a file is absent, or of a size that does not fit the others; a key twice, or outside the slots;
            a `slot_id` that is not its key's.
    """
    size = size_of(folder / KEY_FILE)
    if size % 8:
        raise ContractError(f"model file {folder / KEY_FILE} has {size} bytes, expected a multiple of 8")
    num_rows = size // 8
    reason = f" for the {num_rows} keys of 8 bytes in {folder / KEY_FILE}"
    require_size(folder / VECTOR_FILE, 4 * dim * num_rows, reason=reason)
    localized = is_kept(folder / SLOT_FILE)
    if localized:
        require_size(folder / SLOT_FILE, 8 * num_rows, reason=reason)
    state_rows = _state_rows(state_path, num_rows, dim) if is_kept(state_path) else None
    ascending = _require_keys(folder, num_rows, slot_sizes, localized=localized)
    return SparseFiles(
        folder=folder, state_path=state_path, dim=dim, num_rows=num_rows, state_rows=state_rows, ascending=ascending
    )


def _state_rows(path: Path, num_rows: int, dim: int) -> int:
    """Rows of each state table: as many as keys, or a whole workspace, which is a number of MiB."""
    size, per_row = size_of(path), ADAM_STATES * 4 * dim
    capacity = size // per_row
    whole_workspace = capacity > num_rows and max_vocabulary_size(workspace_mb(capacity, dim), dim) == capacity
    if size % per_row or not (capacity == num_rows or whole_workspace):
        raise ContractError(
            f"model file {path} has {size} bytes, expected {per_row * num_rows} for {num_rows} keys, "
            "or those of a HugeCTR workspace that holds them"
        )
    return capacity


def _require_keys(folder: Path, num_rows: int, slot_sizes: list[int], *, localized: bool) -> bool:
    """Refuses keys and slots that do not fit; answers whether the keys ascend."""
    rows, path = sum(slot_sizes), folder / KEY_FILE
    ascending, last = True, -1
    # A byte per row of the table instead of the sorted copy of all keys that np.unique would take.
    seen = np.zeros(rows, np.bool_)
    with ExitStack() as stack:
        keys_file = stack.enter_context(opened(path))
        slots_file = stack.enter_context(opened(folder / SLOT_FILE)) if localized else None
        for start in range(0, num_rows, ROWS_PER_CHUNK):
            count = min(ROWS_PER_CHUNK, num_rows - start)
            keys = get(keys_file, (count,), "<i8", at=8 * start)
            if keys.min() < 0 or keys.max() >= rows:
                raise ContractError(f"model file {path} holds keys {keys.min()}..{keys.max()}, expected 0..{rows - 1}")
            seen[keys] = True
            ascending = ascending and bool(keys[0] > last and (keys[1:] > keys[:-1]).all())
            last = int(keys[-1])
            if slots_file is None:
                continue
            found, expected = get(slots_file, (count,), "<u8", at=8 * start), slots_of(keys, slot_sizes)
            if (wrong := np.flatnonzero(found != expected)).size:
                row = int(wrong[0])
                raise ContractError(
                    f"model file {folder / SLOT_FILE} has slot {found[row]} for key {keys[row]} in row {start + row}, "
                    f"expected {expected[row]}"
                )
    if np.count_nonzero(seen) != num_rows:
        raise ContractError(f"model file {path} holds a key twice, expected each once")
    return ascending
