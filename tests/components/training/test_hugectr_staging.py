"""Tests that HugeCTR's test double reads staged rows back, batch by batch, in order."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.training.hugectr.embeddings import embeddings_of
from components.training.hugectr.staging import write_stage
from components.training.rows import Rows
from evergreen.runtime.errors import PermanentError
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, dcn


@pytest.fixture
def rows(planted):
    labels, dense, ids, _ = planted.rows(1_500, 1)
    return Rows(labels=labels, dense=dense, ids=ids.astype(np.int32))


@pytest.fixture
def embeddings(planted):
    return embeddings_of(dcn(), planted.slot_sizes, POSITIONS)


@pytest.fixture
def write(rows, embeddings):
    """Writes a stage of batches of 64 rows."""
    return lambda folder, num_rows, num_files: write_stage(
        rows,
        np.arange(num_rows),
        embeddings=embeddings,
        batch_size=64,
        num_files=num_files,
        folder=folder,
    )


def read_stage(stage):
    count, *files = stage.file_list.read_text().splitlines()
    assert int(count) == len(files)
    return [pq.read_table(file) for file in files]


def test_staged_files_are_in_hugectrs_form(write, tmp_path):
    stage = write(tmp_path / "stage", 256, 2)
    first, second = read_stage(stage)
    assert [first.num_rows, second.num_rows] == [128, 128]
    types = [str(field.type) for field in first.schema]
    a_list = "list<element: int64 not null>"
    keys = ["int64", "int64", a_list, "int64", a_list]
    assert types == ["float"] * 3 + keys, "shop, user and genres are summed, item and seen averaged"
    metadata = json.loads((stage.file_list.parent / "_metadata.json").read_text())
    assert [(c["col_name"], c["index"]) for c in metadata["labels"]] == [("label", 0)]
    assert [c["index"] for c in metadata["conts"]] == [1, 2]
    assert [(c["col_name"], c["index"]) for c in metadata["cats"]] == [
        (f"keys_{i}", 3 + i) for i in range(5)
    ]
    assert metadata["file_stats"] == [
        {"file_name": f"00{i}.parquet", "num_rows": 128} for i in range(2)
    ]
    assert write(tmp_path / "one", 64, 4).num_batches == 1


def test_disk_that_refuses_is_permanent_error(write, tmp_path):
    (tmp_path / "file").write_text("")
    with raises(PermanentError, "HugeCTR", "written"):
        write(tmp_path / "file" / "stage", 64, 1)
