"""Convert models between HugeCTR's files and the registry's layout (`evergreen.networks.files`).

The layout is the layout of HugeCTR 24.06's `save_params_to_files("<folder>/dcn", 0)`: little
endian, without headers, and float32 unless stated otherwise.

- `dcn_dense_0.model` has all dense parameters in the order of the layers, with InnerProduct weights
  as [in, out]. A DCN v2 may have additional inputs of 0 (`layers.padded`), whose weights are 0.
- `dcn_opt_dense_0.model` has Adam's m, then v, which starts at a multiple of 256 bytes.
- `dcn<i>_sparse_0.model/{key,emb_vector}` of embedding i have int64 keys, and a vector for each
  key.
- `dcn<i>_opt_sparse_0.model` has m, then v. Each of m and v has one array [capacity, width] per
  GPU, which is the GPU's workspace. Unused rows of a workspace are zero.

The files do not state the workspace row of a key. Key k is on GPU k % n, where n is the number of
GPUs. The row of a loaded key is its position among the keys of its GPU. This module exports all
keys in ascending order, so key k has row k // n of GPU k % n. On one GPU, HugeCTR saves the keys in
the order of their rows. Therefore the r-th key of the file has row r, even if the keys are not
sorted. A model that was trained only with HugeCTR can therefore be imported too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.training.hugectr.embeddings import Embedding, max_vocabulary_size
from components.training.hugectr.layers import padded
from evergreen.config.model import DcnConfig
from evergreen.networks.files import (
    ROWS_PER_CHUNK,
    FloatArray,
    StoredModel,
    chunks,
    new_model,
    table_shapes,
)
from evergreen.networks.network import build_network
from evergreen.runtime.errors import ContractError, PermanentError

DENSE_FILE = "dcn_dense_0.model"
DENSE_OPTIMIZER_FILE = "dcn_opt_dense_0.model"
SPARSE_FOLDER, SPARSE_OPTIMIZER_FILE = "dcn{}_sparse_0.model", "dcn{}_opt_sparse_0.model"
"""Names of the files. `{}` stands for the number of the embedding."""
_KEY_FILE, _VECTOR_FILE = "key", "emb_vector"
_ALIGNMENT_BYTES = 256


def _state_shape(embedding: Embedding, num_gpus: int) -> tuple[int, int, int, int]:
    """Return the shape of a sparse optimizer file: states, GPUs, rows of a workspace, width."""
    rows = max_vocabulary_size(embedding.workspace_mb(num_gpus), embedding.width)
    return (2, num_gpus, rows, embedding.width)


def export_model(
    stored: StoredModel,
    config: DcnConfig,
    embeddings: Sequence[Embedding],
    *,
    num_gpus: int,
    folder: Path,
) -> None:
    """Write a stored model into `folder` as files that HugeCTR can load.

    All keys are written, in ascending order.

    Raises:
        OSError: the disk is full or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _flatten(config, stored.weights.dense).tofile(folder / DENSE_FILE)
    if stored.moments is not None:
        first, second = (_flatten(config, moment.dense) for moment in stored.moments)
        gap = np.zeros(-first.nbytes % _ALIGNMENT_BYTES // 4, "<f4")
        np.concatenate([first, gap, second]).tofile(folder / DENSE_OPTIMIZER_FILE)
    for each in embeddings:
        sparse = folder / SPARSE_FOLDER.format(each.number)
        sparse.mkdir(exist_ok=True)
        np.arange(each.num_keys, dtype="<i8").tofile(sparse / _KEY_FILE)
        with open(sparse / _VECTOR_FILE, "wb") as file:
            for keys in _key_chunks(each):
                stored.weights.tables[each.table][each.rows_of(keys)].tofile(file)
        if stored.moments is None:
            continue
        # The file is sparse, so unused rows take no room on disk.
        path = folder / SPARSE_OPTIMIZER_FILE.format(each.number)
        state = np.memmap(path, "<f4", "w+", shape=_state_shape(each, num_gpus))
        for keys in _key_chunks(each):
            for values, moment in zip(state, stored.moments):
                values[keys % num_gpus, keys // num_gpus] = moment.tables[each.table][
                    each.rows_of(keys)
                ]


def _key_chunks(embedding: Embedding) -> Iterator[NDArray[np.int64]]:
    return (np.arange(part.start, part.stop) for part in chunks(0, embedding.num_keys))


def import_model(
    folder: Path,
    config: DcnConfig,
    embeddings: Sequence[Embedding],
    *,
    num_gpus: int,
    into: Path,
    step: int,
) -> None:
    """Convert HugeCTR's saved files in `folder` to a model in the registry's layout.

    Args:
        folder: Folder with HugeCTR's files. The model must have all keys.
        config: Configuration of the network.
        embeddings: Layout of the embeddings.
        num_gpus: GPUs that share the embeddings.
        into: Folder to write.
        step: Number of optimizer steps taken, which HugeCTR's files do not contain.

    Raises:
        ContractError: a file is absent or has another size, or a key is missing or unknown. The
            error is also raised if a row without a key has optimizer state, because HugeCTR then
            uses an unexpected order of rows.
        PermanentError: the disk has no room for the model.
    """
    _require_dense_sizes(folder, config)
    for each in embeddings:
        _require_valid(folder, each, num_gpus)
    flat = np.fromfile(folder / DENSE_FILE, "<f4")
    both = np.fromfile(folder / DENSE_OPTIMIZER_FILE, "<f4")
    # v is always at the end of the file. There may be a gap between m and v.
    flats = (flat, both[: len(flat)], both[-len(flat) :])
    dense = _unflatten(config, flat)
    num_rows = [0] * len(config.table_widths)
    for each in embeddings:
        num_rows[each.table] += each.num_keys
    shapes = {
        **table_shapes(list(zip(num_rows, config.table_widths))),
        **{n: each.shape for n, each in dense.items()},
    }
    with new_model(into, shapes, step=step) as stored:
        for tensors, values in zip(stored.parts, flats):
            for name, value in _unflatten(config, values).items():
                tensors.dense[name][:] = value
        for each in embeddings:
            _import_embedding(folder, each, num_gpus=num_gpus, stored=stored)


def _import_embedding(
    folder: Path, embedding: Embedding, *, num_gpus: int, stored: StoredModel
) -> None:
    """Copy the vectors and moments of one embedding into the tables of a new model."""
    assert stored.moments is not None, "a new model has moments"
    sparse, table = folder / SPARSE_FOLDER.format(embedding.number), embedding.table
    keys = np.fromfile(sparse / _KEY_FILE, "<i8")
    vectors = _mapped(sparse / _VECTOR_FILE, "<f4", (embedding.num_keys, embedding.width))
    path = folder / SPARSE_OPTIMIZER_FILE.format(embedding.number)
    state = _mapped(path, "<f4", _state_shape(embedding, num_gpus))
    for part in chunks(0, embedding.num_keys):
        of_part = keys[part]
        rows = embedding.rows_of(of_part)
        stored.weights.tables[table][rows] = vectors[part]
        positions = np.arange(part.start, part.stop) if num_gpus == 1 else of_part // num_gpus
        for moment, values in zip(stored.moments, state):
            moment.tables[table][rows] = values[of_part % num_gpus, positions]


def _flatten(config: DcnConfig, dense: Mapping[str, FloatArray]) -> FloatArray:
    """Return the dense parameters, or their moments, as one array in the order of HugeCTR's file.

    >>> config = DcnConfig(
    ...     num_dense=1, num_categorical=1, embedding_dim=1, num_cross_layers=1, tower=(1,)
    ... )
    >>> values = {"cross_weight": [[1, 2]], "cross_bias": [[3, 4]], "tower.0.weight": [[5, 6]],
    ...     "tower.0.bias": [7], "final_tower": [[8]], "final_cross": [[9, 10]], "bias": [11]}
    >>> dense = {name: np.array(each, np.float32) for name, each in values.items()}
    >>> _flatten(config, dense).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    """
    wide = _zero_dense(padded(config))
    for name, values in dense.items():
        _own_part(wide[name], np.shape(values))[:] = values
    flat = np.concatenate([view.ravel() for view in _in_file_order(config, wide)])
    return flat.astype("<f4", copy=False)


def _unflatten(config: DcnConfig, flat: FloatArray) -> dict[str, FloatArray]:
    """Split `flat`, which has the order of HugeCTR's file, into parameters by `state_dict` name."""
    wide = _zero_dense(padded(config))
    at = 0
    for view in _in_file_order(config, wide):
        view[:] = flat[at : at + view.size].reshape(view.shape)
        at += view.size
    shapes = {name: values.shape for name, values in _zero_dense(config).items()}
    return {name: _own_part(wide[name], shape) for name, shape in shapes.items()}


def _own_part(values: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Return a view of a padded parameter without its padding. The view has the shape `shape`."""
    return values[tuple(map(slice, shape))]


def _zero_dense(config: DcnConfig) -> dict[str, FloatArray]:
    shapes = {name: tuple(each.shape) for name, each in build_network(config).named_parameters()}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _in_file_order(config: DcnConfig, dense: Mapping[str, FloatArray]) -> Iterator[FloatArray]:
    """Yield views of the parameters in the order and shape of HugeCTR's layers."""
    of_cross = (
        ("cross_u", "cross_v", "cross_bias")
        if config.projection_dim
        else ("cross_weight", "cross_bias")
    )
    for layer in range(config.num_cross_layers):
        for name in of_cross:
            yield dense[name][layer]
    for name in _tower_names(config):
        yield dense[f"{name}.weight"].T
        yield dense[f"{name}.bias"]
    for name in ("final_tower", "final_cross", "bias"):
        yield dense[name]


def _tower_names(config: DcnConfig) -> list[str]:
    """Return the names of the tower's linear layers.

    ReLU and dropout follow each linear layer (`evergreen.networks.network.mlp`).
    """
    return [f"tower.{3 * i}" for i in range(len(config.tower))]


def _require_dense_sizes(folder: Path, config: DcnConfig) -> None:
    dense = sum(each.nbytes for each in _zero_dense(padded(config)).values())
    _require_size(folder / DENSE_FILE, dense)
    _require_size(
        folder / DENSE_OPTIMIZER_FILE, dense + -dense % _ALIGNMENT_BYTES + dense, 2 * dense
    )


def _require_valid(folder: Path, embedding: Embedding, num_gpus: int) -> None:
    """Check that an embedding's files are complete and have the expected order of rows."""
    sparse, path = (
        folder / SPARSE_FOLDER.format(embedding.number),
        folder / SPARSE_OPTIMIZER_FILE.format(embedding.number),
    )
    shape = _state_shape(embedding, num_gpus)
    _require_size(sparse / _KEY_FILE, 8 * embedding.num_keys)
    _require_size(sparse / _VECTOR_FILE, 4 * embedding.num_keys * embedding.width)
    _require_size(path, 4 * math.prod(shape))
    _require_all_keys(
        np.fromfile(sparse / _KEY_FILE, "<i8"), embedding.num_keys, sparse / _KEY_FILE
    )
    state = _mapped(path, "<f4", shape)
    for gpu in range(num_gpus):
        used = len(range(gpu, embedding.num_keys, num_gpus))
        for table in state[:, gpu]:
            for at in range(used, len(table), ROWS_PER_CHUNK):
                if table[at : at + ROWS_PER_CHUNK].any():
                    raise ContractError(
                        f"optimizer state {path} of GPU {gpu} has values after row {used}, "
                        "expected zeros"
                    )


def _require_size(path: Path, *expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ContractError(f"model file {path} cannot be read: {error.strerror}") from error
    if found not in expected:
        raise ContractError(
            f"model file {path} has {found} bytes, expected {' or '.join(map(str, expected))}"
        )


def _require_all_keys(keys: NDArray[np.int64], num_rows: int, path: Path) -> None:
    if keys.min() < 0 or keys.max() >= num_rows:
        raise ContractError(
            f"{path} has keys {keys.min()}..{keys.max()}, expected 0..{num_rows - 1}"
        )
    seen = np.zeros(num_rows, np.bool_)
    seen[keys] = True
    if missing := int((~seen).sum()):
        raise ContractError(
            f"{path} lacks {missing} keys and has other keys twice, expected each key "
            f"0..{num_rows - 1} once"
        )


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[np.floating]:
    try:
        return np.memmap(path, dtype, "r", shape=shape)
    except OSError as error:
        raise PermanentError(f"model file {path} cannot be mapped: {error}") from error
