"""Tests that compare rehearsal rows with plain Python: which rows are drawn, and how many."""

from collections import Counter
from datetime import datetime, timezone
from math import inf, nan

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.extraction import replay
from components.extraction.extract import data_digest
from components.extraction.reader import RowReader
from evergreen.config.extraction import ExtractionSettings
from evergreen.contracts import raw_rows
from evergreen.rows.times import TimeSpan, parse_time
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from tests.support.errors import raises
from tests.support.lakes import rows_in

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
WINDOW = TimeSpan(parse_time("start", "2026-03-09T12:00:00Z"), None)
"""Window from noon of the tenth day. The lake has 8,000 rows, of which 400 are in the window's
first half day and 400 in the next half day."""


@pytest.fixture
def ten_days(raw_table):
    return raw_table(8000, start=START.timestamp(), seconds=10 * 86_400)


@pytest.fixture
def lake(tmp_path, ten_days, write_lake):
    return write_lake(tmp_path / "la ke", ten_days, num_files=2)


@pytest.fixture
def run_step(run_step):
    return lambda lake, window=WINDOW, **how: run_step(lake, window, **how)


def identities(*uris) -> list[tuple]:
    return [
        (row[raw_rows.EVENT_TIME], row[raw_rows.REQUEST_ID], row[raw_rows.ROW])
        for row in rows_in(*uris)
    ]


def days_of(rows) -> Counter:
    return Counter(time.date().isoformat() for time, *_ in rows)


@pytest.mark.parametrize(("share", "num_rows"), [(0.2, 270), (0.5, 1080), (0.75, 3240)])
def test_drawn_rows_have_requested_share_of_training_rows(lake, run_step, share, num_rows):
    dataset = run_step(lake, replay_share=share)
    assert dataset.num_train_rows == 1080
    assert dataset.replay_share == share
    assert dataset.num_replay_rows == len(identities(dataset.replay_uri)) == num_rows
    assert num_rows / (num_rows + dataset.num_train_rows) == pytest.approx(share)
    assert (
        dataset.num_replay_holdout_rows
        == len(identities(dataset.replay_holdout_uri))
        == dataset.num_holdout_rows
    )


def test_old_rows_are_older_than_window_of_newest_days_and_in_time_order(lake, run_step):
    dataset = run_step(lake, replay_share=0.5, replay_days=3)
    first = datetime.fromisoformat(dataset.first_event_time)
    for uri in (dataset.replay_uri, dataset.replay_holdout_uri):
        rows = identities(uri)
        assert rows == sorted(rows)
        assert max(rows)[0] < first
        # The window begins in the middle of a day. The hours of this day before the window are
        # sampled too.
        assert set(days_of(rows)) == {"2026-03-07", "2026-03-08", "2026-03-09"}


def test_rows_are_drawn_evenly_over_days_by_their_traffic(
    tmp_path, raw_table, write_lake, run_step
):
    """The busy day of 2,400 rows gives three times as many rows as days of 800.

    Each quarter of a day contributes a quarter of the day's rows.
    """
    day = START.timestamp()
    rows = [
        raw_table(2400 if i == 1 else 800, seed=i, start=day + i * 86_400, seconds=86_400)
        for i in range(4)
    ]
    lake = write_lake(tmp_path / "lake", pa.concat_tables(rows))
    dataset = run_step(lake, TimeSpan(parse_time("start", "2026-03-04"), None), replay_share=0.5)
    drawn = identities(dataset.replay_uri)
    assert len(drawn) == 720
    assert days_of(drawn) == {"2026-03-01": 144, "2026-03-02": 432, "2026-03-03": 144}
    quarters = np.bincount([time.hour // 6 for time, *_ in drawn], minlength=4)
    # The limit is four standard deviations of a binomial distribution.
    assert np.abs(quarters - 180).max() < 4 * np.sqrt(720 * 0.25 * 0.75)


def test_manifest_records_rows_of_each_day(lake, run_step):
    dataset = run_step(lake, replay_share=0.3)
    drawn, held_out = (
        days_of(identities(dataset.replay_uri)),
        days_of(identities(dataset.replay_holdout_uri)),
    )
    assert [entry["day"] for entry in dataset.replay_days] == [
        f"2026-03-0{n}" for n in range(3, 10)
    ]
    for entry in dataset.replay_days:
        assert (entry["num_rows"], entry["num_holdout_rows"]) == (
            drawn[entry["day"]],
            held_out[entry["day"]],
        )


def test_repeated_task_draws_same_rows_and_another_window_others(lake, run_step):
    first, again = (run_step(lake, replay_share=0.3, run=run) for run in ("a", "b"))
    assert identities(first.replay_uri) == identities(again.replay_uri)
    assert first.digest == again.digest == data_digest(local_path(first.train_uri).parent)
    later = run_step(
        lake, TimeSpan(WINDOW.start + 1_000_000 * 3600, None), replay_share=0.3, run="c"
    )
    common = set(identities(first.replay_uri)) & set(identities(later.replay_uri))
    assert len(common) < 0.5 * later.num_replay_rows


def test_holdout_rows_are_never_replayed_in_any_round(lake, run_step):
    held_out, replayed = set(), set()
    for hour in range(0, 12, 2):
        window = TimeSpan(WINDOW.start + hour * 3_600_000_000, None)
        dataset = run_step(lake, window, replay_share=0.7, run=f"run-{hour}")
        held_out |= {request for _, request, _ in identities(dataset.replay_holdout_uri)}
        replayed |= {request for _, request, _ in identities(dataset.replay_uri)}
    assert len(held_out) > 50
    assert not held_out & replayed


def damage_older_days(lake):
    for path in lake.glob("day=2026-03-0[1-8]/*.parquet"):
        path.write_bytes(b"corrupt")


def test_without_days_no_older_file_is_opened(lake, run_step, caplog):
    damage_older_days(lake)
    dataset = run_step(lake, replay_days=0)
    assert (dataset.replay_uri, dataset.replay_holdout_uri) == (None, None)
    assert "no rows of earlier days are held out for evaluation" not in caplog.text


def test_corrupt_older_files_stop_round_only_if_it_trains_on_them(lake, run_step, caplog):
    damage_older_days(lake)
    with raises(ContractError, "day=2026-03-08/part-0.parquet", "readable"):
        run_step(lake, replay_share=0.2)
    dataset = run_step(lake)
    assert (dataset.replay_uri, dataset.replay_holdout_uri, dataset.replay_days) == (None, None, [])
    assert "no rows of earlier days are held out for evaluation: " in caplog.text
    folder = local_path(dataset.train_uri).parent
    assert not [path for path in folder.iterdir() if path.name.startswith("replay")]


def test_all_there_is_is_drawn_where_there_is_less_than_wanted(
    tmp_path, raw_table, write_lake, run_step
):
    table = raw_table(1000, start=START.timestamp(), seconds=2 * 86_400)
    window = TimeSpan(parse_time("start", "2026-03-01T06:00:00Z"), None)
    dataset = run_step(
        write_lake(tmp_path / "lake", table), window, replay_share=0.9, holdout_fraction=0.5
    )
    drawn = identities(dataset.replay_uri) + identities(dataset.replay_holdout_uri)
    assert set(drawn) == set(
        zip(
            *(
                table.slice(0, 125).column(n).to_pylist()
                for n in ("event_time", "request_id", "row")
            )
        )
    )


def test_old_rows_delivered_twice_are_drawn_once_and_malformed_ones_never(
    tmp_path, ten_days, write_lake, run_step
):
    lake = write_lake(
        tmp_path / "lake", pa.concat_tables([ten_days, ten_days]).sort_by("event_time")
    )
    path = lake / "day=2026-03-08" / "part-0.parquet"
    table = pq.read_table(path, partitioning=None)
    labels = pa.array([7] * 100 + table.column(raw_rows.LABEL).to_pylist()[100:], pa.int32())
    pq.write_table(
        table.set_column(table.column_names.index(raw_rows.LABEL), raw_rows.LABEL, labels), path
    )
    dataset = run_step(lake, replay_share=0.8, holdout_fraction=0.5)
    rows = identities(dataset.replay_uri) + identities(dataset.replay_holdout_uri)
    assert len(rows) == len(set(rows))
    malformed = set(
        zip(
            *(
                table.slice(0, 100).column(n).to_pylist()
                for n in ("event_time", "request_id", "row")
            )
        )
    )
    assert not malformed & set(rows)
    assert dataset.num_malformed == 0, "the round that trained on this day has reported them"


def test_long_days_are_read_in_parts_and_only_as_needed(
    tmp_path, ten_days, write_lake, run_step, monkeypatch
):
    lake = write_lake(tmp_path / "lake", ten_days, row_group_size=100)
    monkeypatch.setattr(replay, "BATCH_ROWS", 100)
    monkeypatch.setattr(replay, "_MIN_CHUNKS", 14)
    monkeypatch.setattr(replay, "_ROWS_OF_CHUNK", 1)
    monkeypatch.setattr(replay, "_INTERVAL_ROWS", 20)
    read = []

    def counted(self, chunk, malformed):
        rows = read_chunk(self, chunk, malformed)
        if malformed.path.name.startswith("replay"):
            read.append(rows.table.num_rows)
        return rows

    read_chunk = RowReader.read
    monkeypatch.setattr(RowReader, "read", counted)
    dataset = run_step(lake, holdout_fraction=0.05, replay_share=0.05)
    assert (dataset.num_replay_holdout_rows, dataset.num_replay_rows) == (60, 60)
    assert len(dataset.replay_days) == 7
    assert len(read) == 14
    assert sum(read) == pytest.approx(2 * 8 * 60, rel=0.02), (
        "few of the 5,200 rows of these days may be read"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"holdout_fraction": each}, f"holdout_fraction is {each}, expected")
            for each in (0.0, 1.0, -0.1, nan)
        ),
        *(
            ({name: each}, f"{name} is {each}, expected 0 or more")
            for name in ("full_days", "attribution_hours")
            for each in (-1.0, nan, inf)
        ),
        ({"replay_share": 1.0}, "replay_share is 1.0, expected at least 0 and less than 1"),
        ({"replay_share": nan}, "replay_share is nan, expected"),
        ({"replay_days": -1}, "replay_days is -1, expected at least 0"),
        (
            {"replay_share": 0.1, "replay_days": 0},
            "replay_share is 0.1 with replay_days 0, expected at least one day",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ContractError, match=message):
        ExtractionSettings(**settings)
