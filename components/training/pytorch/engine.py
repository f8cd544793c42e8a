"""The PyTorch engine, for any network, on the available device.

Autograd computes the dense gradients. The gradients of the embedding tables are summed per row in
this module. Autograd would build a gradient for all rows of a table, although a batch touches only
a few thousand rows. On a CPU, equal input gives equal bits. A separate thread gathers the next
batch during the current step, and its look-ups are computed on the device. `fit` decides which rows
are used, in which order and how often.

Both optimizers are Adam as HugeCTR computes it. For step t and the gradient g of the mean loss, the
update is:

    m = b1 m + (1 - b1) g

    v = b2 v + (1 - b2) g^2

    w = w - lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)

HugeCTR adds epsilon before it corrects the bias of v, and torch's Adam adds epsilon afterwards.
Adam of torch gives the same result with an epsilon of eps / sqrt(1 - b2^t) in step t. Table rows
that a batch does not touch keep their weights and moments, as with HugeCTR's `Update_t.Local` and
torch.optim.SparseAdam.

Tensor names end in letters for their dimensions, as in `evergreen.networks.network`. This module
also uses P, L and U. P is the number of positions of a table (`evergreen.networks.files.Table`). L
is the number of look-ups of a batch in the table. U is the number of distinct rows among the
look-ups.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

from components.training.engine import Rate
from components.training.rows import Rows, open_rows
from components.training.torch_parts import (
    SEGMENT_ROWS,
    Adam,
    Batch,
    DensePart,
    Lookups,
    TablePositions,
    assemble,
    made_ahead,
    require_tables,
)
from evergreen.config.features import FeaturePositions
from evergreen.config.model import NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import (
    chunks,
    columns_of,
    new_model,
    num_rows,
    one_id_per_slot,
    open_model,
    table_shapes,
    tables_of,
)
from evergreen.networks.network import build_network
from evergreen.networks.scoring import Scorer, side_by_side

logger = logging.getLogger(__name__)

_BATCHES_AHEAD = {"cpu": 0, "cuda": 3}
"""Number of batches that a thread assembles ahead of the training. On a CPU, both threads would run
torch's operations on all cores. On two cores, training would take 1.2 to 1.4 times as long."""
_MIN_GPU_BATCH = 16_384
"""With fewer rows per step, a GPU mostly waits for its kernels to be started. With 2,048 rows per
step, the calculated maximum is about 1.4 million rows/s on any GPU."""


class PytorchEngine:
    """Implementation of `components.training.engine.Engine` with PyTorch."""

    backend = "pytorch"
    open_rows = staticmethod(open_rows)

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: Sequence[int],
        settings: TrainingSettings,
        *,
        device: str | None = None,
        positions: FeaturePositions | None = None,
    ) -> None:
        """Create an engine whose tables are all zero. `restore` loads weights.

        Args:
            config: Configuration of the network.
            slot_sizes: Number of ids of each slot.
            settings: Settings of the fit.
            device: torch's name of the device. None means the GPU, or the CPU if there is no GPU.
            positions: Slot of each categorical position, and the positions of each list. If
                `positions` is None, a row looks up each slot once.
        """
        self._settings, self._slot_sizes = settings, list(slot_sizes)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # This flag applies to the whole process, which has only one engine. If the flag is off,
        # float32 products are exact.
        torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
        self._network = build_network(config).to(self._device)
        self._dense = DensePart(self._network)
        self._tables = tables_of(positions or one_id_per_slot(slot_sizes), config.widths)
        self._rows = [
            _zeros((count, 3, width), self._device)
            for count, width in zip(num_rows(self._tables, slot_sizes), config.table_widths)
        ]
        """Vector, m and v of each row of each table. Vector, m and v are adjacent, so that one
        operation reads or writes all three. For the 34,000 distinct rows of a batch, out of 10
        million rows, this takes 1.6 ms on one core. Three separate arrays take 3.2 ms."""
        self._positions = [
            TablePositions(columns, table.offsets(slot_sizes), table.positions, device=self._device)
            for table, columns in zip(self._tables, columns_of(self._tables))
        ]
        self._rate: Rate = lambda step: settings.learning_rate
        vectors = [rows[:, 0] for rows in self._rows]
        self._scorer = Scorer(self._network, vectors, self._tables, slot_sizes=slot_sizes)
        self.num_steps = 0
        self._is_hinted = False

    @property
    def _table_shapes(self) -> list[tuple[int, int]]:
        return [(len(rows), rows.shape[2]) for rows in self._rows]

    @torch.no_grad()
    def restore(self, weights: Path) -> None:
        """See `Engine`."""
        stored = open_model(weights, self._slot_sizes)
        self._dense.restore(stored)
        require_tables(stored, self._table_shapes, weights)
        for at, rows in enumerate(self._rows):
            rows.zero_()
            for part in chunks(0, len(rows)):
                for number, tensors in enumerate(stored.parts):
                    rows[part, number] = torch.from_numpy(tensors.tables[at][part]).to(self._device)
        self.num_steps = stored.step

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        shapes = table_shapes(self._table_shapes) | self._dense.shapes
        with new_model(folder, shapes, step=self.num_steps) as stored:
            self._dense.save(stored)
            for number, tensors in enumerate(stored.parts):
                for rows, table in zip(self._rows, tensors.tables):
                    for part in chunks(0, len(rows)):
                        table[part] = rows[part, number].cpu().numpy()

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, SEGMENT_ROWS[self._device.type] // batch_size)

    def train(
        self,
        rows: Rows,
        order: NDArray[np.int64],
        *,
        batch_size: int,
        seed: int,
        rate: Rate | None = None,
    ) -> float:
        """See `Engine`."""
        if self._device.type == "cuda" and not self._is_hinted:
            self._is_hinted = True
            for hint in gpu_hints(self._settings, batch_size):
                logger.info(hint)
        self._rate = rate or (lambda step: self._settings.learning_rate)
        parts = (order[at : at + batch_size] for at in range(0, len(order), batch_size))
        if rows.weights is not None:
            weights = rows.weights
            parts = (part for part in parts if weights[part].any())
        batches = (assemble(rows, part, self._positions, device=self._device) for part in parts)
        self._network.train()
        # Dropout draws from torch's generators. The state of these generators is restored
        # afterwards, because they belong to the caller.
        with (
            torch.random.fork_rng([self._device] if self._device.type == "cuda" else []),
            closing(made_ahead(batches, _BATCHES_AHEAD[self._device.type])) as assembled,
        ):
            torch.manual_seed(seed)
            losses = [self._step(batch) for batch in assembled]
        return float(torch.stack(losses).mean()) if losses else 0.0

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        probabilities: NDArray[np.float32] = self._scorer.probabilities(rows.dense, rows.ids)
        return probabilities

    def close(self) -> None:
        """See `Engine`."""
        del self._network, self._dense, self._rows, self._scorer

    def _step(self, batch: Batch) -> Tensor:
        """Take an optimizer step and return the batch's mean loss before the step, in nats."""
        selected = [
            rows.index_select(0, of.table_rows) for rows, of in zip(self._rows, batch.lookups)
        ]
        sums = [
            _summed_lookups(selected_U3E[:, 0], of).requires_grad_()
            for selected_U3E, of in zip(selected, batch.lookups)
        ]
        vectors_BFE = side_by_side(
            [
                (each if of.shares is None else each * of.shares).view(
                    len(batch.labels), -1, rows.shape[2]
                )
                for each, of, rows in zip(sums, batch.lookups, self._rows)
            ],
            self._tables,
        )
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16"
        ):
            logits_B = self._network(batch.dense, vectors_BFE)
        if batch.weights is None:
            loss = binary_cross_entropy_with_logits(logits_B.float(), batch.labels)
        else:
            loss = binary_cross_entropy_with_logits(
                logits_B.float(), batch.labels, batch.weights, reduction="sum"
            )
        gradients = torch.autograd.grad(loss, [*sums, *self._dense.weights.values()])
        to_sums, to_dense = gradients[: len(sums)], list(gradients[len(sums) :])
        self.num_steps += 1
        with torch.no_grad():
            adam = Adam(self._settings, self.num_steps, self._rate(self.num_steps))
            self._dense.step(adam, to_dense)
            for rows, of, selected_U3E, to_sums_VE in zip(
                self._rows, batch.lookups, selected, to_sums
            ):
                if not len(of.table_rows):  # no categorical columns
                    continue
                # The look-ups are sorted by row, so `embedding_bag` can sum the gradients of each
                # row. The sums take 0.06 ms for 2048 x 26 look-ups of width 16, and index_add_
                # takes 0.3 ms.
                gradient_UE = embedding_bag(of.order, to_sums_VE, of.starts, mode="sum")
                vectors_UE, m_UE, v_UE = (part.contiguous() for part in selected_U3E.unbind(1))
                adam.step([vectors_UE], [gradient_UE], m=[m_UE], v=[v_UE])
                rows.index_copy_(0, of.table_rows, torch.stack([vectors_UE, m_UE, v_UE], dim=1))
        return loss.detach()


def gpu_hints(settings: TrainingSettings, batch_size: int) -> list[str]:
    """Return advice on how to train faster on a GPU.

    Larger batches take fewer steps and change the model, so they are not the default.

    Args:
        settings: Settings of the fit.
        batch_size: Rows per step. The batch size is less than the setting if a pass would be too
            short.
    """
    hints = []
    if batch_size == settings.batch_size < _MIN_GPU_BATCH:
        hints.append(
            f"batch_size is {batch_size}: a GPU mostly waits for its kernels to be started. A "
            f"batch_size of {_MIN_GPU_BATCH} or more is faster, if the AUC stays the same"
        )
    if settings.precision == "float32":
        hints.append(
            "precision is float32: on Ampere and newer GPUs, precision tf32 makes matrix products "
            "several times faster"
        )
    return hints


def _summed_lookups(vectors_UE: Tensor, of: Lookups) -> Tensor:
    """Return for each vector the sum of its look-ups, [B * F, E]."""
    if of.bags is None:
        return vectors_UE.index_select(0, of.inverse)
    return embedding_bag(of.inverse, vectors_UE, of.bags, mode="sum")


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU, zeros take no memory until they are written.

    Training rows are decoded before the weights are restored. During decoding, the zeros therefore
    take no memory.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)
