"""Tests that the training benchmark compares equal networks, for any lists."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import speed, training
from benchmarks.encoded_rows import PlantedLogit
from benchmarks.peers import PlainDcn, PlainNetwork, PlainPytorch, TorchrecExample
from components.training.start import write_initial
from evergreen.config.features import ListOptions
from evergreen.config.model import DcnConfig
from evergreen.contracts.criteo import CRITEO
from evergreen.networks.files import open_model
from evergreen.networks.network import build_network
from evergreen.networks.scoring import load_scorer
from testing.networks import shaped


def dcn(**settings):
    """Return a DCN for Criteo's columns."""
    return DcnConfig(num_dense=13, num_categorical=26, **settings)


@pytest.fixture(autouse=True)
def left_group():
    """Ends the process group that a peer created. Later tests join a group of several workers."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


SLOT_SIZES = [3 + 2 * slot for slot in range(26)]
LARGE_SIZES = [20_000, 30_000, *SLOT_SIZES[2:]]
"""Slot sizes with tables so large that TorchRec would choose another kernel for them."""


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
    ours = load_scorer(tmp_path, config, SLOT_SIZES, positions=features.positions).probabilities(
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
    peer.train(peer.prepare(rows))
    for slot, (old, table) in enumerate(zip(before, peer.model.embeddings)):
        if slot == 8 and pool:  # the elements of the list share table 8
            continue
        touched = np.isin(np.arange(len(old)), rows.ids[:, slot])
        moved = (table.weight != old).any(dim=1).numpy()
        np.testing.assert_array_equal(moved, touched)


def network_with_weights_of(peer, config):
    """Return plain PyTorch's network with copies of the TorchRec peer's weights."""
    model = PlainNetwork(build_network(config), LARGE_SIZES, config.embedding_dim)
    weights = {name.removeprefix("module."): each for name, each in peer.model.state_dict().items()}
    for name, bag in zip(CRITEO.slots, model.bags):
        table = weights.pop(f"bags.embedding_bags.{name}.weight")
        bag.weight.data.copy_(table.local_tensor() if hasattr(table, "local_tensor") else table)
    model.network.load_state_dict(
        {name.removeprefix("network."): each for name, each in weights.items()}
    )
    return model


@pytest.mark.parametrize("is_fused", [False, True], ids=["dense", "fused"])
@pytest.mark.parametrize("kind", ["dcn", "deepfm", "dlrm"])
def test_torchrec_peer_trains_network_with_adam_and_tables_as_named(kind, is_fused):
    """TorchRec trains a large table with SGD unless the peer chooses the optimizer."""
    pytest.importorskip("torchrec")
    config = shaped(kind, {"embedding_dim": 4, "tower": (16, 8)}, num_dense=13, num_categorical=26)
    rows = PlantedLogit(LARGE_SIZES).draw(256, seed=3)[0]
    peer = TorchrecExample(config, LARGE_SIZES, batch_size=256, is_fused=is_fused)
    expected = network_with_weights_of(peer, config)
    dense, ids = torch.from_numpy(rows.dense), torch.from_numpy(rows.ids.astype(np.int64))
    before = expected(dense, ids).sigmoid().detach().numpy()
    np.testing.assert_allclose(peer.score(rows), before, atol=1e-6)
    peer.train(peer.prepare(rows))
    loss = torch.nn.BCEWithLogitsLoss()(expected(dense, ids), torch.from_numpy(rows.labels))
    loss.backward()
    torch.optim.Adam(expected.network.parameters(), lr=0.001).step()
    tables = list(expected.bags.parameters())
    if is_fused:
        for table in tables:
            mean_squares = table.grad.square().mean(dim=1, keepdim=True)
            table.data -= 0.01 * table.grad / (mean_squares.sqrt() + 1e-8)
    else:
        torch.optim.Adam(tables, lr=0.001).step()
    after = expected(dense, ids).sigmoid().detach().numpy()
    np.testing.assert_allclose(peer.score(rows), after, atol=1e-4)
    assert np.abs(after - before).max() > 1e-3


def test_ratio_with_target_is_to_fastest_peer_with_adam():
    speeds = {"ours": [40.0], "plain": [4.0], "TorchRec": [5.0], "TorchRec, fused Adagrad": [20.0]}
    config, features = training._NETWORKS["small"]
    case = speed.Case(
        name="small", config=config, features=features, table_rows=1, rounds=1, steps=1
    )
    aucs = {**dict.fromkeys(speeds, 0.7), "TorchRec, fused Adagrad": 0.75}
    result = speed._figures(case, ["ours"], list(speeds)[1:], speeds=speeds, aucs=aucs)
    figures = training.figures_of(result, ratio_target=5)
    ratios = {
        figure.peer: (figure.value.median, figure.target)
        for figure in figures
        if figure.unit == "times"
    }
    assert ratios == {"TorchRec": (8.0, 5), "TorchRec, fused Adagrad": (2.0, None)}
    differences = [(each.value.median, each.target) for each in figures if "AUC" in each.name]
    assert differences == [(0.0, -0.002), (pytest.approx(-0.05), None)]


@pytest.mark.parametrize("is_installed", [True, False], ids=["installed", "absent"])
def test_omitted_peer_is_reported_with_reason(monkeypatch, is_installed):
    monkeypatch.setattr(speed, "find_spec", lambda name: name if is_installed else None)
    found = {}
    for case in training.CASES[:5]:
        config, features = training._NETWORKS[case.split("-")[0]]
        found[case.split("-")[0]] = speed.left_out(config, features)
    absent = {
        "DeepCTR-Torch": "deepctr-torch is not installed",
        "TorchRec": "torchrec is not installed",
    }
    if not is_installed:
        assert found == dict.fromkeys(found, absent)
        return
    assert found == {
        "small": {},
        "sample": {},
        "deepfm": {},
        "dlrm": {"DeepCTR-Torch": "it has no dlrm"},
        "lists": {"TorchRec": "its example has no lists"},
    }
    result = {"case": "dlrm-1.2M", "left_out": found["dlrm"]}
    assert training.skipped_of(result) == ["DeepCTR-Torch in dlrm-1.2M: it has no dlrm"]
