"""A batch's loss and its gradients, written out for this one network instead of left to autograd.

Matrix products go where they are fastest (`products`), ReLU and dropout are undone from what they left, and gradients
are summed into one flat array in the weight file's order, where Adam wants them. The network's own formula
(`components.dcn`) under autograd, and float64 NumPy, are what tests hold this against.

With bfloat16 the operands of the tower's and of DCN v2's products are rounded to it; sums within products, the cross
layers' state, the loss and everything that Adam keeps are float32.

Shape suffixes: as in `components.dcn.network`; H width of a hidden layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from components.contracts.criteo import NUM_DENSE
from components.contracts.dcn import DcnConfig, dense_places
from components.training.pytorch.cross_gradients import CrossV1, CrossV2
from components.training.pytorch.products import product, rectified

Drop = Callable[[Tensor], None]
"""Zeroes, in place, the dropped ones of a hidden layer's activations [B, H]; scaling the others is done here."""


class Backpropagation:
    """Loss and gradients of the network whose dense parameters lie in one flat array."""

    def __init__(self, config: DcnConfig, flat: Tensor, dtype: torch.dtype) -> None:
        """Makes room for the gradients.

        Args:
            config: Shape of the network.
            flat: Its dense parameters, float32, in `dense_layout` order; read anew in every batch.
            dtype: Of the matrix products' operands: float32 or bfloat16.
        """
        self._config, self._flat, self._dtype = config, flat, dtype
        self._scale = 1 / (1 - config.dropout)
        self._tower_width = config.tower[-1]
        self.gradient = torch.zeros_like(flat)
        """Of the batch's mean loss to each of `flat`, after the batch's last part."""
        self._operands = flat if dtype == flat.dtype else torch.empty_like(flat, dtype=dtype)
        self._exact, self._w, self._g = (views(config, f) for f in (flat, self._operands, self.gradient))
        # The final layer's input is concat(tower, cross): its gradient comes in two halves.
        final = self._g.pop("final.weight")[:, 0]
        self._g["final.tower"], self._g["final.cross"] = final[: self._tower_width], final[self._tower_width :]
        self._is_first_part = True

    def begin(self) -> None:
        """Starts a batch: no gradient yet, and weights as they now are."""
        self._is_first_part = True
        if self._operands is not self._flat:
            self._operands.copy_(self._flat)

    @torch.no_grad()
    def part(self, x0_BX: Tensor, labels_B: Tensor, batch_size: int, drop: Drop | None) -> tuple[Tensor, Tensor]:
        """Adds one part of the batch to `gradient`.

        Args:
            x0_BX: Embedding vectors, then dense values, float32.
            labels_B: 0 or 1, float32.
            batch_size: Rows of the whole batch, over which the loss is a mean.
            drop: Dropout; None = none.

        Returns:
            The part's share of the batch's mean loss, in nats, and that loss's gradient to the embedding vectors,
            [B, F * E].
        """
        hidden = self._tower(x0_BX.to(self._dtype), drop)
        final_H = self._exact["final.weight"][: self._tower_width, 0]
        tower_logit_B = hidden[-1].to(self._flat.dtype) @ final_H + self._exact["final.bias"]
        if self._config.projection_dim:
            cross: CrossV1 | CrossV2 = CrossV2(self._config, self._exact, self._w, self._add)
        else:
            cross = CrossV1(self._config, self._exact, self._add)
        logits_B = cross.logits(x0_BX) + tower_logit_B
        loss = binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum") / batch_size
        to_logits_B = (logits_B.sigmoid() - labels_B) / batch_size
        self._add("final.bias", to_logits_B.sum())
        to_vectors = self._to_vectors(hidden, to_logits_B)
        cross.add_to_vectors(to_vectors, to_logits_B)
        self._is_first_part = False
        return loss, to_vectors

    def _add(self, name: str, gradient: Tensor) -> None:
        """Adds a part's gradient to a parameter's; the first part's is copied, which saves setting zeros."""
        if self._is_first_part:
            self._g[name].copy_(gradient)
        else:
            self._g[name].add_(gradient)

    def _tower(self, x0_BX: Tensor, drop: Drop | None) -> list[Tensor]:
        """The tower's input and its layers' outputs."""
        outputs = [x0_BX]
        for layer in range(len(self._config.tower)):
            outputs.append(rectified(outputs[-1], self._w[f"tower.{layer}.weight"], self._w[f"tower.{layer}.bias"]))
            if drop is not None:
                drop(outputs[-1])
                outputs[-1] *= self._scale
        return outputs

    def _to_vectors(self, outputs: list[Tensor], to_logits_B: Tensor) -> Tensor:
        """The tower's share of the gradient to the vectors; the gradients to its weights are added to `gradient`.

        Takes the activations away from `outputs`.
        """
        to_logits_B = to_logits_B.to(self._dtype)
        self._add("final.tower", outputs[-1].t() @ to_logits_B)
        to_output = torch.outer(to_logits_B, self._w["final.weight"][: self._tower_width, 0])
        for layer in reversed(range(len(self._config.tower))):
            # What is positive was neither cut by ReLU nor dropped.
            # It is given up here: with NVIDIA's sample 8 MB per layer that the products below then need not add.
            torch.ops.aten.threshold_backward.grad_input(to_output, outputs.pop(), 0, grad_input=to_output)
            if self._config.dropout:
                to_output *= self._scale
            self._add(f"tower.{layer}.weight", product(outputs[layer].t(), to_output))
            self._add(f"tower.{layer}.bias", to_output.sum(0))
            weight = self._w[f"tower.{layer}.weight"]
            # Nothing asks for the gradient to the dense values.
            to_output = product(to_output, (weight if layer else weight[:-NUM_DENSE]).t())
        return to_output.to(self._flat.dtype)


def views(config: DcnConfig, flat: Tensor) -> dict[str, Tensor]:
    """The dense parameters by `dense_layout` name, as views of one flat array."""
    return {name: flat[place].view(shape) for name, place, shape in dense_places(config)}
