"""The cross layers' share of the logit, and its gradients, written out; one object per part of a batch.

Gradients to weights are handed to `add`, by name; "final.cross" is the final layer's cross half. The layers' formulas
are `contracts.dcn`'s.

Shape suffixes: as in `components.dcn.network`; C = L + 1, the cross layers and the final one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from components.contracts.dcn import DcnConfig
from components.training.pytorch.products import product

Add = Callable[[str, Tensor], None]


class CrossV1:
    """The cross part's share of the logit by `DcnNetwork`'s closed form, and its gradients; float32."""

    def __init__(self, config: DcnConfig, w: dict[str, Tensor], add: Add) -> None:
        """Takes views of the parameters."""
        self._add, self._layers, self._tower_width = add, range(config.num_cross_layers), config.tower[-1]
        self._vectors_CX = torch.stack(
            [*(w[f"cross.{i}.weight"] for i in self._layers), w["final.weight"][self._tower_width :, 0]]
        )
        biases_LX = torch.stack([w[f"cross.{i}.bias"] for i in self._layers])
        self._beta_CX = torch.cat([torch.zeros_like(biases_LX[:1]), biases_LX.cumsum(0)])

    def logits(self, x0_BX: Tensor) -> Tensor:
        """[B]; x0 times alpha, plus beta, is what a layer gets."""
        self._x0_BX, self._products_CB = x0_BX, product(self._vectors_CX, x0_BX.t())
        constants_C = (self._beta_CX * self._vectors_CX).sum(1)
        self._alphas = [torch.ones_like(self._products_CB[0])]
        for layer in self._layers:
            alpha_B = self._alphas[-1]
            self._alphas.append(torch.addcmul(alpha_B, alpha_B, self._products_CB[layer]).add_(constants_C[layer]))
        return self._alphas[-1] * self._products_CB[-1] + constants_C[-1]

    def add_to_vectors(self, to_vectors: Tensor, to_logits_B: Tensor) -> None:
        """Adds the cross part's gradient to that of the embedding vectors, [B, F * E]."""
        to_sums_CB = torch.empty_like(self._products_CB)
        # What arrives at s_l = alpha_l * product_l + constant_l: for the last the logit's, else alpha_{l+1}'s gradient.
        to_sums_CB[-1] = to_logits_B
        to_alpha_B = to_logits_B * self._products_CB[-1]
        for layer in reversed(self._layers):
            to_sums_CB[layer] = to_alpha_B
            to_alpha_B = torch.addcmul(to_alpha_B, to_alpha_B, self._products_CB[layer])
        to_products_CB = to_sums_CB * torch.stack(self._alphas)
        to_constants_C1 = to_sums_CB.sum(1, keepdim=True)
        to_weights_CX = product(to_products_CB, self._x0_BX).addcmul_(to_constants_C1, self._beta_CX)
        # Layer l's bias is in every later layer's beta.
        to_biases_CX = (to_constants_C1 * self._vectors_CX).flip(0).cumsum(0).flip(0)
        for layer in self._layers:
            self._add(f"cross.{layer}.weight", to_weights_CX[layer])
            self._add(f"cross.{layer}.bias", to_biases_CX[layer + 1])
        self._add("final.cross", to_weights_CX[-1])
        to_vectors.addmm_(to_products_CB.t(), self._vectors_CX[:, : to_vectors.shape[1]])


class CrossV2:
    """DCN v2's cross layers, one by one; the layers' state is float32, the products' operands are as `w` is."""

    def __init__(self, config: DcnConfig, exact: dict[str, Tensor], w: dict[str, Tensor], add: Add) -> None:
        """Takes views of the parameters, as they are and as operands."""
        self._exact, self._w, self._add = exact, w, add
        self._names = [f"cross.{i}" for i in range(config.num_cross_layers)]
        self._tower_width = config.tower[-1]

    def logits(self, x0_BX: Tensor) -> Tensor:
        """[B]; layer inputs, their projections and what multiplied x0 are kept for `add_to_vectors`."""
        self._x0_BX, state_BX = x0_BX, x0_BX
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for name in self._names:
            input_BX = state_BX.to(self._w["cross.0.u"].dtype)
            projected_BK = product(input_BX, self._w[f"{name}.u"])
            factor_BX = product(projected_BK, self._w[f"{name}.v"]).to(x0_BX.dtype).add_(self._exact[f"{name}.bias"])
            state_BX = torch.addcmul(state_BX, x0_BX, factor_BX)
            self._kept.append((input_BX, projected_BK, factor_BX))
        self._output_BX = state_BX
        return state_BX @ self._exact["final.weight"][self._tower_width :, 0]

    def add_to_vectors(self, to_vectors: Tensor, to_logits_B: Tensor) -> None:
        """Adds the cross part's gradient to that of the embedding vectors, [B, F * E]."""
        width = to_vectors.shape[1]
        self._add("final.cross", to_logits_B @ self._output_BX)
        to_state_BX = torch.outer(to_logits_B, self._exact["final.weight"][self._tower_width :, 0])
        for name, (input_BX, projected_BK, factor_BX) in zip(reversed(self._names), reversed(self._kept)):
            to_factor_BX = to_state_BX * self._x0_BX
            self._add(f"{name}.bias", to_factor_BX.sum(0))
            to_factor_BX = to_factor_BX.to(projected_BK.dtype)
            to_projected_BK = product(to_factor_BX, self._w[f"{name}.v"].t())
            self._add(f"{name}.v", product(projected_BK.t(), to_factor_BX))
            self._add(f"{name}.u", product(input_BX.t(), to_projected_BK))
            to_vectors.addcmul_(to_state_BX[:, :width], factor_BX[:, :width])
            to_state_BX += product(to_projected_BK, self._w[f"{name}.u"].t())
        to_vectors.add_(to_state_BX[:, :width])
