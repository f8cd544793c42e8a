"""Tests of unreadable files in a lake.

A few unreadable files are skipped. Training uses the files once they are repaired.
"""

import json
import logging
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.registry import runs
from evergreen.rows.archived_rows import write_parquet
from evergreen.rows.times import TimeSpan
from tests.support.archives import day_folders
from tests.support.lakes import OUTCOMES, URI, extract_lake, keys_in, keys_of, put

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
HOURS = 20
BAD = 7
"""Hour whose file is corrupt."""
NAME = f"day=2026-03-01/hour-{BAD:02d}.parquet"


def infinite(path, table):
    numbers = table["price"].to_numpy().astype(np.float32).copy()
    numbers[:2] = np.inf
    rewrite(path, table, "price", pa.array(numbers))


def of_another_type(path, table):
    rewrite(path, table, "price", pa.array(["no number"] * len(table)))


def of_another_time(path, table):
    rewrite(path, table, raw_rows.EVENT_TIME, table[raw_rows.EVENT_TIME].cast(pa.int64()))


def without_a_column(path, table):
    write_parquet(table.drop_columns([raw_rows.REQUEST_ID]), path)


def truncated(path, table):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path, table):
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin + column.total_compressed_size // 2] ^= 16
    path.write_bytes(content)


def empty(path, table):
    path.write_bytes(b"")


def rewrite(path, table, name, values):
    write_parquet(table.set_column(table.schema.get_field_index(name), name, values), path)


KINDS = [
    (
        infinite,
        60,
        "2 of 60 rows are malformed (3.33%), expected at most 1.00%; first: line 1: price is inf",
    ),
    (of_another_type, 60, "expected float: Failed to parse string: 'no number'"),
    (of_another_time, 60, "has event_time of type int64, expected a timestamp"),
    (without_a_column, 60, "lacks the columns ['request_id'], expected the raw schema"),
    (truncated, None, "is not a readable Parquet file"),
    (flipped, 60, "is not a readable Parquet file: "),
    (empty, None, "is not a readable Parquet file"),
]
each_kind = pytest.mark.parametrize(("spoil", "num_rows", "reason"), KINDS)


@pytest.fixture
def hour(raw_table):
    """Makes the rows of an hour, one a minute."""
    return lambda number: raw_table(
        60,
        seed=number,
        start=(START + timedelta(hours=number)).timestamp(),
        seconds=3600,
        request_rows=1,
    )


@pytest.fixture
def lake(tmp_path, hour):
    """Makes a lake with one file for each hour."""
    folder = tmp_path / "hours"

    def add(*numbers: int):
        for number in numbers:
            for rows, partition in day_folders(folder, hour(number)):
                write_parquet(rows, partition / f"hour-{number:02d}.parquet")
        return folder

    return add


@pytest.fixture
def turn(tmp_path, flags, run_main, released):
    """Runs the extraction step once over the lake.

    If the run is accepted, its model is registered as trained up to the newest row.
    """
    numbers = iter(range(1, 10))

    def run(folder, *, code: int = 0, accept: bool = True, **settings: str) -> RawDataset | None:
        number = next(numbers)
        parameters = {
            **flags,
            "--lake": folder.as_uri(),
            "--replay-days": "0",
            "--holdout-fraction": "1e-9",
        }
        assert run_main(parameters, run=f"round {number}", **settings) == code
        if code:
            return None
        dataset = RawDataset.read(flags["--output"])
        if accept:
            record = {"files": dataset.files, "unread_files": dataset.unread_files}
            released(dataset.last_event_time, model_id=f"m{number}", version=number, **record)
        return dataset

    return run


def read_by(dataset: RawDataset) -> list[tuple[str, int]]:
    return sorted(keys_in(dataset.train_uri, dataset.holdout_uri))


def keys_of_hours(hour, numbers) -> list[tuple[str, int]]:
    return sorted(key for number in numbers for key in keys_of(hour(number)))


def others() -> list[int]:
    return [number for number in range(HOURS) if number != BAD]


@each_kind
def test_run_continues_without_file_and_names_it(
    lake, hour, turn, tmp_path, caplog, spoil, num_rows, reason
):
    folder = lake(*range(HOURS))
    spoil(folder / NAME, hour(BAD))
    content = (folder / NAME).read_bytes()
    with caplog.at_level(logging.WARNING, "components.extraction.lake_files"):
        dataset = turn(folder)
    assert read_by(dataset) == keys_of_hours(hour, others())
    (named,) = dataset.quarantined_files
    assert (named["file"], named["num_rows"], named["known"]) == (NAME, num_rows, False)
    assert reason in named["reason"]
    assert (
        f"{NAME} is quarantined, and the run goes on without it: {named['reason']}" in caplog.text
    )
    assert NAME.partition("/")[2] not in dataset.files["2026-03-01"]
    assert dataset.unread_files == {"2026-03-01": {NAME.partition("/")[2]: ""}}
    assert dataset.num_malformed == 0
    (note,) = runs.read_notes(tmp_path / "my store", "round 1")
    assert note.facts["quarantined_files"] == 1
    assert (folder / NAME).read_bytes() == content, "the user's file must not change"


@each_kind
def test_next_run_continues_and_run_after_repair_trains_on_rows_once(
    lake, hour, turn, spoil, num_rows, reason
):
    folder = lake(*range(HOURS))
    spoil(folder / NAME, hour(BAD))
    first = turn(folder)
    second = turn(lake(HOURS))  # the window has one file
    assert read_by(second) == keys_of_hours(hour, [HOURS])
    (named,) = second.quarantined_files
    assert (named["file"], named["known"]) == (NAME, True)
    lake(BAD, HOURS + 1)
    third = turn(folder)
    assert read_by(third) == keys_of_hours(hour, [BAD, HOURS + 1])
    assert (third.num_late_rows, third.quarantined_files, third.unread_files) == (60, [], {})
    assert sorted(read_by(first) + read_by(second) + read_by(third)) == keys_of_hours(
        hour, range(HOURS + 2)
    )
    assert read_by(turn(lake(HOURS + 2))) == keys_of_hours(hour, [HOURS + 2])


def test_file_that_breaks_after_training_is_not_used_twice(lake, hour, turn):
    folder = lake(*range(HOURS))
    late = hour(HOURS)
    path = folder / "day=2026-03-01/long.parquet"
    both = pa.concat_tables([late, hour(HOURS + 1)])
    write_parquet(late, path)
    first = turn(folder)
    write_parquet(both, path)  # a back-fill adds newer rows to the file
    content = path.read_bytes()
    empty(path, both)
    second = turn(lake(*range(HOURS + 2, HOURS + 12)))
    assert second.unread_files == {"2026-03-01": {"long.parquet": first.last_event_time}}
    path.write_bytes(content)
    third = turn(lake(HOURS + 12))
    assert third.num_late_rows == 60
    read = sorted(read_by(first) + read_by(second) + read_by(third))
    assert read == keys_of_hours(hour, range(HOURS + 13))


def test_file_older_than_late_rows_stays_unread_until_run_requests_it(lake, hour, turn):
    folder = lake(*range(HOURS))
    empty(folder / NAME, None)
    turn(folder)
    later = turn(lake(*range(90, 100)))
    assert later.unread_files == {"2026-03-01": {NAME.partition("/")[2]: ""}}
    lake(BAD)
    last = turn(lake(100), late_days="5")
    assert (read_by(last), last.unread_files) == (keys_of_hours(hour, [BAD, 100]), {})


@pytest.mark.parametrize(("allowed", "refused"), [("0.1", False), ("0.0999", True), ("0", True)])
def test_more_unfit_files_than_allowed_are_refused(lake, hour, turn, capsys, allowed, refused):
    folder = lake(*range(HOURS))
    for number, spoil in ((BAD, flipped), (BAD + 1, empty)):
        spoil(folder / f"day=2026-03-01/hour-{number:02d}.parquet", hour(number))
    parameters = {"max_quarantined_file_fraction": allowed}
    if not refused:
        assert len(turn(folder, **parameters).quarantined_files) == 2
        return
    turn(folder, code=2, **parameters)
    message = capsys.readouterr().err
    assert re.search(
        r"[12] of 20 files with rows of window \[first row, last row\) are unfit to read \(.*%\)",
        message,
    )
    assert (
        f"expected at most {float(allowed):.2%} (extraction.max_quarantined_file_fraction)"
        in message
    )
    assert f"hour-{BAD + 1:02d}.parquet is not a readable Parquet file" in message


@pytest.mark.parametrize("spoil", [infinite, flipped, empty])
def test_lake_of_unfit_files_alone_is_refused(lake, hour, turn, capsys, spoil):
    folder = lake(*range(3))
    for number in range(3):
        spoil(folder / f"day=2026-03-01/hour-{number:02d}.parquet", hour(number))
    turn(folder, code=2)
    assert "3 of 3 files with rows" in capsys.readouterr().err


def test_error_of_other_kind_names_skipped_files(lake, hour, turn, capsys):
    folder = lake(*range(HOURS))
    turn(folder)
    empty(folder / NAME, None)
    turn(folder, code=2, max_quarantined_file_fraction="1")
    assert f"has no rows, expected at least 10; lake {folder}" in (
        message := capsys.readouterr().err
    )
    assert message.rstrip().endswith(f"unfit files were left out: {NAME}")


def test_unfit_files_of_replayed_days_are_skipped_and_named(lake, hour, turn, capsys):
    folder = lake(*range(HOURS))
    turn(folder)
    flipped(folder / NAME, hour(BAD))
    lake(*range(24, 34))
    found = turn(folder, replay_days="3", replay_share="0.5", late_days="0")
    assert [each["file"] for each in found.quarantined_files] == [NAME]
    assert found.num_replay_rows > 100
    assert not set(keys_in(found.replay_uri, found.replay_holdout_uri)) & set(keys_of(hour(BAD)))
    assert NAME.partition("/")[2] in found.files["2026-03-01"], "its rows were used for training"
    assert found.unread_files == {}


def test_unfit_file_of_late_outcomes_is_skipped_and_named(lake, turn):
    folder = lake(*range(HOURS))
    outcomes = folder / "outcomes" / "day=2026-03-01"
    outcomes.mkdir(parents=True)
    for number in range(10):
        write_parquet(OUTCOMES.empty_table(), outcomes / f"{number}.parquet")
    expected = read_by(turn(folder, accept=False))
    (outcomes / "3.parquet").write_bytes(b"")
    found = turn(folder, accept=False)
    assert [each["file"] for each in found.quarantined_files] == [
        "outcomes/day=2026-03-01/3.parquet"
    ]
    assert read_by(found) == expected
    (outcomes / "4.parquet").write_bytes(b"")
    turn(folder, code=2)


def test_file_of_bucket_is_named_by_its_object(lake, hour, tmp_path, cloud_storage):
    folder = lake(*range(HOURS))
    flipped(folder / NAME, hour(BAD))
    put(folder)
    found = extract_lake(URI, tmp_path / "work", TimeSpan())
    (named,) = found.quarantined_files
    assert named["file"] == NAME
    assert named["reason"].startswith(f"{URI}/{NAME} is not a readable Parquet file")
    assert read_by(found) == keys_of_hours(hour, others())


def test_requested_window_restarts_record_without_unfit_files(lake, hour, turn):
    folder = lake(*range(HOURS))
    turn(folder)
    truncated(folder / NAME, None)
    start = (START + timedelta(hours=BAD, minutes=30)).isoformat()
    second = turn(lake(HOURS), window_start=start)
    (until,) = second.unread_files["2026-03-01"].values()
    assert until < start
    lake(BAD, HOURS + 1)
    third = turn(folder)
    due = [
        key
        for key, time in zip(keys_of(hour(BAD)), hour(BAD)["event_time"].to_pylist())
        if time.isoformat() >= start
    ]
    assert read_by(third) == sorted(due + keys_of_hours(hour, [HOURS + 1]))


def test_manifest_holds_list_as_json(lake, hour, turn, flags):
    folder = lake(*range(HOURS))
    empty(folder / NAME, None)
    turn(folder)
    (named,) = json.loads(Path(flags["--output"]).read_text())["quarantined_files"]
    assert sorted(named) == ["file", "known", "num_rows", "reason"]
