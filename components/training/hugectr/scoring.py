"""Click probabilities computed from the files themselves, with NumPy: what will be served is what is judged.

HugeCTR can evaluate too, but offers no scores per row that its sources make certain (`check_out_tensor` loops over an
uninitialised counter there), so its own AUC only serves as a cross-check. Maths as in `contracts.dcn`; the table is
mapped, not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig
from components.contracts.dense_files import read_dense
from components.contracts.model_files import DENSE_FILE, SPARSE_FOLDER
from components.contracts.sparse_files import VECTOR_FILE, slot_offsets
from components.training.rows import Rows

_ROWS = 8192
"""Rows at a time."""


def score_files(folder: Path, config: DcnConfig, slot_sizes: list[int], rows: Rows) -> NDArray[np.float32]:
    """Click probabilities, [n], of the model in `folder`, whose keys are all there and ascend.

    An id outside its slot has a zero vector.
    """
    dense = read_dense(folder / DENSE_FILE, config)
    shape = (sum(slot_sizes), config.embedding_dim)
    table = np.memmap(folder / SPARSE_FOLDER / VECTOR_FILE, dtype="<f4", mode="r", shape=shape)
    sizes = np.asarray(slot_sizes, dtype=np.int64)
    offsets = slot_offsets(slot_sizes)
    scores = np.empty(len(rows), dtype=np.float32)
    for at in range(0, len(rows), _ROWS):
        part = rows[at : at + _ROWS]
        known = (part.ids >= 0) & (part.ids < sizes)
        vectors = table[np.where(known, part.ids, 0) + offsets] * known[:, :, None]
        x0 = np.concatenate([vectors.reshape(len(part), -1), part.dense], axis=1).astype(np.float32)
        scores[at : at + len(part)] = _sigmoid(_logits(dense, config, x0))
    return scores


def _logits(dense: dict[str, NDArray[np.float32]], config: DcnConfig, x0: NDArray[np.float32]) -> NDArray[np.float32]:
    cross = x0
    for i in range(config.num_cross_layers):
        bias = dense[f"cross.{i}.bias"]
        if config.projection_dim:
            projected = np.matmul(cross, dense[f"cross.{i}.u"])
            cross = x0 * (np.matmul(projected, dense[f"cross.{i}.v"]) + bias) + cross
        else:
            cross = x0 * (cross @ dense[f"cross.{i}.weight"])[:, None] + cross + bias
    hidden = x0
    for i in range(len(config.tower)):
        hidden = hidden @ dense[f"tower.{i}.weight"]
        hidden += dense[f"tower.{i}.bias"]
        np.maximum(hidden, 0, out=hidden)
    logits: NDArray[np.float32] = np.concatenate([hidden, cross], axis=1) @ dense["final.weight"][:, 0]
    logits += dense["final.bias"][0]
    return logits


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    # Of the negative magnitude, so that nothing overflows.
    small = np.exp(-np.abs(logits))
    scores: NDArray[np.float32] = np.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    return scores
