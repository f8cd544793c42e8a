"""A model in chunks of rows: any shape, key order and state layout comes back, in little memory; misfits refused."""

from __future__ import annotations

import resource
import signal
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contracts.dcn import DcnConfig
from components.contracts.flat_files import sized_file
from components.contracts.model_files import (
    ModelWeights,
    RowChunk,
    num_dense_parameters,
    open_model,
    read_model,
    unflatten,
    write_model,
    write_model_chunks,
)
from components.contracts.sparse_files import max_vocabulary_size
from components.runtime.errors import ContractError, PermanentError

CONFIG = DcnConfig(embedding_dim=2, num_cross_layers=1, tower=(3,))
SLOT_SIZES = [4] * 26
KEY, VECTOR, SLOT = (f"dcn0_sparse_0.model/{name}" for name in ("key", "emb_vector", "slot_id"))
STATE = "dcn0_opt_sparse_0.model"


def floats(random, *shape):
    return random.normal(size=shape).astype(np.float32)


def dense_of(config, random):
    return unflatten(floats(random, num_dense_parameters(config)), config)


def split(keys, vectors, moments, size):
    for start in range(0, len(keys), size):
        part = slice(start, start + size)
        both = None if moments is None else (moments[0][part], moments[1][part])
        yield RowChunk(keys=keys[part], vectors=vectors[part], moments=both)


def joined(chunks):
    chunks = list(chunks)
    rows = [np.concatenate([getattr(c, name) for c in chunks]) for name in ("keys", "vectors")]
    if chunks[0].moments is None:
        return (*rows, None)
    return (*rows, tuple(np.concatenate([c.moments[i] for c in chunks]) for i in (0, 1)))


@pytest.fixture
def table():
    """Every third key of `SLOT_SIZES`, with state."""
    random = np.random.default_rng(5)
    keys = np.arange(0, sum(SLOT_SIZES), 3)
    return keys, floats(random, len(keys), 2), (floats(random, len(keys), 2), floats(random, len(keys), 2))


@pytest.fixture
def write(tmp_path, table):
    """Writes the table, with changes, into `weights/`; answers the folder."""

    def write(**changes):
        keys, vectors, moments = table
        arguments = {
            "num_rows": len(keys),
            "dense": dense_of(CONFIG, np.random.default_rng(6)),
            "dense_moments": None,
            "chunks": split(keys, vectors, moments, 10),
            "with_moments": True,
            **changes,
        }
        write_model_chunks(tmp_path / "weights", CONFIG, **arguments)
        return tmp_path / "weights"

    return write


@st.composite
def models(draw):
    config = DcnConfig(
        embedding_dim=draw(st.integers(1, 5)),
        num_cross_layers=draw(st.integers(1, 3)),
        tower=tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))),
        projection_dim=draw(st.integers(0, 4)),
    )
    slot_sizes = draw(st.lists(st.integers(1, 4), min_size=26, max_size=26))
    kept = draw(st.integers(0, sum(slot_sizes)))
    return config, slot_sizes, kept, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(
    model=models(),
    write_size=st.integers(1, 120),
    read_size=st.integers(1, 120),
    localized=st.booleans(),
    workspace=st.booleans(),
    unpadded=st.booleans(),
)
def test_any_model_in_any_key_order_and_chunks_comes_back(model, write_size, read_size, localized, workspace, unpadded):
    config, slot_sizes, kept, seed = model
    random, dim = np.random.default_rng(seed), config.embedding_dim
    keys = np.sort(random.permutation(sum(slot_sizes))[:kept])
    vectors, moments = floats(random, kept, dim), (floats(random, kept, dim), floats(random, kept, dim))
    dense = dense_of(config, random)
    dense_moments = floats(random, num_dense_parameters(config)), floats(random, num_dense_parameters(config))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        write_model_chunks(
            path,
            config,
            num_rows=kept,
            dense=dense,
            dense_moments=dense_moments,
            chunks=split(keys, vectors, moments, write_size),
            with_moments=True,
            slot_sizes=slot_sizes if localized else None,
            state_rows=max_vocabulary_size(1, dim) if workspace else None,
        )
        assert (path / SLOT).exists() == localized
        # A hash table keeps no order; a whole workspace is only read where the keys ascend.
        order = np.arange(kept) if workspace else random.permutation(kept)
        for name, array in ((KEY, keys.astype("<i8")), (VECTOR, vectors)):
            (path / name).write_bytes(array[order].tobytes())
        if localized:
            slots = np.repeat(np.arange(26), slot_sizes)[keys]
            assert (path / SLOT).read_bytes() == slots.astype("<u8").tobytes()
            (path / SLOT).write_bytes(slots[order].astype("<u8").tobytes())
        state = np.fromfile(path / STATE, "<f4").reshape(2, -1, dim)
        state[:, :kept] = state[:, :kept][:, order]
        (path / STATE).write_bytes(state.tobytes())
        if unpadded:
            (path / "dcn_opt_dense_0.model").write_bytes(b"".join(m.tobytes() for m in dense_moments))
        stored = open_model(path, config, slot_sizes)
        assert (stored.num_rows, stored.has_embedding_moments) == (kept, True)
        chunks = list(stored.chunks(read_size))
        assert [len(c.keys) for c in chunks[:-1]] == [read_size] * (len(chunks) - 1)
        if kept:
            found_keys, found_vectors, found_moments = joined(chunks)
            np.testing.assert_array_equal(found_keys, keys[order])
            np.testing.assert_array_equal(found_vectors, vectors[order])
            np.testing.assert_array_equal(found_moments, np.stack(moments)[:, order])
        np.testing.assert_array_equal(stored.dense_moments(), dense_moments)
        for name, values in stored.dense().items():
            np.testing.assert_array_equal(values, dense[name])
        whole = read_model(path, config, slot_sizes, optimizer=True)
        for found, rows in zip((whole.embeddings, *whole.embedding_moments), (vectors, *moments)):
            expected = np.zeros((sum(slot_sizes), dim), np.float32)
            expected[keys] = rows
            np.testing.assert_array_equal(found, expected)


def test_chunks_leave_out_the_state_on_request_and_where_there_is_none(write, tmp_path, table):
    stored = open_model(write(), CONFIG, SLOT_SIZES)
    assert all(chunk.moments is None for chunk in stored.chunks(7, moments=False))
    assert stored.dense_moments() is None
    write_model_chunks(
        tmp_path / "bare",
        CONFIG,
        num_rows=len(table[0]),
        dense=stored.dense(),
        dense_moments=None,
        chunks=stored.chunks(11),  # straight from one folder into another
        with_moments=False,
    )
    bare = open_model(tmp_path / "bare", CONFIG, SLOT_SIZES)
    assert not bare.has_embedding_moments
    np.testing.assert_array_equal(joined(bare.chunks())[1], table[1])


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        (STATE, 36, "has 576 bytes, expected 560 for 35 keys"),
        (STATE, 34, "has 544 bytes, expected 560 for 35 keys"),
        (STATE, max_vocabulary_size(1, 2) - 1, "expected 560 for 35 keys, or those of a HugeCTR workspace"),
        (STATE, max_vocabulary_size(1, 2) + 1, "expected 560 for 35 keys, or those of a HugeCTR workspace"),
        (SLOT, 36, "slot_id has 576 bytes, expected 280"),
    ],
)
def test_file_that_does_not_fit_the_keys_is_refused(write, name, rows, said):
    folder = write(slot_sizes=SLOT_SIZES)
    (folder / name).write_bytes(b"\0" * rows * 16)
    with pytest.raises(ContractError, match=said):
        open_model(folder, CONFIG, SLOT_SIZES)


@pytest.mark.parametrize("megabytes", [1, 2, 3])
def test_state_of_a_whole_workspace_is_read(write, table, megabytes):
    rows = (megabytes * 2**20) // (3 * 4 * 2)
    folder = write(state_rows=rows)
    assert (folder / STATE).stat().st_size == 2 * rows * 2 * 4
    np.testing.assert_array_equal(joined(open_model(folder, CONFIG, SLOT_SIZES).chunks())[2], table[2])


@pytest.mark.parametrize("first_two", [(3, 0), (0, 3)], ids=["swapped", "ascending"])
def test_state_that_hugectr_saved_itself_belongs_to_no_key_and_is_refused(write, table, first_two):
    folder = write(state_rows=max_vocabulary_size(1, 2))
    for name, width in ((KEY, 8), (VECTOR, 8)):
        content = (folder / name).read_bytes()
        rows = [content[at : at + width] for at in range(0, len(content), width)]
        rows[:2] = rows[:2] if first_two == (0, 3) else rows[1::-1]
        (folder / name).write_bytes(b"".join(rows))
    stored = open_model(folder, CONFIG, SLOT_SIZES)
    assert joined(stored.chunks(moments=False))[0][:2].tolist() == list(first_two)
    np.testing.assert_array_equal(read_model(folder, CONFIG, SLOT_SIZES).embeddings[table[0]], table[1])
    if first_two == (0, 3):
        np.testing.assert_array_equal(joined(stored.chunks())[2], table[2])
        return
    said = rf"{STATE} holds a whole workspace of 43690 rows, but the 35 keys of .*key do not ascend"
    for call in (lambda: list(stored.chunks()), lambda: read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)):
        with pytest.raises(ContractError, match=said):
            call()


def test_order_of_the_keys_is_that_across_chunks(write):
    """The last key of one reading before the first of the next, which descend."""
    size = 3 * 16_384 // 26 + 1
    sizes, n = [size] * 26, 2 * 16_384
    keys = np.r_[np.arange(16_384, n), np.arange(16_384)]
    folder = write(num_rows=n, chunks=[chunk(range(n))])
    (folder / KEY).write_bytes(keys.astype("<i8").tobytes())
    assert not open_model(folder, CONFIG, sizes).rows.ascending
    (folder / KEY).write_bytes(np.sort(keys).astype("<i8").tobytes())
    assert open_model(folder, CONFIG, sizes).rows.ascending


def test_row_in_another_slot_than_its_keys_is_refused_by_file_row_and_slot(write):
    folder = write(slot_sizes=SLOT_SIZES)
    slots = np.fromfile(folder / SLOT, "<u8")
    slots[9] = 3
    (folder / SLOT).write_bytes(slots.tobytes())
    with pytest.raises(ContractError, match="slot_id has slot 3 for key 27 in row 9, expected 6"):
        open_model(folder, CONFIG, SLOT_SIZES)


def test_file_that_shrinks_between_the_check_and_the_reading_is_refused(write):
    folder = write()
    stored = open_model(folder, CONFIG, SLOT_SIZES)
    path = folder / VECTOR
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ContractError, match="emb_vector ends at byte 279, expected 280"):
        list(stored.chunks())


def chunk(keys, width=2, moments=True):
    def rows():
        return np.ones((len(keys), width), np.float32)

    return RowChunk(keys=np.array(keys), vectors=rows(), moments=(rows(), rows()) if moments else None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunks": [chunk([0, 1])]}, "chunks hold 2 rows, expected 35"),
        ({"chunks": [chunk(range(35)), chunk([40])]}, "chunks hold 36 rows, expected 35"),
        ({"chunks": [chunk([3, 2])]}, "keys after -1 do not ascend"),
        ({"chunks": [chunk([3]), chunk([3])]}, "keys after 3 do not ascend"),
        ({"chunks": [chunk([-1])]}, "keys after -1 do not ascend"),
        ({"chunks": [chunk([0], width=3)]}, r"vectors of shape \(1, 3\), expected \(1, 2\)"),
        ({"chunks": [chunk([0], moments=False)]}, "no embedding moments"),
        ({"state_rows": 34}, "state has 34 rows, expected at least the 35"),
        ({"dense": {}}, r"dense parameters are \[\]"),
        ({"dense_moments": (np.zeros(3, np.float32),) * 2}, "dense moments have shapes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_are_not_as_said_are_not_written(write, tmp_path, changes, said):
    with pytest.raises(ContractError, match=said):
        write(**changes)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_file_of_another_size_than_meant_is_not_left_behind(tmp_path):
    with (
        pytest.raises(PermanentError, match="key has 9 bytes after writing, expected 16"),
        sized_file(tmp_path / "key", 16) as file,
    ):
        file.put(np.ones(9), "u1")
    assert list(tmp_path.iterdir()) == []


def test_write_that_the_system_refuses_is_permanent_and_leaves_no_file(write, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (279, limits[1]))
        with pytest.raises(PermanentError, match="cannot be written: File too large"):
            write(with_moments=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_failure_of_the_chunks_own_source_keeps_its_name(write, tmp_path):
    def chunks():
        yield chunk([0])
        raise FileNotFoundError("the source is gone")

    with pytest.raises(FileNotFoundError, match="the source is gone"):
        write(chunks=chunks())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def peak_bytes(call):
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_the_models_own_in_reading_and_a_chunk_in_writing(tmp_path):
    config, slot_sizes, rows = DcnConfig(embedding_dim=16, num_cross_layers=1, tower=(4,)), [12_000] * 26, 312_000
    random = np.random.default_rng(0)
    original = ModelWeights(
        dense=dense_of(config, random),
        embeddings=floats(random, rows, 16),
        embedding_moments=(floats(random, rows, 16), floats(random, rows, 16)),
    )
    table = original.embeddings.nbytes  # 20 MB
    _, writing = peak_bytes(lambda: write_model(tmp_path, config, original))
    assert writing < 0.1 * table
    _, streaming = peak_bytes(lambda: [None for _ in open_model(tmp_path, config, slot_sizes).chunks(4096)])
    assert streaming < 0.15 * table
    loaded, reading = peak_bytes(lambda: read_model(tmp_path, config, slot_sizes, optimizer=True))
    assert reading < 1.15 * 3 * table  # three tables, and the chunks that the caller and the reader hold
    np.testing.assert_array_equal(loaded.embedding_moments, original.embedding_moments)
    np.testing.assert_array_equal(loaded.embeddings, original.embeddings)
