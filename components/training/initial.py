"""The weights a fit starts from: HugeCTR's initialisers, or the parent's weights grown to the new slot sizes.

Which parent is meant, and whether it fits, is `parent`'s. NumPy generators make the weights the same on every device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL
from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.errors import ContractError
from components.contracts.model_files import ModelWeights
from components.contracts.workflow import OOV_ID

_TRUNCATED_NORMAL_SD = 0.87962566
"""HugeCTR divides by the standard deviation of a truncated normal, but does not truncate."""


def initial_weights(config: DcnConfig, slot_sizes: list[int], *, click_rate: float, seed: int) -> ModelWeights:
    """Fresh weights as HugeCTR initialises them, without moments.

    Embeddings U(+-1/sqrt(slot size)) per slot; cross weights N(0, 1/sqrt(n)), cross biases 0; InnerProduct weights
    N(0, sqrt(2/(in + out))/0.8796), biases N(0, 1/sqrt(out)). One value differs: the last bias is the log-odds of
    `click_rate` (a share in (0, 1)) and not N(0, 1), from which small data would need hundreds of steps to return.
    """
    random = np.random.default_rng(seed)
    dense = {name: _initial(name, shape, random) for name, shape in dense_layout(config)}
    dense["final.bias"] = np.full(1, np.log(click_rate / (1 - click_rate)), dtype=np.float32)
    tables = [
        random.uniform(-(size**-0.5), size**-0.5, (size, config.embedding_dim)).astype(np.float32)
        for size in slot_sizes
    ]
    return ModelWeights(dense=dense, embeddings=np.concatenate(tables))


def _initial(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    if name.startswith("cross") and name.endswith("bias"):
        return np.zeros(shape, dtype=np.float32)
    is_matrix = len(shape) == 2
    deviation = (2 / sum(shape)) ** 0.5 / _TRUNCATED_NORMAL_SD if is_matrix else shape[0] ** -0.5
    return random.normal(0, deviation, shape).astype(np.float32)


def grow(weights: ModelWeights, before: list[int], now: list[int]) -> ModelWeights:
    """The weights re-laid from slot sizes `before` to `now`: ids keep their rows, new ids start as their slot's OOV.

    Until now a new id was scored with the row of the ids out of vocabulary, so that row is what is known about it. Its
    moments are zero: nothing was observed of it alone.

    Raises:
        ContractError: a slot shrank, or one that grew has no OOV row.
    """
    for name, old, new in zip(CATEGORICAL, before, now):
        if new < old:
            raise ContractError(f"slot size of {name} is {new}, expected at least the parent's {old}")
        if new > old and old <= OOV_ID:
            raise ContractError(f"slot size of {name} in the parent is {old}, expected more than {OOV_ID} to grow")
    moments = weights.embedding_moments
    return ModelWeights(
        dense=weights.dense,
        embeddings=_relaid(weights.embeddings, before, now, like_oov=True),
        dense_moments=weights.dense_moments,
        embedding_moments=moments
        and (
            _relaid(moments[0], before, now, like_oov=False),
            _relaid(moments[1], before, now, like_oov=False),
        ),
    )


def _relaid(table: NDArray[np.float32], before: list[int], now: list[int], *, like_oov: bool) -> NDArray[np.float32]:
    relaid = np.zeros((sum(now), table.shape[1]), dtype=np.float32)
    old_at = new_at = 0
    for old, new in zip(before, now):
        relaid[new_at : new_at + old] = table[old_at : old_at + old]
        if like_oov and new > old:
            relaid[new_at + old : new_at + new] = table[old_at + OOV_ID]
        old_at, new_at = old_at + old, new_at + new
    return relaid
