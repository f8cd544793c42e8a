"""The product that the machine is fastest at is a product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from components.training.pytorch import products
from components.training.pytorch.products import product, rectified

PRECISION = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 5e-3}
types = pytest.mark.parametrize("dtype", PRECISION, ids=str)


def operands(dtype, *shapes):
    random = np.random.default_rng(0)
    return [torch.from_numpy(random.normal(size=shape)).to(dtype) for shape in shapes]


def assert_close(mine, truth, dtype):
    assert mine.dtype == dtype
    np.testing.assert_allclose(mine.double(), truth, rtol=0, atol=PRECISION[dtype] * np.abs(truth).max())


@types
@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN where it is", "without oneDNN"])
@pytest.mark.parametrize(("m", "k", "n"), [(33, 65, 17), (1, 9, 1), (7, 1, 5)])
def test_products_of_any_strides_equal_float64s(monkeypatch, dtype, onednn, m, k, n):
    if not onednn:
        monkeypatch.setattr(products, "_ONEDNN_LINEAR", False)
    a, b, bias = operands(dtype, (m, k), (k, n), (n,))
    wide_a, wide_b = operands(dtype, (m, 2 * k), (k, 2 * n))
    truth = a.double().numpy() @ b.double().numpy()
    assert_close(product(a, b), truth, dtype)
    assert_close(product(a.t().contiguous().t(), b.t().contiguous().t()), truth, dtype)
    sliced = wide_a.double().numpy()[:, ::2] @ wide_b.double().numpy()[:, :n]
    assert_close(product(wide_a[:, ::2], wide_b[:, :n]), sliced, dtype)
    assert_close(rectified(a, b, bias), np.maximum(truth + bias.double().numpy(), 0), dtype)
