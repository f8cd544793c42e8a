"""Tests of small files that would fill the memory, hang or overflow."""

import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.contracts import raw_rows
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.rows import archived_rows
from evergreen.rows.raw_schema import MalformedRows, open_parquet
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from testing.paths import REPOSITORY
from tests.support.errors import raises
from tests.support.lakes import folder_lake, read_window

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
LONG_TEXT = pa.DictionaryArray.from_arrays(
    pa.array([0] * 60_000, pa.int32()), pa.array(["x" * 100_000])
)
"""A file of a few kilobytes whose decompressed text has 6 GB."""
READ = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from evergreen.rows.raw_schema import MalformedRows
from evergreen.rows.times import TimeSpan
from evergreen.runtime.errors import ContractError
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from tests.support.lakes import folder_lake, read_window
try:
    lake = folder_lake(Path(sys.argv[1]))
    with MalformedRows(Path(sys.argv[1]) / "_m.jsonl", max_fraction=1.0) as malformed:
        found = read_window(lake, malformed, features=CRITEO_RECOMMENDER.features)
        print(sum(rows.table.num_rows for rows in found))
except ContractError as error:
    print("refused:", error)
"""


@pytest.fixture
def lake(tmp_path, raw_table):
    """Writes one day of rows, in which some columns are replaced.

    Returns the output of a process that reads the day's rows with 4 GiB of memory.
    """

    def read(n: int, changes: dict, **options) -> str:
        table = raw_table(n, start=START.timestamp(), seconds=80_000)
        for name, values in changes.items():
            index = table.schema.get_field_index(name)
            table = (
                table.set_column(index, name, values)
                if index >= 0
                else table.append_column(name, values)
            )
        folder = tmp_path / "lake" / "day=2026-03-01"
        folder.mkdir(parents=True)
        pq.write_table(
            table, folder / "part-0.parquet", compression="zstd", store_schema=False, **options
        )
        return message_of(folder.parent)

    return read


def message_of(folder: Path) -> str:
    command = [sys.executable, "-c", READ, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_long_text_of_many_rows_is_refused_and_not_spelled_out(lake):
    found = lake(60_000, {raw_rows.REQUEST_ID: LONG_TEXT})
    assert (
        "part-0.parquet has 6000000000 bytes of text in request_id of 60000 rows, expected at most"
        in found
    )


def test_long_text_in_unused_column_does_no_harm(lake):
    assert lake(60_000, {"note": LONG_TEXT}) == "60000\n"


def test_pages_compressed_thousandfold_are_refused_by_footer(lake):
    text = pa.array(["x" * 1_000_000 for _ in range(100)])
    found = lake(100, {raw_rows.REQUEST_ID: text}, use_dictionary=False)
    assert (
        "before compression, expected at most 16777216 rows and 67108864 bytes in a file of"
        in found
    )


def test_more_rows_than_bytes_can_hold_are_refused_by_footer(tmp_path):
    folder = tmp_path / "lake" / "day=2026-03-01"
    folder.mkdir(parents=True)
    same = pa.repeat(pa.scalar(START, pa.timestamp("us", tz="UTC")), 5_000_000)
    pq.write_table(
        pa.table({raw_rows.EVENT_TIME: same}), folder / "part-0.parquet", compression="zstd"
    )
    assert "states 5000000 rows in" in message_of(folder.parent)


@pytest.mark.parametrize("is_socket", [False, True])
def test_pipe_is_refused_and_not_waited_for(tmp_path, is_socket):
    path = tmp_path / "part-0.parquet"
    if is_socket:
        os.mknod(path, 0o140600)
    else:
        os.mkfifo(path)
    with raises(ContractError, "part-0.parquet", "regular file"):
        open_parquet(path)


@pytest.mark.parametrize("micros", [2**62, -(2**62)])
def test_time_that_no_date_has_is_malformed_row(tmp_path, raw_table, run_step, micros):
    table = raw_table(400, start=START.timestamp(), seconds=80_000)
    index = table.schema.get_field_index(raw_rows.EVENT_TIME)
    times = table.column(index).cast(pa.int64()).to_numpy().copy()
    times[7] = micros
    folder = tmp_path / "lake" / "day=2026-03-01"
    folder.mkdir(parents=True)
    changed = table.set_column(
        index, table.schema.field(index), pa.array(times).cast(table.schema.field(index).type)
    )
    pq.write_table(changed, folder / "part-0.parquet")
    dataset = run_step(folder.parent)
    assert (dataset.num_malformed, dataset.num_train_rows + dataset.num_holdout_rows) == (1, 399)
    text = local_path(dataset.malformed_uri).read_text()
    assert f"event_time {micros} of timestamp[us, tz=UTC] is outside the file's day" in text


def test_dictionary_encoded_strings_and_lists_give_same_rows_as_plain(
    tmp_path, raw_table, write_lake
):
    table = raw_table(5000, start=START.timestamp(), seconds=80_000, request_rows=50)
    found = []
    for name, options in (("a", {"use_dictionary": True}), ("b", {"use_dictionary": False})):
        folder = tmp_path / name / "day=2026-03-01"
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "part-0.parquet", row_group_size=700, **options)
        lake = folder_lake(tmp_path / name)
        with MalformedRows(tmp_path / "m.jsonl") as malformed:
            read = read_window(lake, malformed, features=CRITEO_RECOMMENDER.features)
            found.append(pa.concat_tables([rows.table for rows in read]))
    assert found[0].equals(found[1])
    assert found[0].num_rows == 5000


def test_batch_may_have_long_texts_up_to_size_of_message(tmp_path):
    texts = pa.array([chr(97 + i % 26) * 1000 for i in range(10_000)])
    pq.write_table(
        pa.table({"w": texts, "l": [[t] for t in texts.to_pylist()]}), tmp_path / "a.parquet"
    )
    batches = archived_rows.bounded_batches(
        tmp_path / "a.parquet", ["w", "l"], group=0, batch_rows=3000
    )
    rows = pa.Table.from_batches(list(batches))
    assert rows.column("w").cast(pa.string()).to_pylist() == texts.to_pylist()
    assert np.sum([len(each) for each in rows.column("l").to_pylist()]) == 10_000
