"""Criteo's own files given as the lake."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.extraction.malformed_rows import MalformedRows
from components.extraction.source import ROW_MICROS, CriteoFiles, find_source
from components.extraction.times import DAY_MICROS, TimeSpan
from components.runtime.errors import ContractError

ALL = TimeSpan()


@pytest.fixture
def read_files(tmp_path):
    def run(source, window: TimeSpan = ALL) -> list[dict]:
        with MalformedRows(tmp_path / "s.jsonl", max_fraction=0.0) as malformed:
            return [row for table, _ in source.tables(window, malformed) for row in table.to_pylist()]

    return run


@pytest.fixture
def two_days(tmp_path, criteo_rows, write_text):
    for day in (2, 10):
        write_text(tmp_path / "criteo 1tb" / f"day_{day}.gz", criteo_rows(150, seed=day))
    return tmp_path / "criteo 1tb"


def test_rows_keep_file_order_and_their_files_day(two_days, criteo_rows, truth, read_files):
    rows = read_files(find_source(two_days))
    expected = truth(criteo_rows(150, seed=2)) + truth(criteo_rows(150, seed=10))
    assert [tuple(r[name] for name in (criteo.LABEL, *criteo.FEATURES)) for r in rows] == expected
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    step = timedelta(microseconds=ROW_MICROS)
    assert [r[criteo.EVENT_TIME] for r in rows] == [
        epoch + timedelta(days=day) + i * step for day in (2, 10) for i in range(150)
    ]
    assert len({(r[criteo.REQUEST_ID], r[criteo.ROW]) for r in rows}) == 300
    assert rows[149][criteo.REQUEST_ID] == "day_2.gz-000000001"
    assert rows[149][criteo.ROW] == 49


@pytest.mark.parametrize(("start", "end"), [(None, 60), (60, None), (20, 130), (149, 150)])
def test_a_window_cuts_between_rows(two_days, read_files, start, end):
    def at(row: int | None) -> int | None:
        return None if row is None else 2 * DAY_MICROS + row * ROW_MICROS

    rows = read_files(find_source(two_days), TimeSpan(at(start), at(end)))
    whole = read_files(find_source(two_days))
    assert rows == whole[start or 0 : end]


def test_files_without_a_day_count_from_day_0(tmp_path, criteo_rows, write_text, read_files):
    for name in ("a.csv", "b.csv"):
        write_text(tmp_path / name, criteo_rows(5), delimiter=",")
    days = [r[criteo.EVENT_TIME].date().isoformat() for r in read_files(CriteoFiles(path=tmp_path))]
    assert days == ["1970-01-01"] * 5 + ["1970-01-02"] * 5
    assert CriteoFiles(path=tmp_path).describe() == f"{tmp_path} holds days 1970-01-01 to 1970-01-02"


def test_two_files_of_one_day_are_refused(tmp_path, criteo_rows, write_text, read_files):
    for name in ("day_1", "day_1.gz"):
        write_text(tmp_path / name, criteo_rows(5))
    with pytest.raises(ContractError, match=r"day_1 and day_1.gz in .* are both day 1"):
        read_files(CriteoFiles(path=tmp_path))


def test_a_date_in_place_of_a_days_number_is_refused(tmp_path, criteo_rows, write_text, read_files):
    write_text(tmp_path / "day_20260101", criteo_rows(5))
    with pytest.raises(ContractError, match=r"day_20260101 is of day 20260101, expected a number below 2932896"):
        read_files(CriteoFiles(path=tmp_path))


def test_raw_rows_outside_a_partition_keep_their_times_by_being_refused(tmp_path, raw_table, read_files):
    pq.write_table(raw_table(20), tmp_path / "part.parquet")
    with pytest.raises(ContractError, match=r"part.parquet has event times of its own, expected it in a lake's day="):
        read_files(find_source(tmp_path))


def test_a_lake_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ContractError, match="nowhere does not exist, expected day partitions or Criteo files"):
        find_source(tmp_path / "nowhere")
