"""Weights and optimizer state from a model's folder into HugeCTR, and the proof that they arrived.

HugeCTR logs what goes wrong while loading and goes on with its random initial weights, so what it holds afterwards is
saved again and compared.
"""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import (
    DENSE_FILE,
    DENSE_OPTIMIZER_FILE,
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    open_model,
    read_model,
    write_model,
    write_model_chunks,
)
from components.contracts.sparse_files import KEY_FILE, VECTOR_FILE
from components.runtime.errors import PermanentError
from components.training.hugectr.state_layout import StateLayout


def copy_whole(source: Path, target: Path, config: DcnConfig, slot_sizes: list[int]) -> None:
    """Writes the model in `source` to `target` with all keys, ascending; a key without a row gets zeros.

    Raises:
        ContractError: a file of `source` is absent, truncated, oversized or of another network, or it is a folder that
            HugeCTR saved itself, whose optimizer state nothing joins to its keys.
    """
    stored = open_model(source, config, slot_sizes)
    num_rows = sum(slot_sizes)
    if stored.num_rows < num_rows or not stored.rows.ascending:
        # Only a folder that another trainer wrote: ours have all keys, in order.
        write_model(target, config, read_model(source, config, slot_sizes, optimizer=True))
        return
    write_model_chunks(
        target,
        config,
        num_rows=num_rows,
        dense=stored.dense(),
        dense_moments=stored.dense_moments(),
        chunks=stored.chunks(),
        with_moments=stored.has_embedding_moments,
    )


def load(
    model: Any, folder: Path, config: DcnConfig, slot_sizes: list[int], layout: StateLayout, scratch: Path
) -> None:
    """Gives a compiled model the weights in `folder`, made by `copy_whole`, and the optimizer state where it is there.

    Raises:
        PermanentError: the disk refuses, or HugeCTR does.
    """
    stored = open_model(folder, config, slot_sizes)
    scratch.mkdir(parents=True, exist_ok=True)
    state_path = scratch / SPARSE_OPTIMIZER_FILE
    try:
        if stored.has_embedding_moments:
            state = layout.create(state_path)
            for chunk in stored.chunks():
                assert chunk.moments is not None, "the folder has embedding moments"
                layout.put(state, chunk.keys, chunk.moments)
            del state
        model.load_dense_weights(str(folder / DENSE_FILE))
        # The overloads that take lists: given names, load_sparse_optimizer_states opens the name as a path.
        model.load_sparse_weights([str(folder / SPARSE_FOLDER)])
        if (folder / DENSE_OPTIMIZER_FILE).exists():
            model.load_dense_optimizer_states(str(folder / DENSE_OPTIMIZER_FILE))
        if stored.has_embedding_moments:
            model.load_sparse_optimizer_states([str(state_path)])
    except (OSError, RuntimeError) as error:
        raise PermanentError(f"HugeCTR cannot load {folder}: {error}") from error
    finally:
        state_path.unlink(missing_ok=True)


def require_same(loaded: Path, saved: Path, *, moments: bool) -> None:
    """Refuses a model that, saved right after loading, is not the one that was loaded.

    Args:
        loaded: The folder that was loaded.
        saved: The folder saved since, before any step.
        moments: Whether to compare the optimizer state too, where `loaded` has any.

    Raises:
        PermanentError: a file differs.
    """
    names = [DENSE_FILE, f"{SPARSE_FOLDER}/{KEY_FILE}", f"{SPARSE_FOLDER}/{VECTOR_FILE}"]
    names += [name for name in (DENSE_OPTIMIZER_FILE, SPARSE_OPTIMIZER_FILE) if moments and (loaded / name).exists()]
    for name in names:
        if not filecmp.cmp(loaded / name, saved / name, shallow=False):
            raise PermanentError(
                f"HugeCTR holds another {name} than the one it was told to load, expected the same bytes; "
                "its log says what it passed over"
            )
