"""Tests of writing row streams to files, and of the split between older and newest rows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.extraction.holdout import split_newest
from evergreen.rows import raw_schema
from evergreen.rows.raw_schema import PartWriter


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(raw_schema, "BATCH_ROWS", 16)
    monkeypatch.setattr(raw_schema, "FILE_ROWS", 64)


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6), share=st.floats(0, 1))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_files_hold_stream_and_cut_keeps_order(
    tmp_path_factory, raw_table, small_groups, sizes, share
):
    folder, table = tmp_path_factory.mktemp("parts"), raw_table(sum(sizes))
    with PartWriter(folder / "all") as writer:
        at = 0
        for size in sizes:
            writer.write(table.slice(at, size))
            at += size
    assert [part.num_rows for part in writer.parts[:-1]] == [64] * max(len(writer.parts) - 1, 0)
    for part in writer.parts:
        metadata = pq.ParquetFile(part.path).metadata
        assert metadata.num_rows == part.num_rows
        groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        assert groups[:-1] == [16] * (len(groups) - 1)
    newest = int(sum(sizes) * share)
    split_newest(writer.parts, newest, older=folder / "train", newest=folder / "holdout")
    assert not list((folder / "all").iterdir())
    parts = {name: sorted((folder / name).iterdir()) for name in ("train", "holdout")}
    read = {
        name: pa.concat_tables(
            [table.slice(0, 0), *(pq.read_table(p, partitioning=None) for p in paths)]
        )
        for name, paths in parts.items()
    }
    assert read["train"].equals(table.slice(0, sum(sizes) - newest))
    assert read["holdout"].equals(table.slice(sum(sizes) - newest))
