"""The graph's own features against the workflow's, bit by bit, by either way of looking categories up."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contracts.criteo import CATEGORICAL, MISSING_CATEGORY
from components.contracts.criteo import DENSE as DENSE_COLUMNS
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from components.contracts.workflow import TOMBSTONE
from components.deployment.graph.export import GraphLimits, build_graph
from components.deployment.graph.network import DENSE
from components.deployment.graph.parity import open_graph
from tests.support.nasty_rows import STRANGE_CATEGORIES, STRANGE_DENSE, nasty_rows, strange_workflow
from tests.support.toy_models import toy_model

LIMITS = {"label encoder": GraphLimits(), "hash table": GraphLimits(label_encoder_entries=0)}
WORKFLOW = strange_workflow()


def encoder(workflow, limits):
    """Dense [n, 13] and rows of the fused table [n, 26], as the graph has them inside."""
    toy = toy_model(workflow, embedding_dim=1, hidden=2)
    model = onnx.load_from_string(build_graph(workflow, toy.table, toy.network(), limits=limits))
    names = [DENSE, "table_rows"]
    model.graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, names))
    session = open_graph(model.SerializeToString())
    return lambda dense, categorical: session.run(names, {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical})


def expected_rows(workflow, categorical):
    """Row by row by a dictionary, without the workflow's own search."""
    rows, offset = np.empty_like(categorical), 0
    for column, vocabulary in enumerate(workflow.vocabularies):
        ids = {int(key): 3 + i for i, key in enumerate(vocabulary) if key != TOMBSTONE} | {MISSING_CATEGORY: 1}
        rows[:, column] = [offset + ids.get(int(raw), 2) for raw in categorical[:, column]]
        offset += 3 + len(vocabulary)
    return rows


@pytest.fixture(scope="module", params=list(LIMITS))
def encode(request):
    return encoder(WORKFLOW, LIMITS[request.param])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 300), cut=st.integers(1, 300))
def test_features_are_the_workflows_bit_by_bit_however_the_batch_is_cut(encode, seed, num_rows, cut):
    dense, categorical = nasty_rows(WORKFLOW, num_rows, seed)
    values, rows = encode(dense, categorical)
    np.testing.assert_array_equal(rows, expected_rows(WORKFLOW, categorical))
    np.testing.assert_array_equal(values.view(np.int32), WORKFLOW.encode_dense(dense).view(np.int32))
    parts = [encode(dense[i : i + cut], categorical[i : i + cut]) for i in range(0, num_rows, cut)]
    np.testing.assert_array_equal(np.concatenate([p[0] for p in parts]).view(np.int32), values.view(np.int32))
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), rows)


def test_every_strange_value_in_every_column(encode):
    categorical = np.repeat(STRANGE_CATEGORIES[:, None], 26, axis=1)
    dense = np.resize(np.repeat(STRANGE_DENSE[:, None], 13, axis=1), (len(categorical), 13))
    values, rows = encode(dense, categorical)
    np.testing.assert_array_equal(rows, expected_rows(WORKFLOW, categorical))
    np.testing.assert_array_equal(values.view(np.int32), WORKFLOW.encode_dense(dense).view(np.int32))


def test_every_integer_a_counter_may_show_has_the_correctly_rounded_logarithm(encode):
    counts = np.arange(13 * 20_000, dtype=np.float32).reshape(-1, 13)
    values, _ = encode(counts, np.zeros((len(counts), 26), np.int64))
    logged = np.log(counts.astype(np.longdouble) + 1).astype(np.float32)
    np.testing.assert_array_equal(values, (logged - WORKFLOW.means) / WORKFLOW.stds)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_a_grown_vocabulary_keeps_every_row_and_adds_the_new(limits):
    grown = tuple(np.append(v, 2**32 - 10 - np.arange(4)) for v in WORKFLOW.vocabularies)
    before, after = (encoder(workflow, limits) for workflow in (WORKFLOW, _with(WORKFLOW, grown)))
    _, categorical = nasty_rows(WORKFLOW, 500, 3)
    dense = np.zeros((500, 13), np.float32)
    offsets = [
        np.cumsum([0, *(3 + len(v) for v in vocabularies[:-1])]) for vocabularies in (WORKFLOW.vocabularies, grown)
    ]
    old, new = before(dense, categorical)[1] - offsets[0], after(dense, categorical)[1] - offsets[1]
    entered = np.isin(categorical, 2**32 - 10 - np.arange(4))
    np.testing.assert_array_equal(new[~entered], old[~entered])
    fresh = after(dense[:4], np.repeat(2**32 - 10 - np.arange(4)[:, None], 26, axis=1))[1] - offsets[1]
    np.testing.assert_array_equal(fresh, 3 + np.array([len(v) for v in WORKFLOW.vocabularies]) + np.arange(4)[:, None])


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize(
    "excluded", [("I2", "C1", "C17"), CATEGORICAL, DENSE_COLUMNS], ids=["some", "categories", "dense"]
)
def test_what_excluded_columns_hold_is_missing_in_the_graph(excluded, limits):
    nothing = np.zeros(0, np.int64)
    kept = [nothing if name in excluded else v for name, v in zip(CATEGORICAL, WORKFLOW.vocabularies)]
    workflow = _with(WORKFLOW, tuple(kept), excluded=excluded)
    dense, categorical = nasty_rows(WORKFLOW, 400, 5)
    values, rows = encoder(workflow, limits)(dense, categorical)
    blanked_dense, blanked = dense.copy(), categorical.copy()
    blanked_dense[:, [name in excluded for name in DENSE_COLUMNS]] = np.nan
    blanked[:, [name in excluded for name in CATEGORICAL]] = MISSING_CATEGORY
    np.testing.assert_array_equal(rows, expected_rows(workflow, blanked))
    np.testing.assert_array_equal(values.view(np.int32), WORKFLOW.encode_dense(blanked_dense).view(np.int32))


def _with(workflow, vocabularies, **changes):
    return dataclasses.replace(workflow, vocabularies=vocabularies, **changes)
