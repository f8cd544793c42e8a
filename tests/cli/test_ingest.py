"""Tests of ingestion: a user's files become a lake and a replay file."""

import json
from datetime import date, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.ingest import main
from components.extraction.spool import Spool
from evergreen.config.features import Features
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from evergreen.rows.raw_schema import lake_schema, raw_batch, raw_schema
from evergreen.storage.bucket import BucketObjects
from testing.recommenders import accept_into
from tests.support.crashes import Kill
from tests.support.lakes import URI, open_storage

RAW_SCHEMA = raw_schema(CRITEO)


@pytest.fixture
def run_ingest(tmp_path, capsys):
    """Runs the tool and returns its exit code, summary (or None) and stderr."""

    def run(data: Path, **more: object) -> tuple[int, dict | None, str]:
        accept_into(tmp_path / "store", CRITEO_RECOMMENDER)
        flags = {
            "store": tmp_path / "store",
            "data": data,
            "lake": tmp_path / "my lake",
            "last_day": "2026-03-10",
            "days": 4,
            "lake_fraction": 0.8,
            "replay": tmp_path / "my replay" / "replay.parquet",
            **more,
        }
        code = main([f"--{k.replace('_', '-')}={v}" for k, v in flags.items()])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else None, captured.err

    return run


def lake_rows(lake: Path) -> list[dict]:
    """Return all rows that readers see, and assert that each row is in the folder of its day."""
    rows = []
    for partition in sorted(lake.glob("day=*")):
        for path in sorted(partition.glob("*.parquet")):
            table = pq.read_table(path, partitioning=None)
            assert table.schema.equals(RAW_SCHEMA)
            assert {f"day={t.date()}" for t in table.column(raw_rows.EVENT_TIME).to_pylist()} <= {
                partition.name
            }
            rows += table.to_pylist()
    return rows


def replay_rows(tmp_path: Path) -> list[dict]:
    table = pq.read_table(tmp_path / "my replay" / "replay.parquet", partitioning=None)
    assert table.schema.equals(RAW_SCHEMA)
    return table.to_pylist()


def clicks_of(rows: list[dict]) -> list[tuple]:
    return [tuple(r[name] for name in (raw_rows.LABEL, *criteo.FEATURES)) for r in rows]


def test_rows_in_file_order_are_spread_evenly_over_full_days(
    tmp_path, criteo_rows, write_text, truth, run_ingest
):
    for day in (9, 10):
        write_text(tmp_path / "criteo data" / f"day_{day}.gz", criteo_rows(500, seed=day))
    code, summary, _ = run_ingest(tmp_path / "criteo data")
    expected = truth(criteo_rows(500, seed=9)) + truth(criteo_rows(500, seed=10))
    assert code == 0
    assert summary == {
        "rows": 1000,
        "lake_rows": 800,
        "replay_rows": 200,
        "clicks": sum(row[0] for row in expected),
        "malformed": 0,
        "malformed_file": None,
        "ahead": 0,
        "duplicates": 0,
        "replaced": 0,
        "already_in_lake": 0,
        "repeated": 0,
        "lines": {
            "rows": 1000,
            "rejected": 0,
            "continued": 0,
            "header": 0,
            "blank": 0,
            "comments": 0,
        },
        "skipped_files": [],
    }
    rows = lake_rows(tmp_path / "my lake") + replay_rows(tmp_path)
    assert clicks_of(rows) == expected
    times = [r[raw_rows.EVENT_TIME] for r in rows]
    assert times[0].isoformat() == "2026-03-07T00:00:00+00:00"
    assert {b - a for a, b in zip(times, times[1:])} == {timedelta(days=4) / 1000}
    assert times[-1].date() == date(2026, 3, 10)
    assert {r[raw_rows.ROW] for r in rows} == {0}
    # Without a request id in the file, each row becomes a request.
    assert len({r[raw_rows.REQUEST_ID] for r in rows}) == 1000
    assert {(r[raw_rows.MODEL_VERSION], r[raw_rows.SCORE]) for r in rows} == {(None, None)}


@given(total=st.integers(1, 300), length=st.integers(1, 2**60))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_times_are_exact_at_any_scale(tmp_path_factory, total, length):
    features = Features(numeric=("price",), categorical=())
    spool = Spool(tmp_path_factory.mktemp("spool"), features=features, weighted=False)
    rows = {
        "label": pa.array([0] * total, pa.int32()),
        "price": pa.array(range(total), pa.float32()),
    }
    spool.write(raw_batch(rows, lake_schema(features)))
    with spool.close() as events:
        found = pa.Table.from_batches(events.spread(start=7, length=length))
    assert found.column("price").to_pylist() == list(range(total))
    assert found.column("event_time").cast(pa.int64()).to_pylist() == [
        7 + i * length // total for i in range(total)
    ]


def test_max_rows_stops_reading(tmp_path, criteo_rows, write_text, truth, run_ingest):
    path = write_text(tmp_path / "train.tsv", criteo_rows(300))
    _, summary, _ = run_ingest(path, max_rows=120, days=1)
    assert (summary["rows"], summary["lake_rows"], summary["replay_rows"]) == (120, 96, 24)
    assert clicks_of(lake_rows(tmp_path / "my lake") + replay_rows(tmp_path)) == truth(
        criteo_rows(120)
    )


def test_ingesting_again_gives_same_files_and_replaces_old(
    tmp_path, criteo_rows, write_text, run_ingest
):
    path = write_text(tmp_path / "day_0.gz", criteo_rows(400))
    other = tmp_path / "my lake" / "day=2026-03-07" / "part-other.parquet"
    other.parent.mkdir(parents=True)
    pq.write_table(RAW_SCHEMA.empty_table(), other)
    run_ingest(path)
    first = {p: p.read_bytes() for p in (tmp_path / "my lake").rglob("*.parquet")}
    run_ingest(path)
    assert {p: p.read_bytes() for p in (tmp_path / "my lake").rglob("*.parquet")} == first
    run_ingest(path, lake_fraction=0.25)
    assert len(lake_rows(tmp_path / "my lake")) == 100
    assert other.exists()


def test_malformed_lines_are_stored_beside_replay(tmp_path, criteo_rows, write_text, run_ingest):
    rows = criteo_rows(200)
    rows[150] = rows[150][:38]
    _, summary, _ = run_ingest(write_text(tmp_path / "day_0.gz", rows))
    file = tmp_path / "my replay" / "replay.parquet.malformed_rows.jsonl"
    assert (summary["rows"], summary["malformed"]) == (199, 1)
    assert summary["malformed_file"] == str(file)
    (line,) = file.read_text().splitlines()
    assert (json.loads(line)["line"], json.loads(line)["reason"]) == (
        151,
        "38 columns, expected 40",
    )
    _, summary, _ = run_ingest(write_text(tmp_path / "day_1.gz", criteo_rows(20, seed=2)))
    assert summary["malformed_file"] is None
    assert not file.exists()


def test_own_raw_schema_is_ingested_with_warning_about_replaced_times(
    tmp_path, raw_table, clicks, run_ingest, criteo_rows, write_text, caplog
):
    run_ingest(write_text(tmp_path / "day_0", criteo_rows(20)), lake=tmp_path / "other")
    assert "given up" not in caplog.text
    pq.write_table(raw_table(100), tmp_path / "raw.parquet")
    run_ingest(tmp_path / "raw.parquet")
    assert "raw.parquet has event times, which are replaced" in caplog.text
    assert clicks_of(lake_rows(tmp_path / "my lake") + replay_rows(tmp_path)) == clicks(
        raw_table(100)
    )


@pytest.mark.parametrize(
    ("every", "share"), [(2, "250 of 500 rows are malformed (50.00%)"), (1, "500 of 500 rows")]
)
def test_broken_file_leaves_nothing_visible(
    tmp_path, criteo_rows, write_text, run_ingest, every, share
):
    write_text(
        tmp_path / "day_0",
        [["7", *row[1:]] if i % every == 0 else row for i, row in enumerate(criteo_rows(500))],
    )
    code, summary, error = run_ingest(tmp_path / "day_0")
    assert (code, summary) == (2, None)
    assert f"day_0: {share}" in error
    assert [p.name for p in tmp_path.rglob("*") if p.is_file() and "store" not in p.parts] == [
        "day_0"
    ]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("days", 0, "days is 0, expected at least 1"),
        ("max_rows", 0, "max_rows is 0, expected at least 1"),
        ("lake_fraction", 0, "lake_fraction is 0.0, expected more than 0 and at most 1"),
        ("last_day", "10.3.2026", "last_day is '10.3.2026', expected a date YYYY-MM-DD"),
    ],
)
def test_bad_flag_gives_one_line(
    tmp_path, criteo_rows, write_text, run_ingest, flag, value, message
):
    path = write_text(tmp_path / "day_0", criteo_rows(20))
    code, _, error = run_ingest(**{"data": path, flag: value})
    assert code == 2
    assert f"error: {message}" in error


def test_kaggles_archive_is_its_train_file_and_skipped_files_are_named(
    tmp_path, criteo_rows, write_text, run_ingest
):
    folder = tmp_path / "dac"
    write_text(folder / "train.txt", criteo_rows(200))
    write_text(folder / "test.txt", [row[1:] for row in criteo_rows(100)])
    for name in ("readme.txt", "license.txt"):
        (folder / name).write_text("Criteo's terms.\n")
    code, summary, _ = run_ingest(folder)
    assert code == 0
    assert summary["rows"] == 200
    assert summary["skipped_files"] == ["license.txt", "readme.txt", "test.txt"]


def test_file_with_only_header_is_named(tmp_path, run_ingest):
    path = tmp_path / "clicks.csv"
    path.write_text(",".join((raw_rows.LABEL, *criteo.FEATURES)) + "\n")
    code, _, error = run_ingest(path)
    assert code == 2
    assert f"{path} contains no row" in error


def held() -> dict[str, bytes]:
    objects = open_storage(URI)
    return {each.name: objects.read(each.name).content for each in objects.list()}


def test_bucket_contains_same_files_as_folder_and_other_settings_replace_it(
    tmp_path, criteo_rows, write_text, run_ingest, cloud_storage
):
    path = write_text(tmp_path / "day_0.gz", criteo_rows(400))
    pq.write_table(RAW_SCHEMA.empty_table(), tmp_path / "other.parquet")
    other = (tmp_path / "other.parquet").read_bytes()
    open_storage(URI).write("day=2026-03-07/part-other.parquet", other)
    for more in ({}, {"days": 2}):
        assert run_ingest(path, lake=URI, **more)[0] == 0
        assert run_ingest(path, **more)[0] == 0
        folder = tmp_path / "my lake"
        expected = {
            p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.parquet")
        }
        assert held() == {**expected, "day=2026-03-07/part-other.parquet": other}


def test_killed_ingest_leaves_complete_files_and_next_one_finishes(
    tmp_path, criteo_rows, write_text, run_ingest, cloud_storage
):
    path = write_text(tmp_path / "day_0.gz", criteo_rows(400))
    with Kill(2).watch(BucketObjects, "write") as kill:
        run_ingest(path, lake=URI)
    assert kill.is_dead
    shown = held()
    assert run_ingest(path, lake=URI)[0] == 0
    assert shown == dict(list(held().items())[:2])


@pytest.mark.parametrize(
    ("lake", "code"), [("gs://nowhere/lake", 3), ("gs://", 2), ("s3://bucket/lake", 2)]
)
def test_invalid_lake_is_refused_before_row_is_read(
    tmp_path, run_ingest, cloud_storage, lake, code
):
    (tmp_path / "day_0").write_bytes(b"this would be refused, too")
    found, _, error = run_ingest(tmp_path / "day_0", lake=lake)
    assert (found, error.count("error: ")) == (code, 1)
    assert "day_0" not in error
