"""The PyTorch engine: what `engine` promises, for any network behind the seam, on the device that is there.

Dense gradients are autograd's. The table's are summed per row here, since autograd would build a gradient for all rows
of a table of which a batch touches a few thousand. On a CPU equal input gives equal bits. Batches are `batches`'; which
rows are learned, in which order and how often is `fit`'s.

Both optimizers are Adam as HugeCTR computes it: with t the number of steps taken and g the gradient of the mean loss,
m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps). torch's Adam
divides sqrt(v) by sqrt(1 - b2^t) before it adds its epsilon, so it is this one when its epsilon is
eps / sqrt(1 - b2^t) in step t. Rows of the table that a batch does not touch keep weights and moments: HugeCTR's
`Update_t.Local`, and torch.optim.SparseAdam.

Shape suffixes: as in `components.models.network`; P places (`contracts.features.Places`), U distinct
table rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag
from torch.optim.adam import adam

from components.contracts.features import Places
from components.models.configs import NetworkConfig
from components.models.files import TABLE, chunks, new_model, open_model, slot_offsets
from components.models.network import build_network, load_dense
from components.models.scoring import Scorer, pooled
from components.training.config import TrainingSettings
from components.training.engine import Rate
from components.training.pytorch.batches import Batch, assemble, made_ahead
from components.training.rows import Rows

_CPU_SEGMENT_ROWS = 32_768
"""Rows of one call of `learn`: on two cores 0.1 s with the default network, 1 s with NVIDIA's sample."""
_GPU_SEGMENT_ROWS = 4_194_304
_BATCHES_AHEAD = {"cpu": 1, "cuda": 3}


class PytorchEngine:
    """Engine of `components.training.engine`, in PyTorch."""

    backend = "pytorch"

    def __init__(
        self,
        config: NetworkConfig,
        slot_sizes: Sequence[int],
        settings: TrainingSettings,
        *,
        device: str | None = None,
        places: Places | None = None,
    ) -> None:
        """Makes an engine whose table is zero everywhere; `restore` gives it weights.

        `device` is torch's name of it; None = the GPU where there is one. Without `places` a row looks every slot up.
        """
        self._settings, self._slot_sizes = settings, list(slot_sizes)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # For the whole process, which has one engine; otherwise a float32 product is exact.
        torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
        self._network = build_network(config).to(self._device)
        self._dense = dict(self._network.named_parameters())
        self._dense_moments = [[torch.zeros_like(each) for each in self._dense.values()] for _ in range(2)]
        self._rows = _zeros((sum(slot_sizes), 3, config.embedding_dim), self._device)
        """Vector, m and v of each row of the table. Side by side they are fetched and stored at once: 1.6 ms of one
        core for the 34,000 distinct rows of a batch from 10 million, where three tables took 3.2."""
        self._places = places or Places(tuple(range(len(slot_sizes))), ())
        self._offsets = slot_offsets(slot_sizes)[list(self._places.slots)]
        """The first row of each place's slot, which is that of padding."""
        self._paddings = torch.from_numpy(self._offsets).to(self._device)
        self._shape_PE = len(self._offsets), config.embedding_dim
        self._rate: Rate = lambda step: settings.learning_rate
        self._scorer = Scorer(self._network, self._rows[:, 0], slot_sizes, places=places)
        self.num_steps = 0

    @torch.no_grad()
    def restore(self, weights: Path) -> None:
        """See `Engine`."""
        stored = open_model(weights, self._slot_sizes)
        load_dense(self._network, stored.weights.dense)
        for number, into in enumerate(self._dense_moments):
            for name, target in zip(self._dense, into):
                target.copy_(torch.from_numpy(stored.moments[number].dense[name])) if stored.moments else target.zero_()
        self._rows.zero_()
        for part in chunks(0, len(self._rows)):
            for number, tensors in enumerate(stored.parts):
                self._rows[part, number] = torch.from_numpy(tensors.table[part]).to(self._device)
        self.num_steps = stored.step

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        shapes = {TABLE: (len(self._rows), self._rows.shape[2])}
        shapes |= {name: tuple(each.shape) for name, each in self._dense.items()}
        dense = [[each.detach() for each in self._dense.values()], *self._dense_moments]
        with new_model(folder, shapes, step=self.num_steps) as stored:
            for number, tensors in enumerate(stored.parts):
                for name, values in zip(self._dense, dense[number]):
                    tensors.dense[name][:] = values.cpu().numpy()
                for part in chunks(0, len(self._rows)):
                    tensors.table[part] = self._rows[part, number].cpu().numpy()

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        rows = _CPU_SEGMENT_ROWS if self._device.type == "cpu" else _GPU_SEGMENT_ROWS
        return max(1, rows // batch_size)

    def learn(
        self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int, rate: Rate | None = None
    ) -> float:
        """See `Engine`."""
        self._rate = rate or (lambda step: self._settings.learning_rate)
        parts = (order[at : at + batch_size] for at in range(0, len(order), batch_size))
        if rows.weights is not None:
            weights = rows.weights
            parts = (part for part in parts if weights[part].any())
        batches = (self._on_device(assemble(rows, part, self._offsets)) for part in parts)
        self._network.train()
        # Dropout draws from torch's generators, which are the caller's again afterwards.
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
        del self._network, self._dense, self._dense_moments, self._rows, self._scorer

    def _on_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return batch.map(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))

    def _step(self, batch: Batch) -> Tensor:
        """The batch's mean loss in nats (binary cross entropy), after a step against its gradient."""
        taken_U3E = self._rows.index_select(0, batch.table_rows)
        vectors_BPE = taken_U3E[:, 0].index_select(0, batch.lookups).view(len(batch.labels), *self._shape_PE)
        vectors_BPE.requires_grad_()
        vectors_BFE = self._pooled(vectors_BPE, batch) if self._places.lists else vectors_BPE
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bfloat16"):
            logits_B = self._network(batch.dense, vectors_BFE)
        if batch.weights is None:
            loss = binary_cross_entropy_with_logits(logits_B.float(), batch.labels)
        else:
            loss = binary_cross_entropy_with_logits(logits_B.float(), batch.labels, batch.weights, reduction="sum")
        to_vectors_BPE, *to_dense = torch.autograd.grad(loss, [vectors_BPE, *self._dense.values()])
        self.num_steps += 1
        with torch.no_grad():
            dense_m, dense_v = self._dense_moments
            self._adam(list(self._dense.values()), to_dense, m=dense_m, v=dense_v)
            if not len(batch.table_rows):  # no categorical columns
                return loss.detach()
            # Lookups sorted by row make each row's gradients one bag: 0.06 ms for 2048 x 26 lookups of width 16, where
            # index_add_ took 0.3.
            to_lookups = to_vectors_BPE.reshape(-1, self._rows.shape[2])
            gradient_UE = embedding_bag(batch.order, to_lookups, batch.starts, mode="sum")
            vectors_UE, m_UE, v_UE = (part.contiguous() for part in taken_U3E.unbind(1))
            self._adam([vectors_UE], [gradient_UE], m=[m_UE], v=[v_UE])
            self._rows.index_copy_(0, batch.table_rows, torch.stack([vectors_UE, m_UE, v_UE], dim=1))
        return loss.detach()

    def _pooled(self, vectors_BPE: Tensor, batch: Batch) -> Tensor:
        rows_BP = batch.table_rows.index_select(0, batch.lookups).view(len(batch.labels), -1)
        return pooled(vectors_BPE, rows_BP != self._paddings, self._places)

    def _adam(self, weights: list[Tensor], gradients: list[Tensor], *, m: list[Tensor], v: list[Tensor]) -> None:
        """Moves `weights`, `m` and `v`, in place, in step number `num_steps`."""
        settings = self._settings
        adam(
            weights,
            gradients,
            m,
            v,
            max_exp_avg_sqs=[],
            # torch counts a step itself before it takes it.
            state_steps=[torch.tensor(float(self.num_steps - 1), device=self._device) for _ in weights],
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=self._rate(self.num_steps),
            weight_decay=0.0,
            eps=settings.epsilon / (1 - settings.beta2**self.num_steps) ** 0.5,
            maximize=False,
        )


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros, which on a CPU take memory only when they are written: rows are decoded before an engine is restored."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)
