"""The embedding: one hash table per GPU, Adam over the rows of a batch, and HugeCTR 24.06's files.

A key is on GPU `key % n`. The value index of a key is its row in the table. A new key gets a free
row. Loading assigns rows to keys in the order of the file. Saving writes the keys of each GPU in
the order of their value indices, as HugeCTR's dump does. Optimizer states are written for the whole
workspace, in the order of the value indices.
"""

import logging
from pathlib import Path

import double_fate
import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("hugectr")


class Table:
    """Embedding table with the rows of all GPUs, and with Adam's state of each row."""

    def __init__(self, *, dim: int, workspace_mb: int, num_gpus: int, seed: int) -> None:
        self.dim, self.num_gpus = dim, num_gpus
        self.capacity = (workspace_mb << 20) // (3 * 4 * dim)
        self._rows: list[dict[int, int]] = [{} for _ in range(num_gpus)]
        self._known = np.empty(0, np.int64), np.empty(0, np.int64)
        self._random = np.random.default_rng(seed)
        shape = (num_gpus * self.capacity, dim)
        self.vectors = torch.from_numpy(self._random.uniform(-0.05, 0.05, shape).astype(np.float32))
        self.states = [torch.zeros(shape) for _ in range(2)]

    def positions(self, keys: np.ndarray, *, insert: bool) -> np.ndarray:
        """Return the flat row of each key, or -1.

        The result is -1 for padding, and for an unknown key unless `insert` is set.
        """
        found = self._found(keys)
        if insert and (unknown := np.unique(keys[(found < 0) & (keys >= 0)])).size:
            new = np.array([self._inserted(int(key)) for key in unknown], dtype=np.int64)
            known, positions = (np.concatenate(parts) for parts in zip(self._known, (unknown, new)))
            order = np.argsort(known)
            self._known = known[order], positions[order]
            found = self._found(keys)
        return found

    def _found(self, keys: np.ndarray) -> np.ndarray:
        """Return the flat row of each known key, otherwise -1.

        All keys are searched at once, because a step has thousands.
        """
        known, positions = self._known
        if not len(known):
            return np.full(keys.shape, -1, np.int64)
        at = np.searchsorted(known, keys).clip(max=len(known) - 1)
        return np.where(known[at] == keys, positions[at], -1)

    def _inserted(self, key: int) -> int:
        """Insert a key and return its flat row."""
        gpu = key % self.num_gpus
        rows = self._rows[gpu]
        if len(rows) >= self.capacity:
            double_fate.abort(
                f"Runtime vocabulary size {len(rows) + 1} exceeds max_vocabulary_size_per_gpu "
                f"{self.capacity} on GPU {gpu}"
            )
        rows[key] = len(rows)
        return gpu * self.capacity + rows[key]

    def lookup(self, keys: np.ndarray, *, insert: bool) -> Tensor:
        """Return vectors [n, keys, dim].

        The vectors of padding are zero. The vectors of unknown keys are zero unless `insert` is
        set.
        """
        positions = torch.from_numpy(self.positions(keys, insert=insert))
        return self.vectors[positions.clamp(min=0)] * (positions >= 0)[:, :, None]

    def update(
        self,
        keys: np.ndarray,
        gradients: Tensor,
        rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
    ) -> None:
        """Apply Adam to the rows of `keys`. `rate` is bias-corrected."""
        rows = torch.from_numpy(self.positions(keys, insert=False)).flatten()
        positions, inverse = torch.unique(rows[rows >= 0], return_inverse=True)
        gradients = gradients.reshape(-1, self.dim)[rows >= 0]
        summed = torch.zeros(len(positions), self.dim).index_add_(0, inverse, gradients)
        m, v = (state[positions].float() for state in self.states)
        m, v = beta1 * m + (1 - beta1) * summed, beta2 * v + (1 - beta2) * summed**2
        self.states[0][positions], self.states[1][positions] = m, v
        self.vectors[positions] -= rate * m / (v.sqrt() + epsilon)

    def load(self, folder: str) -> None:
        keys = np.fromfile(Path(folder) / "key", dtype="<i8")
        vectors = np.fromfile(Path(folder) / "emb_vector", dtype="<f4")
        if len(vectors) != len(keys) * self.dim:
            raise OSError(f"{folder}: {len(keys)} keys and {len(vectors)} floats")
        if len(keys) > self.capacity * self.num_gpus:
            raise OSError(f"{folder}: {len(keys)} keys are more than the hash tables hold")
        if any(self._rows):
            raise RuntimeError("the double loads into an empty table only")
        self.vectors[self.positions(keys, insert=True)] = torch.from_numpy(
            vectors.reshape(-1, self.dim)
        )

    def load_states(self, path: str) -> None:
        count = self.states[0].numel()
        values = np.fromfile(path, dtype="<f4")
        # HugeCTR copies its whole buffer, even if the file is shorter than the buffer.
        uninitialised = np.full(max(0, 2 * count - len(values)), 1e9, "<f4")
        values = np.concatenate([values, uninitialised])
        for number, state in enumerate(self.states):
            state.copy_(
                torch.from_numpy(values[number * count : (number + 1) * count].reshape(state.shape))
            )

    def save(self, folder: str) -> None:
        path = Path(folder)
        path.mkdir(exist_ok=True)
        keys = np.concatenate([np.array(list(rows), dtype=np.int64) for rows in self._rows])
        vectors = self.vectors[torch.from_numpy(self.positions(keys, insert=False))].numpy()
        for name, content in (
            ("key", keys.astype("<i8").tobytes()),
            ("emb_vector", vectors.tobytes()),
        ):
            # Overwrite an older file without truncation, like MPI's writers.
            with open(path / name, "r+b" if (path / name).exists() else "wb") as file:
                file.write(content)

    def save_states(self, path: str) -> None:
        Path(path).write_bytes(b"".join(state.numpy().tobytes() for state in self.states))
