"""Matrix products on the fastest public kernel that PyTorch has for the machine and type.

On CPUs torch.mm hands float32 to MKL, which on AMD leaves half of AVX-512 unused. oneDNN, reached through the operator
that torch's own compiler emits for linear layers, took 25 ms where torch.mm took 53 for 2048 x 1024 by 1024 x 1024
(cores shared with other work; both are float32, with largest errors 1.3e-4 and 7e-5 against float64). bfloat16 goes to
oneDNN either way. Where that operator is absent, torch.mm and torch.addmm do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _has_onednn_linear() -> bool:
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


_ONEDNN_LINEAR = _has_onednn_linear()
_ONEDNN_TYPES = (torch.float32, torch.bfloat16)


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b`, [M, N], in their type."""
    if not (_ONEDNN_LINEAR and a_MK.dtype == torch.float32 and a_MK.device.type == "cpu"):
        return torch.mm(a_MK, b_KN)
    # The first operand gets copied where it is a transposed view, so the narrower one is made the first.
    if a_MK.stride(0) == 1 and len(a_MK) > b_KN.shape[1]:
        return _linear(b_KN.t(), a_MK).t()
    return _linear(a_MK, b_KN.t())


def _linear(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, None, "none", [], "")


def rectified(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor) -> Tensor:
    """`relu(x @ weight + bias)`, [B, O], in their type."""
    if _ONEDNN_LINEAR and x_BI.dtype in _ONEDNN_TYPES and x_BI.device.type == "cpu":
        return torch.ops.mkldnn._linear_pointwise(x_BI, weight_IO.t(), bias_O, "relu", [], "")
    return torch.addmm(bias_O, x_BI, weight_IO).relu_()
