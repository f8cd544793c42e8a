"""Tests of the lake's window reader and the join of late outcomes, compared with plain Python."""

import json
import random
from datetime import datetime, timedelta, timezone
from operator import itemgetter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.extraction.lake import Lake
from evergreen.contracts import raw_rows
from evergreen.contracts.records import CLICK, CONVERSION
from evergreen.rows.raw_schema import MalformedRows, raw_schema
from evergreen.rows.times import TimeSpan, parse_time, to_micros
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP
from tests.support.errors import raises
from tests.support.lakes import OUTCOMES, folder_lake, read_window, rows_in

RAW_SCHEMA = raw_schema(SHOP.features)

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
FIRST = to_micros(START)
DAY = 86_400_000_000
ALL = TimeSpan()


@pytest.fixture
def read_lake(tmp_path):
    """Reads a window, and returns its rows as dicts, the number of duplicates, and the bad rows."""

    def run(lake: Lake, window: TimeSpan = ALL) -> tuple[list[dict], int, list[dict]]:
        path = tmp_path / "lake.jsonl"
        path.unlink(missing_ok=True)
        with MalformedRows(path, max_fraction=1.0) as malformed:
            chunks = list(read_window(lake, malformed, window))
        rows = [row for chunk in chunks for row in chunk.table.to_pylist()]
        malformed = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return rows, sum(chunk.copies.num_rows for chunk in chunks), malformed

    return run


identity = itemgetter(raw_rows.EVENT_TIME, raw_rows.REQUEST_ID, raw_rows.ROW)


@pytest.fixture
def four_days(raw_table):
    return raw_table(2000, start=START.timestamp(), seconds=4 * 86_400)


@pytest.fixture
def four_days_lake(tmp_path, four_days, write_lake):
    return write_lake(tmp_path / "la ke", four_days, num_files=3)


@pytest.fixture
def four_days_in_order(four_days):
    return sorted(four_days.to_pylist(), key=identity)


@given(
    start=st.none() | st.integers(-DAY, 5 * DAY),
    length=st.none() | st.integers(1, 3 * DAY),
    chunk_rows=st.sampled_from([50, 333, 10_000]),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_window_holds_its_rows_in_time_order(
    four_days_lake, four_days_in_order, read_lake, start, length, chunk_rows
):
    window = TimeSpan(
        None if start is None else FIRST + start,
        None if length is None else FIRST + (start or 0) + length,
    )
    expected = [
        r
        for r in four_days_in_order
        if (window.start is None or to_micros(r[raw_rows.EVENT_TIME]) >= window.start)
        and (window.end is None or to_micros(r[raw_rows.EVENT_TIME]) < window.end)
    ]
    rows, num_duplicates, malformed = read_lake(
        folder_lake(four_days_lake, chunk_rows=chunk_rows), window
    )
    assert rows == expected
    assert (num_duplicates, malformed) == (0, [])


def test_burst_of_traffic_is_split_by_its_rows(tmp_path, raw_table, write_lake):
    quiet = raw_table(200, start=START.timestamp(), seconds=86_400)
    burst = raw_table(2000, seed=1, start=START.timestamp() + 30_000, seconds=60)
    lake = folder_lake(
        write_lake(tmp_path / "lake", pa.concat_tables([quiet, burst]).sort_by("event_time")),
        chunk_rows=200,
    )
    with MalformedRows(tmp_path / "s.jsonl") as malformed:
        sizes = [rows.table.num_rows for rows in read_window(lake, malformed)]
    assert sum(sizes) == 2200
    assert max(sizes) <= 400


def test_newest_of_rows_with_one_identity_stays(tmp_path, raw_table, write_lake, read_lake):
    table = raw_table(20, start=START.timestamp(), seconds=20)
    index = table.schema.get_field_index(raw_rows.EVENT_TIME)
    later = pa.array([t + 1_000_000_000 for t in table.column(index).cast(pa.int64()).to_pylist()])
    moved = table.set_column(
        index, RAW_SCHEMA.field(index), later.cast(RAW_SCHEMA.field(index).type)
    )
    lake = write_lake(tmp_path / "lake", pa.concat_tables([moved, table]))
    rows, num_duplicates, _ = read_lake(folder_lake(lake))
    assert num_duplicates == 20
    assert [*map(identity, rows)] == [*map(identity, moved.to_pylist())]


def test_unfinished_files_are_not_read(tmp_path, four_days, write_lake, read_lake):
    lake = write_lake(tmp_path / "lake", four_days)
    (lake / "day=2026-03-01" / ".part-9.parquet").write_bytes(b"half")
    (lake / "day=2026-03-01" / "_part-9.parquet").write_bytes(b"half")
    (lake / ".day=2026-03-09").mkdir()
    assert len(read_lake(folder_lake(lake))[0]) == 2000


def test_row_groups_outside_window_are_not_read(tmp_path, four_days, write_lake, read_lake):
    lake = write_lake(tmp_path / "lake", four_days, row_group_size=50)
    path = lake / "day=2026-03-01" / "part-0.parquet"
    column = pq.ParquetFile(path).metadata.row_group(0).column(3)
    corrupt = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    corrupt[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(bytes(corrupt))
    with raises(ContractError, "day=2026-03-01/part-0.parquet", "readable"):
        read_lake(folder_lake(lake))
    assert len(read_lake(folder_lake(lake), TimeSpan(FIRST + DAY // 2, FIRST + DAY))[0]) == 250


def test_chunks_hold_whole_row_groups_where_these_follow_each_other(
    tmp_path, four_days, write_lake
):
    lake = folder_lake(write_lake(tmp_path / "lake", four_days, row_group_size=50), chunk_rows=130)
    sizes = [round(chunk.num_rows) for chunk in lake.plan(ALL).chunks]
    assert len(sizes) == 4 * 4
    assert {size % 50 for size in sizes} == {0}
    assert max(sizes) <= 1.5 * 130


def test_chunk_after_first_names_only_files_that_may_hold_its_rows(tmp_path, four_days):
    (day := tmp_path / "lake" / "day=2026-03-01").mkdir(parents=True)
    for k in range(10):
        pq.write_table(four_days.slice(50 * k, 50), day / f"part-{k}.parquet")
    chunks = folder_lake(tmp_path / "lake", chunk_rows=100).plan(ALL).chunks
    assert [len(chunk.files) for chunk in chunks] == [10, 2, 2, 2, 2]


def test_file_that_lacks_columns_is_refused_by_name(tmp_path, four_days, write_lake, read_lake):
    lake = write_lake(tmp_path / "lake", four_days.drop_columns(["label", "row"]))
    with raises(ContractError, "part-0.parquet", "lacks", ["label", "row"]):
        read_lake(folder_lake(lake))


def test_partition_without_date_is_refused(tmp_path, four_days, write_lake):
    lake = write_lake(tmp_path / "lake", four_days)
    (lake / "day=yesterday").mkdir()
    (lake / "day=yesterday" / "part.parquet").touch()
    with raises(ContractError, "'yesterday'", "expected a date"):
        folder_lake(lake)


@pytest.mark.parametrize("chunk_rows", [30, 10_000])
def test_rows_of_another_day_or_of_none_are_quarantined_once(
    tmp_path, four_days, read_lake, chunk_rows
):
    index = four_days.schema.get_field_index(raw_rows.EVENT_TIME)
    times = four_days.column(index).to_pylist()[:500]
    times[400], times[401] = None, times[401].replace(year=2031)
    table = four_days.slice(0, 500).set_column(
        index, RAW_SCHEMA.field(index), pa.array(times, RAW_SCHEMA[index].type)
    )
    (tmp_path / "lake" / "day=2026-03-01").mkdir(parents=True)
    pq.write_table(table, tmp_path / "lake" / "day=2026-03-01" / "a.parquet", row_group_size=50)
    for window, num_rows in ((TimeSpan(), 498), (TimeSpan(FIRST, FIRST + DAY // 10), 50)):
        rows, _, malformed = read_lake(
            folder_lake(tmp_path / "lake", chunk_rows=chunk_rows), window
        )
        assert len(rows) == num_rows
        assert [m["line"] for m in malformed] == [401, 402]
        assert malformed[0]["reason"].startswith("event_time is None")
        assert (
            "is outside the file's day, expected [2026-03-01T00:00:00+00:00"
            in malformed[1]["reason"]
        )


HOUR = timedelta(hours=1)


@pytest.fixture
def table(raw_table):
    return raw_table(1200, start=START.timestamp(), seconds=4 * 86_400)


@pytest.fixture
def lake(tmp_path, table, write_lake):
    return write_lake(tmp_path / "la ke", table, num_files=2)


def write_outcomes(
    lake, day, outcomes, *, name="part-1", event=CLICK, time=START - HOUR, window=1800.0
):
    """Write outcomes of (request id, row) pairs as one file of the partition `day`.

    By default, the outcomes happened before all rows.
    """
    folder = lake / raw_rows.OUTCOME_PARTITION.format(day=day)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "request_id": request,
            "row": row,
            "event": event,
            "outcome_time": time,
            "stored_at": START + HOUR,
        }
        | {"window_seconds": window}
        for request, row in outcomes
    ]
    pq.write_table(pa.Table.from_pylist(rows, OUTCOMES), folder / f"{name}.parquet")


def labels_of(*uris) -> dict:
    return {(row["request_id"], row["row"]): row["label"] for row in rows_in(*uris)}


def expected_labels(table, late=()):
    return {
        (row["request_id"], row["row"]): int(
            row["label"] or (row["request_id"], row["row"]) in late
        )
        for row in table.to_pylist()
    }


@pytest.mark.parametrize("seed", range(2))
def test_every_late_click_makes_its_rows_label_1_and_changes_nothing_else(
    lake, table, run_step, seed
):
    source = random.Random(seed)
    before = run_step(lake)
    rows = [(row["request_id"], row["row"], row["event_time"]) for row in table.to_pylist()]
    late = source.sample(rows, 150)
    for i, (request, row, time) in enumerate(late):
        # Most outcomes are in the folder of the prediction's day. If the monitor had forgotten the
        # prediction, its outcome is in the folder of a later day. Some outcomes occur twice, in one
        # file or in two files.
        day = (time + timedelta(days=source.choice([0, 0, 0, 1, 9, 40]))).date()
        for copy in range(source.choice([1, 1, 2])):
            write_outcomes(
                lake, day, [(request, row)] * source.choice([1, 3]), name=f"part-{i}-{copy}"
            )
    others = source.sample(rows, 100)
    write_outcomes(
        lake,
        "2026-03-02",
        [(request, row) for request, row, _ in others],
        name="c",
        event=CONVERSION,
    )
    write_outcomes(
        lake,
        "2026-03-02",
        [("no such request", 1), (rows[0][0], 10**6), (rows[0][0], -1)],
        name="unknown",
    )
    dataset = run_step(lake)
    expected = expected_labels(table, {(request, row) for request, row, _ in late})
    assert labels_of(dataset.train_uri, dataset.holdout_uri) == expected
    assert dataset.num_late_clicks == sum(expected.values()) - sum(expected_labels(table).values())
    read = {
        uri: pa.concat_tables(
            [pq.read_table(p, partitioning=None) for p in sorted(local_path(uri).iterdir())]
        )
        for uri in (dataset.train_uri, dataset.holdout_uri)
    }
    rows_now = pa.concat_tables(read.values())
    assert rows_now.drop_columns("label").equals(table.drop_columns("label")), (
        "order, times and features must not change"
    )
    assert (
        (dataset.num_duplicates, dataset.num_malformed)
        == (before.num_duplicates, before.num_malformed)
        == (0, 0)
    )


def test_datasets_version_changes_with_new_late_clicks(lake, table, run_step):
    first = run_step(lake)
    assert (first.num_late_clicks, first.outcomes_digest) == (0, None)
    missed = [(r["request_id"], r["row"]) for r in table.to_pylist() if not r["label"]]
    write_outcomes(lake, "2026-03-01", missed[:1])
    second = run_step(lake)
    assert second.digest != first.digest
    assert (second.num_late_clicks, run_step(lake).outcomes_digest) == (1, second.outcomes_digest)
    write_outcomes(lake, "2026-03-01", missed[:1], name="part-2")
    again = run_step(lake)
    assert again.digest == second.digest, "outcomes that were used before must change no row"
    assert again.outcomes_digest != second.outcomes_digest


def test_replayed_rows_have_their_late_clicks_too(lake, table, run_step):
    late = {(r["request_id"], r["row"]) for r in table.to_pylist()}
    by_day: dict = {}
    for r in table.to_pylist():
        by_day.setdefault(r["event_time"].date().isoformat(), []).append(
            (r["request_id"], r["row"])
        )
    for day, rows in by_day.items():
        write_outcomes(lake, day, rows)
    dataset = run_step(lake, TimeSpan(parse_time("start", "2026-03-04"), None), replay_share=0.4)
    assert dataset.num_replay_rows
    assert dataset.num_replay_holdout_rows
    uris = (dataset.train_uri, dataset.holdout_uri, dataset.replay_uri, dataset.replay_holdout_uri)
    labels = labels_of(*uris)
    assert set(labels.values()) == {1}
    assert set(labels) <= late
    in_window = [r for r in table.to_pylist() if r["event_time"].date().isoformat() == "2026-03-04"]
    assert dataset.num_late_clicks == sum(not r["label"] for r in in_window), (
        "only rows of the window count"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1 and no more", "part-1.parquet is not a readable Parquet file"),
        (None, "lacks the columns .'row', 'event', 'outcome_time', 'stored_at', 'window_seconds'"),
    ],
)
def test_corrupt_file_of_outcomes_stops_step_and_is_named(lake, run_step, content, message):
    folder = lake / "outcomes" / "day=2026-03-01"
    folder.mkdir(parents=True)
    if content is None:
        pq.write_table(pa.table({"request_id": ["a"]}), folder / "part-1.parquet")
    else:
        (folder / "part-1.parquet").write_bytes(content)
    with pytest.raises(ContractError, match=message):
        run_step(lake)


def test_partition_that_names_no_day_is_refused(lake, run_step):
    write_outcomes(lake, "today", [("a", 1)])
    with raises(ContractError, "outcomes/day=today", "'today'", "expected a date"):
        run_step(lake)


def test_folder_with_outcomes_alone_is_lake_without_rows(tmp_path, run_step):
    write_outcomes(tmp_path / "lake", "2026-03-01", [("a", 1)])
    (tmp_path / "lake" / ".objects.lock").touch()
    with raises(ContractError, "lake", "no rows"):
        run_step(tmp_path / "lake")
