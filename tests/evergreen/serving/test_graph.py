"""Tests that compare the graph with the contracts' encoding and a float64 network."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from evergreen.registry.models import DATA_FILE, GRAPH_FILE, graph_sha256
from evergreen.runtime.errors import ContractError
from evergreen.serving.graph import encoding
from evergreen.serving.graph import parts as graph_parts
from evergreen.serving.graph.encoding import CHOICES, DENSE, EMPTY, build_table
from evergreen.serving.graph.export import export, read_network, write_graph
from evergreen.serving.parity import open_graph
from testing.paths import REPOSITORY
from testing.served_names import MODEL_NAME
from tests.support.errors import raises
from tests.support.graphs import open_built, run_graph
from tests.support.nasty_rows import STRANGE_CATEGORIES, STRANGE_DENSE, nasty_rows, strange_workflow
from tests.support.toy_models import ids_of, toy_model

WORKFLOW = strange_workflow(3)
NUM_POSITIONS = len(WORKFLOW.features.position_names)


def bits(values):
    return values.view(np.int32)


@pytest.fixture(scope="module")
def served():
    toy = toy_model(WORKFLOW, scale=0.05)
    session = open_built(WORKFLOW, [toy.table], toy.network())
    return toy, lambda *rows: run_graph(session, *rows)[0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 40))
def test_graph_scores_any_rows_as_float64_network_does(served, seed, num_rows):
    toy, run = served
    dense, categorical = nasty_rows(WORKFLOW, num_rows, seed, dense_up_to=1e5, strange_dense=False)
    scores = run(dense, categorical)
    assert scores.shape == (num_rows, 1)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(
        scores.ravel(), toy.scores(WORKFLOW, dense, categorical), rtol=0, atol=1e-6
    )


def test_infinite_value_spoils_its_own_row_at_most(served):
    _, run = served
    dense, categorical = nasty_rows(WORKFLOW, 50, 2)
    before = run(dense, categorical)
    dense[7, 0], dense[9, 1], dense[11, :] = np.inf, -np.inf, np.inf
    after = run(dense, categorical)
    others = np.delete(np.arange(50), [7, 9, 11])
    np.testing.assert_array_equal(bits(after[others]), bits(before[others]))
    # Minus infinity is clipped like any negative value.
    dense[9, 1] = -5
    np.testing.assert_array_equal(bits(run(dense, categorical)[9]), bits(after[9]))


def encoder(workflow):
    """Return a function that reads two inner tensors of the graph.

    The tensors are the dense values [n, d] and the row numbers in the fused table [n, positions].
    """
    toy = toy_model(workflow, embedding_dim=1, hidden=2)
    names = [DENSE, "table_rows"]
    session = open_built(workflow, [toy.table], toy.network(), names=names)
    return lambda *rows: run_graph(session, *rows, names)


def expected_rows(workflow, categorical):
    """Return row numbers in the fused table, found without the workflow's search.

    At an empty position of a list, the graph looks up the row of a missing value and does not pool
    it.
    """
    sizes = [3 + len(vocabulary) for vocabulary in workflow.vocabularies]
    offsets = np.cumsum([0, *sizes])[list(workflow.features.positions.slots)]
    return np.maximum(ids_of(workflow, categorical), 1) + offsets


@pytest.fixture(scope="module")
def encode():
    return encoder(WORKFLOW)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 300))
def test_features_are_workflows_bit_by_bit(encode, seed, num_rows):
    dense, categorical = nasty_rows(WORKFLOW, num_rows, seed)
    values, rows = encode(dense, categorical)
    np.testing.assert_array_equal(rows, expected_rows(WORKFLOW, categorical))
    np.testing.assert_array_equal(bits(values), bits(WORKFLOW.encode_dense(dense)))


def test_every_strange_value_in_every_column(encode):
    categorical = np.repeat(STRANGE_CATEGORIES[:, None], NUM_POSITIONS, axis=1)
    dense = np.resize(np.repeat(STRANGE_DENSE[:, None], 2, axis=1), (len(categorical), 2))
    values, rows = encode(dense, categorical)
    np.testing.assert_array_equal(rows, expected_rows(WORKFLOW, categorical))
    np.testing.assert_array_equal(bits(values), bits(WORKFLOW.encode_dense(dense)))


def test_every_integer_counter_may_show_has_correctly_rounded_logarithm(encode):
    counts = np.arange(13 * 20_000, dtype=np.float32).reshape(-1, 2)
    values, _ = encode(counts, np.zeros((len(counts), NUM_POSITIONS), np.int64))
    logged = np.log(counts.astype(np.longdouble) + 1).astype(np.float32)
    np.testing.assert_array_equal(values, (logged - WORKFLOW.means) / WORKFLOW.stds)


def look_up(table, key):
    cells = [start + key % prime for prime, start in zip(table.primes, table.starts)]
    return next((int(table.values[cell]) for cell in cells if table.keys[cell] == key), None)


def require_holds(table, keys, values):
    assert [look_up(table, key) for key in keys.tolist()] == values.tolist()
    taken = table.keys != EMPTY
    assert taken.sum() == len(keys)
    assert not table.values[~taken].any()
    assert table.keys[0] == EMPTY
    assert len(table.keys) == len(table.values) == 1 + sum(table.primes)


@settings(max_examples=50, deadline=None)
@given(
    keys=st.sets(st.integers(0, 2**40), max_size=400),
    strangers=st.sets(st.integers(0, 2**40), max_size=50),
)
def test_hash_table_finds_every_key_and_nothing_else(keys, strangers):
    array = np.array(sorted(keys, key=hash), np.int64)
    values = (np.arange(len(array)) * 7 - 1).astype(np.int32)
    table = build_table(array, values)
    require_holds(table, array, values)
    assert {look_up(table, key) for key in strangers - keys} <= {None}


@pytest.mark.parametrize("step", [1, 2**33, 9973], ids="step {}".format)
def test_regular_keys_find_their_slots_in_hash_table_too(step):
    keys = np.unique((np.arange(26)[:, None] * 2**33 + np.arange(800) * step % 2**33).ravel())
    values = np.arange(len(keys), dtype=np.int32) + 1
    table = build_table(keys, values)
    require_holds(table, keys, values)
    assert len(table.keys) < 3 * len(keys) + 30


def test_hash_table_keeps_to_its_load_factor_and_grows_if_keys_do_not_fit(monkeypatch):
    keys = np.unique(np.random.default_rng(0).integers(0, 2**40, 100_000))
    table = build_table(keys, np.arange(len(keys), dtype=np.int32))
    assert len(keys) / len(table.keys) == pytest.approx(encoding.LOAD, rel=0.01)
    assert len(table.primes) == CHOICES
    monkeypatch.setattr(encoding, "LOAD", 3.0)
    keys = np.random.default_rng(1).permutation(500).astype(np.int64)
    require_holds(build_table(keys, keys.astype(np.int32)), keys, keys)
    monkeypatch.setattr(encoding, "MAX_KEYS", 9)
    with raises(ContractError, "10 entries", "at most 9"):
        build_table(np.arange(10), np.arange(10, dtype=np.int32))


def test_graph_is_valid_onnx_of_promised_versions_and_tensors(make_parts, written, tmp_path):
    workflow, toy = make_parts(1)
    path = written() / GRAPH_FILE
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert model.ir_version == 8
    assert {o.domain: o.version for o in model.opset_import} == {"": 17}
    assert [i.name for i in model.graph.input] == [DENSE_INPUT, CATEGORICAL_INPUT]
    assert [o.name for o in model.graph.output] == [PROBABILITY_OUTPUT.name]
    with pytest.raises(ContractError, match=r"embeddings have \d+ rows, expected \d+ from"):
        write_graph(tmp_path, workflow, [toy.table[:-1]], network=toy.network(), name=MODEL_NAME)


def renamed(network):
    network.graph.output[0].name = "logits"


def of_another_opset(network):
    network.opset_import[0].version = 13


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (renamed, "has tensors .*'logits'"),
        (of_another_opset, "has operator sets {'': 13}, expected version 17"),
    ],
)
def test_network_that_is_not_as_exported_is_refused(make_parts, tmp_path, spoil, message):
    network = make_parts(1)[1].network()
    spoil(network)
    onnx.save(network, tmp_path / "network.onnx")
    with pytest.raises(ContractError, match=message):
        read_network(tmp_path / "network.onnx")
    (tmp_path / "network.onnx").write_bytes(b"torn")
    with raises(ContractError, "network.onnx", "read"):
        read_network(tmp_path / "network.onnx")


def test_corrupt_weight_file_is_refused(make_candidate, tmp_path):
    model, _, _ = make_candidate(tmp_path / "store", 1)
    file = tmp_path / "store" / "models" / "model-1" / "weights" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(bytes(content))
    with raises(ContractError, "weights", "sha256", "manifest"):
        export(model, tmp_path / "graph")


def test_graph_bytes_do_not_depend_on_process(make_candidate, exported, tmp_path):
    model, _, _ = make_candidate(tmp_path / "store", 1)
    code = (
        "import sys; from pathlib import Path; from evergreen.contracts.manifests import Model; "
        "from evergreen.serving.graph.export import export; export(Model.read(sys.argv[1]), "
        "Path(sys.argv[2]))"
    )
    manifest = tmp_path / "store" / "models" / "model-1" / "model.json"
    subprocess.run(
        [sys.executable, "-c", code, manifest, tmp_path / "other"], cwd=REPOSITORY, check=True
    )
    assert (tmp_path / "other" / GRAPH_FILE).read_bytes() == exported(model).read_bytes()


@pytest.fixture
def written(make_parts, tmp_path):
    """Writes a graph that depends on a seed, and returns its folder."""

    def write(name="graph", seed=1):
        workflow, toy = make_parts(seed)
        write_graph(tmp_path / name, workflow, [toy.table], network=toy.network(), name=MODEL_NAME)
        return tmp_path / name

    return write


def test_tables_are_in_separate_file_and_start_at_page(written, make_parts):
    folder = written()
    assert sorted(path.name for path in folder.iterdir()) == [DATA_FILE, GRAPH_FILE]
    message = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    locations = {
        t.name: {e.key: e.value for e in t.external_data}
        for t in message.graph.initializer
        if t.external_data
    }
    assert locations.keys() == {"embeddings", "cell_keys", "cell_values"}
    assert {location["location"] for location in locations.values()} == {DATA_FILE}
    assert {int(location["offset"]) % graph_parts.ALIGNMENT for location in locations.values()} == {
        0
    }
    start, length = (int(locations["embeddings"][key]) for key in ("offset", "length"))
    assert (folder / DATA_FILE).read_bytes()[start : start + length] == make_parts(1)[
        1
    ].table.tobytes()


@pytest.mark.parametrize(
    ("file", "num_bytes"), [(DATA_FILE, None), (DATA_FILE, 0), (DATA_FILE, -1), (GRAPH_FILE, -200)]
)
def test_absent_or_truncated_file_is_refused_by_name(written, file, num_bytes):
    path = written() / file
    content = path.read_bytes()
    path.unlink()
    if num_bytes is not None:
        path.write_bytes(content[:num_bytes])
    with raises(ContractError, "graph", "model.onnx", "opened"):
        open_graph(path.with_name(GRAPH_FILE))


def test_changed_byte_in_table_file_changes_graphs_hash(written):
    folder = written()
    before, content = graph_sha256(folder), bytearray((folder / DATA_FILE).read_bytes())
    content[1000] ^= 1
    (folder / DATA_FILE).write_bytes(content)
    assert graph_sha256(folder) != before


def test_message_beyond_protobufs_limit_is_refused_and_nothing_is_left(
    written, tmp_path, monkeypatch
):
    monkeypatch.setattr(graph_parts, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ContractError, match=r"message of \d+ bytes, expected at most 1000"):
        written()
    assert not list(tmp_path.glob("graph/*"))


@pytest.mark.slow
def test_table_beyond_two_gigabytes_is_written_and_scored(tmp_path, make_parts, raw_rows):
    vocabularies = [np.arange(71_500, dtype=np.int64) for _ in range(4)]
    workflow, toy = make_parts(1, vocabularies, embedding_dim=2048, hidden=4)
    assert toy.table.nbytes > 2**31
    write_graph(tmp_path, workflow, [toy.table], network=toy.network(), name=MODEL_NAME)
    dense, categorical = raw_rows(20, 1)
    categorical[::2] = np.random.default_rng(0).integers(0, 71_500, categorical[::2].shape)
    found = run_graph(open_graph(tmp_path / GRAPH_FILE), dense, categorical)[0].ravel()
    # Fifty thousand values are summed, so float32's rounding error is larger than for a short list.
    np.testing.assert_allclose(found, toy.scores(workflow, dense, categorical), atol=1e-3)
