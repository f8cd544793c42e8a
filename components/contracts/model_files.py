"""HugeCTR's model files, the weight format of both training backends: one model's folder, whole or in chunks of rows.

Joins training, which writes them, to evaluation, deployment and the next incremental round, which read them. The bytes
are `contracts.dense_files`' and `contracts.sparse_files`'; here are the names in the folder and the model as one thing.

`weights/`: `dcn_dense_0.model`, `dcn_opt_dense_0.model`, `dcn0_sparse_0.model/{key,emb_vector[,slot_id]}`,
`dcn0_opt_sparse_0.model`, as HugeCTR's `save_params_to_files("weights/dcn", 0)` calls them, and beside them the graph
`dcn.json` (`contracts.graph_json`). The optimizer's two may be absent: there is no state then; so may the graph, which
our readers do not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig
from components.contracts.dense_files import (
    Moments,
    num_dense_parameters,
    read_dense,
    read_dense_moments,
    require_dense,
    require_dense_files,
    unflatten,
    write_dense,
    write_dense_moments,
)
from components.contracts.flat_files import is_kept
from components.contracts.sparse_files import ROWS_PER_CHUNK, RowChunk, SparseFiles, open_rows, write_rows
from components.runtime.errors import ContractError

__all__ = [
    "DENSE_FILE",
    "DENSE_OPTIMIZER_FILE",
    "GRAPH_FILE",
    "SPARSE_FOLDER",
    "SPARSE_OPTIMIZER_FILE",
    "ModelWeights",
    "Moments",
    "RowChunk",
    "StoredModel",
    "num_dense_parameters",
    "open_model",
    "read_model",
    "unflatten",
    "write_model",
    "write_model_chunks",
]

DENSE_FILE = "dcn_dense_0.model"
DENSE_OPTIMIZER_FILE = "dcn_opt_dense_0.model"
SPARSE_FOLDER = "dcn0_sparse_0.model"
SPARSE_OPTIMIZER_FILE = "dcn0_opt_sparse_0.model"
GRAPH_FILE = "dcn.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelWeights:
    """One model's parameters, and its Adam state where it was kept.

    `embeddings` is the fused table: row `offset[slot] + id`, `offset` the running sum of the slot sizes. Keys absent
    from the files (never trained) have zero rows, as HugeCTR answers for unknown keys.
    """

    dense: dict[str, NDArray[np.float32]]
    """By `dense_layout` name."""
    embeddings: NDArray[np.float32]
    """[sum(slot_sizes), dim]."""
    dense_moments: Moments | None = None
    """Adam m and v, flat, in the dense file's order."""
    embedding_moments: Moments | None = None
    """Adam m and v, each shaped as `embeddings`."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A folder of model files whose sizes fit; nothing of its tables is held in memory. See `open_model`."""

    folder: Path
    config: DcnConfig
    rows: SparseFiles

    @property
    def num_rows(self) -> int:
        """Keys in the files, at most the sum of the slot sizes."""
        return self.rows.num_rows

    @property
    def has_embedding_moments(self) -> bool:
        """Whether Adam's state of the embeddings was kept."""
        return self.rows.state_rows is not None

    def dense(self) -> dict[str, NDArray[np.float32]]:
        """The dense parameters by `dense_layout` name."""
        return read_dense(self.folder / DENSE_FILE, self.config)

    def dense_moments(self) -> Moments | None:
        """Adam's m and v, flat, in the dense file's order; None where no state was kept."""
        path = self.folder / DENSE_OPTIMIZER_FILE
        return read_dense_moments(path, self.config) if is_kept(path) else None

    def chunks(self, rows_per_chunk: int = ROWS_PER_CHUNK, *, moments: bool = True) -> Iterator[RowChunk]:
        """The table's rows in the files' order, each chunk in arrays of its own.

        Args:
            rows_per_chunk: Rows of each chunk but the last.
            moments: Whether to read Adam's state too, where it was kept.
        """
        return self.rows.chunks(rows_per_chunk, moments=moments)


def open_model(folder: Path, config: DcnConfig, slot_sizes: list[int]) -> StoredModel:
    """The model in `folder`, after checking all its files' sizes and its keys.

    Args:
        folder: A `weights/` folder.
        config: Shape of the network.
        slot_sizes: Number of ids per slot; the files' keys must lie below their sum.

    Raises:
        ContractError: a file is absent, truncated, oversized, holds a key twice or one that no slot has.
    """
    rows = open_rows(folder / SPARSE_FOLDER, folder / SPARSE_OPTIMIZER_FILE, config.embedding_dim, slot_sizes)
    require_dense_files(folder / DENSE_FILE, folder / DENSE_OPTIMIZER_FILE, config)
    return StoredModel(folder=folder, config=config, rows=rows)


def write_model_chunks(
    folder: Path,
    config: DcnConfig,
    *,
    num_rows: int,
    dense: dict[str, NDArray[np.float32]],
    dense_moments: Moments | None,
    chunks: Iterable[RowChunk],
    with_moments: bool,
    slot_sizes: list[int] | None = None,
    state_rows: int | None = None,
) -> None:
    """Writes the files of one model into `folder`, the table chunk by chunk.

    Each file appears whole or not at all, but one after another: a folder that must not be seen half is written inside
    `durable.whole_directory`.

    Args:
        folder: The `weights/` folder.
        config: Shape of the network.
        num_rows: Rows that the chunks hold in all.
        dense: By `dense_layout` name.
        dense_moments: Adam's m and v, flat; None writes no state.
        chunks: Rows in ascending order of keys.
        with_moments: Whether to write the embeddings' state, which each chunk must then hold.
        slot_sizes: Given to write `slot_id` too, for a LocalizedSlot embedding.
        state_rows: Rows of each state table in the file; HugeCTR loads `sparse_files.max_vocabulary_size` only. None
            writes as many as the table has.

    Raises:
        ContractError: a parameter is missing or has another shape than `config` says; the chunks are not as said.
        PermanentError: a file has not the size that was written to it, or cannot be written.
    """
    require_dense(config, dense, dense_moments)
    write_rows(
        folder / SPARSE_FOLDER,
        folder / SPARSE_OPTIMIZER_FILE,
        chunks,
        num_rows=num_rows,
        dim=config.embedding_dim,
        with_moments=with_moments,
        slot_sizes=slot_sizes,
        state_rows=state_rows,
    )
    write_dense(folder / DENSE_FILE, config, dense)
    if dense_moments is not None:
        write_dense_moments(folder / DENSE_OPTIMIZER_FILE, config, dense_moments)


def write_model(folder: Path, config: DcnConfig, weights: ModelWeights) -> None:
    """Writes the files of one model into `folder`; the optimizer files only where there is state.

    Raises:
        ContractError: a parameter is missing or has another shape than `config` says.
        PermanentError: as `write_model_chunks`.
    """
    rows, dim = weights.embeddings.shape
    if dim != config.embedding_dim:
        raise ContractError(f"embeddings have width {dim}, expected {config.embedding_dim}")
    moments = weights.embedding_moments
    if moments is not None and any(moment.shape != (rows, dim) for moment in moments):
        raise ContractError(f"embedding moments have shapes {[m.shape for m in moments]}, expected {(rows, dim)}")
    parts = (slice(start, min(start + ROWS_PER_CHUNK, rows)) for start in range(0, rows, ROWS_PER_CHUNK))
    write_model_chunks(
        folder,
        config,
        num_rows=rows,
        dense=weights.dense,
        dense_moments=weights.dense_moments,
        chunks=(
            RowChunk(
                keys=np.arange(part.start, part.stop),
                vectors=weights.embeddings[part],
                moments=(moments[0][part], moments[1][part]) if moments is not None else None,
            )
            for part in parts
        ),
        with_moments=moments is not None,
    )


def read_model(folder: Path, config: DcnConfig, slot_sizes: list[int], *, optimizer: bool = False) -> ModelWeights:
    """The model in `folder`, all of it in memory.

    Args:
        folder: A `weights/` folder.
        config: Shape of the network.
        slot_sizes: Number of ids per slot; the files' keys must lie below their sum.
        optimizer: Whether to read Adam's state too; absent files then give `None`.

    Raises:
        ContractError: as `open_model`.
    """
    stored = open_model(folder, config, slot_sizes)
    shape = (sum(slot_sizes), config.embedding_dim)
    embeddings = np.zeros(shape, np.float32)
    moments = None
    if optimizer and stored.has_embedding_moments:
        moments = (np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    for chunk in stored.chunks(moments=moments is not None):
        embeddings[chunk.keys] = chunk.vectors
        if moments is not None and chunk.moments is not None:
            moments[0][chunk.keys], moments[1][chunk.keys] = chunk.moments
    return ModelWeights(
        dense=stored.dense(),
        embeddings=embeddings,
        dense_moments=stored.dense_moments() if optimizer else None,
        embedding_moments=moments,
    )
