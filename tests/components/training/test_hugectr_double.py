"""Tests that the test double fails in the same cases as HugeCTR 24.06.

Each case follows HugeCTR's source code.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.training.hugectr.embeddings import embeddings_of
from components.training.hugectr.files import (
    DENSE_OPTIMIZER_FILE,
    SPARSE_OPTIMIZER_FILE,
)
from components.training.hugectr.layers import MODEL_NAME, Blueprint, compiled_model
from components.training.hugectr.staging import write_stage
from evergreen.config.training import TrainingSettings
from tests.support.planted_rows import POSITIONS, dcn

CONFIG = dcn(embedding_dim=4, num_cross_layers=2, tower=(8,))


@pytest.fixture
def fate(double):
    import double_fate

    return double_fate


@pytest.fixture
def stage_of(planted, tmp_path):
    """Writes a stage of batches of 64 rows."""

    def write(name, num_rows=128, **how):
        return write_stage(
            planted.encoded(1_000),
            np.arange(num_rows),
            embeddings=embeddings_of(CONFIG, planted.slot_sizes, POSITIONS),
            batch_size=64,
            num_files=1,
            folder=tmp_path / name,
            **how,
        )

    return write


@pytest.fixture
def model(double, stage_of, planted):
    """A compiled model whose readers have started."""
    blueprint = Blueprint(
        config=CONFIG,
        embeddings=embeddings_of(CONFIG, planted.slot_sizes, POSITIONS),
        settings=TrainingSettings(),
        num_gpus=1,
        batch_size=64,
        file_list=str(stage_of("first").file_list),
    )
    return compiled_model(double, blueprint)


def rewritten(stage, change):
    """Change the rows in a stage's only file, and update the row count in the metadata."""
    path = stage.file_list.parent / "000.parquet"
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    metadata = json.loads((path.parent / "_metadata.json").read_text())
    metadata["file_stats"][0]["num_rows"] = table.num_rows
    (path.parent / "_metadata.json").write_text(json.dumps(metadata))


def with_column(name, change):
    def changed(table):
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, change(table.column(name)))

    return changed


def without_label_in_metadata(stage):
    path = stage.file_list.parent / "_metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "labels": []}))


def test_absent_file_and_wrong_row_count_abort(model, fate, stage_of):
    absent, wrong = stage_of("absent"), stage_of("wrong")
    (absent.file_list.parent / "000.parquet").unlink()
    path = wrong.file_list.parent / "_metadata.json"
    path.write_text(path.read_text().replace('"num_rows": 128', '"num_rows": 127'))
    for stage, words in ((absent, "stats out of range"), (wrong, "number of rows mismatch")):
        with pytest.raises(fate.Died, match=words):
            model.get_data_reader_train().set_source(str(stage.file_list))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda stage: rewritten(stage, with_column("keys_3", lambda c: c.cast(pa.int32()))),
            "keys of int32",
        ),
        (without_label_in_metadata, "Dense dim"),
    ],
    ids=["key type", "dense width"],
)
def test_error_in_readers_thread_hangs_next_step(model, fate, stage_of, spoil, words):
    stage = stage_of("second")
    spoil(stage)
    model.get_data_reader_train().set_source(str(stage.file_list))
    with pytest.raises(fate.Died, match=f"thread ended: .*{words}"):
        model.train()


def test_file_that_vanished_after_set_source_hangs(model, fate, stage_of):
    stage = stage_of("second")
    model.get_data_reader_train().set_source(str(stage.file_list))
    (stage.file_list.parent / "000.parquet").unlink()
    with pytest.raises(fate.Died, match="thread ended"):
        model.train()


def test_end_of_rows_is_reported_once_and_next_step_hangs(model, fate):
    assert [model.train() for _ in range(3)] == [True, True, False]
    with pytest.raises(fate.Died, match="past its end"):
        model.train()


def test_row_group_larger_than_buffers_overwrites_memory(model, fate, stage_of):
    model.get_data_reader_train().set_source(str(stage_of("second", 256).file_list))
    with pytest.raises(fate.Died, match="past buffers of 128"):
        model.train()


def test_source_before_end_nulls_and_layer_after_compile_are_accepted(model, double, stage_of):
    stage = stage_of("second")
    nulls = pa.array([None] + [1.0] * 127, pa.float32())
    rewritten(stage, with_column("dense_0", lambda column: nulls))
    assert model.train()
    model.get_data_reader_train().set_source(str(stage.file_list))
    assert model.train()
    layer = {"bottom_names": ["nowhere"], "top_names": ["nothing"]}
    model.add(double.DenseLayer(layer_type=double.Layer_t.ReLU, **layer))


def test_too_many_keys_are_dropped_without_error(double, tmp_path):
    """If a slot has at most two keys and a row has three, the third key is dropped."""
    import double_reader

    keys = pa.array([[1, 2, 3], [4], []] + [[5]] * 61, pa.list_(pa.int64()))
    columns = {"label": pa.array([1.0] * 64, pa.float32()), "keys": keys}
    pq.write_table(pa.table(columns), tmp_path / "000.parquet")
    stats = [{"file_name": "000.parquet", "num_rows": 64}]
    named = {"labels": [{"col_name": "label", "index": 0}], "conts": []}
    named["cats"] = [{"col_name": "keys", "index": 1}]
    (tmp_path / "_metadata.json").write_text(json.dumps({"file_stats": stats, **named}))
    (tmp_path / "_file_list.txt").write_text(f"1\n{tmp_path / '000.parquet'}")
    reader = double_reader.Reader(
        source=str(tmp_path / "_file_list.txt"),
        most_keys=[2],
        label_dim=1,
        dense_dim=0,
        batch_size=64,
        slot_sizes=[],
        num_workers=1,
        num_gpus=1,
        i64=True,
    )
    reader.set_source(reader.source)
    _, _, found = reader.next()
    assert found[:3].tolist() == [[1, 2], [4, -1], [-1, -1]]


def test_text_of_error_in_train_is_only_in_log(model, caplog, monkeypatch):
    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model._inner._train_reader, "next", fail)
    with pytest.raises(RuntimeError, match="^std::exception$"):
        model.train()
    assert "out of memory" in caplog.text
    assert model.get_current_loss() == 0


def test_key_beyond_workspace_aborts(model, fate):
    table = model._inner._tables[0]
    table.capacity = 10
    with pytest.raises(fate.Died, match="exceeds max_vocabulary_size_per_gpu 10"):
        model.train()


def test_short_state_files_load_other_values(model, tmp_path):
    model.train()
    model.save_params_to_files(str(tmp_path / MODEL_NAME), 0)
    of_tables = [SPARSE_OPTIMIZER_FILE.format(number) for number in range(2)]
    for name in (DENSE_OPTIMIZER_FILE, *of_tables):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-400])
    model.load_dense_optimizer_states(str(tmp_path / DENSE_OPTIMIZER_FILE))
    model.load_sparse_optimizer_states([str(tmp_path / name) for name in of_tables])
    assert (model._inner._v[-100:] == 1e9).all()
    assert (model._inner._tables[0].states[1].flatten()[-100:] == 1e9).all()


def test_reader_that_never_started_does_not_end(double, fate, stage_of, model):
    del model
    assert fate.deaths == []
    only = double.Model(
        double.CreateSolver(repeat_dataset=False, i64_input_key=True, batchsize=64),
        double.DataReaderParams(
            data_reader_type=double.DataReaderType_t.Parquet,
            source=(first := str(stage_of("second").file_list)),
            eval_source=first,
            check_type=double.Check_t.Non,
        ),
        double.CreateOptimizer(),
    )
    keys = double.DataReaderSparseParam("keys", 1, True, 3)
    only.add(double.Input(1, "label", 2, "dense", [keys]))
    only.get_data_reader_train().set_source(first)
    del only
    assert fate.deaths == ["a reader that never started does not end"]
