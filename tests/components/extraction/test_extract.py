"""Tests that the extraction step makes a complete dataset of a window, or no dataset."""

import json
import os
import signal
from contextlib import suppress
from datetime import datetime, timezone

import distributed
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.extraction import copying
from components.extraction import extract as extract_module
from components.extraction.extract import data_digest
from evergreen.contracts import raw_rows
from evergreen.contracts.records import CLICK
from evergreen.rows.raw_schema import PartWriter
from evergreen.rows.times import TimeSpan, parse_time
from evergreen.runtime import forked
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.storage.uris import local_path
from testing.recommenders import shop_with
from tests.support.errors import raises
from tests.support.lakes import OUTCOMES, folder_lake, rows_in

START = datetime(2026, 3, 1, tzinfo=timezone.utc)


@pytest.fixture
def lake(tmp_path, raw_table, write_lake):
    return folder_lake(
        write_lake(tmp_path / "la ke", raw_table(1000, start=START.timestamp(), seconds=2 * 86_400))
    )


@pytest.mark.parametrize(
    ("fraction", "num_holdout"), [(0.1, 100), (0.25, 250), (1e-6, 1), (0.999999, 999)]
)
def test_newest_rows_are_held_out(lake, run_step, raw_table, fraction, num_holdout):
    dataset = run_step(lake, holdout_fraction=fraction)
    train, holdout = rows_in(dataset.train_uri), rows_in(dataset.holdout_uri)
    assert len(holdout) == dataset.num_holdout_rows == num_holdout
    assert len(train) == dataset.num_train_rows == 1000 - num_holdout
    times = [row[raw_rows.EVENT_TIME] for row in train + holdout]
    assert times == sorted(times)
    assert dataset.first_event_time == times[0].isoformat()
    assert dataset.last_event_time == times[-1].isoformat()
    expected = raw_table(1000, start=START.timestamp(), seconds=2 * 86_400).to_pylist()
    assert train + holdout == expected


def test_manifest_states_window_and_digest(lake, run_step):
    window = TimeSpan(parse_time("start", "2026-03-01T06:00:00Z"), parse_time("end", "2026-03-02"))
    dataset = run_step(lake, window)
    assert (dataset.window_start, dataset.window_end) == (
        "2026-03-01T06:00:00+00:00",
        "2026-03-02T00:00:00+00:00",
    )
    assert dataset.first_event_time == "2026-03-01T06:00:00+00:00"
    assert dataset.num_train_rows + dataset.num_holdout_rows == 375
    assert dataset.digest == data_digest(local_path(dataset.train_uri).parent)
    assert (dataset.num_malformed, dataset.malformed_uri, dataset.num_duplicates) == (0, None, 0)


def test_retried_task_replaces_what_it_finds(lake, run_step, tmp_path):
    run = tmp_path / "wo rk" / "run"
    (run / "extraction" / "train").mkdir(parents=True)
    (run / "extraction" / "train" / "part-00009.parquet").write_bytes(b"half")
    (run / f".extraction.{'0123abcd' * 4}" / "all").mkdir(parents=True)
    assert len(rows_in(run_step(lake).train_uri)) == 900
    assert [path.name for path in run.iterdir()] == ["extraction"]


@pytest.mark.parametrize("num_rows", [1, 9])
def test_window_too_small_to_split_is_refused(lake, run_step, tmp_path, num_rows):
    start = parse_time("start", "2026-03-01")
    window = TimeSpan(start, start + num_rows * 172_800_000)
    with raises(ContractError, f"{num_rows} rows", "at least 10"):
        run_step(lake, window)
    assert not list((tmp_path / "wo rk" / "run").iterdir())


def test_empty_window_names_itself_and_what_lake_holds(lake, run_step):
    with pytest.raises(ContractError) as caught:
        run_step(lake, TimeSpan(parse_time("start", "2027-01-01"), parse_time("end", "2027-01-02")))
    assert str(caught.value) == (
        "window [2027-01-01T00:00:00+00:00, 2027-01-02T00:00:00+00:00) has no rows, expected at "
        "least 10; "
        f"lake {lake.files.name} has days 2026-03-01 to 2026-03-02; bring more rows by "
        "`evergreen data ingest`, or select "
        "other rows by window_start and window_end"
    )


@pytest.fixture
def spoilt(tmp_path, lake):
    """Lake in which every 50th of the 500 rows of the first day has the invalid label 7."""
    path = tmp_path / "la ke" / "day=2026-03-01" / "part-0.parquet"
    table = pq.read_table(path, partitioning=None)
    labels = [
        7 if i % 50 == 0 else label for i, label in enumerate(table[raw_rows.LABEL].to_pylist())
    ]
    pq.write_table(table.set_column(0, raw_rows.LABEL, pa.array(labels, pa.int32())), path)
    return folder_lake(tmp_path / "la ke")


def test_malformed_rows_are_published_with_dataset(spoilt, run_step, tmp_path):
    dataset = run_step(spoilt, max_malformed_fraction=0.02)
    assert dataset.num_train_rows + dataset.num_holdout_rows == 990
    assert dataset.num_malformed == 10
    lines = [
        json.loads(line) for line in local_path(dataset.malformed_uri).read_text().splitlines()
    ]
    assert [line["line"] for line in lines] == list(range(1, 501, 50))
    assert {line["file"] for line in lines} == {
        str(tmp_path / "la ke" / "day=2026-03-01" / "part-0.parquet")
    }
    assert {line["reason"] for line in lines} == {"label is 7, expected 0 or 1"}
    assert all(json.loads(line["text"])["label"] == 7 for line in lines)


def test_too_many_malformed_rows_leave_nothing_behind(spoilt, run_step, tmp_path):
    with raises(ContractError, "part-0.parquet", "10 of 500 rows", "malformed (2.00%)"):
        run_step(spoilt)
    assert not list((tmp_path / "wo rk" / "run").iterdir())


@pytest.fixture
def extract_batches(tmp_path, raw_table, write_lake, monkeypatch):
    """Extracts the rows of a lake in many small batches.

    Some requests are divided between two batches, or between training and holdout. Some rows have a
    late click.

    Returns the manifest and all files by name.
    """
    monkeypatch.setattr(copying, "_TASK_ROWS", 150)
    table = raw_table(1000, start=START.timestamp(), seconds=2 * 86_400, request_rows=7)
    label = pa.array(
        [None if n in (5, 705) else v for n, v in enumerate(table[raw_rows.LABEL].to_pylist())],
        pa.int32(),
    )
    table = table.set_column(table.column_names.index(raw_rows.LABEL), raw_rows.LABEL, label)
    folder = write_lake(
        tmp_path / "la ke", pa.concat_tables([table, table.slice(300, 50)]), num_files=3
    )
    named = table.select([raw_rows.REQUEST_ID, raw_rows.ROW, raw_rows.EVENT_TIME]).to_pylist()[::9]
    late = [
        (row["request_id"], row["row"], CLICK, row["event_time"], row["event_time"], 60.0)
        for row in named
    ]
    (outcomes := folder / raw_rows.OUTCOME_PARTITION.format(day="2026-03-02")).mkdir(parents=True)
    pq.write_table(
        pa.table(list(map(list, zip(*late))), schema=OUTCOMES), outcomes / "part-0.parquet"
    )

    def run(processes, scheduler="", **settings):
        monkeypatch.setattr(forked, "available_cores", lambda: processes)
        dataset = extract_module.extract(
            folder_lake(folder, chunk_rows=40),
            TimeSpan(),
            folder=tmp_path / "work",
            recommender=shop_with(extraction={"max_malformed_fraction": 0.1, **settings}),
            dask_scheduler=scheduler,
        )
        files = {
            path.relative_to(tmp_path): path.read_bytes()
            for path in (tmp_path / "work").rglob("*.*")
        }
        return dataset, files

    rows = [
        row | {raw_rows.LABEL: 1} if n % 9 == 0 else row for n, row in enumerate(table.to_pylist())
    ]
    run.rows = [row for row in rows if row[raw_rows.LABEL] is not None]
    run.files = sorted(folder.glob("day=*/*.parquet"))
    run.num_late_clicks = sum(row[raw_rows.LABEL] == 0 for row in table.to_pylist()[::9])
    return run


def test_processes_share_rows_and_leave_bytes_of_one(extract_batches):
    (dataset, files), shared = extract_batches(1), extract_batches(3)
    assert shared == (dataset, files)
    assert len([path for path in files if "train" in path.parts]) > 5
    assert (dataset.num_duplicates, dataset.num_malformed) == (50, 2)
    assert dataset.num_late_clicks == extract_batches.num_late_clicks > 50
    trained, holdout = rows_in(dataset.train_uri), rows_in(dataset.holdout_uri)
    assert dataset.num_straddling_rows > 0
    assert trained == extract_batches.rows[: len(trained)]
    straddling = trained[-1][raw_rows.REQUEST_ID]
    newer = extract_batches.rows[len(trained) :]
    assert holdout == [row for row in newer if row[raw_rows.REQUEST_ID] != straddling]
    assert len(newer) - len(holdout) == dataset.num_straddling_rows


def test_unfit_files_that_several_processes_find_are_all_skipped(extract_batches):
    _, one, *_, other = extract_batches.files
    for path in (one, other):
        table = pq.read_table(path, partitioning=None)
        column_index = table.column_names.index("price")
        pq.write_table(
            table.set_column(column_index, "price", pa.array(["no number"] * len(table))), path
        )
    dataset, files = extract_batches(3, max_quarantined_file_fraction=0.5)
    assert [each["file"] for each in dataset.quarantined_files] == [
        path.relative_to(path.parents[1]).as_posix() for path in (one, other)
    ]
    for path in (one, other):
        path.unlink()
    expected, expected_files = extract_batches(1)
    assert (dataset.digest, files) == (expected.digest, expected_files)


def test_process_killed_midway_leaves_nothing_and_next_try_is_same(
    extract_batches, monkeypatch, tmp_path
):
    write, parent = PartWriter.write, os.getpid()

    def write_or_die(self, table):
        write(self, table)
        if (
            os.getpid() != parent
            and self._folder.name == copying.WINDOW
            and not (tmp_path / "died").exists()
        ):
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    expected = extract_batches(1)
    monkeypatch.setattr(PartWriter, "write", write_or_die)
    with raises(TemporaryError, "one of 3 processes", "killed"):
        extract_batches(3)
    assert [path.name for path in tmp_path.glob("*work*")] == []
    assert extract_batches(3) == expected


def die_once(folder):
    """Kill the first worker that copied a chunk of a batch."""
    write = PartWriter.write

    def write_or_die(self, table):
        write(self, table)
        with suppress(FileExistsError):
            (folder / "died").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    PartWriter.write = write_or_die


@pytest.mark.slow
def test_two_dask_workers_one_killed_in_middle_leave_bytes_of_one_process(
    extract_batches, tmp_path
):
    expected = extract_batches(1)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(die_once, tmp_path)
        assert extract_batches(1, cluster.scheduler_address) == expected
    assert (tmp_path / "died").exists()


def test_scheduler_whose_address_is_none_is_refused(run_main, flags, capsys):
    assert run_main(flags, dask_scheduler="nowhere") == 2
    assert "dask_scheduler is 'nowhere'" in capsys.readouterr().err
