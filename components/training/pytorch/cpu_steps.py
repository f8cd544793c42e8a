"""Steps on a CPU: a batch goes through the network in parts, then Adam moves what it touched; the next is assembled.

What a step changes is `model_state`'s; loss and gradients are `gradients`'; batches are `batches`'.

Shape suffixes: as in `components.dcn.network`; U distinct table rows of the batch.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.sparse_files import slot_offsets
from components.runtime.allocator import keep_freed_memory
from components.training.config import TrainingSettings
from components.training.pytorch.batches import Batch, batches
from components.training.pytorch.dropout import RandomDrop
from components.training.pytorch.gradients import Backpropagation, Drop
from components.training.pytorch.model_state import ModelState
from components.training.pytorch.optimizers import RowAdam, adam_step
from components.training.rows import Rows

_PART_ROWS = 2048
"""Rows that go through the network at once: their activations stay in the caches, and large batches need no more
memory than small ones."""


class CpuSteps:
    """Takes steps of one model on a CPU; equal batches from an equal state give equal bits."""

    def __init__(self, state: ModelState, config: DcnConfig, slot_sizes: list[int], settings: TrainingSettings) -> None:
        """Makes the steps of `state`."""
        self._state, self._config, self._settings = state, config, settings
        self._offsets = slot_offsets(slot_sizes)
        self._row_adam = RowAdam(state.rows, settings)
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        self._backpropagation = Backpropagation(config, state.flat, dtype)
        # Steps fetch no new pages then, which were 4000 per step of the small network and 9000 of NVIDIA's sample, a
        # tenth of the time of either in float32.
        keep_freed_memory()

    def learn(self, rows: Rows, order: NDArray[np.int64], batch_size: int, seed: int) -> Tensor:
        """The mean loss of each batch in nats, after the steps; `seed` decides dropout."""
        drop = RandomDrop(self._config.dropout, seed) if self._config.dropout else None
        with closing(batches(rows, order, batch_size, self._offsets)) as assembled:
            return torch.stack([self.step(batch, drop) for batch in assembled])

    @torch.no_grad()
    def step(self, batch: Batch, drop: Drop | None) -> Tensor:
        """The batch's mean loss in nats (binary cross entropy), after a step against its gradient."""
        state = self._state
        taken_U3E = self._row_adam.take(batch.table_rows)
        loss, gradient_UE = self._gradients(batch, taken_U3E[:, 0], drop)
        state.num_steps += 1
        self._row_adam.step(batch.table_rows, taken_U3E, gradient_UE, state.num_steps)
        gradient = self._backpropagation.gradient
        adam_step(state.flat, gradient, state.flat_m, state.flat_v, self._settings, state.num_steps)
        return loss

    def _gradients(self, batch: Batch, vectors_UE: Tensor, drop: Drop | None) -> tuple[Tensor, Tensor]:
        """The batch's mean loss, and its gradient to the distinct rows; that to the dense parameters is kept inside."""
        size, width = len(batch.labels), NUM_CATEGORICAL * self._config.embedding_dim
        to_lookups = torch.empty(size, width)
        losses = []
        self._backpropagation.begin()
        for start in range(0, size, _PART_ROWS):
            part = slice(start, min(start + _PART_ROWS, size))
            lookups = batch.lookups[part.start * NUM_CATEGORICAL : part.stop * NUM_CATEGORICAL]
            looked_up_BX = vectors_UE.index_select(0, lookups).view(-1, width)
            x0_BX = torch.cat([looked_up_BX, batch.dense[part]], dim=1)
            loss, to_vectors = self._backpropagation.part(x0_BX, batch.labels[part], size, drop)
            losses.append(loss)
            if len(to_vectors) == size:
                to_lookups = to_vectors
            else:
                to_lookups[part] = to_vectors
        # Lookups sorted by row make each row's gradients one bag: 0.06 ms for 2048 x 26 lookups of width 16, where
        # index_add_ took 0.3.
        to_lookups = to_lookups.view(-1, self._config.embedding_dim)
        gradient_UE = embedding_bag(batch.order, to_lookups, batch.starts, mode="sum")
        return torch.stack(losses).sum(), gradient_UE
