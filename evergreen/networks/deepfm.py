"""DeepFM: a factorization machine and a tower with shared vectors.

Guo et al. published the network (2017, arXiv 1703.04247).

The first number of a category's vector is its first-order weight. The other numbers of a category's
vector are its factors, as in HugeCTR's sample. Each dense value has its own factors, which are
multiplied by the value. The sum of the products of all pairs of factors is (square of the sum - sum
of the squares) / 2.

Sums over fields and factors are computed as matrix products with ones. ONNX Runtime's own sums can
differ in the last bits, depending on the row's position in the batch.

`network` defines the suffixes of the tensor names. Further suffixes: N is the number of fields, F +
D. K is the number of factors in a vector, which is one less than E.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as affine

from evergreen.config.model import DeepFmConfig
from evergreen.networks.network import Network, linear, mlp


class DeepFm(Network):
    """Network that adds first-order weights, pairwise products and the output of a tower."""

    field_sums: Tensor
    """Matrix that sums each factor over all fields, [K, N * K]."""
    pair_sum: Tensor
    """Weights of the squares, [1, K + N * K]: 0.5 for the squared sums and -0.5 for the squared
    factors."""
    category_sum: Tensor
    """Ones, [1, F]."""

    def __init__(self, config: DeepFmConfig) -> None:
        super().__init__()
        num_fields, num_factors = (
            config.num_categorical + config.num_dense,
            config.embedding_dim - 1,
        )
        halves = torch.full((1, num_factors), 0.5), torch.full((1, num_fields * num_factors), -0.5)
        self.register_buffer(
            "field_sums", torch.eye(num_factors).repeat(1, num_fields), persistent=False
        )
        self.register_buffer("pair_sum", torch.cat(halves, dim=1), persistent=False)
        self.register_buffer(
            "category_sum", torch.ones(1, config.num_categorical), persistent=False
        )
        self.dense_factors = nn.Parameter(
            torch.randn(config.num_dense, num_factors) * 0.1 * num_factors**-0.5
        )
        self.first_order = linear(config.num_dense, 1, bias=False) if config.num_dense else None
        self.tower = mlp(
            config.num_categorical * num_factors + config.num_dense,
            config.tower,
            dropout=config.dropout,
        )
        self.final = linear(config.tower[-1], 1, bias=False)

    def forward(self, dense_BD: Tensor, embeddings_BFE: Tensor) -> Tensor:
        """Return the logits. See `Network`."""
        first_BF, factors_BFK = embeddings_BFE[:, :, 0], embeddings_BFE[:, :, 1:]
        fields_BX = torch.cat(
            [factors_BFK, dense_BD.unsqueeze(2) * self.dense_factors], dim=1
        ).flatten(1)
        sums_BK = affine(fields_BX, self.field_sums)
        pairs_B1 = affine(torch.cat([sums_BK, fields_BX], dim=1).square(), self.pair_sum)
        first_B1 = affine(first_BF, self.category_sum)
        if self.first_order is not None:
            first_B1 = first_B1 + self.first_order(dense_BD)
        deep_B1 = self.final(self.tower(torch.cat([factors_BFK.flatten(1), dense_BD], dim=1)))
        return (pairs_B1 + first_B1 + deep_B1)[:, 0] + self.bias


build = DeepFm
