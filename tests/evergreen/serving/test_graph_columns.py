"""Tests of the served graph's numeric options, buckets, fixed values and large categories."""

from dataclasses import replace

import numpy as np
import pytest

from evergreen.config.features import CategoricalOptions, Features, NumericOptions
from evergreen.contracts.serving import named_inputs
from evergreen.contracts.workflow import TOMBSTONE
from evergreen.runtime.errors import ContractError
from evergreen.serving.graph.encoding import DENSE
from testing.recommenders import SHOP
from tests.support.errors import raises
from tests.support.graphs import open_built, run_graph
from tests.support.numeric_columns import EVERY_KIND, scaling_of, unscaled, values_of
from tests.support.toy_models import toy_model
from tests.support.workflows import workflow_of

FEATURES = SHOP.features


def shop_workflow(features, excluded=()):
    vocabularies = {"item": [7, 2**32 - 1, TOMBSTONE, 0], "shop": [0, 7, 5], "genres": [9, 5]}
    return workflow_of(
        [[] if name in excluded else vocabularies.get(name, []) for name in features.slots],
        features,
        means=np.array([1.5, 0.25], np.float32),
        stds=np.array([0.5, 2.0], np.float32),
        excluded=excluded,
    )


def rows_of(features, count=500):
    random = np.random.default_rng(3)
    dense = random.choice([np.nan, -3, 0, 0.5, 7, 12345], (count, len(features.numeric))).astype(
        np.float32
    )
    values = [-1, TOMBSTONE, 0, 5, 7, 9, 2**32 - 1, 2**34, 2**34 + 7]
    return dense, random.choice(values, (count, len(features.position_names)))


def open_inner(workflow, names):
    """Open a graph with random weights.

    The graph returns those of its inner values that `names` lists.
    """
    toy = toy_model(workflow)
    return open_built(workflow, [toy.table], toy.network(), names=names)


@pytest.mark.parametrize(
    "excluded", [(), ("standard", "range")], ids=["all trained", "some excluded"]
)
def test_graph_computes_numeric_columns_by_their_options(excluded):
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
    session = open_inner(workflow, [DENSE])
    (encoded,) = session.run([DENSE], named_inputs(dense, np.full((300, 1), 7)))
    np.testing.assert_array_equal(encoded, workflow.encode_dense(dense))


def test_graph_finds_bucket_of_every_float_beside_boundary():
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
    session = open_inner(workflow, [DENSE, "table_rows"])
    (plain, found), rows = session.run([DENSE, "table_rows"], named_inputs(dense, categorical)), 5
    np.testing.assert_allclose(plain, np.log1p(np.maximum(dense[:, 1:2], 0)), rtol=0, atol=1e-6)
    for position, (name, size) in enumerate({"price": 8, "age": 1024, "none": 2}.items(), start=1):
        clipped = np.clip(values.astype(np.float64), *features.options_of(name).bounds)
        buckets = (clipped[:, None] >= boundaries[name].astype(np.float64)).sum(axis=1)
        expected = rows + np.where(np.isnan(values), 1, 3 + buckets)
        np.testing.assert_array_equal(found[:, position], expected)
        rows += 3 + size


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ({}, "boundaries are given for"),
        ({"price": [1, 1]}, "in ascending order"),
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


@pytest.mark.parametrize("excluded", [(), ("shop",)], ids=["trained", "excluded"])
def test_column_that_is_served_as_one_value_has_it_in_every_row(excluded):
    options = {
        "shop": CategoricalOptions(served_as="5"),
        "item": CategoricalOptions(served_as=2**32 - 1),
    }
    workflow = shop_workflow(replace(FEATURES, categorical_options=options), excluded)
    assert workflow.served_ids == {0: 4, 1: 1 if excluded else 5}
    toy, (dense, categorical) = toy_model(workflow), rows_of(FEATURES)
    (scores,) = run_graph(open_built(workflow, [toy.table], toy.network()), dense, categorical)
    categorical[:, :2] = 2**32 - 1, 5
    np.testing.assert_allclose(
        scores[:, 0], toy.scores(workflow, dense, categorical), rtol=0, atol=1e-6
    )


def test_column_that_is_served_as_value_without_category_is_refused():
    with raises(ContractError, "shop", 6, "categories"):
        shop_workflow(
            replace(FEATURES, categorical_options={"shop": CategoricalOptions(served_as=6)})
        )


def test_categories_of_52_bits_are_found_and_no_other_number_matches():
    known = [each for each in EDGES if each < 2**52]
    workflow = workflow_of(
        [known[::2], known[1::2]], Features(numeric=(), categorical=("item", "user"))
    )
    raw = [
        *EDGES,
        *(-each for each in EDGES),
        2**63 - 1,
        -(2**63),
        2**62,
        *(each + 2**34 for each in known),
    ]
    rows = np.array([(left, right) for left in raw for right in (raw[0], raw[-1], left)])
    session = open_inner(workflow, ["table_rows"])
    (found,) = session.run(["table_rows"], named_inputs(np.zeros((len(rows), 0), np.float32), rows))
    np.testing.assert_array_equal(
        found, workflow.encode_categorical(rows) + [0, workflow.slot_sizes[0]]
    )
    assert (workflow.encode_categorical(rows)[:, 0] >= 3).sum() >= 3 * len(known[::2])


def test_too_many_columns_of_wide_categories_are_refused():
    features = Features(numeric=(), categorical=tuple(f"c{i}" for i in range(1024)))
    workflow = workflow_of([[2**40]] * 1024, features)
    with raises(ContractError, "1024 categorical columns", "at most 1023"):
        open_inner(workflow, [])
