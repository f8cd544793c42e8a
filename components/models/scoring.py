"""Click probabilities of encoded rows: a network with its table of vectors.

Used by training to score rows before it learns them and by evaluation to judge a candidate, whatever engine made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from components.contracts.features import Places
from components.contracts.workflow import PADDING_ID
from components.models.configs import NetworkConfig
from components.models.files import open_model, slot_offsets
from components.models.network import Network, build_network, load_dense
from components.runtime.errors import ContractError

BATCH_ROWS = 2048


class Scorer:
    """Scores rows with a network and a table, where both lie."""

    def __init__(
        self, network: Network, table: Tensor, slot_sizes: Sequence[int], *, places: Places | None = None
    ) -> None:
        """Takes the network and the table as they are; both may change between calls.

        `table` holds the vectors of all slots, [sum(slot_sizes), E]. Without `places` each slot is looked up once.
        """
        self._network, self._table = network, table
        self._places = places or Places(tuple(range(len(slot_sizes))), ())
        slots = list(self._places.slots)
        self._sizes = torch.tensor(slot_sizes, dtype=torch.int64, device=table.device)[slots]
        self._offsets = torch.from_numpy(slot_offsets(slot_sizes)[slots]).to(table.device)

    @torch.no_grad()
    def probabilities(
        self, dense: NDArray[np.float32], ids: NDArray[np.integer], *, batch_rows: int = BATCH_ROWS
    ) -> NDArray[np.float32]:
        """Click probabilities, float32 [n], without dropout; equal input gives equal bits on the same machine.

        Args:
            dense: Normalised values, [n, D].
            ids: Slot-local ids, [n, places]; one outside its slot has a zero vector.
            batch_rows: Rows at a time; the last bits depend on it, as those of every matrix product do.

        Raises:
            ContractError: dense values and ids have not as many rows, or ids not one column per place.
        """
        if len(dense) != len(ids) or ids.shape[1:] != (len(self._sizes),):
            raise ContractError(
                f"dense and ids have shapes {dense.shape} and {ids.shape}, expected [n, D] and [n, {len(self._sizes)}]"
            )
        probabilities = np.empty(len(dense), dtype=np.float32)
        was_training = self._network.training
        self._network.eval()
        try:
            for at in range(0, len(dense), batch_rows):
                part = slice(at, at + batch_rows)
                probabilities[part] = torch.sigmoid(self._logits(dense[part], ids[part])).cpu().numpy()
        finally:
            self._network.train(was_training)
        return probabilities

    def _logits(self, dense: NDArray[np.float32], ids: NDArray[np.integer]) -> Tensor:
        device = self._table.device
        dense_BD = torch.from_numpy(np.ascontiguousarray(dense, np.float32)).to(device)
        ids_BP = torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(device)
        known_BP = (ids_BP >= 0) & (ids_BP < self._sizes)
        vectors_BPE = embedding(torch.where(known_BP, ids_BP, 0) + self._offsets, self._table)
        vectors_BPE = vectors_BPE * known_BP.unsqueeze(-1)
        return self._network(dense_BD, pooled(vectors_BPE, ids_BP != PADDING_ID, self._places)).float()


def pooled(vectors_BPE: Tensor, is_there_BP: Tensor, places: Places) -> Tensor:
    """The vectors of a row, [B, F, E], from those of its places P; in a list only places where something is count."""
    if not places.lists:
        return vectors_BPE
    parts = [vectors_BPE[:, : places.lists[0].start]]
    for start, stop, pool in places.lists:
        weights_B1P = is_there_BP[:, None, start:stop].to(vectors_BPE.dtype)
        if pool == "mean":
            weights_B1P = weights_B1P / weights_B1P.sum(2, keepdim=True).clamp(min=1)
        parts.append(weights_B1P @ vectors_BPE[:, start:stop])
    parts.append(vectors_BPE[:, places.lists[-1].stop :])
    return torch.cat(parts, dim=1)


def load_network(folder: Path, config: NetworkConfig, slot_sizes: Sequence[int]) -> tuple[Network, Tensor]:
    """The network whose weights lie in `folder`, and its table, which is mapped from the file.

    Raises:
        ContractError: a file is absent or damaged, or the weights are of another network.
    """
    weights = open_model(folder, slot_sizes).weights
    if weights.table.shape[1] != config.embedding_dim:
        raise ContractError(f"vectors in {folder} have width {weights.table.shape[1]}, expected {config.embedding_dim}")
    network = build_network(config)
    load_dense(network, weights.dense)
    return network.eval(), torch.from_numpy(weights.table)


def load_scorer(
    folder: Path, config: NetworkConfig, slot_sizes: Sequence[int], *, places: Places | None = None
) -> Scorer:
    """The scorer of the model in `folder`; `places` as `Scorer` takes them.

    Raises:
        ContractError: as `load_network`.
    """
    return Scorer(*load_network(folder, config, slot_sizes), slot_sizes, places=places)
