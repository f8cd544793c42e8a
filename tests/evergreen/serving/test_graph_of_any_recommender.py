"""Tests of the served graph for recommenders with other columns, or without a kind of column."""

import math
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from evergreen.config.features import CategoricalOptions, Features, NumericOptions
from evergreen.contracts.serving import named_inputs
from evergreen.contracts.workflow import TOMBSTONE
from evergreen.registry.models import GRAPH_FILE
from evergreen.runtime.errors import ContractError
from evergreen.serving.graph.encoding import DENSE
from evergreen.serving.graph.export import write_graph
from evergreen.serving.parity import open_graph
from tests.support.errors import raises
from tests.support.graphs import with_inner_values
from tests.support.numeric_columns import EVERY_KIND, scaling_of, unscaled, values_of
from tests.support.workflows import workflow_of

DIM = 4
SHOP = Features(numeric=("price", "age"), categorical=("item", "shop", "city"))


def shop_workflow(features, excluded=()):
    vocabularies = {"item": [7, 2**32 - 1, TOMBSTONE, 0], "shop": [0, 7, 5], "city": []}
    return workflow_of(
        [[] if name in excluded else vocabularies[name] for name in features.categorical],
        features,
        means=np.array([1.5, 0.25], np.float32)[: len(features.numeric)],
        stds=np.array([0.5, 2.0], np.float32)[: len(features.numeric)],
        excluded=excluded,
    )


def network_of(features):
    """Return a network that computes logit = concat(vectors, dense) @ weights."""
    d, c = len(features.dense_inputs), len(features.vector_names)
    weights = np.random.default_rng(1).normal(0, 0.4, d + c * DIM).astype(np.float32)
    nodes = [
        helper.make_node("Reshape", ["embeddings", "wide"], ["flat"]),
        helper.make_node("Concat", ["flat", "dense"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "weights"], ["logit"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([-1, c * DIM]) if c else np.array([0, 0]), "wide"),
        numpy_helper.from_array(weights, "weights"),
    ]
    value = helper.make_tensor_value_info
    inputs = [
        value("dense", TensorProto.FLOAT, ["rows", d]),
        value("embeddings", TensorProto.FLOAT, ["rows", c, DIM]),
    ]
    graph = helper.make_graph(
        nodes, "linear", inputs, [value("logit", TensorProto.FLOAT, ["rows"])], constants
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def rows_of(features, count=500):
    random = np.random.default_rng(3)
    dense = random.choice([np.nan, -3, 0, 0.5, 7, 12345], (count, len(features.numeric))).astype(
        np.float32
    )
    values = [-1, TOMBSTONE, 0, 5, 7, 9, 2**32 - 1, 2**34, 2**34 + 7]
    return dense, random.choice(values, (count, len(features.categorical)))


def by_hand(workflow, table, dense, categorical, weights):
    """Compute probabilities in float64 by the definition in `contracts.workflow`."""
    answers = []
    for dense_row, categorical_row in zip(dense, categorical):
        row, offset = [], 0
        for name, vocabulary, raw in zip(
            workflow.features.categorical, workflow.vocabularies, categorical_row
        ):
            ids = {int(key): 3 + at for at, key in enumerate(vocabulary) if key != TOMBSTONE} | {
                -1: 1
            }
            row.extend(
                table[offset + (1 if name in workflow.excluded else ids.get(int(raw), 2))].tolist()
            )
            offset += 3 + len(vocabulary)
        for name, raw, mean, std in zip(
            workflow.features.numeric, dense_row, workflow.means, workflow.stds
        ):
            value = 0.0 if math.isnan(raw) or name in workflow.excluded else max(float(raw), 0.0)
            row.append((math.log1p(value) - float(mean)) / float(std))
        answers.append(1 / (1 + math.exp(-np.dot(row, weights.astype(np.float64)))))
    return np.array(answers)


@pytest.mark.parametrize(
    "excluded", [(), ("standard", "range")], ids=["all learnt", "some excluded"]
)
def test_graph_computes_numeric_columns_as_their_options_say(excluded, tmp_path):
    values = {name: values_of(name, 300) for name in EVERY_KIND.numeric}
    scalings = [scaling_of(name, unscaled(name, each)) for name, each in values.items()]
    workflow = workflow_of(
        [[7]],
        EVERY_KIND,
        means=np.array([centre for centre, _ in scalings], np.float32),
        stds=np.array([scale for _, scale in scalings], np.float32),
        excluded=excluded,
    )
    dense = np.stack(list(values.values()), axis=1)
    taken = {
        name: np.full(300, np.nan) if name in excluded else each for name, each in values.items()
    }
    columns = [
        (unscaled(name, each) - centre) / scale
        for (name, each), (centre, scale) in zip(taken.items(), scalings)
    ]
    expected = np.stack(
        [*columns, np.isnan(taken["standard"]), np.isnan(taken["constant"])], axis=1
    )
    np.testing.assert_allclose(workflow.encode_dense(dense), expected, rtol=1e-4, atol=1e-5)
    write_graph(
        tmp_path,
        workflow,
        [np.ones((sum(workflow.slot_sizes), DIM), np.float32)],
        network=network_of(EVERY_KIND),
        name="shop",
    )
    session = onnxruntime.InferenceSession(with_inner_values(tmp_path / GRAPH_FILE, [DENSE]))
    (encoded,) = session.run([DENSE], named_inputs(dense, np.full((300, 1), 7)))
    np.testing.assert_array_equal(encoded, workflow.encode_dense(dense))


def test_graph_finds_bucket_of_every_float_beside_boundary(tmp_path):
    random, largest = np.random.default_rng(5), np.finfo(np.float32).max
    boundaries = {
        "price": np.array([-largest, -1e-45, 0, 1e-45, 0.1, 1 / 3, largest], np.float32),
        "age": np.sort(random.normal(0, 3, 1023).astype(np.float32)),
        "none": np.zeros(0, np.float32),
    }
    options = {
        "price": ("clip(-2..1e38)", "quantile_buckets(8)"),
        "age": ("quantile_buckets(1024)",),
    }
    options = {name: NumericOptions(transform=each) for name, each in options.items()}
    options["none"] = NumericOptions(transform=("quantile_buckets(2)",))
    features = Features(
        numeric=("price", "plain", "age", "none"), categorical=("item",), numeric_options=options
    )
    workflow = workflow_of(
        [[7, 2**40], *map(np.arange, (8, 1024, 2))],
        features,
        means=np.zeros(4, np.float32),
        stds=np.ones(4, np.float32),
        boundaries=boundaries,
    )
    ends = np.concatenate(list(boundaries.values()))
    with np.errstate(over="ignore"):
        beside = [
            np.nextafter(ends, np.float32(end), dtype=np.float32) for end in (-np.inf, np.inf)
        ]
    values = np.concatenate(
        [ends, *beside, np.array([np.nan, np.inf, -np.inf, -0.0, 2, -2, 1e38], np.float32)]
    )
    dense = np.stack([values, values, values, values], axis=1)
    dense[:, 1] = random.normal(size=len(dense))
    categorical = random.choice([7, 2**40, 5, -1], (len(dense), 1))
    table = np.ones((sum(workflow.slot_sizes), DIM), np.float32)
    write_graph(tmp_path, workflow, [table], network=network_of(features), name="shop")
    session = onnxruntime.InferenceSession(
        with_inner_values(tmp_path / GRAPH_FILE, [DENSE, "table_rows"])
    )
    (plain, found), rows = session.run([DENSE, "table_rows"], named_inputs(dense, categorical)), 5
    np.testing.assert_allclose(plain, np.log1p(np.maximum(dense[:, 1:2], 0)), rtol=0, atol=1e-6)
    for place, (name, size) in enumerate({"price": 8, "age": 1024, "none": 2}.items(), start=1):
        clipped = np.clip(values.astype(np.float64), *features.options_of(name).bounds)
        buckets = (clipped[:, None] >= boundaries[name].astype(np.float64)).sum(axis=1)
        expected = rows + np.where(np.isnan(values), 1, 3 + buckets)
        np.testing.assert_array_equal(found[:, place], expected)
        rows += 3 + size


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ({}, "boundaries are given for"),
        ({"price": [1, 1]}, "that ascend"),
        ({"price": [1, 2, 3]}, "fewer than 3"),
    ],
)
def test_boundaries_that_are_no_buckets_are_refused(boundaries, message):
    options = {"price": NumericOptions(transform=("quantile_buckets(3)",))}
    features = Features(numeric=("price",), categorical=(), numeric_options=options)
    arrays = {name: np.array(each, np.float32) for name, each in boundaries.items()}
    with pytest.raises(ContractError, match=message):
        workflow_of([range(3)], features, boundaries=arrays)


EDGES = sorted(
    {
        0,
        *(each + off for each in (2**31, 2**32, 2**33, 2**51, 2**52 - 1) for off in (-1, 0, 1)),
        2**52 + 2**31,
        2**53,
    }
)


@pytest.mark.parametrize("excluded", [(), ("shop",)], ids=["learnt", "excluded"])
def test_column_that_is_served_as_one_value_has_it_in_every_row(excluded, tmp_path):
    options = {
        "shop": CategoricalOptions(served_as="5"),
        "item": CategoricalOptions(served_as=2**32 - 1),
    }
    workflow = shop_workflow(replace(SHOP, categorical_options=options), excluded)
    assert workflow.served_ids == {0: 4, 1: 1 if excluded else 5}
    network, random = network_of(SHOP), np.random.default_rng(2)
    weights = numpy_helper.to_array(network.graph.initializer[1])
    table = random.normal(0, 0.5, (sum(workflow.slot_sizes), DIM)).astype(np.float32)
    write_graph(tmp_path, workflow, [table], network=network, name="shop")
    dense, categorical = rows_of(SHOP)
    scores = open_graph(tmp_path / GRAPH_FILE).run(
        ["probability"], named_inputs(dense, categorical)
    )[0]
    categorical[:, :2] = 2**32 - 1, 5
    np.testing.assert_allclose(
        scores[:, 0], by_hand(workflow, table, dense, categorical, weights), rtol=0, atol=1e-6
    )


def test_column_that_is_served_as_value_without_category_is_refused():
    with raises(ContractError, "shop", 6, "categories"):
        shop_workflow(replace(SHOP, categorical_options={"shop": CategoricalOptions(served_as=6)}))


def test_categories_of_52_bits_are_found_and_no_other_number_matches(tmp_path):
    known = [each for each in EDGES if each < 2**52]
    workflow = workflow_of(
        [known[::2], known[1::2]], Features(numeric=(), categorical=("item", "user"))
    )
    table = np.random.default_rng(0).normal(size=(sum(workflow.slot_sizes), DIM)).astype(np.float32)
    write_graph(tmp_path, workflow, [table], network=network_of(workflow.features), name="shop")
    raw = [
        *EDGES,
        *(-each for each in EDGES),
        2**63 - 1,
        -(2**63),
        2**62,
        *(each + 2**34 for each in known),
    ]
    rows = np.array([(left, right) for left in raw for right in (raw[0], raw[-1], left)])
    session = onnxruntime.InferenceSession(with_inner_values(tmp_path / GRAPH_FILE, ["table_rows"]))
    (found,) = session.run(["table_rows"], named_inputs(np.zeros((len(rows), 0), np.float32), rows))
    np.testing.assert_array_equal(
        found, workflow.encode_categorical(rows) + [0, workflow.slot_sizes[0]]
    )
    assert (workflow.encode_categorical(rows)[:, 0] >= 3).sum() >= 3 * len(known[::2])


def test_too_many_columns_of_wide_categories_are_refused(tmp_path):
    features = Features(numeric=(), categorical=tuple(f"c{i}" for i in range(1024)))
    workflow = workflow_of([[2**40]] * 1024, features)
    with raises(ContractError, "1024 categorical columns", "at most 1023"):
        write_graph(
            tmp_path,
            workflow,
            [np.zeros((4096, DIM), np.float32)],
            network=network_of(SHOP),
            name="shop",
        )
