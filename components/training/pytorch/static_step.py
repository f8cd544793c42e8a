"""A step whose shapes depend on the batch's size alone, so that a CUDA graph can hold all of it.

`cpu_steps`' step on a CPU works on the distinct rows of a batch, and how many those are, the host must know. Here each
lookup has a place of its own: the first U places hold the distinct rows, all others the table's spare row, which
belongs to no id. The values are those of `cpu_steps`' step up to the order of sums (tested on a CPU); on a GPU that
order, and so the last bits, may differ from run to run. It was not run on a GPU here.

Shape suffixes: as in `components.dcn.network`; N lookups of the batch (B * F).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from components.contracts.dcn import DcnConfig
from components.training.config import TrainingSettings
from components.training.pytorch.gradients import Backpropagation
from components.training.pytorch.model_state import ModelState


class StaticStepper:
    """Steps of one model whose state has a spare row; nothing in a step waits for the device."""

    def __init__(self, state: ModelState, config: DcnConfig, settings: TrainingSettings) -> None:
        """Makes the stepper of `state`, which has one spare row."""
        self._state, self._config, self._settings = state, config, settings
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        self._backpropagation = Backpropagation(config, state.flat, dtype)
        # On the device, since a graph holds no number of the host's that changes; float64, as 0.999^t needs.
        self._step_count = torch.zeros((), dtype=torch.float64, device=state.flat.device)

    @torch.no_grad()
    def step(self, labels_B: Tensor, dense_BD: Tensor, ids_BF: Tensor) -> Tensor:
        """The batch's mean loss in nats, after a step against its gradient.

        Args:
            labels_B: 0 or 1, float32.
            dense_BD: Normalised values, float32.
            ids_BF: Slot-local ids, int32, known to lie in their slots.
        """
        state, size = self._state, len(labels_B)
        keys_N = (ids_BF + state.network.offsets).flatten()
        x0_BX = torch.cat([embedding(keys_N, state.table).view(size, -1), dense_BD], dim=1)
        self._backpropagation.begin()
        drop = self._drop if self._config.dropout else None
        loss, to_vectors = self._backpropagation.part(x0_BX, labels_B, size, drop)
        rows_N, gradient_NE = sum_by_key(keys_N, to_vectors.reshape(len(keys_N), -1), state.num_rows)
        self._move(rows_N, gradient_NE)
        return loss

    def begin(self) -> None:
        """Takes over the step count, which the host keeps; called before the first step and wherever it changed."""
        self._step_count.fill_(self._state.num_steps)

    def _drop(self, activations: Tensor) -> None:
        activations.mul_(torch.empty_like(activations).bernoulli_(1 - self._config.dropout))

    def _move(self, rows_N: Tensor, gradient_NE: Tensor) -> None:
        """Adam on the dense parameters and on the rows; where a row comes twice, both write the same values."""
        state, settings = self._state, self._settings
        self._step_count += 1
        root = torch.sqrt(1 - settings.beta2**self._step_count)
        step_size = (settings.learning_rate * root / (1 - settings.beta1**self._step_count)).float()

        def moved(w: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> Tensor:
            m.lerp_(gradient, 1 - settings.beta1)
            v.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
            return w - (m / v.sqrt().add_(settings.epsilon)).mul_(step_size)

        state.flat.copy_(moved(state.flat, self._backpropagation.gradient, state.flat_m, state.flat_v))
        taken_N3E = state.rows.index_select(0, rows_N)
        vectors_NE, m_NE, v_NE = taken_N3E.unbind(1)
        vectors_NE.copy_(moved(vectors_NE, gradient_NE, m_NE, v_NE))
        state.rows.index_copy_(0, rows_N, taken_N3E)


def sum_by_key(keys_N: Tensor, values_NE: Tensor, spare: int) -> tuple[Tensor, Tensor]:
    """The distinct keys, ascending, then `spare` up to N; per place the sum of its key's values, zero for the spare."""
    in_order, positions = torch.sort(keys_N, stable=True)
    is_first = torch.ones_like(in_order)
    is_first[1:] = in_order[1:] != in_order[:-1]
    place_N = is_first.cumsum(0) - 1
    sums_NE = torch.zeros_like(values_NE).index_add_(0, place_N, values_NE[positions])
    # Lookups of one key write the same number to its place.
    return torch.full_like(keys_N, spare).scatter_(0, place_N, in_order), sums_NE
