"""Adam as HugeCTR computes it: for the dense parameters, and for the embedding rows that a batch touches.

With t the number of steps taken, g the gradient of the mean loss (D. Kingma and J. Ba 2014, "epsilon hat" form):
m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).
torch.optim.Adam divides sqrt(v) by sqrt(1 - b2^t) before it adds eps, which is far away for gradients near eps, as
those of embeddings are. For embeddings this is HugeCTR's `Update_t.Local`, equal to torch.optim.SparseAdam: untouched
rows keep weights and moments. One step count is shared by both; it is kept by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from components.training.config import TrainingSettings


def step_size(settings: TrainingSettings, step: int) -> float:
    """The bias-corrected learning rate of step number `step`, counted from 1."""
    return settings.learning_rate * float((1 - settings.beta2**step) ** 0.5 / (1 - settings.beta1**step))


class DenseAdam:
    """Adam over the dense parameters; its moments are flat, in the parameters' order, as HugeCTR's file holds them."""

    def __init__(self, parameters: Sequence[Tensor], settings: TrainingSettings) -> None:
        """Starts with zero moments."""
        self._parameters, self._settings = list(parameters), settings
        self.m = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.v = torch.zeros_like(self.m)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], step: int) -> None:
        """Moves the parameters against `gradients`, shaped as they are, in step number `step` (from 1)."""
        flat = torch.cat([g.reshape(-1) for g in gradients])
        self.m.lerp_(flat, 1 - self._settings.beta1)
        self.v.mul_(self._settings.beta2).addcmul_(flat, flat, value=1 - self._settings.beta2)
        change = (self.m / self.v.sqrt().add_(self._settings.epsilon)).mul_(step_size(self._settings, step))
        for parameter, part in zip(self._parameters, change.split([p.numel() for p in self._parameters])):
            parameter.sub_(part.view_as(parameter))


class RowAdam:
    """Adam over the rows of one table that a batch looked up; a row looked up twice gets the sum of its gradients."""

    def __init__(self, table: Tensor, settings: TrainingSettings) -> None:
        """Starts with zero moments, each as large as the table."""
        self._table, self._settings = table, settings
        self.m, self.v = torch.zeros_like(table), torch.zeros_like(table)

    @torch.no_grad()
    def step(self, keys: Tensor, gradients: Tensor, step: int) -> None:
        """Moves the rows `keys` [n] against `gradients` [n, width] in step number `step` (from 1)."""
        rows, gradient = sum_by_key(keys, gradients)
        m = self.m[rows].lerp_(gradient, 1 - self._settings.beta1)
        v = self.v[rows].mul_(self._settings.beta2).addcmul_(gradient, gradient, value=1 - self._settings.beta2)
        self.m[rows], self.v[rows] = m, v
        change = m.div_(v.sqrt_().add_(self._settings.epsilon)).mul_(step_size(self._settings, step))
        self._table[rows] = self._table[rows].sub_(change)


def sum_by_key(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct keys, ascending, and per key the sum of its rows of `values` [n, width].

    Sorting once and summing runs with embedding_bag is deterministic, also on a GPU, and 5 times as fast as
    embedding_dense_backward on two cores (0.46 against 2.3 ms for 2048 x 26 keys, width 16).
    """
    in_order, positions = torch.sort(keys, stable=True)
    distinct, counts = torch.unique_consecutive(in_order, return_counts=True)
    sums = torch.nn.functional.embedding_bag(positions, values, counts.cumsum(0) - counts, mode="sum")
    return distinct, sums
