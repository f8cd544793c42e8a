"""HugeCTR's model files byte by byte: small models beside hexadecimal digits worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import (
    RowChunk,
    num_dense_parameters,
    open_model,
    read_model,
    unflatten,
    write_model_chunks,
)
from components.runtime.errors import ContractError

SLOT_SIZES = [2, 300, *[1] * 24]
NARROW = DcnConfig(embedding_dim=1, num_cross_layers=1, tower=(1,))  # x0 has 26 + 13 = 39 values
NARROW_V2 = DcnConfig(embedding_dim=1, num_cross_layers=1, tower=(1,), projection_dim=2)

# Little-endian IEEE 754: 1.0 is 3f800000, so 0000803f in the file; every number here has a short mantissa.
ZERO, HALF, ONE, MINUS_TWO, THREE = "00000000", "0000003f", "0000803f", "000000c0", "00004040"
KEYS = "010000000000000002000000000000002d01000000000000"  # 1 of slot 0; 2 and 301 = 0x012d of slot 1
SLOTS = "000000000000000001000000000000000100000000000000"
VECTORS = ONE + MINUS_TWO + HALF
FIRST = HALF + ZERO + ONE
SECOND = THREE + ONE + HALF


def values(text):
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def rows(keys=(1, 2, 301)):
    return RowChunk(
        keys=np.array(keys),
        vectors=values(VECTORS)[:, None],
        moments=(values(FIRST)[:, None], values(SECOND)[:, None]),
    )


def counting(config):
    """Dense parameters that hold their own positions in the file."""
    return unflatten(np.arange(num_dense_parameters(config), dtype=np.float32), config)


def write(folder, config=NARROW, **changes):
    size = num_dense_parameters(config)
    moments = np.full(size, 0.5, np.float32), np.full(size, 3, np.float32)
    arguments = {"num_rows": 3, "dense": counting(config), "dense_moments": moments, "chunks": [rows()]}
    write_model_chunks(folder, config, **{**arguments, "with_moments": True, **changes})


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes().hex() for p in folder.rglob("*") if p.is_file()}


def test_sparse_files_have_these_bytes(tmp_path):
    write(tmp_path, slot_sizes=SLOT_SIZES)
    found = contents(tmp_path)
    assert found["dcn0_sparse_0.model/key"] == KEYS
    assert found["dcn0_sparse_0.model/emb_vector"] == VECTORS
    assert found["dcn0_sparse_0.model/slot_id"] == SLOTS
    assert found["dcn0_opt_sparse_0.model"] == FIRST + SECOND


def test_state_for_hugectr_has_the_workspaces_rows_each_table_filled_up_with_zeros(tmp_path):
    write(tmp_path, state_rows=5)
    assert contents(tmp_path)["dcn0_opt_sparse_0.model"] == FIRST + ZERO * 2 + SECOND + ZERO * 2


def test_folder_that_hugectr_wrote_is_read_but_for_its_state(tmp_path):
    """Hash table's order, slot_id, a workspace of 1 MiB (87,381 rows of one value and two moments) in another order."""
    write(tmp_path)
    folder, order = tmp_path / "dcn0_sparse_0.model", (2, 0, 1)
    for name, text, width in (("key", KEYS, 16), ("slot_id", SLOTS, 16), ("emb_vector", VECTORS, 8)):
        cells = [text[i : i + width] for i in range(0, len(text), width)]
        (folder / name).write_bytes(bytes.fromhex("".join(cells[i] for i in order)))
    state = [ONE + HALF + ZERO + ZERO * (87_381 - 3), HALF + THREE + ONE + ZERO * (87_381 - 3)]
    (tmp_path / "dcn0_opt_sparse_0.model").write_bytes(bytes.fromhex("".join(state)))
    model = read_model(tmp_path, NARROW, SLOT_SIZES)
    trained = [1, 2, 301]
    np.testing.assert_array_equal(model.embeddings[trained, 0], [1, -2, 0.5])
    assert np.count_nonzero(model.embeddings) == 3
    with pytest.raises(ContractError, match="a whole workspace of 87381 rows, but the 3 keys"):
        read_model(tmp_path, NARROW, SLOT_SIZES, optimizer=True)
    # Three rows are a state that somebody put in the order of the keys.
    (tmp_path / "dcn0_opt_sparse_0.model").write_bytes(bytes.fromhex(ONE + HALF + ZERO + HALF + THREE + ONE))
    model = read_model(tmp_path, NARROW, SLOT_SIZES, optimizer=True)
    np.testing.assert_array_equal(model.embedding_moments[0][trained, 0], [0.5, 0, 1])
    np.testing.assert_array_equal(model.embedding_moments[1][trained, 0], [3, 1, 0.5])


@pytest.mark.parametrize(
    ("config", "places"),
    [
        # cross weight and bias of 39, tower weight 39 and bias 1, final weight 1 + 39 and bias: 159 numbers
        (NARROW, {"cross.0.bias": 39, "tower.0.weight": 78, "tower.0.bias": 117, "final.bias": 158}),
        # u [39, 2] and v [2, 39] take 156 in place of 39
        (NARROW_V2, {"cross.0.u": 0, "cross.0.v": 78, "cross.0.bias": 156, "tower.0.weight": 195, "final.bias": 275}),
    ],
    ids=["v1", "v2"],
)  # fmt: skip
def test_dense_file_has_these_bytes(tmp_path, config, places):
    write(tmp_path, config)
    found = contents(tmp_path)["dcn_dense_0.model"]
    size = places["final.bias"] + 1
    assert found == "".join(np.float32(i).tobytes().hex() for i in range(size))
    assert found[: 8 * 4] == ZERO + ONE + "00000040" + THREE
    dense = open_model(tmp_path, config, SLOT_SIZES).dense()
    assert {name: int(dense[name].ravel()[0]) for name in places} == places
    # Row-major: the second number of a matrix stands beside the first.
    assert [int(array.ravel()[1] - array.ravel()[0]) for array in dense.values() if array.size > 1] == [1] * (
        len(dense) - 2
    )


def test_dense_state_has_these_bytes_with_the_gap_and_is_read_without_it_too(tmp_path):
    write(tmp_path)
    path = tmp_path / "dcn_opt_dense_0.model"
    # 159 numbers are 636 bytes; v begins at 768 = 3 * 256.
    assert path.read_bytes().hex() == HALF * 159 + ZERO * 33 + THREE * 159
    garbage = "deadbeef" * 33  # HugeCTR's allocator leaves anything there
    for text in (HALF * 159 + garbage + THREE * 159, HALF * 159 + THREE * 159):
        path.write_bytes(bytes.fromhex(text))
        first, second = open_model(tmp_path, NARROW, SLOT_SIZES).dense_moments()
        assert (first == 0.5).all()
        assert (second == 3).all()
