"""The slope of a fit's final logit mends a model that is too sure of itself, and leaves a well calibrated one alone."""

from dataclasses import replace

import numpy as np
import pytest

from components.contracts.metrics import log_loss
from components.models.configs import DeepFmConfig, DlrmConfig
from components.models.files import multiply
from components.models.scoring import load_scorer
from components.runtime.errors import ContractError, Preempted
from components.training.calibration import sure_slope
from components.training.config import TrainingSettings
from components.training.pytorch.engine import PytorchEngine
from tests.support.logistic_engine import StopAfter, content
from tests.support.training_world import dcn, fit_by_pytorch

DCN = dcn(embedding_dim=4, num_cross_layers=1, tower=(8,))
DLRM = DlrmConfig(num_dense=13, num_categorical=26, embedding_dim=4, tower=(8,))
SLOW = TrainingSettings(round_rates=(0.001,), batch_size=256)
"""A round that leaves its parent nearly as it is."""


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def rows_in_requests(seed, *, rows_a_request, num_rows=6_400, rate_logit=-1.2):
    """Labels and the best logits without a hidden part of theirs; half of either's variance is the request's."""
    random = np.random.default_rng(seed)
    of_request = random.normal(size=(2, num_rows // rows_a_request))
    known, hidden = (np.repeat(of_request, rows_a_request, 1) + random.normal(size=(2, num_rows))) * 0.5**0.5
    points, weights = np.polynomial.hermite_e.hermegauss(31)
    best = sigmoid(rate_logit + known[:, None] + points) @ weights / weights.sum()
    labels = random.random(num_rows) < sigmoid(rate_logit + known + hidden)
    return labels.astype(np.float32), np.log(best / (1 - best))


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_the_slope_takes_back_what_multiplied_the_logits(factor):
    labels, logits = rows_in_requests(1, rows_a_request=1, num_rows=40_000)
    slope = sure_slope(labels, sigmoid(factor * logits + 0.3).astype(np.float32))
    assert slope == pytest.approx(1 / factor, rel=0.06)


@pytest.mark.parametrize("rows_a_request", [1, 64])
def test_a_calibrated_model_is_left_alone_also_where_rows_come_in_long_requests(rows_a_request):
    changed = [
        sure_slope(labels, sigmoid(logits)) != 1.0
        for labels, logits in (rows_in_requests(seed, rows_a_request=rows_a_request) for seed in range(300))
    ]
    assert np.mean(changed) < 0.1  # 5 % are the interval's promise


@pytest.mark.parametrize(
    ("labels", "probabilities"),
    [
        (np.tile([0.0, 0.0, 1.0], 190), np.tile([0.1, 0.2, 0.9], 190)),
        (np.tile([0.0, 1.0], 1_000), np.tile([0.2, 0.8], 1_000)),
        (np.tile([0.0, 1.0], 1_000), np.full(2_000, 0.3)),
        (np.tile([0.0, 1.0], 1_000), np.tile([0.0, 1.0], 1_000)),
        (np.zeros(0), np.zeros(0)),
    ],
    ids=["too few clicks", "every click is told", "all logits alike", "certain", "no rows"],
)
def test_rows_that_tell_no_slope_change_nothing(labels, probabilities):
    assert sure_slope(labels.astype(np.float32), probabilities.astype(np.float32)) == 1.0


@pytest.mark.parametrize(("factor", "expected"), [(-1.0, 0.5), (10.0, 0.5), (0.1, 2.0)])
def test_no_slope_turns_a_model_around_or_bends_it_by_more_than_two(factor, expected):
    labels, logits = rows_in_requests(2, rows_a_request=1)
    assert sure_slope(labels, sigmoid(factor * logits)) == expected


@pytest.fixture
def fitted(tmp_path):
    count = iter(range(100))

    def go(training_set, config, settings, *, start=None, path=None, **keywords):
        path = path or tmp_path / f"fit {next(count)}"
        return fit_by_pytorch(training_set, config, settings, path, start=start, **keywords).weights

    return go


def overconfident(weights, config):
    """Makes the stored model 1.8 times as sure as it was fitted to be."""
    multiply(weights, (*config.logit_weights, "bias"), 1.8)


def loss(weights, config, world):
    labels, dense, ids, _ = world.rows(20_000, seed=99)
    return log_loss(labels, load_scorer(weights, config, world.slot_sizes).probabilities(dense, ids))


@pytest.mark.parametrize("config", [DCN, DLRM], ids=["dcn", "dlrm"])
def test_a_round_mends_a_parent_that_is_too_sure_in_log_loss_and_in_every_band_of_its_scores(
    config, world, make_training_set, fitted
):
    parent = fitted(make_training_set(*world.rows(16_000, 1)[:3], name="first"), config, replace(SLOW, seed=1))
    sound = loss(parent, config, world)
    overconfident(parent, config)
    training_set = make_training_set(*world.rows(16_000, 2)[:3], name="second")
    by_bias, mended = (
        fitted(training_set, config, replace(SLOW, calibration=each), start=parent) for each in ("bias", "platt")
    )
    assert loss(by_bias, config, world) > sound + 0.02
    assert loss(mended, config, world) < sound + 0.002
    labels, dense, ids, _ = world.rows(20_000, seed=99)
    scored = load_scorer(mended, config, world.slot_sizes).probabilities(dense, ids)
    for band in np.array_split(np.argsort(scored), 5):
        assert scored[band].mean() == pytest.approx(labels[band].mean(), abs=0.03)


def test_a_round_from_a_calibrated_parent_ends_with_the_bits_that_it_has_without_the_slope(
    world, make_training_set, fitted
):
    parent = fitted(make_training_set(*world.rows(16_000, 1)[:3], name="first"), DCN, TrainingSettings())
    training_set = make_training_set(*world.rows(6_000, 2)[:3], name="second")
    by_bias, by_platt = (
        fitted(training_set, DCN, replace(SLOW, calibration=each), start=parent) for each in ("bias", "platt")
    )
    assert content(by_bias) == content(by_platt)


def test_a_fit_that_was_broken_off_after_it_was_judged_is_mended_as_a_whole_one(
    world, make_training_set, fitted, tmp_path, monkeypatch
):
    monkeypatch.setattr(PytorchEngine, "segment_batches", lambda self, batch_size: 4)
    settings = replace(SLOW, calibration="platt")
    parent = fitted(make_training_set(*world.rows(16_000, 1)[:3], name="first"), DCN, SLOW)
    overconfident(parent, DCN)
    training_set, path = make_training_set(*world.rows(16_000, 2)[:3], name="second"), tmp_path / "broken"
    whole = fitted(training_set, DCN, settings, start=parent)
    with pytest.raises(Preempted):
        fitted(training_set, DCN, settings, start=parent, path=path, should_stop=StopAfter(145))
    assert '"slope": 0.' in (path / "progress.json").read_text(), "the break came after the rows were scored"
    assert content(fitted(training_set, DCN, settings, start=parent, path=path)) == content(whole)


def test_a_network_without_a_layer_to_multiply_is_refused(world, make_training_set, fitted):
    config = DeepFmConfig(num_dense=13, num_categorical=26, embedding_dim=4, tower=(8,))
    training_set = make_training_set(*world.rows(300)[:3])
    with pytest.raises(ContractError, match="calibration is platt for network 'deepfm'"):
        fitted(training_set, config, replace(SLOW, calibration="platt"))


@pytest.mark.parametrize(
    ("wrong", "message"), [({"calibration": "isotonic"}, "calibration is 'isotonic'"), ({"passes": 2}, "passes is 2")]
)
def test_settings_that_cannot_be_calibrated_are_refused(wrong, message):
    with pytest.raises(ContractError, match=message):
        TrainingSettings(**{"calibration": "platt", **wrong})
