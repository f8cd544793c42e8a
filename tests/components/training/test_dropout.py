"""Dropout's zeroes: as many as asked for, the same for the same seed, and nothing else changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from components.training.pytorch.dropout import RandomDrop

both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@both_types
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_each_activation_is_zeroed_with_the_rates_probability_and_others_keep_their_bits(dtype, rate):
    drop, shape = RandomDrop(rate, seed=3), (400, 333)
    activations = torch.randn(shape, generator=torch.Generator().manual_seed(0)).abs().add(0.1).to(dtype)
    dropped = activations.clone()
    drop(dropped)
    kept = dropped != 0
    assert torch.equal(dropped[kept], activations[kept])
    share, n = 1 - kept.double().mean().item(), kept.numel()
    assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / n) ** 0.5)
    for axis in (0, 1):
        shares = 1 - kept.double().mean(axis).numpy()
        deviation = (rate * (1 - rate) / shape[axis]) ** 0.5
        assert shares.std() == pytest.approx(deviation, rel=0.25)


@both_types
def test_seeds_decide_which(dtype):
    def zeroed(seed):
        drop, activations = RandomDrop(0.5, seed), [torch.ones(20, 31, dtype=dtype) for _ in range(2)]
        for one in activations:
            drop(one)
        return np.stack([one.float().numpy() for one in activations])

    np.testing.assert_array_equal(zeroed(1), zeroed(1))
    assert (zeroed(1) != zeroed(2)).any()
    assert (zeroed(1)[0] != zeroed(1)[1]).any()


@both_types
def test_signs_zeros_and_infinities_survive(dtype):
    special = torch.tensor([[-0.0, 0.0, float("inf"), -float("inf"), -1.5]] * 64, dtype=dtype)
    dropped = special.clone()
    RandomDrop(0.5, seed=0)(dropped)
    assert bool(((dropped == special) | (dropped == 0)).all())
