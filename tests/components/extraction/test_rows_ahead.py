"""Tests of rows with future times: counted, excluded from the window, and used later."""

import json
import logging
from datetime import datetime, timedelta, timezone

import pyarrow.parquet as pq
import pytest

from components.extraction.__main__ import main
from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS
from evergreen.storage.uris import local_path
from tests.support.archives import day_folders
from tests.support.lakes import keys_in, keys_of

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
NOW = START + timedelta(hours=40)
AHEAD = timedelta(seconds=CLOCK_AHEAD_SECONDS)


@pytest.fixture
def rows(raw_table):
    """Makes one row every 6 minutes, starting at `hour`. Each row is its own request."""

    def make(hour: float, num: int, *, seed: int = 0):
        start = (START + timedelta(hours=hour)).timestamp()
        return raw_table(num, seed=seed, start=start, seconds=num * 360)

    return make


@pytest.fixture
def add(tmp_path):
    def write(table, name: str):
        for part, folder in day_folders(tmp_path / "lake", table):
            pq.write_table(part, folder / name, row_group_size=20)

    return write


@pytest.fixture
def turn(tmp_path, flags):
    def run(now: datetime = NOW, *, code: int = 0, **parameters: str) -> RawDataset | None:
        given = {
            **flags,
            "--lake": (tmp_path / "lake").as_uri(),
            "--settings": "extraction.holdout_fraction=0.1",
        }
        given |= {f"--{name.replace('_', '-')}": value for name, value in parameters.items()}
        assert (
            main([f"{flag}={value}" for flag, value in given.items()], clock=now.timestamp) == code
        )
        return RawDataset.read(flags["--output"]) if code == 0 else None

    return run


def test_future_rows_are_deferred_and_no_later_row_is_lost(rows, add, turn, released, caplog):
    add(rows(0, 400), "a.parquet")
    add(rows(24 * 365 * 73, 30, seed=1), "ahead.parquet")
    with caplog.at_level(logging.WARNING, "components.extraction.lake"):
        first = turn()
    assert (
        first.num_ahead,
        first.num_train_rows + first.num_holdout_rows,
        first.num_malformed,
    ) == (30, 400, 0)
    assert first.last_event_time < "2026-03-03"
    assert (
        "30 rows in 1 files are not read yet, because their times are ahead of the clock"
        in caplog.text
    )
    (line,) = map(json.loads, local_path(first.ahead_uri).read_text().splitlines())
    assert (line["num_rows"], line["file"][:6]) == (30, "day=20")
    assert line["reason"].endswith(
        f"ahead of {(NOW + AHEAD + timedelta(microseconds=1)).isoformat()}"
    )
    released(first.watermark, files=first.files)
    later = rows(48, 200, seed=2)
    add(later, "b.parquet")
    second = turn(NOW + timedelta(days=3))
    read = keys_in(second.train_uri) + keys_in(second.holdout_uri)
    assert set(keys_of(later)) <= set(read)


def test_rows_within_tolerance_are_read_and_others_once_their_time_comes(rows, add, turn, released):
    add(rows(0, 400), "a.parquet")
    table = rows(40, 30, seed=1)
    add(table, "b.parquet")
    due = [
        key
        for key, time in zip(keys_of(table), table["event_time"].to_pylist())
        if time <= NOW + AHEAD
    ]
    assert 0 < len(due) < 30
    first = turn()
    read = set(keys_in(first.train_uri) + keys_in(first.holdout_uri))
    assert read & set(keys_of(table)) == set(due)
    assert (first.num_ahead, len(read)) == (30 - len(due), 400 + len(due))
    assert first.last_event_time <= (NOW + AHEAD).isoformat()
    released(first.watermark, files=first.files)
    second = turn(NOW + timedelta(hours=4))
    read |= set(keys_in(second.train_uri) + keys_in(second.holdout_uri))
    assert read >= set(keys_of(table))
    assert (second.num_ahead, second.ahead_uri) == (0, None)


@pytest.mark.parametrize("setting", ["extraction.attribution_hours=5", "extraction.full_days=1"])
def test_end_of_lake_is_its_newest_row_that_is_not_in_future(rows, add, turn, setting):
    add(rows(0, 400), "a.parquet")
    expected = turn(settings=setting)
    add(rows(43, 30, seed=1), "b.parquet")
    add(rows(900, 30, seed=2), "c.parquet")
    found = turn(settings=setting)
    assert (found.window_start, found.window_end) == (expected.window_start, expected.window_end)
    assert found.digest == expected.digest
    assert found.num_ahead == 60


def test_run_reproduced_later_reads_what_it_read_then(rows, add, turn):
    add(rows(0, 400), "a.parquet")
    add(rows(43, 30, seed=1), "b.parquet")
    then = turn()
    much_later = NOW + timedelta(days=900)
    assert turn(much_later).digest != then.digest
    until = (
        datetime.now(timezone.utc) + timedelta(days=1)
    ).isoformat()  # The rows of the files are new.
    assert turn(NOW, lake_until=until).num_ahead == 0, "the requested end is the current time"


@pytest.mark.parametrize("parameters", [{}, {"window_start": "2026-03-02"}, {"parent": "none"}])
def test_model_trained_on_future_rows_is_refused_with_remedy(
    rows, add, turn, released, capsys, parameters
):
    add(rows(0, 400), "a.parquet")
    released("2099-12-31T00:00:00+00:00")
    turn(code=2, **parameters)
    message = capsys.readouterr().err
    assert (
        "model m1 was trained on rows up to 2099-12-31T00:00:00+00:00, "
        "expected rows before 2026-03-02T17:00:00" in message
    )
    assert "run it again with `--from-scratch`" in message
    assert turn(parent="none", champion="none").watermark < "2026-03-03"


def test_lake_with_only_future_rows_is_reported(rows, add, turn, capsys, caplog):
    add(rows(24 * 400, 30), "a.parquet")
    with caplog.at_level(logging.WARNING, "components.extraction.lake"):
        turn(code=2)
    assert "30 rows in 1 files are not read yet" in caplog.text
    assert "has no rows" in capsys.readouterr().err
