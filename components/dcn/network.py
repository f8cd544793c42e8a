"""The Deep & Cross Network's arithmetic in PyTorch, and the way between it and HugeCTR's weight files.

Shape, names and order of the parameters are `contracts.dcn`'s; the bytes are `contracts.model_files`'s. Fitting is left
to training, judging to evaluation, and the served graph to deployment.

Shape suffixes: B rows, F slots (26), D dense values (13), E embedding width, X width of x0 (F * E + D), L cross layers,
K rank of a cross layer's matrix (v2).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.contracts.criteo import CATEGORICAL, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import ModelWeights, open_model
from components.runtime.errors import ContractError


class DcnNetwork(nn.Module):
    """The network of `contracts.dcn`: one fused embedding table, cross layers (v1 or v2), a tower, one logit.

    The table is a buffer and not a parameter: autograd would build a gradient for all of its rows, where a batch
    touches a few thousand. Training takes the gradient of the looked-up vectors (`embed`, then `logits`) instead.

    A new network is zero everywhere; `load_weights` or training's initialisers fill it.
    """

    slot_sizes: Tensor
    """[F]."""
    offsets: Tensor
    """First row of each slot, [F]."""
    embeddings: Tensor
    """[sum(slot_sizes), E]."""

    def __init__(self, config: DcnConfig, slot_sizes: list[int], embeddings: Tensor | None = None) -> None:
        """Makes the network.

        Args:
            config: Its shape.
            slot_sizes: Number of ids per categorical column, 26 of them.
            embeddings: The table, [sum(slot_sizes), E], used as it is; the network lies where it does. None makes one
                of zeros.

        Raises:
            ContractError: another number of slots, or a slot without ids.
        """
        super().__init__()
        check_slot_sizes(slot_sizes)
        self.config = config
        sizes = torch.tensor(slot_sizes, dtype=torch.int64)
        self.register_buffer("slot_sizes", sizes, persistent=False)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        if embeddings is None:
            embeddings = torch.zeros(sum(slot_sizes), config.embedding_dim)
        self.register_buffer("embeddings", embeddings)
        # Parameter names must not hold dots, so the layout's order is kept and its names are added in `named_dense`.
        self.dense_parameters = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _, shape in dense_layout(config))
        self.to(embeddings.device)

    def named_dense(self) -> dict[str, nn.Parameter]:
        """The dense parameters by their `dense_layout` names, in its order."""
        return dict(zip((name for name, _ in dense_layout(self.config)), self.dense_parameters))

    def forward(self, dense_BD: Tensor, ids_BF: Tensor) -> Tensor:
        """Logits [B] of normalised dense values (float32 [B, 13]) and slot-local ids (int64 [B, 26])."""
        return self.logits(dense_BD, self.embed(ids_BF))

    def embed(self, ids_BF: Tensor) -> Tensor:
        """Embedding vectors [B, F, E]; an id outside its slot has a zero vector, HugeCTR's answer for unknown keys."""
        known_BF = (ids_BF >= 0) & (ids_BF < self.slot_sizes)
        keys_BF = torch.where(known_BF, ids_BF, 0) + self.offsets
        vectors_BFE = nn.functional.embedding(keys_BF, self.embeddings)
        return vectors_BFE if bool(known_BF.all()) else vectors_BFE * known_BF.unsqueeze(-1)

    def logits(self, dense_BD: Tensor, vectors_BFE: Tensor) -> Tensor:
        """Logits [B] of normalised dense values and embedding vectors."""
        *parameters, final_weight, final_bias = self.dense_parameters
        num_cross = cross_parameters(self.config)
        cross, tower = parameters[:num_cross], parameters[num_cross:]
        tower_width = self.config.tower[-1]
        x0_BX = torch.cat([vectors_BFE.flatten(1), dense_BD], dim=1)
        if self.config.projection_dim:
            cross_BX = x0_BX
            for u_XK, v_KX, bias_X in zip(cross[::3], cross[1::3], cross[2::3]):
                cross_BX = torch.addcmul(cross_BX, x0_BX, torch.addmm(bias_X, cross_BX @ u_XK, v_KX))
            cross_logit_B = cross_BX @ final_weight[tower_width:, 0]
            hidden = torch.addmm(tower[1], x0_BX, tower[0])
        else:
            cross_logit_B, hidden = self._by_closed_form(x0_BX, cross, tower, final_weight[tower_width:])
        hidden = self._drop(torch.relu(hidden))
        for layer in range(1, len(self.config.tower)):
            hidden = self._drop(torch.relu(torch.addmm(tower[2 * layer + 1], hidden, tower[2 * layer])))
        return hidden @ final_weight[:tower_width, 0] + cross_logit_B + final_bias

    def _by_closed_form(
        self, x0_BX: Tensor, cross: list[Tensor], tower: list[Tensor], final_X1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The cross part's share of the logit (v1), and the tower's first layer before ReLU.

        Every cross layer's output is `alpha * x0 + beta`, alpha a number per row and beta a vector for all rows:
        x_{l+1} = x0 * (x_l . w_l) + x_l + b_l = (alpha_l + x_l . w_l) * x0 + (beta_l + b_l). So one product of x0 with
        all weight vectors replaces L passes over [B, X]; the values are those of the layers run one by one.
        """
        num_layers, cross_weights, cross_biases = self.config.num_cross_layers, cross[::2], cross[1::2]
        # The final layer's share for the cross part is one more weight vector; the tower's first layer rides along.
        vectors_XL = torch.stack([*cross_weights, final_X1[:, 0]], dim=1)
        product = x0_BX @ torch.cat([vectors_XL, tower[0]], dim=1)
        products_BL, hidden = product[:, : num_layers + 1], product[:, num_layers + 1 :] + tower[1]

        beta_LX = torch.cat([torch.zeros_like(final_X1.T), torch.stack(list(cross_biases))]).cumsum(0)
        beta_products_L = (beta_LX * vectors_XL.T).sum(1)
        alpha_B = torch.ones_like(products_BL[:, 0])
        for layer in range(num_layers):
            alpha_B = alpha_B + (alpha_B * products_BL[:, layer] + beta_products_L[layer])
        return alpha_B * products_BL[:, num_layers] + beta_products_L[num_layers], hidden

    def _drop(self, hidden: Tensor) -> Tensor:
        if not self.config.dropout:
            return hidden
        return nn.functional.dropout(hidden, self.config.dropout, self.training)


def cross_parameters(config: DcnConfig) -> int:
    """Number of dense parameters that belong to cross layers, the first ones of `dense_layout`."""
    return config.num_cross_layers * (3 if config.projection_dim else 2)


def check_slot_sizes(slot_sizes: list[int]) -> None:
    """Refuses slot sizes that are not one positive number for each of the 26 columns.

    Raises:
        ContractError: another number of slots, or a slot without ids.
    """
    if len(slot_sizes) != NUM_CATEGORICAL:
        raise ContractError(f"there are {len(slot_sizes)} slot sizes, expected {NUM_CATEGORICAL}")
    for name, size in zip(CATEGORICAL, slot_sizes):
        if size < 1:
            raise ContractError(f"slot size of {name} is {size}, expected at least 1")


def load_weights(network: DcnNetwork, weights: ModelWeights) -> None:
    """Copies `weights` into `network`.

    Raises:
        ContractError: a parameter is missing or has another shape than the network's.
    """
    if weights.embeddings.shape != tuple(network.embeddings.shape):
        raise ContractError(
            f"embeddings have shape {weights.embeddings.shape}, expected {tuple(network.embeddings.shape)}"
        )
    # torch.tensor copies: arrays read from files are read-only.
    network.embeddings.copy_(torch.tensor(weights.embeddings))
    _load_dense(network, weights.dense)


@torch.no_grad()
def _load_dense(network: DcnNetwork, dense: dict[str, NDArray[np.float32]]) -> None:
    for name, parameter in network.named_dense().items():
        if name not in dense or dense[name].shape != tuple(parameter.shape):
            shape = dense[name].shape if name in dense else None
            raise ContractError(f"dense parameter {name} has shape {shape}, expected {tuple(parameter.shape)}")
        parameter.copy_(torch.tensor(dense[name]))


def load_network(weights_folder: Path, config: DcnConfig, slot_sizes: list[int]) -> DcnNetwork:
    """The network whose weights lie in `weights_folder` (a model's `weights/`), ready to score.

    The table is read in chunks, so no second one is held.

    Raises:
        ContractError: a file is absent, truncated, oversized or holds keys that no slot has.
    """
    network = DcnNetwork(config, slot_sizes)
    stored = open_model(weights_folder, config, slot_sizes)
    _load_dense(network, stored.dense())
    for chunk in stored.chunks(moments=False):
        network.embeddings.index_copy_(0, torch.tensor(chunk.keys), torch.tensor(chunk.vectors))
    network.eval()
    return network


def to_weights(network: DcnNetwork) -> ModelWeights:
    """A copy of the network's weights, without optimizer state."""
    return ModelWeights(
        dense={name: p.detach().cpu().numpy().copy() for name, p in network.named_dense().items()},
        embeddings=network.embeddings.cpu().numpy().copy(),
    )


@torch.no_grad()
def predict(
    network: DcnNetwork, dense: NDArray[np.float32], ids: NDArray[np.int64], batch_size: int = 2048
) -> NDArray[np.float32]:
    """Click probabilities, float32 [n]; the same input gives the same bits on the same machine.

    The last bits depend on `batch_size` and the number of threads, as those of every matrix product do.

    Args:
        network: The network; its training mode is left as it was, and dropout is off.
        dense: Normalised values, [n, 13].
        ids: Slot-local ids, [n, 26]; one outside its slot scores with a zero vector. Any integer type.
        batch_size: Rows at a time.

    Raises:
        ContractError: the shapes are not [n, 13] and [n, 26].
    """
    if dense.shape != (len(dense), NUM_DENSE) or ids.shape != (len(dense), NUM_CATEGORICAL):
        raise ContractError(f"dense and ids have shapes {dense.shape} and {ids.shape}, expected [n, 13] and [n, 26]")
    device, was_training = network.embeddings.device, network.training
    probabilities = np.empty(len(dense), dtype=np.float32)
    network.eval()
    try:
        for at in range(0, len(dense), batch_size):
            dense_BD = torch.from_numpy(np.ascontiguousarray(dense[at : at + batch_size], np.float32)).to(device)
            ids_BF = torch.from_numpy(np.ascontiguousarray(ids[at : at + batch_size], np.int64)).to(device)
            probabilities[at : at + batch_size] = torch.sigmoid(network(dense_BD, ids_BF)).cpu().numpy()
    finally:
        network.train(was_training)
    return probabilities
