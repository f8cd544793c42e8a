"""HugeCTR's model files, the weight format of both training backends.

Joins training, which writes them, to evaluation, deployment and the next incremental round, which read them. Layouts
as HugeCTR 24.06 writes them for one GPU: no headers, little endian; sizes are checked here because nothing in the
files is.

`weights/`: `dcn_dense_0.model` (float32, `contracts.dcn.dense_layout` order), `dcn_opt_dense_0.model` (Adam m, then v
at the next multiple of 256 bytes), `dcn0_sparse_0.model/{key,emb_vector}` (int64 keys = id + slot offset; float32
[rows, dim]), `dcn0_opt_sparse_0.model` (Adam m, then v, each [rows, dim], row r belonging to key row r).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.durable import write_whole
from components.contracts.errors import ContractError

DENSE_FILE = "dcn_dense_0.model"
DENSE_OPTIMIZER_FILE = "dcn_opt_dense_0.model"
SPARSE_FOLDER = "dcn0_sparse_0.model"
SPARSE_OPTIMIZER_FILE = "dcn0_opt_sparse_0.model"
_ALIGNMENT_BYTES = 256


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
    dense_moments: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
    """Adam m and v, flat, in the dense file's order."""
    embedding_moments: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
    """Adam m and v, each shaped as `embeddings`."""


def num_dense_parameters(config: DcnConfig) -> int:
    """Number of floats in the dense file."""
    return sum(int(np.prod(shape)) for _, shape in dense_layout(config))


def write_model(folder: Path, config: DcnConfig, weights: ModelWeights) -> None:
    """Writes the files of one model into `folder`; the optimizer files only where there is state.

    Raises:
        ContractError: a parameter is missing or has another shape than `config` says.
    """
    layout = dense_layout(config)
    if [name for name, _ in layout] != list(weights.dense):
        raise ContractError(f"dense parameters are {list(weights.dense)}, expected {[name for name, _ in layout]}")
    for name, shape in layout:
        if weights.dense[name].shape != shape:
            raise ContractError(f"dense parameter {name} has shape {weights.dense[name].shape}, expected {shape}")
    rows, dim = weights.embeddings.shape
    if dim != config.embedding_dim:
        raise ContractError(f"embeddings have width {dim}, expected {config.embedding_dim}")
    for kind, moments, shape in (
        ("dense", weights.dense_moments, (num_dense_parameters(config),)),
        ("embedding", weights.embedding_moments, (rows, dim)),
    ):
        if moments is not None and any(moment.shape != shape for moment in moments):
            raise ContractError(f"{kind} moments have shapes {[m.shape for m in moments]}, expected {shape}")
    write_whole(folder / DENSE_FILE, b"".join(_floats(weights.dense[name]) for name, _ in layout))
    write_whole(folder / SPARSE_FOLDER / "key", np.arange(rows, dtype="<i8").tobytes())
    write_whole(folder / SPARSE_FOLDER / "emb_vector", _floats(weights.embeddings))
    if weights.dense_moments is not None:
        first, second = (_floats(moment) for moment in weights.dense_moments)
        padding = b"\0" * (-len(first) % _ALIGNMENT_BYTES)
        write_whole(folder / DENSE_OPTIMIZER_FILE, first + padding + second)
    if weights.embedding_moments is not None:
        write_whole(folder / SPARSE_OPTIMIZER_FILE, b"".join(_floats(m) for m in weights.embedding_moments))


def read_model(folder: Path, config: DcnConfig, slot_sizes: list[int], *, optimizer: bool = False) -> ModelWeights:
    """The model in `folder`.

    Args:
        folder: A `weights/` folder.
        config: Shape of the network.
        slot_sizes: Number of ids per slot; the files' keys must lie below their sum.
        optimizer: Whether to read Adam's state too; absent files then give `None`.

    Raises:
        ContractError: a file is absent, truncated, oversized or holds keys that no slot has.
    """
    rows = sum(slot_sizes)
    keys = _read(folder / SPARSE_FOLDER / "key", "<i8", None).astype(np.int64)
    vectors = _read(folder / SPARSE_FOLDER / "emb_vector", "<f4", len(keys) * config.embedding_dim)
    if len(keys) and (keys.min() < 0 or keys.max() >= rows):
        raise ContractError(f"{folder / SPARSE_FOLDER}/key holds {keys.min()}..{keys.max()}, expected 0..{rows - 1}")
    if len(np.unique(keys)) != len(keys):
        raise ContractError(f"{folder / SPARSE_FOLDER}/key holds a key twice")

    def table(values: NDArray[np.float32]) -> NDArray[np.float32]:
        whole = np.zeros((rows, config.embedding_dim), dtype=np.float32)
        whole[keys] = values.reshape(len(keys), config.embedding_dim)
        return whole

    size = num_dense_parameters(config)
    flat = _read(folder / DENSE_FILE, "<f4", size)
    dense_moments = embedding_moments = None
    if optimizer and (folder / DENSE_OPTIMIZER_FILE).exists():
        dense_moments = _read_dense_moments(folder / DENSE_OPTIMIZER_FILE, size)
    if optimizer and (folder / SPARSE_OPTIMIZER_FILE).exists():
        state = _read(folder / SPARSE_OPTIMIZER_FILE, "<f4", 2 * vectors.size)
        embedding_moments = (table(state[: vectors.size]), table(state[vectors.size :]))
    return ModelWeights(
        dense=unflatten(flat, config),
        embeddings=table(vectors),
        dense_moments=dense_moments,
        embedding_moments=embedding_moments,
    )


def unflatten(flat: NDArray[np.float32], config: DcnConfig) -> dict[str, NDArray[np.float32]]:
    """The dense parameters by name, from one flat array in the dense file's order."""
    parameters, at = {}, 0
    for name, shape in dense_layout(config):
        count = int(np.prod(shape))
        parameters[name] = flat[at : at + count].reshape(shape)
        at += count
    return parameters


def _read_dense_moments(path: Path, size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Adam's m and v; accepts HugeCTR's padded span and the unpadded one."""
    floats = _read(path, "<f4", None)
    padded = size + (-4 * size % _ALIGNMENT_BYTES) // 4
    if len(floats) not in (2 * size, padded + size):
        raise ContractError(f"{path} has {4 * len(floats)} bytes, expected {8 * size} or {4 * (padded + size)}")
    return floats[:size], floats[len(floats) - size :]


def _read(path: Path, dtype: str, count: int | None) -> NDArray[Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ContractError(f"model file {path} cannot be read: {error.strerror}") from error
    item = np.dtype(dtype).itemsize
    expected = f"{count * item}" if count is not None else f"a multiple of {item}"
    if len(content) % item or (count is not None and len(content) != count * item):
        raise ContractError(f"model file {path} has {len(content)} bytes, expected {expected}")
    return np.frombuffer(content, dtype)


def _floats(array: NDArray[np.float32]) -> bytes:
    return np.ascontiguousarray(array, dtype="<f4").tobytes()
