"""The written folder, read by the rules of HugeCTR's own Parquet reader, stated here a second time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL
from components.contracts.errors import PermanentError
from components.contracts.uris import local_path
from components.preprocessing import hugectr_parquet


def read_as_hugectr(folder: Path):
    """Labels, dense values and keys, columns taken by sorted index; refuses what HugeCTR would misread."""
    number, *listed = (folder / "_file_list.txt").read_text().splitlines()
    assert int(number) == len(listed) > 0
    metadata = json.loads((Path(listed[0]).parent / "_metadata.json").read_text())
    rows = {stat["file_name"]: stat["num_rows"] for stat in metadata["file_stats"]}
    order = {kind: sorted(entry["index"] for entry in metadata[kind]) for kind in ("labels", "conts", "cats")}
    parts = {kind: [] for kind in order}
    for path in map(Path, listed):
        assert path.suffix == ".parquet"
        file = pq.ParquetFile(path)
        assert rows[path.name] == file.metadata.num_rows
        table = file.read()
        for kind, wanted in (("labels", "float"), ("conts", "float"), ("cats", "int64")):
            columns = [table.column(index) for index in order[kind]]
            assert {str(column.type) for column in columns} == {wanted}
            assert sum(column.null_count for column in columns) == 0
            parts[kind].append(np.stack([column.to_numpy() for column in columns], 1))
        assert [table.column_names[i] for i in order["labels"]] == [LABEL]
        assert [table.column_names[i] for i in order["conts"]] == list(DENSE)
        assert [table.column_names[i] for i in order["cats"]] == list(CATEGORICAL)
        assert table.num_columns == 1 + len(DENSE) + len(CATEGORICAL)
    return {kind: np.concatenate(arrays) for kind, arrays in parts.items()}


@pytest.fixture
def encoded_set(write_raw, run_step, raw_table):
    return run_step(write_raw(raw_table(1000, seed=1), raw_table(350, seed=2)), extra=("--partition-rows", "300"))


def test_hugectr_reads_every_row(encoded_set):
    train = read_as_hugectr(local_path(encoded_set.train_uri))
    holdout = read_as_hugectr(local_path(encoded_set.holdout_uri))
    assert (len(train["labels"]), len(holdout["labels"])) == (1000, 350)
    assert set(np.unique(train["labels"])) == {0.0, 1.0}
    for part in (train, holdout):
        assert (part["cats"].min(0) >= 1).all()
        assert (part["cats"].max(0) < encoded_set.slot_sizes).all()


def test_no_path_of_the_unpublished_folder_is_left(encoded_set):
    for uri in (encoded_set.train_uri, encoded_set.holdout_uri):
        for path in local_path(uri).rglob("*"):
            if path.is_file():
                assert b"/.preprocessing." not in path.read_bytes(), path


@pytest.mark.parametrize("damage", ["rows", "type", "null", "infinite", "range"])
def test_verification_refuses(encoded_set, damage):
    folder = local_path(encoded_set.holdout_uri)
    path = min(folder.glob("*.parquet"))
    table = pq.read_table(path)
    sizes, rows = list(encoded_set.slot_sizes), 350
    hugectr_parquet.verify(folder, expected_rows=rows, slot_sizes=sizes)
    if damage == "rows":
        rows = 351
    elif damage == "type":
        table = table.set_column(0, LABEL, table[LABEL].cast("int32"))
    elif damage == "null":
        table = table.set_column(1, "I1", table["I2"].fill_null(0).to_pandas().mask(lambda v: v == v.max()).pipe(_array))
    elif damage == "infinite":
        table = table.set_column(1, "I1", _array(np.full(table.num_rows, np.inf, dtype=np.float32)))
    else:
        sizes[0] = int(table["C1"].to_numpy().max())
    pq.write_table(table, path)
    with pytest.raises(PermanentError, match={"rows": "350 rows, expected 351", "range": "C1"}.get(damage, "expected")):
        hugectr_parquet.verify(folder, expected_rows=rows, slot_sizes=sizes)


def _array(values):
    import pyarrow as pa

    return pa.array(values, from_pandas=True)
