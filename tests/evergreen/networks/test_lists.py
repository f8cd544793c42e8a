"""Tests that engine, scorer and served graph look up and pool lists like torch's EmbeddingBag.

The columns include a bucketed number, which is placed after the lists.
"""

from contextlib import closing
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, embedding_bag

from components.training.backends import make_engine
from components.training.rows import Rows
from components.training.start import write_initial
from evergreen.config.features import Features, ListOptions, NumericOptions
from evergreen.config.model import DcnConfig
from evergreen.config.training import TrainingSettings
from evergreen.contracts.workflow import FIRST_ID
from evergreen.networks.files import Tensors, open_model, tables_of
from evergreen.networks.network import build_network, export_onnx, load_dense
from evergreen.networks.scoring import Scorer
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tests.support.graphs import open_built, run_graph
from tests.support.rounded import rounded
from tests.support.workflows import workflow_of

OPTIONS = {
    "last": ListOptions(max=4, pool="sum", table="item"),
    "tags": ListOptions(max=3),
    "words": ListOptions(max=1, pool="sum"),
}
FEATURES = Features(
    numeric=("age", "price"),
    categorical=("user", "item"),
    lists=("last", "tags", "words"),
    numeric_options={"age": NumericOptions(transform=("quantile_buckets(4)",))},
    list_options=OPTIONS,
)

SLOTS = [0, 1, *[1] * 4, *[2] * 3, 3, 4]
"""Expected slot of each position."""
LISTS = [(2, 6, "sum"), (6, 9, "mean"), (9, 10, "sum")]
CONFIG = DcnConfig(num_dense=1, num_categorical=6, embedding_dim=4, tower=(8,), num_cross_layers=2)
WIDTHS = [(), (8, 3, 3, 8, 4, 8), (3, 8, 8, 3, 3, 8)]
"""Vector widths of user, item, last, tags, words and age. An empty dict means that all columns have
the same width."""
SETTINGS = TrainingSettings()


def workflow_without(*excluded):
    sizes = {"user": 5, "item": 6, "tags": 7, "words": 8}
    vocabularies = [np.arange(0 if name in excluded else size) * 10 for name, size in sizes.items()]
    boundaries = {"age": np.array([0.25, 0.5], np.float32)}
    return workflow_of(
        [*vocabularies, np.arange(4)], FEATURES, excluded=excluded, boundaries=boundaries
    )


def raw_rows(count=200):
    """Return rows with lists of every length, with gaps, and with known and unknown categories."""
    random = np.random.default_rng(7)
    categorical = random.choice([-1, 0, 10, 20, 30, 40, 77], (count, 10))
    categorical[:20, 2:] = -1
    categorical[20:40, 2:] = 10
    dense = random.random((count, 2)).astype(np.float32)
    dense[::9, 0] = np.nan
    return dense, categorical


def encoded(workflow, dense, categorical):
    return workflow.encode_dense(dense), workflow.encode_categorical(
        workflow.with_buckets(dense, categorical)
    )


def bagged(slots, ids):
    """Return all vectors of a row side by side.

    EmbeddingBag skips id 0 and averages over the other ids.
    """
    parts = [embedding(ids[:, column], slots[SLOTS[column]]) for column in (0, 1, 10)]
    bucket = parts.pop()
    for start, stop, mode in LISTS:
        parts.append(
            embedding_bag(ids[:, start:stop], slots[SLOTS[start]], mode=mode, padding_idx=0)
        )
    return torch.cat([*parts, bucket], dim=1)[:, None]


def of_slots(tensors, widths, sizes):
    return tensors.slots(sizes, tables_of(FEATURES.id_positions, widths))


@pytest.fixture(params=WIDTHS, ids=["one width", "three widths", "two widths"])
def initial(request, tmp_path):
    """Configuration and network with fresh weights, and the vectors of each slot."""
    config, sizes = replace(CONFIG, widths=request.param), workflow_without().slot_sizes
    write_initial(
        tmp_path / "initial", config, sizes, click_rate=0.3, seed=1, positions=FEATURES.id_positions
    )
    weights = open_model(tmp_path / "initial", sizes).weights
    network = build_network(config)
    load_dense(network, weights.dense)
    return config, network, [torch.tensor(each) for each in of_slots(weights, config.widths, sizes)]


def test_ids_are_those_of_position_slots_and_padding_elsewhere():
    _, found = encoded(
        workflow_without(),
        np.array([[0.5, 0]]),
        np.array([[-1, 10, 20, -1, 77, 50, -1, 60, -1, -1]]),
    )
    assert found.tolist() == [
        [1, FIRST_ID + 1, FIRST_ID + 2, 0, 2, FIRST_ID + 5, 0, FIRST_ID + 6, 0, 0, FIRST_ID + 2]
    ]
    _, found = encoded(
        workflow_without("user", "tags"), np.array([[np.nan, 0]]), np.full((1, 10), 10)
    )
    assert found.tolist() == [[1, *[FIRST_ID + 1] * 5, 0, 0, 0, FIRST_ID + 1, 1]]


def test_step_and_scores_are_those_of_embedding_bags(tmp_path, initial):
    config, network, slots = initial
    workflow = workflow_without()
    sizes, (dense, ids) = workflow.slot_sizes, encoded(workflow, *raw_rows())
    labels = (np.random.default_rng(3).random(len(ids)) < 0.3).astype(np.float32)
    for each in slots:
        each.requires_grad_()
    logits = network(torch.tensor(dense), bagged(slots, torch.tensor(ids)))
    loss = binary_cross_entropy_with_logits(logits, torch.tensor(labels))
    expected = torch.autograd.grad(loss, [*slots, *network.parameters()])
    rows = Rows(labels=labels, dense=dense, ids=ids.astype(np.int32))
    engine = make_engine(
        "pytorch", config, sizes, settings=SETTINGS, scratch=tmp_path, features=FEATURES
    )
    with closing(engine):
        engine.restore(tmp_path / "initial")
        np.testing.assert_allclose(engine.score(rows), torch.sigmoid(logits).detach(), atol=1e-6)
        seen = engine.train(rows, np.arange(len(rows)), batch_size=len(rows), seed=0)
        engine.save(tmp_path / "after")
    assert seen == pytest.approx(loss.item(), abs=1e-6)
    before, after = (open_model(tmp_path / name, sizes) for name in ("initial", "after"))
    # Compute the gradient from Adam's first moment after one step.
    first = after.moments[0]
    scale = 1 - SETTINGS.beta1
    for moments, gradient in zip(of_slots(first, config.widths, sizes), expected):
        np.testing.assert_allclose(moments / scale, gradient, atol=1e-7)
    for (name, _), gradient in zip(network.named_parameters(), expected[len(slots) :]):
        np.testing.assert_allclose(first.dense[name] / scale, gradient, atol=1e-6)
    for stored, moved in zip(
        *(of_slots(each.weights, config.widths, sizes) for each in (before, after))
    ):
        np.testing.assert_array_equal(moved[0], stored[0])  # row 0 is the vector of padding
        assert (moved != stored).any()


@pytest.mark.parametrize(
    ("excluded", "numbers"),
    [
        ((), "float32"),
        (("tags",), "float32"),
        (("item", "last"), "float32"),
        ((), "float16"),
        ((), "int8"),
    ],
    ids=["all learnt", "own table", "shared table", "float16", "int8"],
)
def test_graph_and_scorer_score_as_embedding_bags_do(initial, excluded, numbers):
    config, network, _ = initial
    workflow, (dense, categorical) = workflow_without(*excluded), raw_rows()
    tables, sizes = tables_of(FEATURES.id_positions, config.widths), workflow.slot_sizes
    generator = torch.Generator().manual_seed(1)
    values = [
        torch.randn((sum(table.sizes(sizes)), width), generator=generator).numpy()
        for table, width in zip(tables, config.table_widths)
    ]
    as_served = Tensors(tuple(rounded(each, numbers) for each in values), {})
    slots = [torch.tensor(each) for each in as_served.slots(sizes, tables)]
    inputs, ids = map(torch.tensor, encoded(workflow, dense, categorical))
    with torch.no_grad():
        expected = torch.sigmoid(network(inputs, bagged(slots, ids)))
    graph = onnx.load_from_string(export_onnx(network, config))
    session = open_built(workflow, values, graph, widths=config.widths, numbers=numbers)
    (found,) = run_graph(session, dense, categorical)
    assert expected.std() > 0.01
    np.testing.assert_allclose(found[:, 0], expected, rtol=0, atol=1e-6)
    scorer = Scorer(
        network, list(map(torch.tensor, values)), tables, slot_sizes=sizes, numbers=numbers
    )
    np.testing.assert_allclose(
        scorer.probabilities(inputs.numpy(), ids.numpy()), expected, rtol=0, atol=1e-6
    )
    one_by_one = [
        run_graph(session, dense[i : i + 1], categorical[i : i + 1])[0][0, 0] for i in range(40)
    ]
    np.testing.assert_allclose(one_by_one, found[:40, 0], rtol=0, atol=1e-6)


def test_tables_of_other_sizes_are_refused(tmp_path):
    options = {"settings": SETTINGS, "scratch": tmp_path, "features": FEATURES}
    with raises(ContractError, "slot sizes", "expected 5 sizes, each at least 1"):
        make_engine("pytorch", CONFIG, [5] * 4, **options)


def test_lists_without_elements_or_with_unknown_table_are_refused():
    with raises(ContractError, "max", 0, "at least 1"):
        ListOptions(max=0)
    with raises(ContractError, "last", "'tags'", "categorical"):
        Features(
            numeric=(),
            categorical=(),
            lists=("last", "tags"),
            list_options={"last": ListOptions(table="tags")},
        )
