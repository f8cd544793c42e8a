"""Tests of back-fills: a version of a day is complete or absent, and no data is lost."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from functools import partial
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cli.backfill as backfill_module
from cli.backfill import backfill, main
from components.extraction.extract import extract
from components.extraction.lake_files import VersionMarker
from evergreen.contracts import raw_rows
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from evergreen.rows.raw_schema import PartWriter, raw_schema
from evergreen.rows.times import TimeSpan
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError
from evergreen.storage.bucket import BucketObjects
from evergreen.storage.folder import FolderObjects
from testing.recommenders import accept_into, criteo_with
from tests.support import lakes
from tests.support.crashes import Kill
from tests.support.errors import raises
from tests.support.lakes import URI, folder_lake, open_storage, put

RAW_SCHEMA = raw_schema(CRITEO)

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
DAY = date(2026, 3, 1)

extract_lake = partial(lakes.extract_lake, recommender=CRITEO_RECOMMENDER)


@pytest.fixture
def table(raw_table):
    """Rows of two days."""
    return raw_table(1000, start=START.timestamp(), seconds=2 * 86_400)


@pytest.fixture
def store(tmp_path):
    """URI of a model registry that has accepted Criteo's recommender."""
    accept_into(tmp_path / "store", CRITEO_RECOMMENDER)
    return str(tmp_path / "store")


@pytest.fixture
def lake(tmp_path, table, write_lake):
    return write_lake(tmp_path / "la ke", table, num_files=2)


def labelled(table, label: int):
    """Return the rows of the first day, all with the label `label`."""
    day = table.filter(
        pa.array([t.date() == DAY for t in table.column(raw_rows.EVENT_TIME).to_pylist()])
    )
    return day.set_column(0, raw_rows.LABEL, pa.array([label] * day.num_rows, pa.int32()))


@pytest.fixture
def corrected(tmp_path, table):
    """A file with the first day's rows in random order. All rows are clicked."""
    day = labelled(table, 1)
    path = tmp_path / "corrected rows.parquet"
    pq.write_table(day.take(pa.array(list(range(day.num_rows))[::-1])), path)
    return path


def run_step(lake: Path, tmp_path: Path, **settings):
    folder = tmp_path / "work" / "extraction"
    dataset = extract(
        folder_lake(lake), TimeSpan(), folder=folder, recommender=criteo_with(extraction=settings)
    )
    rows = [
        row for part in ("train", "holdout") for row in pq.read_table(folder / part).to_pylist()
    ]
    return dataset, rows


def paths_of_day(lake: Path, day: date) -> list[Path]:
    files = folder_lake(lake).files
    return files.paths(files.of_day(day).files)


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name != ".objects.lock"]


def test_training_again_gets_back_filled_rows(lake, tmp_path, table, corrected):
    before, _ = run_step(lake, tmp_path)
    done = backfill([corrected], CRITEO_RECOMMENDER, lake=lake.as_uri(), day=DAY)
    after, rows = run_step(lake, tmp_path)
    first = labelled(table, 1)
    assert done == (1, first.num_rows, 0, 0, 0, 0, ["part-0.parquet", "part-1.parquet"])
    assert rows == [*first.to_pylist(), *table.slice(first.num_rows).to_pylist()]
    assert [(d["day"], d["version"], d["num_rows"]) for d in before.days] == [
        ("2026-03-01", 0, 500),
        ("2026-03-02", 0, 500),
    ]
    assert [(d["day"], d["version"], d["num_rows"]) for d in after.days] == [
        ("2026-03-01", 1, 500),
        ("2026-03-02", 0, 500),
    ]
    assert before.days[0]["digest"] != after.days[0]["digest"]
    assert before.days[1] == after.days[1]
    assert not unfinished(lake)


def test_marker_describes_upload(lake, corrected):
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY, reason="labels were wrong")
    folder = lake / "day=2026-03-01" / "version=1"
    marker = VersionMarker.parse((folder / raw_rows.VERSION_COMPLETE).read_bytes(), "")
    assert (marker.day, marker.version, marker.num_rows, marker.reason) == (
        "2026-03-01",
        1,
        500,
        "labels were wrong",
    )
    assert [(m.name, m.size, m.sha256) for m in marker.files] == [
        (path.name, path.stat().st_size, sha256_file(path))
        for path in sorted(folder.glob("*.parquet"))
    ]


def test_replayed_days_name_their_version(lake, tmp_path, corrected):
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    second = int(datetime(2026, 3, 2, tzinfo=timezone.utc).timestamp() * 1e6)
    recommender = criteo_with(extraction={"replay_share": 0.2})
    dataset = extract(
        folder_lake(lake),
        TimeSpan(second, None),
        folder=tmp_path / "x" / "e",
        recommender=recommender,
    )
    assert [(each["day"], each["version"]) for each in dataset.replay_days] == [("2026-03-01", 1)]
    assert dataset.num_replay_rows > 0
    assert [
        (each["day"], each["version"], each.get("replay", False)) for each in dataset.seen_days()
    ] == [("2026-03-02", 0, False), ("2026-03-01", 1, True)]


@pytest.mark.parametrize("label", [0, 1])
def test_back_filled_row_replaces_row_that_arrives_again_later(
    lake, tmp_path, table, caplog, label
):
    pq.write_table(labelled(table, label), tmp_path / "corrected.parquet")
    backfill([tmp_path / "corrected.parquet"], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    pq.write_table(
        labelled(table, 1 - label).slice(0, 50), lake / "day=2026-03-01" / "part-again.parquet"
    )
    dataset, rows = run_step(lake, tmp_path)
    assert (dataset.num_duplicates, dataset.num_updated) == (0, 50)
    assert [row["label"] for row in rows[:500]] == [label] * 500
    assert (
        "1 files were added after the back-fill of version 1 and are read too: "
        "['part-again.parquet']" in caplog.text
    )


def test_file_that_arrives_during_back_fill_is_not_replaced(
    lake, tmp_path, table, corrected, monkeypatch
):
    rows_of = backfill_module._day_rows

    def slow(*arguments, **more):
        pq.write_table(
            labelled(table, 0).slice(0, 10), lake / "day=2026-03-01" / "part-new.parquet"
        )
        yield from rows_of(*arguments, **more)

    monkeypatch.setattr(backfill_module, "_day_rows", slow)
    done = backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    assert done.replaces == ["part-0.parquet", "part-1.parquet"]
    assert "part-new.parquet" in [path.name for path in paths_of_day(lake, DAY)]


def test_later_version_replaces_earlier_version_and_files_in_between(
    lake, tmp_path, table, corrected
):
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    pq.write_table(
        labelled(table, 0).slice(0, 50), lake / "day=2026-03-01" / "part-between.parquet"
    )
    pq.write_table(labelled(table, 0).slice(0, 60), tmp_path / "second.parquet")
    done = backfill([tmp_path / "second.parquet"], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    assert (done.version, done.replaces) == (
        2,
        ["part-0.parquet", "part-1.parquet", "part-between.parquet"],
    )
    dataset, rows = run_step(lake, tmp_path)
    assert [(d["version"], d["num_rows"]) for d in dataset.days] == [(2, 60), (0, 500)]
    assert rows[:60] == labelled(table, 0).slice(0, 60).to_pylist()


@pytest.mark.parametrize(
    "moment", [(PartWriter, "_write_group"), (FolderObjects, "upload")], ids=["rows", "upload"]
)
def test_interrupted_back_fill_is_invisible(lake, tmp_path, corrected, moment, caplog):
    _, rows = run_step(lake, tmp_path)

    with Kill(0).watch(*moment) as kill:
        backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    assert kill.is_dead
    assert run_step(lake, tmp_path)[1] == rows
    was_claimed = moment[0] is FolderObjects
    assert (
        backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY).version
        == 1 + was_claimed
    )
    run_step(lake, tmp_path)
    assert ("ignored versions [1] of 2026-03-01" in caplog.text) == was_claimed


@pytest.mark.timeout(120)
def test_two_concurrent_back_fills_are_both_written(lake, tmp_path, table, monkeypatch):
    paths = []
    for label in (0, 1):
        paths.append(tmp_path / f"all {label}.parquet")
        pq.write_table(labelled(table, label), paths[-1])
    together = Barrier(2)
    rows_of = backfill_module._day_rows

    def meeting(*arguments, **more):
        yield from rows_of(*arguments, **more)
        together.wait(60)

    monkeypatch.setattr(backfill_module, "_day_rows", meeting)
    with ThreadPoolExecutor(2) as pool:
        versions = [
            done.version
            for done in pool.map(
                lambda path: backfill([path], CRITEO_RECOMMENDER, lake=str(lake), day=DAY), paths
            )
        ]
    assert sorted(versions) == [1, 2]
    dataset, rows = run_step(lake, tmp_path)
    assert dataset.days[0]["version"] == 2
    assert [row["label"] for row in rows[:500]] == [versions.index(2)] * 500
    assert not unfinished(lake)


def test_criteo_rows_are_spread_over_day(lake, tmp_path, criteo_rows, write_text, truth, clicks):
    files = [write_text(tmp_path / f"{i}.tsv.gz", criteo_rows(30, seed=i)) for i in range(2)]
    backfill(files, CRITEO_RECOMMENDER, lake=str(lake), day=date(2026, 4, 2))
    found = pa.concat_tables(
        pq.read_table(path, partitioning=None) for path in paths_of_day(lake, date(2026, 4, 2))
    )
    assert clicks(found) == truth(criteo_rows(30, seed=0) + criteo_rows(30, seed=1))
    times = found.column(raw_rows.EVENT_TIME).to_pylist()
    assert {(b - a).total_seconds() for a, b in zip(times, times[1:])} == {86_400 / 60}
    assert {t.date() for t in times} == {date(2026, 4, 2)}


def test_rows_of_another_day_are_malformed(lake, tmp_path, table):
    pq.write_table(table, tmp_path / "both days.parquet")
    with raises(ContractError, "500 of 1000 rows", "malformed"):
        backfill([tmp_path / "both days.parquet"], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    tolerant = criteo_with(extraction={"max_malformed_fraction": 0.5})
    done = backfill([tmp_path / "both days.parquet"], tolerant, lake=str(lake), day=DAY)
    assert (done.num_rows, done.num_malformed) == (500, 500)
    aside = lake / "day=2026-03-01" / "version=1" / backfill_module.MALFORMED_FILE
    assert len(aside.read_text().splitlines()) == 500


def test_changed_file_of_version_is_reported(lake, corrected):
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    path = lake / "day=2026-03-01" / "version=1" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with raises(ContractError, "version=1/part-00000.parquet", "changed", "bytes"):
        paths_of_day(lake, DAY)


@pytest.mark.parametrize(
    "text", ["[]", '{"format_version": 2}', '{"format_version": 1, "files": [1]}']
)
def test_corrupt_marker_is_reported(lake, corrected, text):
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    (lake / "day=2026-03-01" / "version=1" / "_SUCCESS").write_text(text)
    with raises(ContractError, "_SUCCESS"):
        paths_of_day(lake, DAY)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["empty.parquet"], "have no row of 2026-03-01"),
        (["raw.parquet", "day_0"], "expected files of one kind"),
        (["none"], "none does not exist"),
    ],
    ids=["no rows", "mixed", "absent"],
)
def test_refused_command_prints_one_line_and_leaves_no_file(
    lake, store, tmp_path, table, write_text, criteo_rows, capsys, names, message
):
    pq.write_table(RAW_SCHEMA.empty_table(), tmp_path / "empty.parquet")
    pq.write_table(labelled(table, 1), tmp_path / "raw.parquet")
    write_text(tmp_path / "day_0", criteo_rows(10))
    files = [str(tmp_path / name) for name in names]
    assert main(["--store", store, "--lake", str(lake), "--day", "2026-03-01", *files]) == 2
    assert message in capsys.readouterr().err
    assert not list(lake.glob("day=*/version=*"))
    assert not unfinished(lake)


def test_command_prints_its_result(lake, store, corrected, capsys):
    flags = ["--store", store, "--lake", lake.as_uri(), "--day", "2026-03-01"]
    assert main([*flags, "--reason", "a bug", str(corrected)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "day": "2026-03-01",
        "version": 1,
        "num_rows": 500,
        "num_malformed": 0,
        "num_duplicates": 0,
        "num_updated": 0,
        "num_conflicting": 0,
        "replaces": ["part-0.parquet", "part-1.parquet"],
    }
    assert (
        main(
            [
                "--store",
                store,
                "--lake",
                str(lake / "nowhere"),
                "--day",
                "2026-03-01",
                str(corrected),
            ]
        )
        == 2
    )
    assert main(["--store", store, "--lake", str(lake), "--day", "1.3.2026", str(corrected)]) == 2


def test_rows_that_arrive_while_lake_is_read_belong_to_another_run(
    lake, tmp_path, table, corrected
):
    before, _ = run_step(lake, tmp_path)
    opened = folder_lake(lake)
    pq.write_table(table.slice(990), lake / "day=2026-03-02" / "part-later.parquet")
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    during = extract(
        opened, TimeSpan(), folder=tmp_path / "x" / "extraction", recommender=criteo_with()
    )
    assert (during.digest, during.days) == (before.digest, before.days)
    after, _ = run_step(lake, tmp_path)
    assert [each["version"] for each in after.days] == [1, 0]
    assert after.days[1]["digest"] != before.days[1]["digest"]


def test_lake_in_bucket_is_back_filled_as_folder_is(lake, tmp_path, corrected, cloud_storage):
    put(lake)
    done = backfill([corrected], CRITEO_RECOMMENDER, lake=URI, day=DAY)
    backfill([corrected], CRITEO_RECOMMENDER, lake=str(lake), day=DAY)
    dataset = extract_lake(URI, tmp_path / "bucket work", TimeSpan())
    in_folder, rows = run_step(lake, tmp_path)
    folder = tmp_path / "bucket work" / "run" / "extraction"
    found = [
        row for part in ("train", "holdout") for row in pq.read_table(folder / part).to_pylist()
    ]
    assert done.version == 1
    assert found == rows
    assert dataset.days == in_folder.days


def test_back_fill_removed_while_it_is_written_gets_no_marker(
    lake, store, tmp_path, corrected, cloud_storage, monkeypatch
):
    put(lake)
    upload = BucketObjects.upload

    def removed(self, name, path):
        upload(self, name, path)
        if name.endswith(".parquet"):
            self.delete(name)

    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, "upload", removed)
        assert main(["--store", store, "--lake", URI, "--day", "2026-03-01", str(corrected)]) == 3
    assert not [
        info for info in open_storage(URI).list() if info.name.endswith(raw_rows.VERSION_COMPLETE)
    ]
    assert [each["version"] for each in extract_lake(URI, tmp_path / "work", TimeSpan()).days] == [
        0,
        0,
    ]


def test_digest_of_day_covers_files_that_window_reads(lake, tmp_path, table):
    noon = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1e6)

    def digest(start: int | None) -> str:
        days = folder_lake(lake).plan(TimeSpan(start, None)).days
        return {planned.day: planned.digest() for planned in days}[DAY]

    before = digest(noon)
    morning = labelled(table, 0).slice(0, 10)
    pq.write_table(morning, lake / "day=2026-03-01" / "part-morning.parquet")
    assert digest(noon) == before
    assert digest(None) != digest(noon)
    pq.write_table(
        labelled(table, 0).slice(490, 10), lake / "day=2026-03-01" / "part-evening.parquet"
    )
    assert digest(noon) != before
