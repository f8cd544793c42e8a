"""HugeCTR's model files, written from and read into a model of the store (`components.models.files`).

Layout as HugeCTR 24.06's `save_params_to_files("<folder>/dcn", 0)` has it; little endian, no headers, float32 where
nothing else is stated:

- `dcn_dense_0.model`: all dense parameters back to back, in the order of the layers, InnerProduct weights as [in, out];
- `dcn_opt_dense_0.model`: Adam's m, then v, which begins at a multiple of 256 bytes;
- `dcn0_sparse_0.model/{key,emb_vector}`: int64 keys (id + slot offset), and a vector per key;
- `dcn0_opt_sparse_0.model`: m, then v; each is the workspace of every GPU, [capacity, dim], zero in unused rows.

The files do not state which row of the workspace belongs to a key. A loaded key's row is its position among the keys of
its GPU (key modulo the number of GPUs), and a model that was exported here has all keys in ascending order, so key k
has row k // n of GPU k % n. On one GPU a save lists the keys by their rows, so that row r belongs to key r of the file,
whatever their order: what HugeCTR trained alone can be imported too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.models.configs import DcnConfig
from components.models.files import ROWS_PER_CHUNK, TABLE, FloatArray, StoredModel, chunks, new_model
from components.models.network import build_network
from components.runtime.errors import ContractError, PermanentError
from components.training.hugectr.settings import max_vocabulary_size

DENSE_FILE = "dcn_dense_0.model"
DENSE_OPTIMIZER_FILE = "dcn_opt_dense_0.model"
SPARSE_FOLDER = "dcn0_sparse_0.model"
SPARSE_OPTIMIZER_FILE = "dcn0_opt_sparse_0.model"
KEY_FILE, VECTOR_FILE = "key", "emb_vector"
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Shape of one sparse optimizer file."""

    num_rows: int
    """Keys of the table, 0..num_rows-1."""
    dim: int
    num_gpus: int
    workspace_mb: int
    """Per GPU."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """States, GPUs, rows of a workspace, width."""
        return (2, self.num_gpus, max_vocabulary_size(self.workspace_mb, self.dim), self.dim)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return 4 * int(np.prod(self.shape))


def export_model(stored: StoredModel, config: DcnConfig, layout: StateLayout, *, folder: Path) -> None:
    """Writes HugeCTR's files of a stored model into `folder`, for HugeCTR to load; all keys, ascending.

    Raises:
        OSError: the disk refuses.
    """
    (folder / SPARSE_FOLDER).mkdir(parents=True, exist_ok=True)
    flatten(config, stored.weights.dense).tofile(folder / DENSE_FILE)
    np.arange(layout.num_rows, dtype="<i8").tofile(folder / SPARSE_FOLDER / KEY_FILE)
    with open(folder / SPARSE_FOLDER / VECTOR_FILE, "wb") as file:
        for part in chunks(0, layout.num_rows):
            stored.weights.table[part].tofile(file)
    if stored.moments is None:
        return
    first, second = (flatten(config, moment.dense) for moment in stored.moments)
    gap = np.zeros(-first.nbytes % _ALIGNMENT_BYTES // 4, "<f4")
    np.concatenate([first, gap, second]).tofile(folder / DENSE_OPTIMIZER_FILE)
    # Unused rows take no room on the disk.
    state = np.memmap(folder / SPARSE_OPTIMIZER_FILE, "<f4", "w+", shape=layout.shape)
    for part in chunks(0, layout.num_rows):
        keys = np.arange(part.start, part.stop)
        for table, moment in zip(state, stored.moments):
            table[keys % layout.num_gpus, keys // layout.num_gpus] = moment.table[part]


def import_model(folder: Path, config: DcnConfig, layout: StateLayout, *, into: Path, step: int) -> None:
    """Writes the model whose files HugeCTR saved in `folder` into the folder `into`, as the store has it.

    The files are those of a model that has all keys. They do not hold `step`, the number of optimizer steps taken.

    Raises:
        ContractError: a file is absent or of another size, a key is missing or unknown, or a row of the optimizer
            state that no key has is in use, so that the moments are not where they are looked for.
        PermanentError: the disk has no room for the model.
    """
    _require_sizes(folder, config, layout)
    key_path = folder / SPARSE_FOLDER / KEY_FILE
    keys = np.fromfile(key_path, "<i8")
    _require_all_keys(keys, layout.num_rows, key_path)
    vectors = _mapped(folder / SPARSE_FOLDER / VECTOR_FILE, "<f4", (layout.num_rows, layout.dim))
    state = _mapped(folder / SPARSE_OPTIMIZER_FILE, "<f4", layout.shape)
    _require_unused_rows_zero(state, layout, folder / SPARSE_OPTIMIZER_FILE)
    flat = np.fromfile(folder / DENSE_FILE, "<f4")
    both = np.fromfile(folder / DENSE_OPTIMIZER_FILE, "<f4")
    # With or without the gap, v ends where the file does.
    flats = (flat, both[: len(flat)], both[-len(flat) :])
    dense = unflatten(config, flat)
    shapes = {TABLE: (layout.num_rows, layout.dim), **{name: each.shape for name, each in dense.items()}}
    with new_model(into, shapes, step=step) as stored:
        for tensors, values in zip(stored.parts, flats):
            for name, value in unflatten(config, values).items():
                tensors.dense[name][:] = value
        assert stored.moments is not None, "a new model has moments"
        for part in chunks(0, layout.num_rows):
            of_part = keys[part]
            stored.weights.table[of_part] = vectors[part]
            rows = np.arange(part.start, part.stop) if layout.num_gpus == 1 else of_part // layout.num_gpus
            for moment, table in zip(stored.moments, state):
                moment.table[of_part] = table[of_part % layout.num_gpus, rows]


def flatten(config: DcnConfig, dense: Mapping[str, FloatArray]) -> FloatArray:
    """The dense parameters, or a moment of each, in one array as HugeCTR's dense file has them.

    >>> config = DcnConfig(num_dense=1, num_categorical=1, embedding_dim=1, num_cross_layers=1, tower=(1,))
    >>> names = {"cross_weight": [[1, 2]], "cross_bias": [[3, 4]], "tower.0.weight": [[5, 6]], "tower.0.bias": [7],
    ...     "final_tower": [[8]], "final_cross": [[9, 10]], "bias": [11]}
    >>> flatten(config, {name: np.array(values, np.float32) for name, values in names.items()}).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    """
    flat = np.concatenate([view.ravel() for view in _in_file_order(config, dense)])
    return flat.astype("<f4", copy=False)


def unflatten(config: DcnConfig, flat: FloatArray) -> dict[str, FloatArray]:
    """The dense parameters by their `state_dict` names, of an array as HugeCTR's dense file has it."""
    dense = _empty_dense(config)
    at = 0
    for view in _in_file_order(config, dense):
        view[:] = flat[at : at + view.size].reshape(view.shape)
        at += view.size
    return dense


def _empty_dense(config: DcnConfig) -> dict[str, FloatArray]:
    shapes = {name: tuple(each.shape) for name, each in build_network(config).named_parameters()}
    return {name: np.empty(shape, np.float32) for name, shape in shapes.items()}


def _in_file_order(config: DcnConfig, dense: Mapping[str, FloatArray]) -> Iterator[FloatArray]:
    """Views of the parameters as the layers have them, one after another."""
    of_cross = ("cross_u", "cross_v", "cross_bias") if config.projection_dim else ("cross_weight", "cross_bias")
    for layer in range(config.num_cross_layers):
        for name in of_cross:
            yield dense[name][layer]
    for name in _tower_names(config):
        yield dense[f"{name}.weight"].T
        yield dense[f"{name}.bias"]
    for name in ("final_tower", "final_cross", "bias"):
        yield dense[name]


def _tower_names(config: DcnConfig) -> list[str]:
    """Of the tower's linear layers, each followed by ReLU and dropout (`components.models.network.mlp`)."""
    return [f"tower.{3 * i}" for i in range(len(config.tower))]


def _require_sizes(folder: Path, config: DcnConfig, layout: StateLayout) -> None:
    dense = sum(each.nbytes for each in _empty_dense(config).values())
    _require_size(folder / DENSE_FILE, dense)
    _require_size(folder / DENSE_OPTIMIZER_FILE, dense + -dense % _ALIGNMENT_BYTES + dense, 2 * dense)
    _require_size(folder / SPARSE_FOLDER / KEY_FILE, 8 * layout.num_rows)
    _require_size(folder / SPARSE_FOLDER / VECTOR_FILE, 4 * layout.num_rows * layout.dim)
    _require_size(folder / SPARSE_OPTIMIZER_FILE, layout.num_bytes)


def _require_size(path: Path, *expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ContractError(f"model file {path} cannot be read: {error.strerror}") from error
    if found not in expected:
        raise ContractError(f"model file {path} has {found} bytes, expected {' or '.join(map(str, expected))}")


def _require_all_keys(keys: NDArray[np.int64], num_rows: int, path: Path) -> None:
    if keys.min() < 0 or keys.max() >= num_rows:
        raise ContractError(f"{path} holds keys {keys.min()}..{keys.max()}, expected 0..{num_rows - 1}")
    seen = np.zeros(num_rows, np.bool_)
    seen[keys] = True
    if missing := int((~seen).sum()):
        raise ContractError(f"{path} lacks {missing} keys and holds others twice, expected each of 0..{num_rows - 1}")


def _require_unused_rows_zero(state: NDArray[np.floating], layout: StateLayout, path: Path) -> None:
    for gpu in range(layout.num_gpus):
        used = len(range(gpu, layout.num_rows, layout.num_gpus))
        for table in state[:, gpu]:
            for at in range(used, len(table), ROWS_PER_CHUNK):
                if table[at : at + ROWS_PER_CHUNK].any():
                    raise ContractError(f"optimizer state {path} of GPU {gpu} is not zero after row {used}")


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[np.floating]:
    try:
        return np.memmap(path, dtype, "r", shape=shape)
    except OSError as error:
        raise PermanentError(f"model file {path} cannot be mapped: {error}") from error
