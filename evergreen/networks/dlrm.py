"""DLRM: dot products of all pairs of vectors, followed by a tower.

Naumov et al. published the network (2019, arXiv 1906.00091).

The bottom tower converts the dense values to an additional vector. The bottom tower has one hidden
layer, as wide as the last layer of the top tower. The inputs of the top tower are the output of the
bottom tower, and the dot products of all pairs of different vectors. Without dense values, the
network has no bottom tower, and the top tower gets only the dot products.

`network` defines the suffixes of the tensor names. Further suffixes: N is the number of vectors (F,
or F + 1 with dense values), and P is the number of pairs.
"""

import torch
from torch import Tensor

from evergreen.config.model import DlrmConfig
from evergreen.networks.network import Network, linear, mlp


class Dlrm(Network):
    """Bottom tower, dot products and top tower."""

    pairs: Tensor
    """Positions of the products below the diagonal in the flattened [N, N] matrix, [P]."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        has_dense = config.num_dense > 0
        num_vectors = config.num_categorical + has_dense
        lower = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", lower[0] * num_vectors + lower[1], persistent=False)
        hidden = [config.tower[-1], config.embedding_dim]
        self.bottom = mlp(config.num_dense, hidden, dropout=config.dropout) if has_dense else None
        num_inputs = has_dense * config.embedding_dim + len(self.pairs)
        self.tower = mlp(num_inputs, config.tower, dropout=config.dropout)
        self.final = linear(config.tower[-1], 1, bias=False)

    def forward(self, dense_BD: Tensor, embeddings_BFE: Tensor) -> Tensor:
        """Return the logits. See `Network`."""
        dense_BE, vectors_BNE = dense_BD, embeddings_BFE
        if self.bottom is not None:
            dense_BE = self.bottom(dense_BD)
            vectors_BNE = torch.cat([dense_BE.unsqueeze(1), embeddings_BFE], dim=1)
        products_BP = (
            (vectors_BNE @ vectors_BNE.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        )
        return self.final(self.tower(torch.cat([dense_BE, products_BP], dim=1)))[:, 0] + self.bias


build = Dlrm
