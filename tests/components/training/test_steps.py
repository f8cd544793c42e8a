"""Whole steps, on distinct rows and with static shapes, against autograd in float64 and Adam in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from components.contracts.dcn import DcnConfig
from components.training.config import TrainingSettings
from components.training.pytorch import cpu_steps
from components.training.pytorch.batches import assemble
from components.training.pytorch.cpu_steps import CpuSteps
from components.training.pytorch.model_state import ModelState
from components.training.pytorch.static_step import StaticStepper, sum_by_key
from components.training.rows import Rows

V1 = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8))
V2 = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8), projection_dim=3)
networks = pytest.mark.parametrize("config", [V1, V2], ids=["v1", "v2"])
SIZES = [3 + i % 5 for i in range(26)]
OFFSETS = np.cumsum([0, *SIZES[:-1]])
SETTINGS = TrainingSettings(learning_rate=0.01)
NUM_ROWS, NUM_STEPS = 21, 12


def rows_of_step(step):
    random = np.random.default_rng(step)
    # The last id of every slot is never looked up; others often, so batches repeat them.
    return Rows(
        labels=(random.random(NUM_ROWS) < 0.4).astype(np.float32),
        dense=random.normal(size=(NUM_ROWS, 13)).astype(np.float32),
        ids=(random.random((NUM_ROWS, 26)) * (np.array(SIZES) - 1)).astype(np.int32),
    )


def state_of(config, spare_rows=0):
    state = ModelState(config, SIZES, torch.device("cpu"), spare_rows=spare_rows)
    generator = torch.Generator().manual_seed(5)
    state.flat.normal_(0, 0.2, generator=generator)
    state.table[: state.num_rows].normal_(0, 0.5, generator=generator)
    return state


def trained_by_the_book(config):
    """Losses, flat parameters and table after the steps, float64."""
    network = copy.deepcopy(state_of(config).network).double()
    for parameter in network.dense_parameters:
        parameter.data = parameter.data.clone()
    moving = [*(p.data.numpy() for p in network.dense_parameters), network.embeddings.numpy()]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in moving]
    losses = []
    for t in range(1, NUM_STEPS + 1):
        rows = rows_of_step(t)
        vectors = network.embed(torch.from_numpy(rows.ids)).requires_grad_()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            network.logits(torch.from_numpy(rows.dense).double(), vectors), torch.from_numpy(rows.labels).double()
        )
        to_vectors, *to_dense = torch.autograd.grad(loss, [vectors, *network.dense_parameters])
        losses.append(loss.item())
        keys = (rows.ids + OFFSETS).ravel()
        to_table = np.zeros_like(moving[-1])
        np.add.at(to_table, keys, to_vectors.numpy().reshape(len(keys), -1))
        gradients = [*(g.numpy() for g in to_dense), to_table]
        touched = np.isin(np.arange(len(to_table)), keys)[:, None]
        for w, g, (m, v) in zip(moving, gradients, moments):
            moves = touched if w is moving[-1] else np.True_
            m[:] = np.where(moves, 0.9 * m + 0.1 * g, m)
            v[:] = np.where(moves, 0.999 * v + 0.001 * g * g, v)
            change = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
            w -= np.where(moves, change, 0)
    return losses, np.concatenate([w.ravel() for w in moving[:-1]]), moving[-1]


def distinct_steps(state, config, settings=SETTINGS):
    step = CpuSteps(state, config, SIZES, settings).step
    return [step(assemble(rows_of_step(t), np.arange(NUM_ROWS), OFFSETS), None).item() for t in range(1, NUM_STEPS + 1)]


def static_steps(state, config, settings=SETTINGS):
    step = StaticStepper(state, config, settings).step
    taken = []
    for t in range(1, NUM_STEPS + 1):
        rows = rows_of_step(t)
        taken.append(step(*(torch.from_numpy(a) for a in (rows.labels, rows.dense, rows.ids))).item())
    return taken


@networks
@pytest.mark.parametrize(("steps", "spare_rows"), [(distinct_steps, 0), (static_steps, 1)], ids=["distinct", "static"])
def test_steps_equal_autograd_and_adam_in_float64(config, steps, spare_rows):
    state = state_of(config, spare_rows)
    start = state.table.clone()
    losses, flat, table = trained_by_the_book(config)
    np.testing.assert_allclose(steps(state, config), losses, rtol=1e-4)
    np.testing.assert_allclose(state.flat, flat, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state.table[: state.num_rows], table, rtol=1e-3, atol=1e-4)
    untouched = OFFSETS + SIZES - 1
    assert torch.equal(state.table[untouched], start[untouched])
    assert not state.row_m[untouched].any()
    assert not state.row_v[untouched].any()


@networks
def test_static_shapes_change_the_order_of_sums_and_nothing_else(config):
    distinct, static = state_of(config), state_of(config, spare_rows=1)
    np.testing.assert_allclose(distinct_steps(distinct, config), static_steps(static, config), rtol=1e-6)
    for mine, its in ((distinct.table, static.table), (distinct.row_m, static.row_m), (distinct.row_v, static.row_v)):
        np.testing.assert_allclose(mine, its[: distinct.num_rows], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(distinct.flat, static.flat, rtol=1e-4, atol=1e-6)
    assert not static.table[distinct.num_rows :].any()


def test_static_steps_take_over_a_restored_step_count():
    one, other = state_of(V1, spare_rows=1), state_of(V1, spare_rows=1)
    for state, num_steps in ((one, 0), (other, 1000)):
        state.num_steps = num_steps
        stepper = StaticStepper(state, V1, SETTINGS)
        stepper.begin()
        rows = rows_of_step(1)
        stepper.step(*(torch.from_numpy(a) for a in (rows.labels, rows.dense, rows.ids)))
    # From zero moments a first step moves by the learning rate; step 1001 by 0.1 / sqrt(0.001) of it at most.
    start = state_of(V1).flat
    ratio = (other.flat - start).abs().sum() / (one.flat - start).abs().sum()
    assert ratio.item() == pytest.approx(0.1 / 0.001**0.5 * (1 - 0.999**1001) ** 0.5, rel=1e-3)


def test_sums_by_key_fill_the_places_that_no_key_needs_with_the_spare_row():
    keys, sums = sum_by_key(torch.tensor([5, 2, 5, 9]), torch.tensor([[1.0], [2.0], [3.0], [4.0]]), spare=70)
    assert keys.tolist() == [2, 5, 9, 70]
    assert sums.tolist() == [[2.0], [4.0], [4.0], [0.0]]


@networks
def test_the_size_of_a_part_changes_the_order_of_sums_and_nothing_else(config, monkeypatch):
    whole, parts = state_of(config), state_of(config)
    losses = distinct_steps(whole, config)
    monkeypatch.setattr(cpu_steps, "_PART_ROWS", 4)
    np.testing.assert_allclose(distinct_steps(parts, config), losses, rtol=1e-5)
    np.testing.assert_allclose(parts.flat, whole.flat, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(parts.table, whole.table, rtol=1e-3, atol=1e-4)


def test_bfloat16_learns_what_float32_learns_and_keeps_float32_weights():
    exact, rounded = state_of(V1), state_of(V1)
    losses = distinct_steps(exact, V1)
    mine = distinct_steps(rounded, V1, TrainingSettings(learning_rate=0.01, precision="bfloat16"))
    np.testing.assert_allclose(mine, losses, rtol=0.02)
    assert rounded.flat.dtype == rounded.table.dtype == torch.float32
    assert (mine != np.array(losses)).any()
