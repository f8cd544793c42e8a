"""Adam against float64 NumPy, and the row form against torch's own SparseAdam."""

from __future__ import annotations

import numpy as np
import torch

from components.training.config import TrainingSettings
from components.training.optimizers import DenseAdam, RowAdam, sum_by_key

SETTINGS = TrainingSettings(learning_rate=0.01)


def adam_by_the_book(weights, gradients, first_step=1):
    w, m, v = weights.astype(np.float64), np.zeros(weights.shape), np.zeros(weights.shape)
    for t, g in enumerate(gradients, start=first_step):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    return w, m, v


def test_dense_adam_equals_float64_numpy_also_for_gradients_as_small_as_epsilon():
    random = np.random.default_rng(0)
    start = random.normal(size=(3, 4)).astype(np.float32)
    # Gradients near epsilon tell HugeCTR's placement of epsilon from torch.optim.Adam's.
    gradients = random.normal(size=(20, 3, 4)) * 10.0 ** random.integers(-8, 0, (20, 3, 4))
    weights, other = torch.tensor(start), torch.zeros(5)
    adam = DenseAdam([weights, other], SETTINGS)
    for step, gradient in enumerate(gradients, start=1):
        adam.step([torch.tensor(gradient, dtype=torch.float32), torch.zeros(5)], step)
    expected, m, v = adam_by_the_book(start, gradients)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(adam.m[:12].view(3, 4).numpy(), m, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(adam.v[:12].view(3, 4).numpy(), v, rtol=1e-4, atol=1e-12)
    assert not other.any()


def test_row_adam_equals_torchs_sparse_adam_and_leaves_other_rows_alone():
    random = np.random.default_rng(1)
    start = torch.tensor(random.normal(size=(30, 4)), dtype=torch.float64)
    table, reference = start.clone(), torch.nn.Parameter(start.clone())
    adam = RowAdam(table, SETTINGS)
    peer = torch.optim.SparseAdam([reference], lr=0.01, eps=1e-7)
    for step in range(1, 25):
        keys = torch.tensor(random.integers(0, 20, 40))
        gradients = torch.tensor(random.normal(size=(40, 4)) * 10.0 ** random.integers(-8, 0, (40, 4)))
        adam.step(keys, gradients, step)
        reference.grad = torch.sparse_coo_tensor(keys[None], gradients, (30, 4), check_invariants=True)
        peer.step()
    torch.testing.assert_close(table, reference.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(table[20:], start[20:])
    assert not adam.m[20:].any()


def test_a_key_seen_twice_gets_the_sum_of_its_rows():
    keys, sums = sum_by_key(torch.tensor([5, 2, 5, 9]), torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    assert keys.tolist() == [2, 5, 9]
    assert sums.tolist() == [[2.0], [4.0], [4.0]]
