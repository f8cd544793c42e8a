"""Adam against float64 NumPy, and the row form against torch's own SparseAdam."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from components.training.config import TrainingSettings
from components.training.pytorch import optimizers
from components.training.pytorch.optimizers import RowAdam, adam_step

SETTINGS = TrainingSettings(learning_rate=0.01)


def adam_by_the_book(weights, gradients, first_step=1, beta1=0.9, beta2=0.999):
    w, m, v = weights.astype(np.float64), np.zeros(weights.shape), np.zeros(weights.shape)
    for t, g in enumerate(gradients, start=first_step):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - 0.01 * np.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (np.sqrt(v) + 1e-7)
    return w, m, v


def small_and_large(random, shape):
    """Gradients near epsilon tell HugeCTR's placement of epsilon from torch.optim.Adam's."""
    return random.normal(size=shape) * 10.0 ** random.integers(-8, 0, shape)


@pytest.mark.parametrize("first_step", [1, 5_000], ids=["from scratch", "continued"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)], ids=["usual", "no memory"])
def test_adam_equals_float64_numpy_also_for_gradients_as_small_as_epsilon(first_step, betas):
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=40), small_and_large(random, (20, 40))
    settings = TrainingSettings(learning_rate=0.01, beta1=betas[0], beta2=betas[1])
    expected = adam_by_the_book(start, gradients, first_step, *betas)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        w, m, v = torch.tensor(start, dtype=dtype), torch.zeros(40, dtype=dtype), torch.zeros(40, dtype=dtype)
        for step, gradient in enumerate(gradients, start=first_step):
            adam_step(w, torch.tensor(gradient, dtype=dtype), m, v, settings, step)
        np.testing.assert_allclose(w.numpy(), expected[0], rtol=tolerance, atol=tolerance)
        for moment, truth in ((m, expected[1]), (v, expected[2])):
            np.testing.assert_allclose(moment.numpy(), truth, rtol=20 * tolerance, atol=1e-16)


@pytest.mark.parametrize("rows_at_once", [3, 100], ids=["in parts", "at once"])
def test_row_adam_equals_torchs_sparse_adam_and_leaves_other_rows_alone(monkeypatch, rows_at_once):
    monkeypatch.setattr(optimizers, "_ROWS_AT_ONCE", rows_at_once)
    random = np.random.default_rng(1)
    start = torch.tensor(random.normal(size=(30, 4)), dtype=torch.float64)
    reference = torch.nn.Parameter(start.clone())
    whole = torch.stack([start, torch.zeros_like(start), torch.zeros_like(start)], dim=1)
    adam = RowAdam(whole, SETTINGS)
    peer = torch.optim.SparseAdam([reference], lr=0.01, eps=1e-7)
    for step in range(1, 25):
        rows = torch.tensor(np.sort(random.choice(20, 7, replace=False)))
        gradient = torch.tensor(small_and_large(random, (7, 4)))
        taken = adam.take(rows)
        assert torch.equal(taken, whole[rows])
        adam.step(rows, taken, gradient, step)
        reference.grad = torch.sparse_coo_tensor(rows[None], gradient, (30, 4), check_invariants=True)
        peer.step()
    torch.testing.assert_close(whole[:, 0], reference.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(whole[20:, 0], start[20:])
    assert not whole[20:, 1:].any()
