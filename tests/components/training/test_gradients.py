"""Loss and gradients written out, against the layers and their derivatives one by one in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import num_dense_parameters, unflatten
from components.dcn.network import DcnNetwork
from components.training.pytorch.gradients import Backpropagation, views

V1 = DcnConfig(embedding_dim=2, num_cross_layers=3, tower=(9, 5), dropout=0.25)
V2 = DcnConfig(embedding_dim=2, num_cross_layers=3, tower=(9, 5), dropout=0.25, projection_dim=4)
ONE_LAYER = DcnConfig(embedding_dim=1, num_cross_layers=1, tower=(3,))
NUM_ROWS = 30
networks = pytest.mark.parametrize("config", [V1, V2, ONE_LAYER], ids=["v1", "v2", "one layer"])


def loss_and_gradients(config, p, x0, labels, masks):
    """By the book: float64, layer after layer; gradients by parameter's name, and "x0"."""
    x, inputs, factors = x0, [], []
    for i in range(config.num_cross_layers):
        inputs.append(x)
        if config.projection_dim:
            factors.append(x @ p[f"cross.{i}.u"] @ p[f"cross.{i}.v"] + p[f"cross.{i}.bias"])
            x = x0 * factors[i] + x
        else:
            factors.append((x @ p[f"cross.{i}.weight"])[:, None])
            x = x0 * factors[i] + x + p[f"cross.{i}.bias"]
    hidden, before = [x0], []
    for i, mask in enumerate(masks):
        before.append(hidden[i] @ p[f"tower.{i}.weight"] + p[f"tower.{i}.bias"])
        hidden.append(np.maximum(before[i], 0) * mask / (1 - config.dropout))
    top = np.concatenate([hidden[-1], x], axis=1)
    z = (top @ p["final.weight"] + p["final.bias"])[:, 0]
    loss = np.mean(np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z))))

    dz = ((1 / (1 + np.exp(-z)) - labels) / len(z))[:, None]
    g = {"final.weight": top.T @ dz, "final.bias": dz.sum(0)}
    d_top = dz @ p["final.weight"].T
    d_hidden, d = d_top[:, : config.tower[-1]], d_top[:, config.tower[-1] :]
    d_x0 = np.zeros_like(x0)
    for i in reversed(range(config.num_cross_layers)):
        if config.projection_dim:
            d_factor = d * x0
            d_projected = d_factor @ p[f"cross.{i}.v"].T
            g[f"cross.{i}.bias"] = d_factor.sum(0)
            g[f"cross.{i}.v"] = (inputs[i] @ p[f"cross.{i}.u"]).T @ d_factor
            g[f"cross.{i}.u"] = inputs[i].T @ d_projected
            through = d_projected @ p[f"cross.{i}.u"].T
        else:
            d_factor = (d * x0).sum(1)
            g[f"cross.{i}.bias"] = d.sum(0)
            g[f"cross.{i}.weight"] = inputs[i].T @ d_factor
            through = np.outer(d_factor, p[f"cross.{i}.weight"])
        d_x0 += d * factors[i]
        d = d + through
    d_x0 += d
    for i in reversed(range(len(config.tower))):
        d_before = d_hidden * masks[i] / (1 - config.dropout) * (before[i] > 0)
        g[f"tower.{i}.weight"], g[f"tower.{i}.bias"] = hidden[i].T @ d_before, d_before.sum(0)
        d_hidden = d_before @ p[f"tower.{i}.weight"].T
    g["x0"] = d_x0 + d_hidden
    return loss, g


class Masks:
    """Dropout of given masks, layer after layer."""

    def __init__(self, masks):
        self._masks = iter(masks)

    def __call__(self, hidden):
        hidden.mul_(torch.from_numpy(next(self._masks)).to(hidden.dtype))


class Case:
    """A network, rows and dropout masks of known numbers."""

    def __init__(self, config, num_rows=NUM_ROWS, seed=0):
        random = np.random.default_rng(seed)
        self.config = config
        # Numbers that float32 holds, so that every oracle and every subject starts from the same.
        self.flat = (0.3 * random.normal(size=num_dense_parameters(config))).astype(np.float32).astype(np.float64)
        self.x0 = random.normal(size=(num_rows, config.input_width)).astype(np.float32).astype(np.float64)
        self.labels = (random.random(num_rows) < 0.3).astype(np.float64)
        self.masks = [(random.random((num_rows, h)) >= config.dropout).astype(np.float64) for h in config.tower]

    def truth(self, flat=None, x0=None):
        parameters = unflatten(self.flat if flat is None else flat, self.config)
        return loss_and_gradients(self.config, parameters, self.x0 if x0 is None else x0, self.labels, self.masks)

    def flat_truth(self):
        loss, g = self.truth()
        to_vectors = g["x0"][:, : 26 * self.config.embedding_dim]
        return loss, np.concatenate([g[name].ravel() for name, _ in dense_layout(self.config)]), to_vectors

    def subject(self, dtype, held=torch.float32, part_rows=NUM_ROWS):
        """Loss, flat gradient and gradient to the vectors as the code under test has them, in parts of the batch."""
        flat = torch.from_numpy(self.flat).to(held)
        backpropagation = Backpropagation(self.config, flat, dtype)
        losses, to_vectors = [], []
        backpropagation.begin()
        for at in range(0, len(self.x0), part_rows):
            drop = Masks([m[at : at + part_rows] for m in self.masks]) if self.config.dropout else None
            loss, part = backpropagation.part(
                torch.from_numpy(self.x0[at : at + part_rows]).to(held),
                torch.from_numpy(self.labels[at : at + part_rows]).to(held),
                len(self.x0),
                drop,
            )
            losses.append(loss)
            to_vectors.append(part)
        return float(sum(losses)), backpropagation.gradient.double().numpy(), torch.cat(to_vectors).double().numpy()


@networks
def test_the_book_itself_equals_central_differences(config):
    case = Case(config)
    _, gradient, _ = case.flat_truth()
    to_x0 = case.truth()[1]["x0"]
    random, h = np.random.default_rng(1), 1e-6
    for index in random.integers(0, len(case.flat), 60):
        step = np.zeros_like(case.flat)
        step[index] = h
        slope = (case.truth(case.flat + step)[0] - case.truth(case.flat - step)[0]) / (2 * h)
        assert gradient[index] == pytest.approx(slope, rel=1e-5, abs=1e-8)
    for row, column in zip(random.integers(0, NUM_ROWS, 30), random.integers(0, config.input_width, 30)):
        step = np.zeros_like(case.x0)
        step[row, column] = h
        slope = (case.truth(x0=case.x0 + step)[0] - case.truth(x0=case.x0 - step)[0]) / (2 * h)
        assert to_x0[row, column] == pytest.approx(slope, rel=1e-5, abs=1e-8)


@networks
@pytest.mark.parametrize("part_rows", [NUM_ROWS, 7], ids=["whole", "in parts"])
def test_loss_and_gradients_equal_the_book_to_float64s_precision(config, part_rows):
    case = Case(config)
    for mine, truth in zip(case.subject(torch.float64, torch.float64, part_rows), case.flat_truth()):
        np.testing.assert_allclose(mine, truth, rtol=1e-11, atol=1e-13)


@networks
@pytest.mark.parametrize("part_rows", [NUM_ROWS, 7], ids=["whole", "in parts"])
def test_loss_and_gradients_equal_the_book_to_float32s_precision(config, part_rows):
    case = Case(config)
    for mine, truth in zip(case.subject(torch.float32, part_rows=part_rows), case.flat_truth()):
        np.testing.assert_allclose(mine, truth, rtol=1e-4, atol=2e-6 * np.abs(truth).max())


@networks
def test_bfloat16_products_keep_the_gradients_direction_and_length(config):
    case = Case(config, num_rows=512)
    loss, gradient, to_vectors = case.flat_truth()
    mine = case.subject(torch.bfloat16, part_rows=512)
    assert mine[0] == pytest.approx(loss, rel=0.01)
    for one, truth in ((mine[1], gradient), (mine[2].ravel(), to_vectors.ravel())):
        # bfloat16 has 8 bits: each operand is off by 0.2 % at most half the time, in any direction.
        assert np.linalg.norm(one - truth) < 0.02 * np.linalg.norm(truth)


@pytest.mark.parametrize("config", [V1, V2], ids=["v1", "v2"])
def test_gradients_equal_autograds_of_the_network_that_scores(config):
    config = DcnConfig(**{**config.as_document(), "tower": config.tower, "dropout": 0.0})
    case = Case(config)
    network = DcnNetwork(config, [3] * 26)
    for parameter, values in zip(network.dense_parameters, unflatten(case.flat.astype(np.float32), config).values()):
        parameter.data = torch.from_numpy(values.copy())
    x0 = torch.from_numpy(case.x0).float().requires_grad_()
    vectors, dense = x0[:, : 26 * config.embedding_dim].unflatten(1, (26, -1)), x0[:, 26 * config.embedding_dim :]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        network.logits(dense, vectors), torch.from_numpy(case.labels).float()
    )
    to_x0, *to_dense = torch.autograd.grad(loss, [x0, *network.dense_parameters])
    mine = case.subject(torch.float32)
    assert mine[0] == pytest.approx(loss.item(), rel=1e-6)
    np.testing.assert_allclose(mine[1], torch.cat([g.flatten() for g in to_dense]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mine[2], to_x0[:, : 26 * config.embedding_dim], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("logit", [-200.0, -30.0, 30.0, 200.0])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_loss_is_exact_where_a_probability_would_be_0_or_1(logit, label):
    flat = torch.zeros(num_dense_parameters(ONE_LAYER))
    flat[-1] = logit
    backpropagation = Backpropagation(ONE_LAYER, flat, torch.float32)
    backpropagation.begin()
    loss, _ = backpropagation.part(torch.zeros(1, ONE_LAYER.input_width), torch.tensor([label]), 1, None)
    assert float(loss) == pytest.approx(max(logit, 0) - logit * label + np.log1p(np.exp(-abs(logit))), rel=1e-6)
    expected = (1 / (1 + np.exp(-logit)) if logit < 0 else 1 - np.exp(-logit) / (1 + np.exp(-logit))) - label
    assert float(backpropagation.gradient[-1]) == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_views_are_the_weight_files_order():
    flat = torch.arange(num_dense_parameters(V2), dtype=torch.float32)
    for (name, view), (expected, values) in zip(views(V2, flat).items(), unflatten(flat.numpy(), V2).items()):
        assert name == expected
        np.testing.assert_array_equal(view.numpy(), values)
        assert view.data_ptr() == flat.data_ptr() + 4 * int(values.flat[0])
