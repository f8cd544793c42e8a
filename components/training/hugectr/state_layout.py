"""Where HugeCTR's sparse optimizer file keeps the moments of a key.

The file is Adam's m, then v; each is the tables of all GPUs one after another, and each of those the whole workspace,
[capacity, dim], with row = value index and zeros in unused rows. A loaded key's value index is its place among the keys
of its GPU, in the order of the loaded file, whatever order a later save writes its keys in. This engine loads all keys,
ascending, before it trains, so key k has row k // n of GPU k % n, n their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.sparse_files import ADAM_STATES, ROWS_PER_CHUNK, Moments, max_vocabulary_size
from components.runtime.errors import PermanentError


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Shape of one sparse optimizer file."""

    num_rows: int
    """Keys of the table, 0..num_rows-1."""
    dim: int
    num_gpus: int
    workspace_mb: int
    """Per GPU."""
    half: bool
    """Whether the moments are float16, as with mixed precision."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """States, GPUs, rows of a workspace, width."""
        return (ADAM_STATES, self.num_gpus, max_vocabulary_size(self.workspace_mb, self.dim), self.dim)

    @property
    def dtype(self) -> str:
        """NumPy's name of the moments' type."""
        return "<f2" if self.half else "<f4"

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def create(self, path: Path) -> NDArray[np.floating]:
        """The new file at `path`, mapped, all zeros; unused rows take no disk space."""
        return np.memmap(path, dtype=self.dtype, mode="w+", shape=self.shape)

    def open(self, path: Path) -> NDArray[np.floating]:
        """The file at `path`, mapped; its size was checked.

        Raises:
            PermanentError: a row that no key has is not zero, so the moments lie elsewhere than thought.
        """
        state = np.memmap(path, dtype=self.dtype, mode="r", shape=self.shape)
        for gpu in range(self.num_gpus):
            used = len(range(gpu, self.num_rows, self.num_gpus))
            for table in state[:, gpu]:
                for at in range(used, len(table), ROWS_PER_CHUNK):
                    if table[at : at + ROWS_PER_CHUNK].any():
                        raise PermanentError(f"optimizer state {path} of GPU {gpu} is not zero after row {used}")
        return state

    def put(self, state: NDArray[np.floating], keys: NDArray[np.int64], moments: Moments) -> None:
        """Writes the moments of some keys."""
        for table, moment in zip(state, moments):
            table[keys % self.num_gpus, keys // self.num_gpus] = moment

    def get(self, state: NDArray[np.floating], keys: NDArray[np.int64]) -> Moments:
        """The moments of some keys, float32."""
        first, second = (table[keys % self.num_gpus, keys // self.num_gpus].astype(np.float32) for table in state)
        return first, second
