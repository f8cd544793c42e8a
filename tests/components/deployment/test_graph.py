"""The graph against the contracts' own encoding and a float64 network written for the test."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.contracts.criteo import MAX_CATEGORY, MISSING_CATEGORY
from components.contracts.dcn import DcnConfig
from components.contracts.errors import ContractError
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from components.contracts.workflow import TOMBSTONE
from components.deployment import graph as graph_module
from components.deployment.graph import build_graph, export
from components.deployment.graph_files import GRAPH_FILE
from components.deployment.parity import open_graph

CONFIG = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8))


@pytest.fixture(scope="module")
def parts(make_parts):
    workflow, weights = make_parts(3)
    return workflow, weights, open_graph(build_graph(workflow, weights, CONFIG))


def run(session, dense, categorical):
    return session.run(None, {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical})[0]


dense_values = st.one_of(
    st.just(np.nan), st.integers(-3, 10).map(float), st.floats(0, 1e9, width=32), st.just(3.0e38), st.just(-3.0e38)
)


@st.composite
def batches(draw):
    n = draw(st.integers(1, 9))
    dense = draw(st.lists(st.lists(dense_values, min_size=13, max_size=13), min_size=n, max_size=n))
    kind = draw(st.lists(st.lists(st.integers(0, 5), min_size=26, max_size=26), min_size=n, max_size=n))
    pick = draw(st.integers(0, 10**6))
    return np.array(dense, np.float32), np.array(kind), pick


def keys_of(workflow, kind, pick):
    """Raw categories by kind: missing, extreme ids, unseen, known (three shares of the draws)."""
    keys = np.empty(kind.shape, np.int64)
    for (row, column), k in np.ndenumerate(kind):
        vocabulary = workflow.vocabularies[column]
        special = [MISSING_CATEGORY, MAX_CATEGORY, np.iinfo(np.int64).min, np.iinfo(np.int64).max]
        if k >= 3 and len(vocabulary):
            keys[row, column] = vocabulary[(pick + row * 7 + column) % len(vocabulary)]
        else:
            keys[row, column] = special[(pick + row + column) % 4] if k else (pick * 31 + row * 26 + column) % 2**32
    return keys


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), split=st.integers(1, 8))
def test_graph_scores_any_rows_as_the_float64_network_does_and_however_they_are_split(
    parts, reference_scores, batch, split
):
    workflow, weights, session = parts
    dense, kind, pick = batch
    categorical = keys_of(workflow, kind, pick)
    scores = run(session, dense, categorical)
    assert scores.shape == (len(dense), 1)
    assert scores.dtype == np.float32
    expected = reference_scores(workflow, weights, CONFIG, dense, categorical)
    # Values near float32's limit make logits of hundreds: float32's own rounding shows there, and saturation.
    np.testing.assert_allclose(
        scores.ravel(), expected, atol=2e-5 if np.abs(np.nan_to_num(dense)).max() > 1e6 else 2e-6
    )
    apart = [run(session, dense[i : i + split], categorical[i : i + split]) for i in range(0, len(dense), split)]
    np.testing.assert_allclose(np.concatenate(apart), scores, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 5, 117], ids="rank {}".format)
def test_graph_of_dcn_v2_scores_as_the_float64_network_does(make_parts, reference_scores, raw_rows, rank):
    config = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8), projection_dim=rank)
    workflow, weights = make_parts(7, config=config)
    # Products of matrices grow with the rank: keep the logits where float32 is fine.
    scale = np.float32(1 / np.sqrt(rank))
    weights.dense.update({name: w * scale for name, w in weights.dense.items() if name.endswith(".u")})
    model = build_graph(workflow, weights, config)
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    dense, categorical = raw_rows(300, 7)
    scores = run(open_graph(model), dense, categorical).ravel()
    expected = reference_scores(workflow, weights, config, dense, categorical)
    assert expected.std() > 0.05
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_graph_encodes_as_the_workflow_does(make_parts, raw_rows):
    workflow, weights = make_parts(4)
    model = onnx.load_from_string(build_graph(workflow, weights, CONFIG))
    for name, kind, width in (
        ("dense_encoded", onnx.TensorProto.FLOAT, 13),
        ("table_rows", onnx.TensorProto.INT64, 26),
    ):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, ["rows", width]))
    dense, categorical = raw_rows(500, 4)
    categorical[::7] = np.random.default_rng(0).integers(-1, 2**32, categorical[::7].shape)
    inputs = {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical}
    _, encoded, rows = open_graph(model.SerializeToString()).run(None, inputs)
    offsets = np.cumsum([0, *workflow.slot_sizes[:-1]])
    np.testing.assert_array_equal(rows, workflow.encode_categorical(categorical) + offsets)
    np.testing.assert_allclose(encoded, workflow.encode_dense(dense), atol=1e-6)


def test_empty_vocabularies_everywhere_still_tell_missing_from_unknown(make_parts, reference_scores, raw_rows):
    workflow, weights = make_parts(5, vocabularies=[np.zeros(0, np.int64)] * 26)
    dense, categorical = raw_rows(20, 5)
    categorical[0] = MISSING_CATEGORY
    categorical[1:] = 7
    dense[:] = dense[0]
    scores = run(open_graph(build_graph(workflow, weights, CONFIG)), dense, categorical).ravel()
    np.testing.assert_allclose(scores, reference_scores(workflow, weights, CONFIG, dense, categorical), atol=2e-6)
    assert scores[0] != scores[1]


@pytest.mark.parametrize("every", [1, 3], ids=["all evicted", "some evicted"])
def test_an_evicted_category_is_served_as_unknown_and_the_others_keep_their_rows(
    make_parts, reference_scores, raw_rows, every
):
    workflow, weights = make_parts(6)
    buried = [v.copy() for v in workflow.vocabularies]
    for vocabulary in buried:
        vocabulary[::every] = TOMBSTONE
    evicted, _ = make_parts(6, vocabularies=buried)
    dense, categorical = raw_rows(200, 6)
    categorical[:3] = TOMBSTONE
    model = onnx.load_from_string(build_graph(evicted, weights, CONFIG))
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("table_rows"))
    inputs = {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical}
    scores, rows = open_graph(model.SerializeToString()).run(None, inputs)
    ids = rows - np.cumsum([0, *workflow.slot_sizes[:-1]])
    np.testing.assert_array_equal(ids, evicted.encode_categorical(categorical))
    before = workflow.encode_categorical(categorical)
    np.testing.assert_array_equal(ids, np.where((before >= 3) & ((before - 3) % every == 0), 2, before))
    np.testing.assert_allclose(
        scores.ravel(), reference_scores(evicted, weights, CONFIG, dense, categorical), atol=2e-6
    )


def test_no_tombstone_is_a_key_of_the_graph(make_parts):
    workflow, weights = make_parts(6, vocabularies=[np.array([5, TOMBSTONE, 9, TOMBSTONE], np.int64)] * 26)
    model = onnx.load_from_string(build_graph(workflow, weights, CONFIG))
    encoders = [node for node in model.graph.node if node.op_type == "LabelEncoder"]
    assert len(encoders) == 26
    for slot, node in enumerate(encoders):
        tensors = {a.name: onnx.numpy_helper.to_array(a.t) for a in node.attribute if a.name.endswith("tensor")}
        assert tensors["keys_tensor"].tolist() == [MISSING_CATEGORY, 5, 9]
        assert (tensors["values_tensor"] - slot * 7).tolist() == [1, 3, 5]


def test_same_model_gives_the_same_bytes_and_another_does_not(make_parts):
    first, again, other = (build_graph(*make_parts(seed), CONFIG) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_graph_is_valid_onnx_of_the_promised_versions_and_tensors(make_parts):
    model = onnx.load_from_string(build_graph(*make_parts(1), CONFIG))
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 8
    assert {o.domain: o.version for o in model.opset_import} == {"": 17, "ai.onnx.ml": 4}
    assert [i.name for i in model.graph.input] == [DENSE_INPUT.name, CATEGORICAL_INPUT.name]
    assert [o.name for o in model.graph.output] == [PROBABILITY_OUTPUT.name]


def test_weights_of_another_vocabulary_are_refused(make_parts):
    workflow, weights = make_parts(1)
    with pytest.raises(ContractError, match=r"embeddings have shape .* expected"):
        build_graph(workflow, dataclasses.replace(weights, embeddings=weights.embeddings[:-1]), CONFIG)


def test_a_graph_beyond_protobufs_limit_is_refused_before_it_is_built(make_parts, monkeypatch):
    monkeypatch.setattr(graph_module, "MAX_GRAPH_BYTES", 1000)
    with pytest.raises(ContractError, match="expected at most 1000"):
        build_graph(*make_parts(1), CONFIG)


def test_a_damaged_weight_file_is_refused(make_candidate, tmp_path):
    model, _, _ = make_candidate(tmp_path / "store", 1)
    file = tmp_path / "store" / "models" / "model-1" / "weights" / "dcn_dense_0.model"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ContractError, match=r"weights has sha256 .* as in its manifest"):
        export(model, tmp_path / "graph")


def test_graph_bytes_do_not_depend_on_the_process(make_candidate, exported, tmp_path):
    model, _, _ = make_candidate(tmp_path / "store", 1)
    code = (
        "import sys; from pathlib import Path; from components.contracts.manifests import Model; "
        "from components.deployment.graph import export; export(Model.read(sys.argv[1]), Path(sys.argv[2]))"
    )
    manifest = tmp_path / "store" / "models" / "model-1" / "model.json"
    command = [sys.executable, "-c", code, manifest, tmp_path / "other"]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True)
    assert (tmp_path / "other" / GRAPH_FILE).read_bytes() == exported(model).read_bytes()
