"""A network with its optimizers: one step, and the way from and to the weights of a model.

Order of rows, epochs and when to stop are `pytorch_trainer`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import ModelWeights
from components.dcn.network import DcnNetwork, load_weights, to_weights
from components.training.config import TrainingSettings
from components.training.optimizers import DenseAdam, RowAdam


class Stepper:
    """Network, Adam's moments and the step count: all that a step changes."""

    def __init__(
        self, config: DcnConfig, slot_sizes: list[int], settings: TrainingSettings, device: torch.device
    ) -> None:
        """Makes a network of zeros; `restore` gives it weights."""
        self.network = DcnNetwork(config, slot_sizes).to(device)
        self.num_steps = 0
        self._dense_adam = DenseAdam(list(self.network.dense_parameters), settings)
        self._row_adam = RowAdam(self.network.embeddings, settings)

    def step(self, labels_B: Tensor, dense_BD: Tensor, ids_BF: Tensor) -> Tensor:
        """The batch's mean loss in nats (binary cross entropy), after a step against its gradient.

        Args:
            labels_B: 0 or 1, float32.
            dense_BD: Normalised values, float32.
            ids_BF: Slot-local ids, int64, known to lie in their slots.
        """
        network = self.network
        keys_BF = ids_BF + network.offsets
        vectors_BFE = embedding(keys_BF, network.embeddings).requires_grad_()
        loss = binary_cross_entropy_with_logits(network.logits(dense_BD, vectors_BFE), labels_B)
        to_vectors, *to_dense = torch.autograd.grad(loss, [vectors_BFE, *network.dense_parameters])
        self.num_steps += 1
        self._dense_adam.step(to_dense, self.num_steps)
        self._row_adam.step(keys_BF.flatten(), to_vectors.flatten(0, 1), self.num_steps)
        return loss.detach()

    def restore(self, weights: ModelWeights, num_steps: int) -> None:
        """Takes over weights, moments (zero where `weights` has none) and the step count.

        Raises:
            ContractError: a parameter has another shape than the network's.
        """
        load_weights(self.network, weights)
        for adam, moments in (
            (self._dense_adam, weights.dense_moments),
            (self._row_adam, weights.embedding_moments),
        ):
            for target, source in zip((adam.m, adam.v), moments or (None, None)):
                if source is None:
                    target.zero_()
                else:
                    # torch.tensor copies: arrays read from files are read-only.
                    target.copy_(torch.tensor(source))
        self.num_steps = num_steps

    def weights(self) -> ModelWeights:
        """A copy of weights and moments."""
        plain = to_weights(self.network)
        dense, rows = self._dense_adam, self._row_adam
        return ModelWeights(
            dense=plain.dense,
            embeddings=plain.embeddings,
            dense_moments=(dense.m.cpu().numpy().copy(), dense.v.cpu().numpy().copy()),
            embedding_moments=(rows.m.cpu().numpy().copy(), rows.v.cpu().numpy().copy()),
        )
