"""HugeCTR's files out of a model: saved aside, proven, and written anew in our order.

HugeCTR reports failed writes by a return value, if at all, and its files hold no sizes; keys come in the order of its
hash table. So every size and the set of keys are checked before anything is taken for a model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig
from components.contracts.dense_files import num_dense_parameters, read_dense, read_dense_moments
from components.contracts.flat_files import require_size
from components.contracts.model_files import (
    DENSE_FILE,
    DENSE_OPTIMIZER_FILE,
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    RowChunk,
    write_model_chunks,
)
from components.contracts.sparse_files import KEY_FILE, ROWS_PER_CHUNK, VECTOR_FILE
from components.runtime.errors import ContractError, PermanentError
from components.training.hugectr.state_layout import StateLayout

_PREFIX = "dcn"
_ALIGNMENT_BYTES = 256


def save(hugectr: Any, model: Any, target: Path, config: DcnConfig, layout: StateLayout, scratch: Path) -> None:
    """Writes the model's weights and optimizer state to `target`, all keys, ascending.

    Args:
        hugectr: The module.
        model: A compiled `hugectr.Model` that was given all keys.
        target: Folder of the model's files.
        config: Shape of the network.
        layout: Of the sparse optimizer file.
        scratch: Folder for HugeCTR's own files; made empty first, since HugeCTR writes over older files without
            cutting them off.

    Raises:
        PermanentError: HugeCTR failed, or what it wrote is not what it should be; names file, found and expected.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        answer = model.save_params_to_files(prefix=str(scratch / _PREFIX), iter=0)
    except (OSError, RuntimeError) as error:
        raise PermanentError(f"HugeCTR cannot save to {scratch}: {error}") from error
    if answer is not None and answer != hugectr.Error_t.Success:
        raise PermanentError(f"HugeCTR answers {answer} to saving to {scratch}, expected {hugectr.Error_t.Success}")
    try:
        _require_sizes(scratch, config, layout)
        keys = np.fromfile(scratch / SPARSE_FOLDER / KEY_FILE, dtype="<i8")
        places = _places(keys, layout.num_rows, scratch / SPARSE_FOLDER / KEY_FILE)
        write_model_chunks(
            target,
            config,
            num_rows=layout.num_rows,
            dense=read_dense(scratch / DENSE_FILE, config),
            dense_moments=read_dense_moments(scratch / DENSE_OPTIMIZER_FILE, config),
            chunks=_chunks(scratch, places, layout),
            with_moments=True,
        )
    except (ContractError, OSError) as error:
        raise PermanentError(f"what HugeCTR saved is no model: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _require_sizes(folder: Path, config: DcnConfig, layout: StateLayout) -> None:
    dense = 4 * num_dense_parameters(config)
    require_size(folder / DENSE_FILE, dense)
    require_size(folder / DENSE_OPTIMIZER_FILE, dense + -dense % _ALIGNMENT_BYTES + dense, 2 * dense)
    require_size(folder / SPARSE_FOLDER / KEY_FILE, 8 * layout.num_rows)
    require_size(folder / SPARSE_FOLDER / VECTOR_FILE, 4 * layout.num_rows * layout.dim)
    require_size(folder / SPARSE_OPTIMIZER_FILE, layout.num_bytes)


def _places(keys: NDArray[np.int64], num_rows: int, path: Path) -> NDArray[np.int64]:
    """Row of the file for each key 0..num_rows-1."""
    if keys.min() < 0 or keys.max() >= num_rows:
        raise PermanentError(f"{path} holds keys {keys.min()}..{keys.max()}, expected 0..{num_rows - 1}")
    places = np.full(num_rows, -1, dtype=np.int64)
    places[keys] = np.arange(num_rows)
    if (absent := np.flatnonzero(places < 0)).size:
        raise PermanentError(f"{path} lacks {absent.size} keys, first {absent[0]}, expected each of 0..{num_rows - 1}")
    return places


def _chunks(folder: Path, places: NDArray[np.int64], layout: StateLayout) -> Iterator[RowChunk]:
    shape = (layout.num_rows, layout.dim)
    vectors = np.memmap(folder / SPARSE_FOLDER / VECTOR_FILE, dtype="<f4", mode="r", shape=shape)
    state = layout.open(folder / SPARSE_OPTIMIZER_FILE)
    for at in range(0, layout.num_rows, ROWS_PER_CHUNK):
        keys = np.arange(at, min(at + ROWS_PER_CHUNK, layout.num_rows))
        yield RowChunk(keys=keys, vectors=vectors[places[keys]], moments=layout.get(state, keys))
