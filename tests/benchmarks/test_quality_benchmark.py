"""The quality study judges everybody by the same rows, and its differences and intervals are as stated."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import (
    DEEPCTR,
    LIGHTGBM,
    OURS,
    ContestantScores,
    Split,
    figures,
    folds,
    lightgbm_table,
)
from components.contracts.features import Features, ListOptions
from components.training.rows import Rows
from inference_client.simulation.world import WorldRows


def rows(count, seed=0):
    random = np.random.default_rng(seed)
    probability = random.uniform(0.1, 0.5, count)
    label = (random.random(count) < probability).astype(np.int32)
    return WorldRows(np.arange(count * 13).reshape(-1, 13), np.zeros((count, 26), np.int64), probability, label)


def test_each_row_judges_once_and_no_row_is_learned_and_judges():
    splits = list(folds(rows(100), 5))
    judging = np.concatenate([split.judging.dense[:, 0] for split in splits])
    assert sorted(judging // 13) == list(range(100))
    assert all(not set(s.window.dense[:, 0]) & set(s.judging.dense[:, 0]) for s in splits)


def test_a_contestant_that_knows_the_truth_is_calibrated_and_ahead_of_one_that_knows_nothing():
    splits = [Split(rows(1), rows(20_000, seed)) for seed in (1, 2)]
    found = []
    for split in splits:
        knows, nothing = (ContestantScores(p, 1.0) for p in (split.judging.probability, np.full(20_000, 0.3)))
        found.append({OURS: knows, DEEPCTR: nothing, LIGHTGBM: knows})
    result = figures(splits, found)
    assert result["contestants"][OURS]["mean_over_rate"]["mean"] == pytest.approx(1, abs=0.02)
    assert result["differences"][DEEPCTR]["auc"]["low"] > 0
    assert result["differences"][DEEPCTR]["log_loss"]["high"] < 0
    assert result["differences"][LIGHTGBM]["auc"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert result["best_possible"]["auc"].most > 0.6
    assert result["best_possible"]["auc_short_of_it"] == (0.0, 0.0, 0.0)


def test_lightgbm_gets_a_list_as_how_often_it_holds_each_id_and_padding_is_none():
    options = {"last": ListOptions(max=3, table="item")}
    features = Features(numeric=("price",), categorical=("item",), lists=("last",), list_options=options)
    ids = np.array([[4, 4, 3, 4], [3, 0, 0, 0]], np.int32)
    encoded = Rows(labels=np.zeros(2, np.float32), dense=np.zeros((2, 1), np.float32), ids=ids)
    raw = WorldRows(np.array([[0.5], [np.nan]]), ids.astype(np.int64), np.full(2, 0.3), np.zeros(2, np.int32))
    table = lightgbm_table(raw, encoded, features, sizes=[5]).toarray()
    np.testing.assert_array_equal(table, [[0.5, 4, 0, 0, 0, 1, 2], [np.nan, 3, 0, 0, 0, 0, 0]])
