"""Tests that rows of HugeCTR's Parquet folders are read, or refused before a fit starts."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.training.rows import RowFolder, open_rows
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.storage.uris import local_path
from testing.paths import REPOSITORY
from tests.support.errors import raises
from tests.support.full_disk import files_of_at_most
from tests.support.planted_rows import FEATURES


@pytest.fixture
def read_rows(tmp_path):
    """Decodes into a cache, which must be empty afterwards."""

    def read(folder, num_rows, slot_sizes):
        try:
            return open_rows(
                [RowFolder(path=folder, num_rows=num_rows, features=FEATURES)],
                slot_sizes,
                tmp_path / "cache",
            )
        finally:
            assert not list((tmp_path / "cache").iterdir())

    return read


@pytest.fixture
def written(planted, make_training_set):
    labels, dense, ids, _ = planted.rows(1200)
    manifest = make_training_set(labels, dense, ids, num_files=3)
    return local_path(manifest.train_uri), labels, dense, ids


def edited(path, name, values):
    """Replace a column of one file."""
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, values), path)


@pytest.mark.parametrize("row_group_size", [1200, 37])
def test_rows_come_back_in_file_lists_order(read_rows, written, planted, row_group_size):
    folder, labels, dense, ids = written
    for path in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(path), path, row_group_size=row_group_size)
    rows = read_rows(folder, 1200, planted.slot_sizes)
    np.testing.assert_array_equal(rows.labels, labels)
    np.testing.assert_array_equal(rows.dense, dense)
    np.testing.assert_array_equal(rows.ids, ids)


@pytest.mark.parametrize("num_rows", [1199, 1201])
def test_another_number_of_rows_than_manifest_is_refused(read_rows, written, planted, num_rows):
    with pytest.raises(ContractError, match=str(num_rows)):
        read_rows(written[0], num_rows, planted.slot_sizes)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "user",
            pa.array([10**6] * 400, pa.int64()),
            "ids of user .* are 1000000..1000000, expected 0..59",
        ),
        ("seen/0", pa.array([40] * 400, pa.int64()), "ids of seen/0 .* are 40..40, expected 0..39"),
        ("user", pa.array([1] * 400, pa.int32()), "column user .* is int32"),
        ("label", pa.array([0.5] * 400, pa.float32()), "label in .* is 0.5, expected 0 or 1"),
        ("age", pa.array([float("nan")] * 400, pa.float32()), "column age .* has NaN"),
        ("age", pa.nulls(400, pa.float32()), "column age .* with 400 nulls"),
    ],
    ids=["id too large", "id of a list too large", "int32 ids", "soft labels", "nan", "all null"],
)
def test_values_unusable_for_training_are_refused(
    read_rows, written, planted, column, values, message
):
    edited(written[0] / "part_10.parquet", column, values)
    with pytest.raises(ContractError, match=message):
        read_rows(written[0], 1200, planted.slot_sizes)


def test_missing_column_truncated_and_absent_file_are_refused_by_name(read_rows, written, planted):
    path = written[0] / "part_10.parquet"
    content = path.read_bytes()
    pq.write_table(pq.read_table(path).drop_columns(["seen/1"]), path)
    with raises(ContractError, "part_10.parquet", "lacks", ["seen/1"]):
        read_rows(written[0], 1200, planted.slot_sizes)
    path.write_bytes(content[: len(content) // 2])
    with raises(ContractError, "part_10.parquet", "readable"):
        read_rows(written[0], 1200, planted.slot_sizes)
    path.unlink()
    with raises(ContractError, "lacks", ["part_10.parquet"]):
        read_rows(written[0], 1200, planted.slot_sizes)


def test_folders_follow_one_another(written, planted, make_training_set, tmp_path):
    folder, labels, dense, ids = written
    older = local_path(
        make_training_set(*planted.rows(50, seed=3)[:3], name="older", num_files=1).train_uri
    )
    folders = [
        RowFolder(path=folder, num_rows=1200, features=FEATURES),
        RowFolder(path=older, num_rows=50, features=FEATURES),
    ]
    rows = open_rows(folders, planted.slot_sizes, tmp_path / "cache")
    np.testing.assert_array_equal(rows.ids, np.concatenate([ids, planted.rows(50, seed=3)[2]]))
    np.testing.assert_array_equal(rows[1200:].dense, planted.rows(50, seed=3)[1])


def test_folder_without_rows_is_empty(planted, make_training_set, tmp_path):
    folder = local_path(make_training_set(*planted.rows(0)[:3]).train_uri)
    nothing = RowFolder(path=folder, num_rows=0, features=FEATURES)
    assert len(open_rows([nothing], planted.slot_sizes, tmp_path / "cache")) == 0


def test_rows_are_decoded_in_parts_without_holding_them(tmp_path, planted, make_training_set):
    """The arrays are in a memory-mapped file, so decoding more rows needs no more memory."""
    labels, dense, ids, _ = planted.rows(200_000)
    folder = local_path(make_training_set(labels, dense, ids).train_uri)
    code = (
        "import sys; from pathlib import Path; from components.training.rows import RowFolder, "
        "open_rows\n"
        "from tests.support.planted_rows import FEATURES\n"
        "def anonymous(): return [int(line.split()[1]) for line in open('/proc/self/status') if "
        "'RssAnon' in line][0]\n"
        "def opened():\n"
        "    folder = RowFolder(path=Path(sys.argv[1]), num_rows=200_000, features=FEATURES)\n"
        "    return open_rows([folder], [200] * 4, Path(sys.argv[2]))\n"
        "opened(); before = anonymous(); kept = [opened() for _ in range(4)]\n"
        "print(anonymous() - before, sum(rows.labels.sum() for rows in kept))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path / "cache"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
    )
    grown_kib, clicks = done.stdout.split()
    assert float(clicks) == 4 * labels.sum()
    assert int(grown_kib) * 1024 < 0.5 * 4 * 200_000 * 44, done.stderr


def test_flat_files_that_system_refuses_are_reported_with_their_folder(
    read_rows, written, planted, tmp_path
):
    refused = raises(PermanentError, tmp_path / "cache", "File too large")
    with files_of_at_most(1 << 10), refused:
        read_rows(written[0], 1200, planted.slot_sizes)
