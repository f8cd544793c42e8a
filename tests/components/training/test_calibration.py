"""Tests that a model trained on downsampled rows is calibrated for all rows."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.training.rows import Rows
from components.training.start import continue_from, log_odds_correction
from evergreen.config.features import CategoricalOptions
from evergreen.config.model import config_from_document
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import Model
from evergreen.contracts.workflow import FIRST_ID, FeatureWorkflow
from evergreen.networks.files import WEIGHTS_FILE, add_to_bias, open_model
from evergreen.networks.scoring import load_scorer
from evergreen.runtime.errors import ContractError, Preempted
from evergreen.storage.uris import local_path
from tests.support.errors import raises
from tests.support.logistic_engine import SETTINGS, StopAfter, content, fitted
from tests.support.planted_rows import FEATURES, POSITIONS, dcn

CONFIG = dcn(embedding_dim=4, num_cross_layers=1, tower=(8,))
NUM_ROWS = 8_192
HELD_OUT_ROWS = 20_000
SHOP = FEATURES.categorical.index("shop")


def downsampled(labels, dense, ids, rate, seed=3):
    """Return all clicks. Every row without a click is returned with probability `rate`."""
    sampled = (labels == 1) | (np.random.default_rng(seed).random(len(labels)) < rate)
    return labels[sampled], dense[sampled], ids[sampled]


def bound(labels, rate):
    """Return four standard errors of the ratio of predicted to observed clicks, as a share.

    The number of holdout clicks has a Poisson distribution. The model's mean follows the odds of
    its training rows. Among these rows, the number of clicks and the number of downsampled rows
    without a click have Poisson distributions too. The newest tenth of the training rows may have
    more weight, so the formula uses only half of the rows.
    """
    share = float(labels.mean())
    clicks, others = NUM_ROWS / 2 * share, NUM_ROWS / 2 * (1 - share) * rate
    return 4 * float(np.sqrt(1 / float(labels.sum()) + 1 / clicks + 1 / others))


@pytest.fixture
def held_out(planted):
    return planted.encoded(HELD_OUT_ROWS, 99)


@pytest.fixture
def run(train_run, double):
    """Runs a whole training step and returns the model in the registry."""
    options = {"config": CONFIG, "settings": TrainingSettings(learning_rate=0.005, batch_size=128)}
    return lambda training_set, backend, name: train_run(
        training_set, name=name, backend=backend, **options
    )


def calibration(weights, model, rows):
    """Return the ratio of predicted to observed clicks. The network reads the stored files."""
    config = config_from_document(model.config)
    scorer = load_scorer(weights, config, model.slot_sizes, positions=POSITIONS)
    return scorer.probabilities(rows.dense, rows.ids).sum(dtype=np.float64) / rows.labels.sum(
        dtype=np.float64
    )


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("hugectr", marks=pytest.mark.slow)])
def test_runs_on_downsampled_rows_are_calibrated_only_with_correction(
    backend, run, planted, held_out, make_training_set, tmp_path
):
    parent = None
    for number, rate in enumerate([0.2, 0.2, 0.35]):
        rows = downsampled(*planted.rows(NUM_ROWS, number + 1)[:3], rate, seed=number)
        training_set = make_training_set(*rows, name=f"set {number}")
        training_set = replace(training_set, negative_rate=rate, parent_model_uri=parent)
        model = run(training_set, backend, f"round {number}")
        assert model.negative_rate == rate
        weights = local_path(model.uri) / Model.WEIGHTS
        assert calibration(weights, model, held_out) == pytest.approx(
            1, abs=bound(held_out.labels, rate)
        )
        # The test changes a copy, because the next run compares its parent's files with their hash.
        without = Path(shutil.copytree(weights, tmp_path / f"without {number}"))
        add_to_bias(without, -np.log(rate))
        assert calibration(without, model, held_out) > 1 + 1.5 * bound(held_out.labels, rate)
        parent = model.uri


def test_ranking_does_not_change_and_log_odds_move_by_logarithm_of_rate(
    planted, make_training_set, tmp_path
):
    training_set = make_training_set(*planted.rows(1_500)[:3])
    plain, engine, _ = fitted(training_set, SETTINGS, tmp_path / "plain")
    corrected, _, _ = fitted(
        replace(training_set, negative_rate=0.1), SETTINGS, tmp_path / "corrected"
    )
    before, after = (
        open_model(result.weights, training_set.slot_sizes).weights for result in (plain, corrected)
    )
    assert after.dense["bias"] == pytest.approx(before.dense["bias"] + np.log(0.1), abs=1e-6)
    bias_aside = {
        name
        for name, sampled in content(plain.weights).items()
        if content(corrected.weights)[name] != sampled
    }
    assert bias_aside == {WEIGHTS_FILE}
    np.testing.assert_array_equal(before.table, after.table)
    np.testing.assert_array_equal(before.dense["final_cross"], after.dense["final_cross"])


@pytest.mark.parametrize("looks", [1, 14])
def test_fit_that_was_broken_off_is_corrected_once(looks, planted, make_training_set, tmp_path):
    training_set = replace(make_training_set(*planted.rows(3_000)[:3]), negative_rate=0.25)
    whole, _, _ = fitted(training_set, SETTINGS, tmp_path / "whole")
    with pytest.raises(Preempted):
        fitted(training_set, SETTINGS, tmp_path / "broken", should_stop=StopAfter(looks))
    resumed, _, _ = fitted(training_set, SETTINGS, tmp_path / "broken")
    assert content(resumed.weights) == content(whole.weights)


def test_run_starts_from_parents_scores_at_own_rate_for_any_parent_rate(
    run, planted, held_out, make_training_set
):
    first = make_training_set(*downsampled(*planted.rows(2_000, 1)[:3], 0.2), name="first")
    parent = run(replace(first, negative_rate=0.2), "pytorch", "first")
    second = make_training_set(*downsampled(*planted.rows(2_000, 2)[:3], 0.6), name="second")
    training_set = replace(second, negative_rate=0.6)
    start = continue_from(
        parent, training_set, CONFIG, into=local_path(parent.uri).parent / "start"
    )
    before = calibration(local_path(parent.uri) / Model.WEIGHTS, parent, held_out)
    assert calibration(start, parent, held_out) > 1.1 * before
    add_to_bias(start, log_odds_correction(0.6))
    assert calibration(start, parent, held_out) == pytest.approx(before, rel=1e-6)


def test_rows_have_logged_click_rate_when_served_and_next_run_starts_so(
    run, planted, make_training_set
):
    weights = planted.by_id[SHOP]
    weights[:] = np.where(np.arange(len(weights)) == FIRST_ID, 2, 0)
    training_set = make_training_set(*planted.rows(NUM_ROWS)[:3])
    path = local_path(training_set.workflow_uri)
    workflow = FeatureWorkflow.load(path)
    served_as = int(workflow.vocabularies[SHOP][0])
    features = replace(
        workflow.features,
        categorical_options={"shop": CategoricalOptions(served_as=served_as)},
    )
    replace(workflow, features=features).save(path)
    training_set = replace(
        training_set, recommender=replace(training_set.recommender, features=features)
    )
    model = run(training_set, "pytorch", "served")
    rows = planted.encoded(HELD_OUT_ROWS, 99)
    served = Rows(labels=rows.labels, dense=rows.dense, ids=rows.ids.copy())
    served.ids[:, SHOP] = FIRST_ID
    logits = planted.logit(rows.dense, served.ids)
    expected = float((1 / (1 + np.exp(-logits))).mean() / rows.labels.mean())
    start = continue_from(model, training_set, CONFIG, into=path.parent / "start")
    assert expected > 1.4
    assert calibration(local_path(model.uri) / Model.WEIGHTS, model, served) == pytest.approx(
        1, abs=0.15
    )
    assert calibration(start, model, served) == pytest.approx(expected, rel=0.15)
    assert calibration(start, model, rows) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, float("nan")])
def test_rate_that_keeps_nothing_or_more_than_all_is_refused(rate):
    with raises(ContractError, "negative_rate"):
        log_odds_correction(rate)
