"""The weights that a fit from scratch starts from: HugeCTR's initialisers.

An incremental round starts from its parent's, see `parent`. NumPy generators make the weights the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import RowChunk, write_model_chunks
from components.contracts.sparse_files import ROWS_PER_CHUNK

_TRUNCATED_NORMAL_SD = 0.87962566
"""HugeCTR divides by the standard deviation of a truncated normal, but does not truncate."""


def write_initial(folder: Path, config: DcnConfig, slot_sizes: list[int], *, click_rate: float, seed: int) -> None:
    """Writes fresh weights as HugeCTR initialises them into `folder`, without moments; the table is never in memory.

    The same numbers whatever the chunks. With N(mean, standard deviation): embeddings U(+-1/sqrt(slot size)) per slot;
    cross weights N(0, 1/sqrt(n)) in DCN v1, U and V N(0, sqrt(2/(n + k))) in v2, cross biases 0; InnerProduct weights
    N(0, sqrt(2/(in + out))/0.8796), biases N(0, 1/sqrt(out)). One value differs: the last bias is the log-odds of
    `click_rate` (a share in (0, 1)) and not N(0, 1), from which small data would need hundreds of steps to return.
    """
    random = np.random.default_rng(seed)
    dense = {name: _initial(name, shape, random) for name, shape in dense_layout(config)}
    dense["final.bias"] = np.full(1, np.log(click_rate / (1 - click_rate)), dtype=np.float32)
    write_model_chunks(
        folder,
        config,
        num_rows=sum(slot_sizes),
        dense=dense,
        dense_moments=None,
        chunks=_initial_rows(slot_sizes, config.embedding_dim, random),
        with_moments=False,
    )


def _initial_rows(slot_sizes: list[int], dim: int, random: np.random.Generator) -> Iterator[RowChunk]:
    first = 0
    for size in slot_sizes:
        for start in range(0, size, ROWS_PER_CHUNK):
            shape = (min(ROWS_PER_CHUNK, size - start), dim)
            vectors = random.uniform(-(size**-0.5), size**-0.5, shape).astype(np.float32)
            keys = np.arange(first + start, first + start + len(vectors))
            yield RowChunk(keys=keys, vectors=vectors)
        first += size


def _initial(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    is_cross, is_matrix = name.startswith("cross"), len(shape) == 2
    if is_cross and name.endswith("bias"):
        return np.zeros(shape, dtype=np.float32)
    deviation = (2 / sum(shape)) ** 0.5 if is_matrix else shape[0] ** -0.5
    if is_matrix and not is_cross:
        deviation /= _TRUNCATED_NORMAL_SD
    return random.normal(0, deviation, shape).astype(np.float32)
