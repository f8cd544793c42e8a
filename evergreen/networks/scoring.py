"""Compute click probabilities of encoded rows with a network and its embedding tables.

Training scores rows with this module before it trains on them. Evaluation uses this module to score
the candidates of all training engines.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from evergreen.config.features import FeaturePositions
from evergreen.config.model import NetworkConfig
from evergreen.config.release import FLOAT32
from evergreen.contracts.workflow import PADDING_ID
from evergreen.networks.files import (
    Table,
    columns_of,
    one_id_per_slot,
    open_model,
    require_rows,
    tables_of,
)
from evergreen.networks.network import Network, build_network, load_dense
from evergreen.networks.rounding import round_table
from evergreen.runtime.errors import ContractError

BATCH_ROWS = 2048


class Scorer:
    """Function that scores rows with a network and its tables, on the device of the tables."""

    def __init__(
        self,
        network: Network,
        values: Sequence[Tensor],
        tables: Sequence[Table],
        *,
        slot_sizes: Sequence[int],
        numbers: str = FLOAT32,
    ) -> None:
        """Store references to the network and the tables.

        The values of the network and the tables may change between two calls.

        Args:
            network: The network.
            values: Contents of each table.
            tables: Layout of the tables.
            slot_sizes: Number of ids of each slot.
            numbers: Number type to which vectors are rounded, see `rounding.TABLE_TYPES`. All
                number types except float32 need tables on the CPU.

        Raises:
            ContractError: the values and the tables have different numbers of rows.
        """
        require_rows(values, tables, slot_sizes)
        self._network, self._values, self._tables, self._numbers = network, values, tables, numbers
        self._device = values[0].device
        self._num_positions = sum(len(table.columns) for table in tables)
        self._columns = columns_of(tables)
        self._sizes = [
            torch.tensor(table.sizes(slot_sizes), dtype=torch.int64, device=self._device)[
                list(table.positions.slots)
            ]
            for table in tables
        ]
        self._offsets = [
            torch.from_numpy(table.offsets(slot_sizes)).to(self._device) for table in tables
        ]

    @torch.no_grad()
    def probabilities(
        self, dense: NDArray[np.float32], ids: NDArray[np.integer], *, batch_rows: int = BATCH_ROWS
    ) -> NDArray[np.float32]:
        """Return click probabilities, float32 [n], without dropout.

        On the same machine, equal inputs give results with equal bits.

        Args:
            dense: Normalised values, [n, D].
            ids: Ids within their slots, [n, positions]. An id outside its slot has a zero vector.
            batch_rows: Number of rows at a time. The batch size can change the last bits of the
                result, as in every matrix product.

        Raises:
            ContractError: dense values and ids have different numbers of rows, or `ids` does not
                have one column for each of `positions.slots`.
        """
        if len(dense) != len(ids) or ids.shape[1:] != (self._num_positions,):
            raise ContractError(
                f"dense and ids have shapes {dense.shape} and {ids.shape}, expected [n, D] and [n, "
                f"{self._num_positions}]"
            )
        probabilities = np.empty(len(dense), dtype=np.float32)
        was_training = self._network.training
        self._network.eval()
        try:
            for at in range(0, len(dense), batch_rows):
                part = slice(at, at + batch_rows)
                probabilities[part] = (
                    torch.sigmoid(self._logits(dense[part], ids[part])).cpu().numpy()
                )
        finally:
            self._network.train(was_training)
        return probabilities

    def _logits(self, dense: NDArray[np.float32], ids: NDArray[np.integer]) -> Tensor:
        dense_BD = torch.from_numpy(np.ascontiguousarray(dense, np.float32)).to(self._device)
        found = []
        for number, (values, table) in enumerate(zip(self._values, self._tables)):
            ids_BP = torch.from_numpy(
                np.ascontiguousarray(ids[:, self._columns[number]], np.int64)
            ).to(self._device)
            known_BP = (ids_BP >= 0) & (ids_BP < self._sizes[number])
            vectors_BPE = embedding(
                torch.where(known_BP, ids_BP, 0) + self._offsets[number], values
            )
            if self._numbers != FLOAT32:
                rounded = round_table(vectors_BPE.flatten(0, 1).numpy(), self._numbers).vectors()
                vectors_BPE = torch.from_numpy(rounded).view_as(vectors_BPE)
            vectors_BPE = vectors_BPE * known_BP.unsqueeze(-1)
            found.append(pooled(vectors_BPE, ids_BP != PADDING_ID, table.positions))
        return self._network(dense_BD, side_by_side(found, self._tables)).float()


def pooled(vectors_BPE: Tensor, is_there_BP: Tensor, positions: FeaturePositions) -> Tensor:
    """Replace the vectors of each list by one pooled vector.

    Args:
        vectors_BPE: Embedding vectors of B rows with P positions.
        is_there_BP: Whether the position has an id. Positions without an id are ignored when a list
            is pooled.
        positions: Slot of each position, and which positions form a list.

    Returns:
        F vectors for each row, [B, F, E].
    """
    if not positions.lists:
        return vectors_BPE
    parts = [vectors_BPE[:, : positions.lists[0].start]]
    for start, stop, pool in positions.lists:
        weights_B1P = is_there_BP[:, None, start:stop].to(vectors_BPE.dtype)
        if pool == "mean":
            weights_B1P = weights_B1P / weights_B1P.sum(2, keepdim=True).clamp(min=1)
        parts.append(weights_B1P @ vectors_BPE[:, start:stop])
    parts.append(vectors_BPE[:, positions.lists[-1].stop :])
    return torch.cat(parts, dim=1)


def side_by_side(found: Sequence[Tensor], tables: Sequence[Table]) -> Tensor:
    """Return the vectors in the form that a network takes.

    The vectors of a single table are returned unchanged, [B, F, E]. Vectors of several tables are
    concatenated in the order of the row's vectors, [B, 1, X].
    """
    if len(found) == 1:
        return found[0]
    vectors = {
        i: each
        for part, table in zip(found, tables)
        for i, each in zip(table.vectors, part.unbind(1))
    }
    return torch.cat([vectors[i] for i in range(len(vectors))], dim=1).unsqueeze(1)


def load_network(
    folder: Path, config: NetworkConfig, slot_sizes: Sequence[int]
) -> tuple[Network, list[Tensor]]:
    """Load the network from `folder`, and map its tables from the file.

    Args:
        folder: Folder of the model.
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.

    Raises:
        ContractError: a file is absent or corrupt, or the weights belong to another network.
    """
    weights = open_model(folder, slot_sizes).weights
    widths = tuple(each.shape[1] for each in weights.tables)
    if widths != config.table_widths:
        found, expected = (", ".join(map(str, each)) for each in (widths, config.table_widths))
        raise ContractError(f"vectors in {folder} have width {found}, expected {expected}")
    network = build_network(config)
    load_dense(network, weights.dense)
    return network.eval(), [torch.from_numpy(each) for each in weights.tables]


def load_scorer(
    folder: Path,
    config: NetworkConfig,
    slot_sizes: Sequence[int],
    *,
    positions: FeaturePositions | None = None,
    numbers: str = FLOAT32,
) -> Scorer:
    """Return the scorer of the model in `folder`.

    Args:
        folder: Folder of the model.
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.
        positions: Slot of each position of a row, and which positions form a list. If None, a row
            has one id for each slot.
        numbers: Number type of the tables, see `rounding.TABLE_TYPES`.

    Raises:
        ContractError: See `load_network`.
    """
    network, values = load_network(folder, config, slot_sizes)
    tables = tables_of(positions or one_id_per_slot(slot_sizes), config.widths)
    return Scorer(network, values, tables, slot_sizes=slot_sizes, numbers=numbers)
