"""Deep & Cross Network: cross layers and a tower, both applied to x0.

x0 is concat(vectors, dense values). A cross layer of DCN v1 (Wang et al. 2017, arXiv 1708.05123) is
`x_{l+1} = x0 * (x_l . w_l) + x_l + b_l`. A cross layer of DCN v2 with low-rank matrices (Wang et
al. 2021, arXiv 2008.13535) is `x_{l+1} = x0 * (x_l U_l V_l + b_l) + x_l`. The logit is one linear
layer on concat(tower, cross). HugeCTR's layer MultiCross computes the same function.

`network` defines the suffixes of the tensor names. Further suffixes: L is the number of cross
layers, M is L + 1, and K is the rank of a cross layer's matrices.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as affine

from evergreen.config.model import DcnConfig
from evergreen.networks.network import Network, linear, mlp


class Dcn(Network):
    """DCN v1, or DCN v2 if `projection_dim` is set. Weights are initialised as in HugeCTR."""

    factor_bias: Tensor
    """Bias of each factor, [M]: 1 for a cross layer and 0 for the final layer."""

    def __init__(self, config: DcnConfig) -> None:
        super().__init__()
        rank, shape = config.projection_dim, (config.num_cross_layers, config.input_width)
        if rank:
            deviation = (2 / (config.input_width + rank)) ** 0.5
            self.cross_u = nn.Parameter(torch.randn(*shape, rank) * deviation)
            self.cross_v = nn.Parameter(torch.randn(shape[0], rank, shape[1]) * deviation)
        else:
            self.cross_weight = nn.Parameter(torch.randn(shape) * config.input_width**-0.5)
            self.register_buffer(
                "factor_bias", torch.tensor([1.0] * shape[0] + [0.0]), persistent=False
            )
        self.cross_bias = nn.Parameter(torch.zeros(shape))
        self.tower = mlp(config.input_width, config.tower, dropout=config.dropout)
        # The final layer is split into two parameters. After the split, the exported graph
        # multiplies only by constants. ONNX Runtime packs constants once, so its results have equal
        # bits for any number of rows.
        final_1 = linear(config.tower[-1] + config.input_width, 1, bias=False).weight.detach()
        self.final_tower = nn.Parameter(final_1[:, : config.tower[-1]].clone())
        self.final_cross = nn.Parameter(final_1[:, config.tower[-1] :].clone())
        self._cross_logits = self._by_matrices if rank else self._by_vectors

    def forward(self, dense_BD: Tensor, embeddings_BFE: Tensor) -> Tensor:
        """Return the logits. See `Network`."""
        x0_BX = torch.cat([embeddings_BFE.flatten(1), dense_BD], dim=1)
        return (affine(self.tower(x0_BX), self.final_tower, self.bias) + self._cross_logits(x0_BX))[
            :, 0
        ]

    def _by_vectors(self, x0_BX: Tensor) -> Tensor:
        """Return the contribution of the cross layers of DCN v1 to the logits, [B, 1].

        The output of every cross layer is `scale * x0 + shift`. There is one scale for each row,
        and one shift vector for all rows. The recursion is x_{l+1} = (scale_l + x_l . w_l) * x0 +
        (shift_l + b_l), where x_l . w_l = scale_l * (x0 . w_l) + shift_l . w_l. One product of x0
        with all weight vectors therefore replaces L passes over [B, X]. Training and the served
        graph both use this formula.
        """
        vectors_MX = torch.cat([self.cross_weight, self.final_cross])
        shifts_MX = torch.cat([torch.zeros_like(self.final_cross), self.cross_bias.cumsum(0)])
        constants_M = (shifts_MX * vectors_MX).sum(1)
        *factors, product_B1 = affine(x0_BX, vectors_MX, self.factor_bias).split(1, dim=1)
        scale_B1 = factors[0]
        for layer in range(1, len(factors)):
            scale_B1 = scale_B1 * factors[layer] + constants_M[layer]
        return scale_B1 * product_B1 + constants_M[-1]

    def _by_matrices(self, x0_BX: Tensor) -> Tensor:
        """Return the contribution of the cross layers of DCN v2 to the logits, [B, 1]."""
        cross_BX = x0_BX
        for u_XK, v_KX, bias_X in zip(self.cross_u, self.cross_v, self.cross_bias):
            cross_BX = x0_BX * torch.addmm(bias_X, cross_BX @ u_XK, v_KX) + cross_BX
        return affine(cross_BX, self.final_cross)


build = Dcn
