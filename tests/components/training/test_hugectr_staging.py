"""Rows staged as HugeCTR's Parquet folders: the double's reader gets them back, batch by batch, in their order."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.models.files import one_each
from components.runtime.errors import PermanentError
from components.training.hugectr.embeddings import embeddings_of
from components.training.hugectr.staging import staged, write_stage
from components.training.rows import Rows
from tests.support.training_world import dcn


@pytest.fixture
def rows(world):
    labels, dense, ids, _ = world.rows(1_500, 1)
    return Rows(labels=labels, dense=dense, ids=ids.astype(np.int32))


@pytest.fixture
def embeddings(world):
    return embeddings_of(dcn(), world.slot_sizes, one_each(world.slot_sizes))


@pytest.fixture
def write(rows, embeddings):
    """Writes a stage of batches of 64 rows."""
    return lambda folder, num_rows, num_files: write_stage(
        rows, np.arange(num_rows), embeddings=embeddings, batch_size=64, num_files=num_files, folder=folder
    )


def read_stage(stage):
    count, *files = stage.file_list.read_text().splitlines()
    assert int(count) == len(files)
    return [pq.read_table(file) for file in files]


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_staged_batches_come_out_of_the_workers_in_order(num_files, rows, tmp_path, double, world, embeddings):
    import double_reader

    order = np.random.default_rng(4).permutation(1_500)[: 128 * 7]
    sizes = {"batch_size": 128, "num_files": num_files, "stage_rows": 500}
    stages = staged(rows, order, embeddings=embeddings, folder=tmp_path / "staged", **sizes)
    at = 0
    for stage in stages:
        reader = double_reader.Reader(
            source=str(stage.file_list), most_keys=[1] * 26, is_fixed=[True] * 26, label_dim=1, dense_dim=13,
            batch_size=128, slot_sizes=[], num_workers=12, num_gpus=num_files, i64=True,
        )  # fmt: skip
        reader.set_source("")
        for _ in range(stage.num_batches):
            labels, dense, keys = reader.next()
            expected = order[at : at + 128]
            np.testing.assert_array_equal(labels[:, 0], rows.labels[expected])
            np.testing.assert_array_equal(dense, rows.dense[expected])
            offsets = np.cumsum(world.slot_sizes) - world.slot_sizes
            np.testing.assert_array_equal(keys, rows.ids[expected] + offsets)
            at += 128
        assert reader.next() is None
    assert at == len(order)


def test_staged_files_are_in_hugectrs_form(write, tmp_path):
    stage = write(tmp_path / "stage", 256, 2)
    first, second = read_stage(stage)
    assert [first.num_rows, second.num_rows] == [128, 128]
    types = [str(field.type) for field in first.schema]
    assert types == ["float"] * 14 + ["int64"] * 26
    metadata = json.loads((stage.file_list.parent / "_metadata.json").read_text())
    assert [(c["col_name"], c["index"]) for c in metadata["labels"]] == [("label", 0)]
    assert [c["index"] for c in metadata["conts"]] == list(range(1, 14))
    assert [(c["col_name"], c["index"]) for c in metadata["cats"]] == [(f"keys_{i}", 14 + i) for i in range(26)]
    assert metadata["file_stats"] == [{"file_name": f"00{i}.parquet", "num_rows": 128} for i in range(2)]
    assert write(tmp_path / "one", 64, 4).num_batches == 1


def test_a_disk_that_refuses_is_a_permanent_error(write, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermanentError, match="rows for HugeCTR cannot be written"):
        write(tmp_path / "file" / "stage", 64, 1)
