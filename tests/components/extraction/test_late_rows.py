"""Tests of rows that arrive after training on newer rows.

The next accepted run trains on the late rows once.
"""

import logging
import shutil
from datetime import date, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.backfill import backfill
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from testing.recommenders import SHOP
from tests.support.archives import day_folders
from tests.support.lakes import URI, fetched, keys_in, keys_of, put

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
DAY = timedelta(days=1)
WARNINGS = "components.extraction.seen_files"


class Rounds:
    """A growing lake, and successive runs that read it.

    Each accepted run is the champion of the next.
    """

    def __init__(self, root, flags, run_main, released):
        self.lake, self._run_main, self._released = root / "a lake", run_main, released
        self.flags = {
            **flags,
            "--lake": self.lake.as_uri(),
            "--replay-days": "0",
            "--late-days": "1",
        }
        self.flags["--holdout-fraction"] = "1e-9"  # the holdout has one row
        self.num = 0

    def add(self, table, name: str) -> None:
        """Add the rows to the lake. Each day gets a file `name` with its rows."""
        for rows, folder in day_folders(self.lake, table):
            pq.write_table(rows, folder / name, row_group_size=20)

    def turn(self, fate: str = "accepted", **flags: str) -> RawDataset:
        self.num += 1
        assert self._run_main(self.flags, run=f"round {self.num}", **flags) == 0
        dataset = RawDataset.read(self.flags["--output"])
        if fate == "accepted":
            self.accept(dataset)
        return dataset

    def accept(self, dataset: RawDataset, **changed) -> None:
        """Accept the model as if it had also been trained on the holdout row.

        The watermark is the newest row that was read.
        """
        told = {"files": dataset.files, "days": dataset.days, **changed}
        self._released(dataset.last_event_time, model_id=f"m{self.num}", version=self.num, **told)


@pytest.fixture
def rounds(tmp_path, flags, run_main, released):
    return Rounds(tmp_path, flags, run_main, released)


@pytest.fixture
def rows(raw_table):
    """Rows of five days, with a row every 6 minutes."""
    return raw_table(1200, start=START.timestamp(), seconds=5 * 86_400)


@pytest.fixture
def between(rows):
    """Selects every `step`-th row from hour `first` to hour `last` after the start."""

    def pick(first: float, last: float, *, step: int = 1, offset: int = 0):
        hours = np.arange(len(rows)) * 0.1
        mask = (
            (hours >= first - 1e-6)
            & (hours < last - 1e-6)
            & (np.arange(len(rows)) % step == offset)
        )
        return rows.filter(pa.array(mask))

    return pick


def test_days_before_those_asked_for_are_left_and_off_is_off(rounds, between):
    rounds.add(between(0, 80, step=2, offset=1), "a.parquet")
    rounds.turn(late_days="3")
    rounds.add(between(0, 80, step=2), "b.parquet")
    rounds.add(between(80, 96), "c.parquet")
    # The newest row is at hour 79.8 of the lake, on the fourth day.
    for late_days, hours in (("0", 0), ("1", 32), ("2", 56), ("3", 80)):
        assert rounds.turn("refused", late_days=late_days).num_late_rows == hours * 5


def test_files_of_each_day_asked_about_are_noted_by_name_and_size(rounds, between):
    rounds.add(between(0, 24), "a.parquet")
    rounds.add(between(48, 60), "a.parquet")
    rounds.add(between(58, 60, step=2, offset=1), "b.parquet")
    (rounds.lake / "day=2026-03-03" / "_unfinished.parquet").write_bytes(b"x")
    dataset = rounds.turn(late_days="2", window_end="2026-03-03T02:00:00Z")
    sizes = {name: (rounds.lake / name).stat().st_size for name in ("day=2026-03-01/a.parquet",)}
    assert dataset.files["2026-03-01"] == {"a.parquet": sizes["day=2026-03-01/a.parquet"]}
    assert "2026-03-02" not in dataset.files
    assert min(dataset.files) == "2025-03-02", "366 days before the last row learned"
    assert set(dataset.files["2026-03-03"]) == {"a.parquet", "b.parquet"}


def test_unseen_files_older_than_late_days_are_named_and_read_on_request(rounds, between, caplog):
    rounds.add(between(0, 96, step=2, offset=1), "a.parquet")
    rounds.turn()
    # These rows are of two days. Both days are older than `late_days`.
    rounds.add(between(0, 40, step=2), "b.parquet")
    rounds.add(between(72, 80, step=2), "b.parquet")
    for end in (100, 104, 108):
        rounds.add(between(end - 4, end), f"c-{end}.parquet")
        with caplog.at_level(logging.WARNING, WARNINGS):
            dataset = rounds.turn()
        assert (dataset.num_left_files, dataset.num_left_rows) == (2, 200)
        assert dataset.num_late_rows == (40 if end == 100 else 0)
    sentence = (
        "2 files with about 200 rows of the days 2026-03-01 to 2026-03-02 are not read, because "
        "the lineage has not seen them and they are older than late_days=1. To read them, use a "
        "window_start of 2026-03-01 or --set extraction.late_days="
    )
    assert caplog.text.count(sentence) == 3
    assert "First file: day=2026-03-01/b.parquet" in caplog.text
    rounds.add(between(108, 112), "d.parquet")
    dataset = rounds.turn(late_days="4")
    assert (dataset.num_late_rows, dataset.num_left_files, dataset.num_left_rows) == (200, 0, 0)
    rounds.add(between(112, 116), "e.parquet")
    assert rounds.turn(late_days="4").num_late_rows == 0


@pytest.mark.parametrize(
    ("asked", "left"),
    [({"late_days": "0"}, (3, 360)), ({"window_start": "2026-03-04T12:00:00Z"}, (4, 420))],
)
def test_unseen_rows_before_what_round_reads_are_counted_to_row(rounds, between, asked, left):
    rounds.add(between(0, 72, step=2, offset=1), "a.parquet")
    rounds.turn()
    rounds.add(between(0, 100, step=2), "b.parquet")
    dataset = rounds.turn(**asked)
    assert (dataset.num_left_files, dataset.num_left_rows, dataset.num_late_rows) == (*left, 0)


def test_explicit_window_has_no_late_rows_and_settles_days_before_it(rounds, between):
    rounds.add(between(0, 30, step=2, offset=1), "a.parquet")
    rounds.turn()
    rounds.add(between(0, 30, step=2), "b.parquet")
    rounds.add(between(30, 48), "c.parquet")
    dataset = rounds.turn(window_start="2026-03-02T06:00:00Z")
    assert dataset.num_late_rows == 0
    assert dataset.num_train_rows + dataset.num_holdout_rows == 180
    rounds.add(between(48, 60), "d.parquet")
    assert rounds.turn().num_late_rows == 0


def test_file_that_was_changed_is_told_and_not_learnt(rounds, between, caplog):
    rounds.add(between(24, 30, step=2, offset=1), "a.parquet")
    rounds.turn()
    rounds.add(between(24, 30), "a.parquet")
    rounds.add(between(30, 48), "c.parquet")
    with caplog.at_level(logging.WARNING, WARNINGS):
        dataset = rounds.turn()
    assert dataset.num_late_rows == 0
    assert "day=2026-03-02/a.parquet has" in caplog.text
    assert "Changed rows are not read" in caplog.text


def test_click_in_late_copy_of_learned_row_is_counted_and_named(rounds, between, caplog):
    shown = between(24, 30)
    rounds.add(
        shown.set_column(0, raw_rows.LABEL, pa.array([0] * len(shown), pa.int32())), "a.parquet"
    )
    rounds.turn()
    clicked = shown.set_column(
        0, raw_rows.LABEL, pa.array([1] * 4 + [0] * (len(shown) - 4), pa.int32())
    )
    rounds.add(clicked.slice(0, 10), "b.parquet")
    rounds.add(between(30, 48), "c.parquet")
    with caplog.at_level(logging.WARNING, "components.extraction.copying"):
        dataset = rounds.turn()
    assert (dataset.num_late_rows, dataset.num_duplicates, dataset.num_updated) == (0, 6, 4)
    assert (
        "4 late rows of day 2026-03-02 were left out, because the lineage was trained on copies "
        "with another label or other features" in caplog.text
    )


def test_row_whose_seen_copy_was_malformed_is_learned_from_valid_copy(rounds, between):
    good = between(24, 30)
    labels = pa.array([7, *good[raw_rows.LABEL].to_pylist()[1:]], pa.int32())
    rounds.add(good.set_column(0, raw_rows.LABEL, labels), "a.parquet")
    assert rounds.turn(max_malformed_fraction="0.5").num_malformed == 1
    rounds.add(good.slice(0, 5), "b.parquet")
    rounds.add(between(30, 48), "c.parquet")
    dataset = rounds.turn()
    assert keys_in(dataset.train_uri)[: dataset.num_late_rows] == keys_of(good.slice(0, 1))


def test_malformed_late_rows_are_set_aside_once_and_evaluated(rounds, between):
    rounds.add(between(20, 30, step=2, offset=1), "a.parquet")
    rounds.turn()
    late = between(20, 30, step=2)
    at = late.column_names.index(raw_rows.EVENT_TIME)
    # Spoil two rows of each day: one row has no time, and the other has no label.
    times = late[raw_rows.EVENT_TIME].to_pylist()
    labels = late[raw_rows.LABEL].to_pylist()
    days = [time.date() for time in times]
    for day in (START.date(), START.date() + DAY):
        labels[days.index(day) + 1] = None
    late = late.set_column(0, raw_rows.LABEL, pa.array(labels, pa.int32()))
    rounds.add(late, "b.parquet")
    for day in ("2026-03-01", "2026-03-02"):
        path = rounds.lake / f"day={day}" / "b.parquet"
        table = pq.read_table(path, partitioning=None)
        kept = [None, *table[raw_rows.EVENT_TIME].to_pylist()[1:]]
        pq.write_table(
            table.set_column(
                at, table.schema.field(at), pa.array(kept, table.schema.field(at).type)
            ),
            path,
        )
    rounds.add(between(30, 48), "c.parquet")
    dataset = rounds.turn("refused", max_malformed_fraction="0.5")
    assert (dataset.num_malformed, dataset.num_late_rows) == (4, 46)
    assert rounds._run_main(rounds.flags, run="strict", max_malformed_fraction="0.01") == 2


def test_back_filled_rows_are_not_late_but_what_came_beside_them_is(rounds, between, tmp_path):
    rounds.add(between(0, 30, step=4, offset=3), "a.parquet")
    rounds.turn()
    for day, hours in ((1, (0, 24)), (2, (24, 30))):
        pq.write_table(between(*hours, step=2, offset=1), tmp_path / "again.parquet")
        backfill(
            [tmp_path / "again.parquet"],
            SHOP,
            lake=str(rounds.lake),
            day=date(2026, 3, day),
        )
    late = between(10, 30, step=2)
    rounds.add(late, "b.parquet")
    rounds.add(between(30, 48), "c.parquet")
    dataset = rounds.turn()
    assert keys_in(dataset.train_uri)[: dataset.num_late_rows] == keys_of(late)
    assert [day["version"] for day in dataset.days] == [1, 1]
    # Rows that a back-filled version replaced still count as seen, even if somebody removes this
    # version.
    shutil.rmtree(rounds.lake / "day=2026-03-02" / "version=1")
    assert set(dataset.files["2026-03-02"]) == {"a.parquet", "b.parquet", "c.parquet"}
    rounds.add(between(48, 60), "d.parquet")
    assert rounds.turn().num_late_rows == 0


def test_of_bucket_only_days_with_unseen_files_are_fetched(rounds, between, cloud_storage):
    rounds.add(between(0, 60), "a.parquet")
    rounds.turn()
    rounds.add(between(60, 72), "b.parquet")
    put(rounds.lake)
    cloud_storage.seen.clear()
    dataset = rounds.turn(lake=URI)
    assert dataset.num_late_rows == 0
    assert {name.partition("/")[0] for name in fetched(cloud_storage.seen)} == {"day=2026-03-03"}
    # Files are compared by name, so that the result does not depend on fetched files or on the
    # champion.
    alone = {"parent": "none", "champion": "none"}
    own = rounds.turn(
        "refused", lake=URI, window_start="2026-03-03T12:00:00Z", late_days="2", **alone
    )
    assert {day: set(files) for day, files in own.files.items() if files} == {
        "2026-03-01": {"a.parquet"},
        "2026-03-02": {"a.parquet"},
        "2026-03-03": {"a.parquet", "b.parquet"},
    }
    assert own.files.items() >= dataset.files.items()
