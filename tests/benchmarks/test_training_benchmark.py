"""Tests that the training benchmark compares equal networks, for any lists."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.encoded_rows import PlantedLogit
from benchmarks.peers import PlainDcn, PlainPytorch
from components.training.start import write_initial
from evergreen.config.features import ListOptions
from evergreen.contracts.criteo import CRITEO
from evergreen.networks.files import open_model
from evergreen.networks.scoring import load_scorer
from tests.support.training_world import dcn

SLOT_SIZES = [3 + 2 * slot for slot in range(26)]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("pool", [None, "mean", "sum"])
def test_plain_pytorch_peer_computes_our_network(tmp_path, pool, is_sparse):
    options = {"last": ListOptions(max=5, table="C9", pool=pool)} if pool else {}
    features = replace(CRITEO, lists=tuple(options), list_options=options)
    config = dcn(embedding_dim=4, num_cross_layers=3, tower=(16, 8), dropout=0.5)
    config = replace(config, num_categorical=26 + len(options))
    write_initial(tmp_path, config, SLOT_SIZES, click_rate=0.4, seed=0)
    weights = open_model(tmp_path, SLOT_SIZES).weights
    peer = PlainDcn(config, weights, SLOT_SIZES, features=features, is_sparse=is_sparse)
    rows, _ = PlantedLogit(SLOT_SIZES, features=features).draw(500, seed=3)
    assert not pool or {0, 5} <= set((rows.ids[:, 26:] > 0).sum(axis=1))
    ours = load_scorer(tmp_path, config, SLOT_SIZES, places=features.places).probabilities(
        rows.dense, rows.ids
    )
    with torch.no_grad():
        theirs = peer.eval()(
            torch.from_numpy(rows.dense), torch.from_numpy(rows.ids.astype(np.int64))
        ).sigmoid()
    assert ours.std() > 0.1
    np.testing.assert_allclose(theirs.numpy(), ours, atol=1e-6)


@pytest.mark.parametrize("pool", [None, "mean"])
def test_sparse_peer_does_not_change_untouched_rows(tmp_path, pool):
    options = {"last": ListOptions(max=5, table="C9", pool=pool)} if pool else {}
    features = replace(CRITEO, lists=tuple(options), list_options=options)
    config = replace(
        dcn(embedding_dim=4, num_cross_layers=2, tower=(8,)), num_categorical=26 + len(options)
    )
    write_initial(tmp_path, config, SLOT_SIZES, click_rate=0.4, seed=0)
    peer = PlainPytorch(
        config, SLOT_SIZES, tmp_path, batch_size=8, features=features, is_sparse=True
    )
    rows = PlantedLogit(SLOT_SIZES, features=features).draw(8, seed=3)[0]
    before = [each.weight.detach().clone() for each in peer.model.embeddings]
    peer.learn(peer.prepare(rows))
    for slot, (old, table) in enumerate(zip(before, peer.model.embeddings)):
        if slot == 8 and pool:  # the list's elements are in table 8 too
            continue
        touched = np.isin(np.arange(len(old)), rows.ids[:, slot])
        moved = (table.weight != old).any(dim=1).numpy()
        np.testing.assert_array_equal(moved, touched)
