"""Late outcomes joined to the rows: against plain dictionaries."""

import random
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import raw_rows
from components.contracts.records import CLICK, CONVERSION
from components.extraction.times import TimeSpan, parse_time
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from tests.support.lakes import OUTCOMES, rows_in

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


@pytest.fixture
def table(raw_table):
    return raw_table(1200, start=START.timestamp(), seconds=4 * 86_400)


@pytest.fixture
def lake(tmp_path, table, write_lake):
    return write_lake(tmp_path / "la ke", table, num_files=2)


def write_outcomes(lake, day, outcomes, *, name="part-1", event=CLICK, time=START - HOUR, window=1800.0):
    """Outcomes at `time` of (request id, row) pairs as one file of the partition `day`; by default before any row."""
    folder = lake / raw_rows.OUTCOME_PARTITION.format(day=day)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"request_id": request, "row": row, "event": event, "outcome_time": time, "stored_at": START + HOUR}
        | {"window_seconds": window}
        for request, row in outcomes
    ]
    pq.write_table(pa.Table.from_pylist(rows, OUTCOMES), folder / f"{name}.parquet")


def labels_of(*uris) -> dict:
    return {(row["request_id"], row["row"]): row["label"] for row in rows_in(*uris)}


def truth(table, late=()):
    return {
        (row["request_id"], row["row"]): int(row["label"] or (row["request_id"], row["row"]) in late)
        for row in table.to_pylist()
    }


@pytest.mark.parametrize("seed", range(2))
def test_every_late_click_makes_its_rows_label_1_and_changes_nothing_else(lake, table, run_step, seed):
    source = random.Random(seed)
    before = run_step(lake)
    rows = [(row["request_id"], row["row"], row["event_time"]) for row in table.to_pylist()]
    late = source.sample(rows, 150)
    for i, (request, row, time) in enumerate(late):
        # On the day of the prediction, or, where that was forgotten, days later; some twice, in one file or in two.
        day = (time + timedelta(days=source.choice([0, 0, 0, 1, 9, 40]))).date()
        for copy in range(source.choice([1, 1, 2])):
            write_outcomes(lake, day, [(request, row)] * source.choice([1, 3]), name=f"part-{i}-{copy}")
    others = source.sample(rows, 100)
    write_outcomes(lake, "2026-03-02", [(request, row) for request, row, _ in others], name="c", event=CONVERSION)
    write_outcomes(lake, "2026-03-02", [("no such request", 1), (rows[0][0], 10**6), (rows[0][0], -1)], name="unknown")
    dataset = run_step(lake)
    expected = truth(table, {(request, row) for request, row, _ in late})
    assert labels_of(dataset.train_uri, dataset.holdout_uri) == expected
    assert dataset.num_late_clicks == sum(expected.values()) - sum(truth(table).values())
    read = {
        uri: pa.concat_tables([pq.read_table(p, partitioning=None) for p in sorted(local_path(uri).iterdir())])
        for uri in (dataset.train_uri, dataset.holdout_uri)
    }
    rows_now = pa.concat_tables(read.values())
    assert rows_now.drop_columns("label").equals(table.drop_columns("label")), "order, times and features are as before"
    assert (dataset.num_duplicates, dataset.num_malformed) == (before.num_duplicates, before.num_malformed) == (0, 0)


def test_the_datasets_version_tells_new_late_clicks(lake, table, run_step):
    first = run_step(lake)
    assert (first.num_late_clicks, first.outcomes_digest) == (0, None)
    missed = [(r["request_id"], r["row"]) for r in table.to_pylist() if not r["label"]]
    write_outcomes(lake, "2026-03-01", missed[:1])
    second = run_step(lake)
    assert second.digest != first.digest
    assert (second.num_late_clicks, run_step(lake).outcomes_digest) == (1, second.outcomes_digest)
    write_outcomes(lake, "2026-03-01", missed[:1], name="part-2")
    again = run_step(lake)
    assert again.digest == second.digest, "what was known already changes no row"
    assert again.outcomes_digest != second.outcomes_digest


def test_replayed_rows_have_their_late_clicks_too(lake, table, run_step):
    late = {(r["request_id"], r["row"]) for r in table.to_pylist()}
    by_day: dict = {}
    for r in table.to_pylist():
        by_day.setdefault(r["event_time"].date().isoformat(), []).append((r["request_id"], r["row"]))
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
    assert dataset.num_late_clicks == sum(not r["label"] for r in in_window), "of the window's rows alone"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1 and no more", "part-1.parquet is not a readable Parquet file"),
        (None, "lacks the columns .'row', 'event', 'outcome_time', 'stored_at', 'window_seconds'"),
    ],
)
def test_a_damaged_file_of_outcomes_stops_the_step_and_is_named(lake, run_step, content, message):
    folder = lake / "outcomes" / "day=2026-03-01"
    folder.mkdir(parents=True)
    if content is None:
        pq.write_table(pa.table({"request_id": ["a"]}), folder / "part-1.parquet")
    else:
        (folder / "part-1.parquet").write_bytes(content)
    with pytest.raises(ContractError, match=message):
        run_step(lake)


def test_a_partition_that_names_no_day_is_refused(lake, run_step):
    write_outcomes(lake, "today", [("a", 1)])
    with pytest.raises(ContractError, match=r"outcomes/day=today is 'today', expected a date"):
        run_step(lake)


def test_a_folder_with_outcomes_alone_is_a_lake_without_rows(tmp_path, run_step):
    write_outcomes(tmp_path / "lake", "2026-03-01", [("a", 1)])
    (tmp_path / "lake" / ".objects.lock").touch()
    with pytest.raises(ContractError, match="lake .* holds no rows"):
        run_step(tmp_path / "lake")
