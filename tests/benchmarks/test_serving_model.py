"""What the serving benchmark serves: seeded rows with what is missing and unseen, and scores that are the network's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import serving_model
from components.contracts.criteo import MISSING_CATEGORY
from components.contracts.dcn import DcnConfig


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


def test_expected_scores_are_the_networks(monkeypatch):
    import torch

    from components.contracts.dcn import dense_layout
    from components.contracts.model_files import ModelWeights
    from components.dcn.network import DcnNetwork, load_weights

    config = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(8, 4))
    monkeypatch.setattr(serving_model, "CONFIG", config)
    random, sizes = np.random.default_rng(0), [5] * 26
    weights = ModelWeights(
        dense={n: random.normal(0, 0.3, s).astype(np.float32) for n, s in dense_layout(config)},
        embeddings=random.normal(0, 0.3, (130, 4)).astype(np.float32),
    )
    network = DcnNetwork(config, sizes)
    load_weights(network, weights)
    ids, dense = random.integers(0, 5, (50, 26)), random.normal(0, 1, (50, 13)).astype(np.float32)
    with torch.no_grad():
        expected = torch.sigmoid(network.eval()(torch.from_numpy(dense), torch.from_numpy(ids))).numpy().ravel()
    found = serving_model.network_scores(weights, sizes, ids, dense)
    assert found.std() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-6)
