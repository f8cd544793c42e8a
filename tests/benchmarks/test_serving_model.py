"""What the serving benchmark serves: seeded rows with what is missing and unseen, and scores that are the network's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest

from benchmarks import serving_model
from benchmarks.initial_model import write_initial_model
from components.contracts.criteo import MISSING_CATEGORY


def test_drawn_rows_are_seeded_and_hold_missing_and_unseen_values():
    log = serving_model.DrawnLog()
    rows, again = log.draw(2000, seed=5), serving_model.DrawnLog().draw(2000, seed=5)
    assert np.array_equal(rows.categorical, again.categorical)
    assert np.array_equal(rows.dense, again.dense, equal_nan=True)
    assert np.isnan(rows.dense).mean() == pytest.approx(0.03, abs=0.005)
    assert (rows.categorical == MISSING_CATEGORY).mean() == pytest.approx(0.03, abs=0.005)
    assert sum(log.cardinalities) == pytest.approx(serving_model.TABLE_ROWS, rel=0.01)


def test_every_category_is_among_the_fitted_rows():
    log = serving_model.DrawnLog()
    fitted = log.draw_all()
    assert [len(np.unique(column)) for column in fitted.categorical.T] == list(log.cardinalities)


def test_expected_scores_are_the_networks(monkeypatch, tmp_path):
    config, sizes = replace(serving_model.CONFIG, embedding_dim=4, num_cross_layers=2, tower=(8, 4)), [5] * 26
    monkeypatch.setattr(serving_model, "CONFIG", config)
    weights = write_initial_model(tmp_path, config, sizes, seed=0)
    random = np.random.default_rng(0)
    ids, dense = random.integers(0, 5, (50, 26)), random.normal(0, 1, (50, 13)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx", providers=["CPUExecutionProvider"])
    vectors = weights.table[ids + 5 * np.arange(26)]
    (logits,) = session.run(["logit"], {"dense": dense, "embeddings": vectors})
    found = serving_model.network_scores(weights, sizes, ids=ids, dense=dense)
    assert found.std() > 0.01
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-6)
