"""The graph against the contracts' own encoding and a float64 network written for the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contracts.criteo import MISSING_CATEGORY
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from components.contracts.workflow import TOMBSTONE
from components.deployment.graph.export import GraphLimits, build_graph, export
from components.deployment.graph.files import GRAPH_FILE
from components.deployment.graph.network import read_network
from components.deployment.graph.parity import open_graph
from components.runtime.errors import ContractError
from tests.support.nasty_rows import nasty_rows, strange_workflow
from tests.support.toy_models import toy_model

LIMITS = {"label encoder": GraphLimits(), "hash table": GraphLimits(label_encoder_entries=0)}
WORKFLOW = strange_workflow(3)


@pytest.fixture(scope="module", params=list(LIMITS))
def served(request):
    toy = toy_model(WORKFLOW, scale=0.05)
    return toy, open_graph(build_graph(WORKFLOW, toy.table, toy.network(), limits=LIMITS[request.param]))


def graph_of(workflow, toy):
    return build_graph(workflow, toy.table, toy.network())


def run(session, dense, categorical):
    return session.run(None, {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical})[0]


def bits(scores):
    return scores.view(np.int32)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 40))
def test_graph_scores_any_rows_as_the_float64_network_does(served, seed, num_rows):
    toy, session = served
    dense, categorical = nasty_rows(WORKFLOW, num_rows, seed, dense_up_to=1e5, strange_dense=False)
    scores = run(session, dense, categorical)
    assert scores.shape == (num_rows, 1)
    assert scores.dtype == np.float32
    expected = toy.scores(WORKFLOW, dense, categorical)
    np.testing.assert_allclose(scores.ravel(), expected, rtol=0, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 20))
def test_dense_values_at_the_ends_of_float32_are_scored_as_by_float64_within_its_rounding(served, seed, num_rows):
    toy, session = served
    dense, categorical = nasty_rows(WORKFLOW, num_rows, seed)
    expected = toy.scores(WORKFLOW, dense, categorical)
    # Terms of hundreds cancel in some logits there, and float32's own rounding shows, however the sums are written.
    np.testing.assert_allclose(run(session, dense, categorical).ravel(), expected, rtol=0, atol=5e-5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.sampled_from([1, 2, 3, 5, 8, 13, 64, 100, 1000, 1024, 4095, 4096]),
    cuts=st.lists(st.integers(1, 4095), max_size=12),
)
def test_how_a_batch_is_cut_changes_no_bit_of_any_score(served, seed, num_rows, cuts):
    _, session = served
    dense, categorical = nasty_rows(WORKFLOW, num_rows, seed)
    whole = run(session, dense, categorical)
    ends = [0, *sorted({cut for cut in cuts if cut < num_rows}), num_rows]
    parts = [run(session, dense[start:end], categorical[start:end]) for start, end in zip(ends, ends[1:])]
    np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(whole))


def test_an_infinite_value_spoils_its_own_row_at_most(served):
    _, session = served
    dense, categorical = nasty_rows(WORKFLOW, 50, 2)
    before = run(session, dense, categorical)
    dense[7, 3], dense[9, 4], dense[11, :] = np.inf, -np.inf, np.inf
    after = run(session, dense, categorical)
    others = np.delete(np.arange(50), [7, 9, 11])
    np.testing.assert_array_equal(bits(after[others]), bits(before[others]))
    # Minus infinity is clipped like any negative value.
    dense[9, 4] = -5
    np.testing.assert_array_equal(bits(run(session, dense, categorical)[9]), bits(after[9]))


def test_empty_vocabularies_everywhere_still_tell_missing_from_unknown(make_parts, raw_rows):
    workflow, toy = make_parts(5, vocabularies=[np.zeros(0, np.int64)] * 26)
    dense, categorical = raw_rows(20, 5)
    categorical[0] = MISSING_CATEGORY
    categorical[1:] = 7
    dense[:] = dense[0]
    scores = run(open_graph(build_graph(workflow, toy.table, toy.network())), dense, categorical).ravel()
    np.testing.assert_allclose(scores, toy.scores(workflow, dense, categorical), atol=2e-6)
    assert scores[0] != scores[1]


@pytest.mark.parametrize("every", [1, 3], ids=["all evicted", "some evicted"])
def test_an_evicted_category_is_served_as_unknown_and_the_others_keep_their_rows(make_parts, raw_rows, every):
    workflow, toy = make_parts(6)
    buried = [v.copy() for v in workflow.vocabularies]
    for vocabulary in buried:
        vocabulary[::every] = TOMBSTONE
    evicted, _ = make_parts(6, vocabularies=buried)
    dense, categorical = raw_rows(200, 6)
    categorical[:3] = TOMBSTONE
    model = onnx.load_from_string(build_graph(evicted, toy.table, toy.network()))
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("table_rows"))
    inputs = {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical}
    scores, rows = open_graph(model.SerializeToString()).run(None, inputs)
    ids = rows - np.cumsum([0, *workflow.slot_sizes[:-1]])
    np.testing.assert_array_equal(ids, evicted.encode_categorical(categorical))
    before = workflow.encode_categorical(categorical)
    np.testing.assert_array_equal(ids, np.where((before >= 3) & ((before - 3) % every == 0), 2, before))
    np.testing.assert_allclose(scores.ravel(), toy.scores(evicted, dense, categorical), atol=2e-6)


def test_same_model_gives_the_same_bytes_and_another_does_not(make_parts):
    first, again, other = (graph_of(*make_parts(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_graph_is_valid_onnx_of_the_promised_versions_and_tensors(make_parts):
    model = onnx.load_from_string(graph_of(*make_parts(1)))
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 8
    assert {o.domain: o.version for o in model.opset_import} == {"": 17, "ai.onnx.ml": 4}
    assert [i.name for i in model.graph.input] == [DENSE_INPUT.name, CATEGORICAL_INPUT.name]
    assert [o.name for o in model.graph.output] == [PROBABILITY_OUTPUT.name]


def test_a_table_of_another_vocabulary_is_refused(make_parts):
    workflow, toy = make_parts(1)
    with pytest.raises(ContractError, match=r"embeddings have \d+ rows, expected \d+ from"):
        build_graph(workflow, toy.table[:-1], toy.network())


def renamed(network):
    network.graph.output[0].name = "logits"


def of_another_opset(network):
    network.opset_import[0].version = 13


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(renamed, "has tensors .*'logits'"), (of_another_opset, "has operator sets {'': 13}, expected version 17")],
)
def test_a_network_that_is_not_as_exported_is_refused(make_parts, tmp_path, spoil, message):
    network = make_parts(1)[1].network()
    spoil(network)
    onnx.save(network, tmp_path / "network.onnx")
    with pytest.raises(ContractError, match=message):
        read_network(tmp_path / "network.onnx")
    (tmp_path / "network.onnx").write_bytes(b"torn")
    with pytest.raises(ContractError, match=r"network\.onnx cannot be read"):
        read_network(tmp_path / "network.onnx")


def test_a_damaged_weight_file_is_refused(make_candidate, tmp_path):
    model, _, _ = make_candidate(tmp_path / "store", 1)
    file = tmp_path / "store" / "models" / "model-1" / "weights" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ContractError, match=r"weights has sha256 .* as in its manifest"):
        export(model, tmp_path / "graph")


def test_graph_bytes_do_not_depend_on_the_process(make_candidate, exported, tmp_path):
    model, _, _ = make_candidate(tmp_path / "store", 1)
    code = (
        "import sys; from pathlib import Path; from components.contracts.manifests import Model; "
        "from components.deployment.graph.export import export; export(Model.read(sys.argv[1]), Path(sys.argv[2]))"
    )
    manifest = tmp_path / "store" / "models" / "model-1" / "model.json"
    command = [sys.executable, "-c", code, manifest, tmp_path / "other"]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True)
    assert (tmp_path / "other" / GRAPH_FILE).read_bytes() == exported(model).read_bytes()
