"""The graph's files: tables beside the message, what a reader is told of damage, and scores that depend on neither."""

from __future__ import annotations

import os
import shutil

import numpy as np
import onnx
import pytest

from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from components.deployment.graph import parts as graph_parts
from components.deployment.graph.export import GraphLimits, build_graph, write_graph
from components.deployment.graph.files import DATA_FILE, GRAPH_FILE, graph_bytes, graph_sha256
from components.deployment.graph.parity import open_graph
from components.deployment.graph.parts import ALIGNMENT
from components.runtime.errors import ContractError

BESIDE = GraphLimits(inline_bytes=0)
ALL_BESIDE = GraphLimits(inline_bytes=0, label_encoder_entries=0)
BOTH = pytest.mark.parametrize("limits", [BESIDE, ALL_BESIDE], ids=["embeddings beside", "hash table beside too"])


def parts(made):
    workflow, toy = made
    return {"workflow": workflow, "table": toy.table, "network": toy.network()}


@pytest.fixture
def written(make_parts, tmp_path):
    """Writes the graph of seed 1 with the given limits; its folder."""

    def write(limits=BESIDE, name="graph", seed=1):
        folder = tmp_path / name
        write_graph(folder, **parts(make_parts(seed)), limits=limits)
        return folder

    return write


@pytest.fixture
def scores(raw_rows):
    dense, categorical = raw_rows(200, 1)
    return lambda graph: open_graph(graph).run(None, {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical})[0]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@BOTH
def test_tables_beside_the_message_change_no_bit_of_a_score(written, scores, make_parts, limits):
    folder = written(limits)
    assert names(folder) == [DATA_FILE, GRAPH_FILE]
    expected = scores(build_graph(**parts(make_parts(1))))
    np.testing.assert_array_equal(scores(folder / GRAPH_FILE).view(np.int32), expected.view(np.int32))


@BOTH
def test_what_lies_beside_is_valid_onnx_and_each_table_starts_a_page(written, make_parts, limits):
    folder = written(limits)
    onnx.checker.check_model(str(folder / GRAPH_FILE), full_check=True)
    message = onnx.load(str(folder / GRAPH_FILE), load_external_data=False)
    places = {t.name: {e.key: e.value for e in t.external_data} for t in message.graph.initializer if t.external_data}
    assert places.keys() == {"embeddings"} | ({"cell_keys", "cell_values"} if limits is ALL_BESIDE else set())
    assert {place["location"] for place in places.values()} == {DATA_FILE}
    assert {int(place["offset"]) % ALIGNMENT for place in places.values()} == {0}
    data = (folder / DATA_FILE).read_bytes()
    start, length = (int(places["embeddings"][key]) for key in ("offset", "length"))
    assert data[start : start + length] == make_parts(1)[1].table.tobytes()


def test_the_limit_is_on_the_tables_bytes_and_a_table_at_the_limit_stays_inside(written, make_parts):
    table = make_parts(1)[1].table.nbytes
    assert names(written(GraphLimits(inline_bytes=table), "at")) == [GRAPH_FILE]
    assert names(written(GraphLimits(inline_bytes=table - 1), "above")) == [DATA_FILE, GRAPH_FILE]


@BOTH
def test_the_same_model_gives_the_same_files_however_large_the_chunks(written, limits, monkeypatch):
    first = written(limits, "first")
    monkeypatch.setattr(graph_parts, "_CHUNK_BYTES", 1000)
    again, other = written(limits, "again"), written(limits, "other", seed=2)
    for name in (GRAPH_FILE, DATA_FILE):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert graph_sha256(first) == graph_sha256(again) != graph_sha256(other)
    assert graph_bytes(first) == sum((first / name).stat().st_size for name in (GRAPH_FILE, DATA_FILE))


def test_a_graph_written_over_another_leaves_nothing_of_it(written, scores, make_parts):
    folder = written(BESIDE, seed=2)
    assert written(GraphLimits()) == folder
    assert names(folder) == [GRAPH_FILE]
    np.testing.assert_array_equal(scores(folder / GRAPH_FILE), scores(build_graph(**parts(make_parts(1)))))


def test_an_absent_table_file_is_named(written):
    folder = written()
    (folder / DATA_FILE).unlink()
    with pytest.raises(ContractError, match=r"graph .*model\.onnx cannot be opened: .*model\.data is absent"):
        open_graph(folder / GRAPH_FILE)


@pytest.mark.parametrize("kept", [0, 100, -1], ids="{} bytes kept".format)
@BOTH
def test_a_truncated_table_file_is_refused_with_both_sizes(written, limits, kept):
    folder = written(limits)
    whole = (folder / DATA_FILE).read_bytes()
    (folder / DATA_FILE).write_bytes(whole[:kept])
    expected = rf"model\.data has {len(whole[:kept])} bytes, expected {len(whole)}: it is not whole"
    with pytest.raises(ContractError, match=expected):
        open_graph(folder / GRAPH_FILE)


def test_a_changed_byte_in_the_table_file_changes_the_graphs_hash(written):
    folder = written()
    before = graph_sha256(folder)
    content = bytearray((folder / DATA_FILE).read_bytes())
    content[1000] ^= 1
    (folder / DATA_FILE).write_bytes(content)
    assert graph_sha256(folder) != before


def test_a_truncated_message_is_refused_by_name(written):
    folder = written()
    path = folder / GRAPH_FILE
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ContractError, match=r"graph .*model\.onnx cannot be opened"):
        open_graph(path)
    with pytest.raises(ContractError, match=r"absent\.onnx cannot be opened"):
        open_graph(folder / "absent.onnx")


def test_hard_links_of_both_files_are_the_graph(written, scores, tmp_path):
    folder = written()
    (tmp_path / "linked").mkdir()
    for name in names(folder):
        os.link(folder / name, tmp_path / "linked" / name)
    expected = scores(folder / GRAPH_FILE)
    shutil.rmtree(folder)
    np.testing.assert_array_equal(scores(tmp_path / "linked" / GRAPH_FILE), expected)


def test_a_message_beyond_protobufs_limit_is_refused_and_nothing_is_left(make_parts, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_parts, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ContractError, match=r"message of \d+ bytes, expected at most 1000"):
        build_graph(**parts(make_parts(1)))
    with pytest.raises(ContractError, match="expected at most 1000"):
        write_graph(tmp_path, **parts(make_parts(1)), limits=BESIDE)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_half_of_a_graph(make_parts, tmp_path, monkeypatch):
    def full(file, value):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(graph_parts, "_write_in_chunks", full)
    with pytest.raises(OSError, match="No space left"):
        write_graph(tmp_path, **parts(make_parts(1)), limits=BESIDE)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_table_beyond_two_gigabytes_is_written_and_scored(tmp_path, make_parts, raw_rows):
    vocabularies = [np.arange(11_000, dtype=np.int64) for _ in range(26)]
    workflow, toy = make_parts(1, vocabularies, embedding_dim=2048, hidden=4)
    assert toy.table.nbytes > 2**31
    write_graph(tmp_path, **parts((workflow, toy)))
    dense, categorical = raw_rows(20, 1)
    categorical[::2] = np.random.default_rng(0).integers(0, 11_000, categorical[::2].shape)
    session = open_graph(tmp_path / GRAPH_FILE)
    found = session.run(None, {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical})[0].ravel()
    # Fifty thousand values are summed here: float32's rounding is that much larger.
    np.testing.assert_allclose(found, toy.scores(workflow, dense, categorical), atol=1e-3)
