"""HugeCTR's dense model file and its Adam state: all dense parameters back to back, in the order of the layers.

Joins both training backends, which write them, to whoever reads a model; used through `contracts.model_files`. Names,
shapes and order are `contracts.dcn.dense_layout`'s. Layout as HugeCTR 24.06 writes it: float32, little endian, no
header. The state is the raw span of two buffers, m and v, of which the second begins at a multiple of 256 bytes; the
bytes between are undefined. Not in any file: the number of steps taken (`manifests.Model.optimizer_step`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig, dense_layout, dense_places
from components.contracts.flat_files import get, is_kept, opened, require_size, sized_file
from components.runtime.errors import ContractError

Moments = tuple[NDArray[np.float32], NDArray[np.float32]]
_ALIGNMENT_BYTES = 256


def num_dense_parameters(config: DcnConfig) -> int:
    """Number of floats in the dense file."""
    _, last, _ = dense_places(config)[-1]
    return int(last.stop)


def unflatten(flat: NDArray[np.float32], config: DcnConfig) -> dict[str, NDArray[np.float32]]:
    """The dense parameters by name, as views of one flat array in the dense file's order."""
    return {name: flat[place].reshape(shape) for name, place, shape in dense_places(config)}


def require_dense(config: DcnConfig, dense: dict[str, NDArray[np.float32]], moments: Moments | None) -> None:
    """Refuses parameters that `config` does not have.

    Raises:
        ContractError: a name or shape is wrong.
    """
    layout = dense_layout(config)
    if [name for name, _ in layout] != list(dense):
        raise ContractError(f"dense parameters are {list(dense)}, expected {[name for name, _ in layout]}")
    for name, shape in layout:
        if dense[name].shape != shape:
            raise ContractError(f"dense parameter {name} has shape {dense[name].shape}, expected {shape}")
    expected = (num_dense_parameters(config),)
    if moments is not None and any(moment.shape != expected for moment in moments):
        raise ContractError(f"dense moments have shapes {[m.shape for m in moments]}, expected {expected}")


def write_dense(path: Path, config: DcnConfig, dense: dict[str, NDArray[np.float32]]) -> None:
    """Writes the dense file."""
    with sized_file(path, 4 * num_dense_parameters(config)) as file:
        for name, _ in dense_layout(config):
            file.put(dense[name], "<f4")


def _padded_bytes(config: DcnConfig) -> int:
    """Size of the state as HugeCTR writes it, with its gap between m and v."""
    size = 4 * num_dense_parameters(config)
    return size + -size % _ALIGNMENT_BYTES + size


def write_dense_moments(path: Path, config: DcnConfig, moments: Moments) -> None:
    """Writes Adam's m and v, with HugeCTR's gap between them."""
    padded = _padded_bytes(config)
    with sized_file(path, padded) as file:
        file.put(moments[0], "<f4")
        file.put(moments[1], "<f4", at=padded - 4 * num_dense_parameters(config))


def require_dense_files(path: Path, moments_path: Path, config: DcnConfig) -> None:
    """Checks the size of the dense file and, where there is one, of its state.

    Raises:
        ContractError: names the file, its size and what was expected.
    """
    size = 4 * num_dense_parameters(config)
    require_size(path, size)
    if is_kept(moments_path):
        require_size(moments_path, 2 * size, _padded_bytes(config))


def read_dense(path: Path, config: DcnConfig) -> dict[str, NDArray[np.float32]]:
    """The dense parameters by name.

    Raises:
        ContractError: the file is absent or of another size.
    """
    count = num_dense_parameters(config)
    require_size(path, 4 * count)
    with opened(path) as file:
        return unflatten(get(file, (count,), "<f4", at=0), config)


def read_dense_moments(path: Path, config: DcnConfig) -> Moments:
    """Adam's m and v, flat; of a file with or without the gap between them.

    Raises:
        ContractError: the file is absent or of another size.
    """
    count = num_dense_parameters(config)
    require_size(path, 8 * count, _padded_bytes(config))
    with opened(path) as file:
        # Either way v ends where the file does.
        start = path.stat().st_size - 4 * count
        return get(file, (count,), "<f4", at=0), get(file, (count,), "<f4", at=start)
