"""HugeCTR's model files: written byte for byte as it lays them out, read back, and refused when they do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from components.contracts import model_files
from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import ModelWeights, read_model, write_model
from components.runtime.errors import ContractError

CONFIG = DcnConfig(embedding_dim=3, num_cross_layers=2, tower=(5, 4))
SLOT_SIZES = [4 + i % 3 for i in range(26)]
ROWS = sum(SLOT_SIZES)


def weights(config=CONFIG, rows=ROWS, *, moments=True, seed=0):
    random = np.random.default_rng(seed)

    def floats(*shape):
        return random.normal(size=shape).astype(np.float32)

    size = model_files.num_dense_parameters(config)
    return ModelWeights(
        dense={name: floats(*shape) for name, shape in dense_layout(config)},
        embeddings=floats(rows, config.embedding_dim),
        dense_moments=(floats(size), floats(size)) if moments else None,
        embedding_moments=(floats(rows, config.embedding_dim), floats(rows, config.embedding_dim)) if moments else None,
    )


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "weights", CONFIG, weights())
    return tmp_path / "weights"


def test_model_survives_the_disk_with_its_optimizer_state(folder):
    original, loaded = weights(), read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    assert list(loaded.dense) == list(original.dense)
    for name, values in original.dense.items():
        np.testing.assert_array_equal(values, loaded.dense[name])
    np.testing.assert_array_equal(original.embeddings, loaded.embeddings)
    np.testing.assert_array_equal(original.dense_moments, loaded.dense_moments)
    np.testing.assert_array_equal(original.embedding_moments, loaded.embedding_moments)


def test_optimizer_state_is_read_only_on_request_and_none_where_none_was_kept(folder, tmp_path):
    without = read_model(folder, CONFIG, SLOT_SIZES)
    assert (without.dense_moments, without.embedding_moments) == (None, None)
    write_model(tmp_path / "bare", CONFIG, weights(moments=False))
    bare = read_model(tmp_path / "bare", CONFIG, SLOT_SIZES, optimizer=True)
    assert (bare.dense_moments, bare.embedding_moments) == (None, None)
    assert sorted(p.name for p in (tmp_path / "bare").iterdir()) == ["dcn0_sparse_0.model", "dcn_dense_0.model"]


def test_files_have_hugectrs_layout(folder):
    original = weights()
    dense = np.concatenate([original.dense[name].ravel() for name, _ in dense_layout(CONFIG)])
    assert (folder / "dcn_dense_0.model").read_bytes() == dense.astype("<f4").tobytes()
    keys = (folder / "dcn0_sparse_0.model" / "key").read_bytes()
    assert keys == b"".join(i.to_bytes(8, "little") for i in range(ROWS))
    vectors = (folder / "dcn0_sparse_0.model" / "emb_vector").read_bytes()
    assert vectors == original.embeddings.astype("<f4").tobytes()
    m, v = original.embedding_moments
    assert (folder / "dcn0_opt_sparse_0.model").read_bytes() == m.tobytes() + v.tobytes()
    m, v = (moment.tobytes() for moment in original.dense_moments)
    state = (folder / "dcn_opt_dense_0.model").read_bytes()
    offset = -(-len(m) // 256) * 256
    assert (state[: len(m)], state[offset:]) == (m, v)


def test_dense_optimizer_file_of_hugectrs_sample_has_its_size_and_offset(tmp_path):
    config = DcnConfig(embedding_dim=16, num_cross_layers=6, tower=(1024, 1024))
    sample = weights(config, 26)
    write_model(tmp_path, config, sample)
    assert (tmp_path / "dcn_dense_0.model").stat().st_size == 5_986_088
    state = (tmp_path / "dcn_opt_dense_0.model").read_bytes()
    assert len(state) == 11_972_392
    assert state[5_986_304:] == sample.dense_moments[1].tobytes()
    loaded = read_model(tmp_path, config, [1] * 26, optimizer=True)
    np.testing.assert_array_equal(loaded.dense_moments, sample.dense_moments)


def test_unpadded_dense_optimizer_file_is_read_too(folder):
    m, v = weights().dense_moments
    (folder / "dcn_opt_dense_0.model").write_bytes(m.tobytes() + v.tobytes())
    loaded = read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    np.testing.assert_array_equal(loaded.dense_moments, (m, v))


def test_rows_in_hash_table_order_find_their_place_and_untrained_keys_are_zero(folder):
    original = weights()
    order = np.random.default_rng(3).permutation(ROWS)[:20]
    (folder / "dcn0_sparse_0.model" / "key").write_bytes(order.astype("<i8").tobytes())
    (folder / "dcn0_sparse_0.model" / "emb_vector").write_bytes(original.embeddings[order].tobytes())
    m, v = original.embedding_moments
    (folder / "dcn0_opt_sparse_0.model").write_bytes(m[order].tobytes() + v[order].tobytes())
    loaded = read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    trained = np.isin(np.arange(ROWS), order)
    for kept, whole in ((loaded.embeddings, original.embeddings), *zip(loaded.embedding_moments, (m, v))):
        np.testing.assert_array_equal(kept[trained], whole[trained])
        assert not kept[~trained].any()


FILES = [
    "dcn_dense_0.model",
    "dcn_opt_dense_0.model",
    "dcn0_sparse_0.model/emb_vector",
    "dcn0_sparse_0.model/key",
    "dcn0_opt_sparse_0.model",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [-8, -1, 1, 8, 256], ids="{:+d} bytes".format)
def test_file_of_another_size_is_refused_by_name_size_and_expectation(folder, name, change):
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\x01" * change)
    with pytest.raises(ContractError) as refused:
        read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    # One key more or less is a fitting key file, and makes the vectors beside it the wrong number.
    named, size = (
        ("emb_vector", len((folder / FILES[2]).read_bytes()))
        if change % 8 == 0 and "key" in name
        else (name.rsplit("/")[-1], len(content) + change)
    )
    assert named in str(refused.value)
    assert f"has {size} bytes, expected" in str(refused.value)


@pytest.mark.parametrize("name", [FILES[0], FILES[2], FILES[3]])
def test_absent_file_is_refused_by_name(folder, name):
    (folder / name).unlink()
    with pytest.raises(ContractError, match=f"{name} cannot be read: No such file"):
        read_model(folder, CONFIG, SLOT_SIZES)


@pytest.mark.parametrize(
    ("key", "said"), [(-1, "holds keys -1"), (ROWS, f"expected 0..{ROWS - 1}"), (1, "holds a key twice")]
)
def test_key_that_no_slot_has_is_refused(folder, key, said):
    path = folder / "dcn0_sparse_0.model" / "key"
    path.write_bytes(np.r_[key, np.arange(1, ROWS)].astype("<i8").tobytes())
    with pytest.raises(ContractError, match=said):
        read_model(folder, CONFIG, SLOT_SIZES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("link", [False, True], ids=["folder", "link to nowhere"])
def test_name_that_is_no_file_is_refused_even_where_the_file_may_be_left_out(folder, name, link):
    path = folder / name
    path.unlink()
    if link:
        path.symlink_to(folder / "gone")
    else:
        path.mkdir()
    with pytest.raises(ContractError, match=rf"{name} (cannot be read: No such file|is no file but a folder)"):
        read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)


def test_link_to_a_file_is_read(folder, tmp_path):
    expected = read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    for name in FILES:
        (folder / name).rename(tmp_path / name.replace("/", "_"))
        (folder / name).symlink_to(tmp_path / name.replace("/", "_"))
    found = read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    np.testing.assert_array_equal(found.embedding_moments, expected.embedding_moments)
    np.testing.assert_array_equal(found.dense_moments, expected.dense_moments)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda keys: keys[1:].astype("<i4"),
            rf"emb_vector has \d+ bytes, expected \d+ for the {ROWS // 2} keys of 8 bytes",
        ),
        (lambda keys: np.stack([keys, keys]).astype("<i4"), r"key holds keys \d+\.\.\d{12,}, expected 0\.\."),
        (lambda keys: keys.astype(">i8"), r"key holds keys -\d{18,}\.\.\d{18,}, expected 0\.\."),
        (lambda keys: keys.astype("<f8"), r"key holds keys 0\.\.\d{18,}, expected 0\.\."),
        (lambda keys: keys[:0], r"emb_vector has \d+ bytes, expected 0 for the 0 keys"),
    ],
    ids=["int32", "twice int32", "big endian", "float64", "none"],
)
def test_keys_of_another_type_are_refused(folder, spoil, said):
    path = folder / "dcn0_sparse_0.model" / "key"
    path.write_bytes(spoil(np.arange(ROWS)).tobytes())
    with pytest.raises(ContractError, match=said):
        read_model(folder, CONFIG, SLOT_SIZES)


def test_model_of_no_rows_answers_zero_vectors(folder):
    for name in FILES[2:]:
        (folder / name).write_bytes(b"")
    loaded = read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
    assert not loaded.embeddings.any()
    assert not np.any(loaded.embedding_moments)


def test_files_in_each_others_place_are_refused(folder):
    contents = {name: (folder / name).read_bytes() for name in FILES}
    for one in FILES:
        for other in FILES:
            if one == other:
                continue
            (folder / one).write_bytes(contents[other])
            with pytest.raises(
                ContractError, match=r"model file .*(has \d+ bytes, expected (\d+|a multiple of 8)|holds keys)"
            ):
                read_model(folder, CONFIG, SLOT_SIZES, optimizer=True)
            (folder / one).write_bytes(contents[one])


def test_model_of_another_shape_is_refused(folder):
    with pytest.raises(ContractError, match="dcn_dense_0.model has"):
        read_model(folder, DcnConfig(embedding_dim=3, num_cross_layers=3, tower=(5, 4)), SLOT_SIZES)
    with pytest.raises(ContractError, match="expected 0..25"):
        read_model(folder, CONFIG, [1] * 26)


def test_weights_that_do_not_fit_the_settings_are_not_written(tmp_path):
    right = weights()
    name = "tower.0.weight"
    wrong = [
        (ModelWeights(dense={**right.dense, name: np.zeros((2, 2), np.float32)}, embeddings=right.embeddings), name),
        (ModelWeights(dense={name: right.dense[name]}, embeddings=right.embeddings), "dense parameters are"),
        (ModelWeights(dense=right.dense, embeddings=np.zeros((ROWS, 4), np.float32)), "width 4, expected 3"),
        (
            ModelWeights(dense=right.dense, embeddings=right.embeddings, dense_moments=(np.zeros(5, np.float32),) * 2),
            "dense moments",
        ),
        (
            ModelWeights(
                dense=right.dense, embeddings=right.embeddings, embedding_moments=(np.zeros((5, 3), np.float32),) * 2
            ),
            "embedding moments",
        ),
    ]
    for weights_, said in wrong:
        with pytest.raises(ContractError, match=said):
            write_model(tmp_path, CONFIG, weights_)
    assert list(tmp_path.iterdir()) == []
