"""The double refuses what HugeCTR refuses, swallows what it swallows, and writes what it writes."""

from __future__ import annotations

import json

import hugectr
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SLOTS = [5, 7]
SOLVER = {"batchsize": 4, "batchsize_eval": 4, "repeat_dataset": False, "i64_input_key": True}


def write_rows(folder, *, labels, keys, num_rows=None):
    """One Parquet file in HugeCTR's form; gives its file list."""
    folder.mkdir(parents=True, exist_ok=True)
    n = len(labels)
    columns = [pa.array(labels, pa.float32()), pa.array(np.ones(n), pa.float32())]
    columns += [pa.array(column, pa.int64()) for column in np.array(keys).T]
    pq.write_table(pa.table(columns, names=["label", "I1", "C1", "C2"]), folder / "0.parquet")
    metadata = {
        "file_stats": [{"file_name": "0.parquet", "num_rows": num_rows or n}],
        "labels": [{"col_name": "label", "index": 0}],
        "conts": [{"col_name": "I1", "index": 1}],
        "cats": [{"col_name": "C1", "index": 2}, {"col_name": "C2", "index": 3}],
    }
    (folder / "_metadata.json").write_text(json.dumps(metadata))
    (folder / "_file_list.txt").write_text(f"1\n{folder}/0.parquet\n")
    return str(folder / "_file_list.txt")


@pytest.fixture
def rows(tmp_path):
    random = np.random.default_rng(0)
    keys = np.stack([random.integers(0, size, 8) for size in SLOTS], axis=1)
    return write_rows(tmp_path / "rows", labels=(keys[:, 0] > 2).astype(float), keys=keys)


def model_of(rows, *, compiled=True, workspace_mb=1, **solver):
    """A linear model over two slots and one dense value."""
    optimizer = hugectr.CreateOptimizer(update_type=hugectr.Update_t.Local)
    model = hugectr.Model(
        hugectr.CreateSolver(**SOLVER | solver),
        hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Parquet,
            source=rows,
            eval_source=rows,
            check_type=hugectr.Check_t.Non,
            slot_size_array=SLOTS,
        ),
        optimizer,
    )
    sparse = hugectr.DataReaderSparseParam("keys", 1, True, 2)
    model.add(hugectr.Input(1, "label", 1, "dense", [sparse]))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(kind, workspace_mb, 2, "sum", "vectors", "keys", [], optimizer))
    layer, types = hugectr.DenseLayer, hugectr.Layer_t
    model.add(layer(types.Reshape, ["vectors"], ["flat"], leading_dim=4))
    model.add(layer(types.Concat, ["flat", "dense"], ["all"]))
    model.add(layer(types.InnerProduct, ["all"], ["logit"], num_output=1))
    model.add(layer(types.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
    if compiled:
        model.compile()
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hugectr.CreateSolver(batch_size=4), "unknown arguments"),
        (lambda: hugectr.CreateSolver(batchsize="4"), "batchsize is '4', expected int"),
        (lambda: hugectr.CreateSolver("dcn", model_name="dcn"), "given twice"),
        (lambda: hugectr.DataReaderSparseParam("keys", 1, True), "slot_num is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_type_errors(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, rows: model.train(), "before calling Model.compile"),
        (lambda model, rows: (model.compile(), model.compile()), "was called before"),
        (lambda model, rows: (model.compile(), model.train()), "Start the data reader first"),
        (lambda model, rows: (model.compile(), model.get_current_loss()), "before the first batch"),
        (
            lambda model, rows: (
                model.compile(),
                model.add(hugectr.DenseLayer(hugectr.Layer_t.ReLU, ["flat"], ["late"])),
            ),
            "after Model.compile",
        ),
        (
            lambda model, rows: model.add(hugectr.DenseLayer(hugectr.Layer_t.ReLU, ["nowhere"], ["x"])),
            "no tensor named",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_out_of_order_are_refused(rows, call, message):
    with pytest.raises(RuntimeError, match=message):
        call(model_of(rows, compiled=False), rows)


def test_a_reader_ends_once_and_starts_over_with_a_source(rows):
    model = model_of(rows)
    reader = model.get_data_reader_train()
    for _ in range(2):
        reader.set_source(rows)
        assert [model.train() for _ in range(3)] == [True, True, False]
        with pytest.raises(RuntimeError, match="past its end"):
            model.train()


def test_files_and_metadata_that_disagree_are_refused(tmp_path, rows):
    reader = model_of(rows).get_data_reader_train()
    reader.set_source(write_rows(tmp_path / "large", labels=[1.0] * 9, keys=[[0, 0]] * 9))
    with pytest.raises(RuntimeError, match="row group of 9 rows, the buffers hold 8"):
        reader._inner.next()
    reader = model_of(rows).get_data_reader_train()
    reader.set_source(write_rows(tmp_path / "short", labels=[1.0] * 4, keys=[[0, 0]] * 4, num_rows=5))
    with pytest.raises(RuntimeError, match="has 4 rows, 5 in _metadata"):
        reader._inner.next()
    (tmp_path / "rows" / "_metadata.json").unlink()
    with pytest.raises(RuntimeError, match=r"_metadata\.json"):
        model_of(rows)


def trained(rows, **solver):
    model = model_of(rows, **solver)
    model.get_data_reader_train().set_source(rows)
    while model.train():
        pass
    return model


def test_files_are_as_large_and_as_unordered_as_hugectrs(tmp_path, rows):
    trained(rows).save_params_to_files(f"{tmp_path}/m", 7)
    names = {path.name for path in tmp_path.iterdir() if path.name.startswith("m")}
    assert names == {"m_dense_7.model", "m_opt_dense_7.model", "m0_sparse_7.model", "m0_opt_sparse_7.model"}
    keys = np.fromfile(tmp_path / "m0_sparse_7.model" / "key", "<i8")
    assert keys.tolist() != sorted(keys)
    assert (tmp_path / "m0_sparse_7.model" / "emb_vector").stat().st_size == len(keys) * 2 * 4
    assert (tmp_path / "m_dense_7.model").stat().st_size == 4 * 6
    assert (tmp_path / "m_opt_dense_7.model").stat().st_size == 256 + 4 * 6
    capacity = (1 << 20) // (3 * 4 * 2)
    state = np.fromfile(tmp_path / "m0_opt_sparse_7.model", "<f4").reshape(2, capacity, 2)
    assert state[:, : len(keys)].any(axis=(0, 2)).all()
    assert not state[:, len(keys) :].any()


def test_errors_in_files_are_swallowed(tmp_path, rows):
    model = trained(rows)
    assert model.save_params_to_files(f"{tmp_path}/nowhere/m") == hugectr.Error_t.FileCannotOpen
    model.save_params_to_files(f"{tmp_path}/m")
    before = (tmp_path / "m_dense_0.model").read_bytes()
    model.load_dense_weights("nowhere")
    model.load_dense_optimizer_states("nowhere")
    model.load_sparse_weights(["nowhere"])
    # The overload with names opens the name as a path.
    model.load_sparse_optimizer_states({"vectors": f"{tmp_path}/m0_opt_sparse_0.model"})
    model.save_params_to_files(f"{tmp_path}/m")
    assert (tmp_path / "m_dense_0.model").read_bytes() == before


def test_loading_forgets_adams_step_count(tmp_path, rows):
    one = trained(rows)
    one.save_params_to_files(f"{tmp_path}/m")
    two = model_of(rows)
    two.load_dense_weights(f"{tmp_path}/m_dense_0.model")
    two.load_dense_optimizer_states(f"{tmp_path}/m_opt_dense_0.model")
    two.load_sparse_weights([f"{tmp_path}/m0_sparse_0.model"])
    for model in (one, two):
        model.get_data_reader_train().set_source(rows)
        model.train()
        model.save_params_to_files(f"{tmp_path}/{'one' if model is one else 'two'}")
    moved = [
        np.abs(
            np.fromfile(tmp_path / f"{name}_dense_0.model", "<f4") - np.fromfile(tmp_path / "m_dense_0.model", "<f4")
        )
        for name in ("one", "two")
    ]

    def correction(t):
        return (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)

    np.testing.assert_allclose(moved[0] / moved[1], correction(3) / correction(1), rtol=1e-3)
