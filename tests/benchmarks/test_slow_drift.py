"""Tests of the slowly drifting simulator: click probabilities, and how fast a model is outdated."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks.slow_drift import DriftingSimulator, SlowDrift
from demo.simulation.simulator import Simulator

ROWS = 50_000


@pytest.fixture(scope="module")
def simulator():
    return Simulator.create(7)


@pytest.fixture(scope="module")
def drifting(simulator):
    return DriftingSimulator(simulator=simulator, drift=SlowDrift(seed=3))


@pytest.mark.parametrize("hours", [0.0, 49.5, 300.0])
def test_click_rate_and_best_auc_are_constant(simulator, drifting, hours):
    now = drifting.at(hours)
    rows = now.draw(ROWS, np.random.default_rng(5))
    measured = roc_auc_score(rows.label, rows.probability)
    assert rows.label.mean() == pytest.approx(simulator.click_rate, abs=0.008)
    assert measured == pytest.approx(now.bayes_auc, abs=0.01)
    assert now.bayes_auc == pytest.approx(drifting.at(0.0).bayes_auc, abs=0.006)


def test_old_labels_lose_point_of_auc_in_day_and_more_with_age(drifting):
    """The documentation of the default `moving_share` states how much AUC an old model loses.

    The test measures the lost AUC at several times over five days.
    """
    lost = {age: [] for age in (1.0, 5.0, 24.0)}
    for start in range(0, 120, 24):
        old = drifting.at(start)
        for age, losses in lost.items():
            rows = drifting.at(start + age).draw(40_000, np.random.default_rng(start))
            best = roc_auc_score(rows.label, rows.probability)
            losses.append(
                best - roc_auc_score(rows.label, old.probability_of(rows.dense, rows.categorical))
            )
    means = {age: float(np.mean(losses)) for age, losses in lost.items()}
    assert 0 < means[1.0] < means[5.0] < means[24.0]
    assert means[24.0] == pytest.approx(0.01, abs=0.004)
