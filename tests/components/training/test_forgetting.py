"""Tests of how much an incremental run forgets, and how much rehearsal of old rows preserves.

Some ids mean different things in two seasons. One dense value identifies the season, so a model can
fit both seasons. The parent was trained on the first season. The window has only the second season.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from evergreen.config.training import TrainingSettings
from evergreen.networks.scoring import load_scorer
from evergreen.statistics.metrics import auc_difference, roc_auc
from tests.support.planted_rows import POSITIONS, dcn, fit_by_pytorch

CONFIG = dcn(embedding_dim=8, num_cross_layers=2, tower=(32,))
SETTINGS = TrainingSettings(batch_size=512)
CHANGED = [1, 2]


class Season(NamedTuple):
    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray


def season(planted, n, *, seed, mark):
    """Return rows whose first dense value is `mark`. This value does not affect the labels."""
    _, dense, ids, _ = planted.rows(n, seed=seed)
    dense[:, 0] = mark
    logit = planted.logit(dense * [0, 1], ids)
    labels = (np.random.default_rng(seed).random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return Season(labels, dense, ids)


@pytest.fixture
def fitted(tmp_path):
    def go(training_set, name, start=None):
        return fit_by_pytorch(training_set, CONFIG, SETTINGS, tmp_path / name, start=start)

    return go


def test_replayed_rows_keep_old_season_known_at_little_cost_to_new(
    planted, make_training_set, fitted
):
    other = planted.drifted(CHANGED)
    parent = fitted(
        make_training_set(*season(planted, 24_000, seed=1, mark=-1.0), name="parent"), "parent"
    )
    start = parent.weights
    window = make_training_set(*season(other, 8_000, seed=2, mark=1.0), name="window")
    old_rows = make_training_set(*season(planted, 8_000, seed=3, mark=-1.0), name="old")
    with_old = replace(
        window, replay_uri=old_rows.train_uri, num_replay_rows=old_rows.num_train_rows
    )
    alone, mixed = (
        fitted(replace(with_old, replay_share=s), f"share {s}", start) for s in (0.0, 0.3)
    )

    def scores(result, rows):
        scorer = load_scorer(result.weights, CONFIG, planted.slot_sizes, positions=POSITIONS)
        return scorer.probabilities(rows.dense, rows.ids)

    old, new = season(planted, 8_000, seed=4, mark=-1.0), season(other, 8_000, seed=5, mark=1.0)
    known = roc_auc(old.labels, scores(parent, old))
    forgotten = known - roc_auc(old.labels, scores(alone, old))
    assert forgotten > 0.1, "the model without replayed rows must forget"
    groups = range(8_000)
    remembered = auc_difference(old.labels, scores(mixed, old), scores(alone, old), groups=groups)
    assert remembered.low > 0.7 * forgotten
    assert (
        auc_difference(new.labels, scores(mixed, new), scores(alone, new), groups=groups).low
        > -0.025
    )
    assert roc_auc(new.labels, scores(mixed, new)) > roc_auc(new.labels, scores(parent, new)) + 0.15
