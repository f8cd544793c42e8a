"""Tests of the windows of successive runs, which end by day, by watermark or by final labels."""

from datetime import datetime, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.extraction.window import resolve_window
from evergreen.contracts import raw_rows
from evergreen.rows.times import DAY_MICROS, TimeSpan, parse_time
from tests.support.lakes import folder_lake

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
HOUR_MICROS = DAY_MICROS // 24
NEWEST = parse_time("newest", "2026-03-05T12:00:00Z")


@pytest.fixture
def resolve():
    """Resolves the window of a registry without a champion.

    The newest row is `NEWEST` by default.
    """

    def run(start="", end="", newest=NEWEST, **policy):
        return resolve_window(start=start, end=end, parent=None, newest=lambda: newest, **policy)

    return run


def test_window_of_days_ends_where_asked_or_at_newest_row(resolve):
    assert resolve(full_days=2.0) == TimeSpan(NEWEST + 1 - 2 * DAY_MICROS, NEWEST + 1)
    end = parse_time("end", "2026-03-03")
    assert resolve(end="2026-03-03", full_days=0.5) == TimeSpan(end - DAY_MICROS // 2, end)
    assert resolve(newest=None, full_days=2.0) == TimeSpan()


def test_window_of_days_counts_mature_days(resolve):
    end = NEWEST + 1 - 6 * HOUR_MICROS
    assert resolve(full_days=1.0, attribution=6 * HOUR_MICROS) == TimeSpan(end - DAY_MICROS, end)


def test_asked_end_is_what_ages_count_from_so_that_later_try_reads_same(resolve):
    half_day = 12 * HOUR_MICROS
    windows = {
        resolve(end="2026-03-04", attribution=half_day, newest=NEWEST + i * DAY_MICROS)
        for i in range(3)
    }
    assert windows == {TimeSpan(None, parse_time("end", "2026-03-03T12:00:00Z"))}


def test_newest_row_is_found_without_trust_in_footers(tmp_path, raw_table, write_lake):
    table = raw_table(500, start=START.timestamp(), seconds=3 * 86_400)
    folder = write_lake(tmp_path / "lake", table, num_files=2)
    times = table[raw_rows.EVENT_TIME].cast(pa.int64()).to_numpy()
    assert folder_lake(folder).newest() == times.max()
    newest_day = folder / "day=2026-03-03"
    for path in newest_day.iterdir():
        pq.write_table(pq.read_table(path, partitioning=None), path, write_statistics=False)
    assert folder_lake(folder).newest() == times.max()
    # A row in the folder of another day, or without a time, is malformed and does not change the
    # result.
    stray = table.slice(0, 2)
    of_stray = pa.array([np.datetime64("2026-04-01", "us"), None]).cast(
        stray.schema.field(raw_rows.EVENT_TIME).type
    )
    at = stray.column_names.index(raw_rows.EVENT_TIME)
    pq.write_table(
        stray.set_column(at, raw_rows.EVENT_TIME, of_stray), newest_day / "stray.parquet"
    )
    assert folder_lake(folder).newest() == times.max()
    for path in newest_day.iterdir():
        path.rename(path.with_name(f"_{path.name}"))
    assert folder_lake(folder).newest() == times[days_of(table) < "2026-03-03"].max()


def days_of(table):
    return np.array([time.date().isoformat() for time in table[raw_rows.EVENT_TIME].to_pylist()])
