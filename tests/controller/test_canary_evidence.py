"""Tests of pairs and counters: each row and request is counted once, for its own arm."""

import os
import re
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.canary.evidence import (
    ArmCounts,
    counted,
    counts_since,
    fetch,
    read_baseline,
    read_pairs,
    uncounted,
)
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.errors import TemporaryError
from evergreen.storage.folder import FolderObjects
from tests.support.http_double import Page
from tests.support.shadow_rows import write_shadow_rows

COLUMNS = (
    "request_id",
    "row",
    "event_time",
    "label",
    "model_version",
    "score",
    "shadow_version",
    "shadow_score",
    "user",
)
BEGIN = datetime(2026, 1, 1, 23, 59, 30, tzinfo=timezone.utc)
STABLE, CANARY = (
    Arm(model_name="click_model", version=3),
    Arm(model_name="click_model_canary", version=4),
)


def write(path, rows, *, shadow=True):
    """Write rows to a Parquet file.

    A row is (request, row, seconds after BEGIN, label, version, score, shadow version, shadow
    score[, user]).
    """
    columns = dict(zip(COLUMNS, zip(*rows)))
    columns["event_time"] = [
        BEGIN + timedelta(seconds=seconds) for seconds in columns["event_time"]
    ]
    kept = {
        name: values for name, values in columns.items() if shadow or not name.startswith("shadow")
    }
    write_shadow_rows(path, **kept)


def read(*folders, at=BEGIN, most=1_000, user=None):
    places = [FolderObjects(each) if isinstance(each, Path) else each for each in folders]
    return read_pairs(places, stable=3, canary=4, since=at, max_pairs=most, user=user)


def test_both_directions_are_distinguished_and_sorted_by_time(tmp_path):
    write(
        tmp_path / "day=2026-01-01" / "a.parquet",
        [
            ("b", 0, 5, 1, 3, 0.25, 4, 0.5),
            ("a", 1, 2, 0, 4, 0.125, 3, 0.75),
            ("a", 0, 2, 1, 4, 0.375, 3, 0.625),
        ],
    )
    found = read(tmp_path)
    assert found.labels.tolist() == [1, 0, 1]
    assert found.stable.tolist() == [0.625, 0.75, 0.25]
    assert found.canary.tolist() == [0.375, 0.125, 0.5]
    assert found.groups.tolist() == [0, 0, 1]


def test_rows_of_one_user_are_one_group_and_unknown_ones_group_by_request(tmp_path):
    scored = (3, 0.5, 4, 0.25)
    rows = [
        ("a", 0, 1, 1, *scored, 7),
        ("b", 0, 2, 0, *scored, 7),
        *(("c", i, 3, 0, *scored, None) for i in (0, 1)),
    ]
    write(tmp_path / "day=2026-01-01" / "a.parquet", [*rows, ("d", 0, 4, 1, *scored, 8)])
    write(tmp_path / "day=2026-01-02" / "before_users.parquet", [("e", 0, 40, 1, *scored)])
    groups = read(tmp_path, user="user").groups.tolist()
    assert groups == [7, 7, groups[2], groups[2], 8, groups[5]]
    assert groups[2] < 0 > groups[5] != groups[2]


def test_pairs_are_limited_to_what_last_look_needs_and_are_oldest(tmp_path, monkeypatch):
    """The evidence of a canary that runs for many days must fit into memory.

    Archive and lake may both hold a row.
    """
    archive, lake, held = tmp_path / "archive", tmp_path / "lake", []
    for part in reversed(range(50)):
        rows = [
            (f"r{10 * part + i:03}", 0, 10 * part + i, i % 2, 3, part / 64, 4, 0.5)
            for i in range(10)
        ]
        for place in (archive, lake):
            write(place / "day=2026-01-01" / f"{part}.parquet", rows)
    whole, concat = read(archive, lake), pa.concat_tables

    def counted(tables):
        held.append(sum(table.num_rows for table in tables))
        return concat(tables)

    monkeypatch.setattr(pa, "concat_tables", counted)
    found = read(archive, lake, most=25)
    assert (len(whole), len(found), max(held) <= 5 * 25) == (500, 25, True)
    assert found.stable.tolist() == whole.stable.tolist()[:25]
    assert found.groups.tolist() == whole.groups.tolist()[:25]


def test_rows_of_other_versions_other_times_and_no_shadow_are_no_pairs(tmp_path):
    write(
        tmp_path / "day=2026-01-01" / "a.parquet",
        [
            ("early", 0, -1, 1, 3, 0.1, 4, 0.2),
            ("other", 0, 1, 1, 2, 0.1, 4, 0.2),
            ("older", 0, 1, 1, 3, 0.1, 2, 0.2),
            ("alone", 0, 1, 1, 3, 0.1, None, None),
            ("itself", 0, 1, 1, 3, 0.1, 3, 0.2),
            ("first", 0, 0, 1, 3, 0.1, 4, 0.2),
        ],
    )
    write(
        tmp_path / "day=2026-01-02" / "plain.parquet",
        [("p", 0, 60, 1, 3, 0.1, None, None)],
        shadow=False,
    )
    write(tmp_path / "day=2025-12-31" / "corrupt.parquet", [("y", 0, 1, 1, 3, 0.1, 4, 0.2)])
    (tmp_path / "day=2025-12-31" / "corrupt.parquet").write_bytes(
        b"an earlier day is not even opened"
    )
    (tmp_path / "day=2026-01-01" / ".part.parquet").write_bytes(b"unfinished")
    assert len(read(tmp_path)) == 1


def test_corrupt_file_is_named_and_no_evidence(tmp_path, caplog):
    rows = [(f"r{i}", 0, i, i % 2, 3, 0.5, 4, 0.25) for i in range(10)]
    write(tmp_path / "day=2026-01-01" / "a.parquet", rows)
    (tmp_path / "day=2026-01-01" / "torn.parquet").write_bytes(b"PAR1 and no more")
    assert len(read(tmp_path)) == 10
    assert re.search(
        r"left out of the canary.s evidence: .*torn.parquet is not a readable Parquet file",
        caplog.text,
    )


def test_file_with_a_column_of_another_type_is_no_evidence(tmp_path, caplog):
    rows = [(f"r{i}", 0, i, i % 2, 3, 0.5, 4, 0.25) for i in range(10)]
    write(tmp_path / "day=2026-01-01" / "a.parquet", rows)
    odd = pq.read_table(tmp_path / "day=2026-01-01" / "a.parquet", partitioning=None)
    at = odd.column_names.index("label")
    odd = odd.set_column(at, "label", pa.array(["click"] * 10))
    pq.write_table(odd, tmp_path / "day=2026-01-01" / "odd.parquet")
    assert len(read(tmp_path)) == 10
    assert "left out of the canary's evidence" in caplog.text


def test_file_that_is_in_archive_and_lake_counts_once(tmp_path):
    rows = [(f"r{i}", 0, i, i % 2, 3, 0.5, 4, 0.25) for i in range(10)]
    write(tmp_path / "archive" / "day=2026-01-01" / "part-1.parquet", rows[3:])
    write(tmp_path / "lake" / "day=2026-01-01" / "part-1.parquet", rows[:7])
    write(
        tmp_path / "lake" / "day=2026-01-02" / "part-2.parquet",
        [("next day", 0, 40, 1, 3, 0.5, 4, 0.25)],
    )
    found = read(tmp_path / "archive", tmp_path / "lake")
    assert len(found) == 11
    assert found.labels.tolist() == [i % 2 for i in range(10)] + [1]


def test_file_that_moves_away_meanwhile_is_no_error(tmp_path, monkeypatch):
    write(tmp_path / "a" / "day=2026-01-01" / "part-1.parquet", [("r", 0, 1, 1, 3, 0.5, 4, 0.25)])
    write(tmp_path / "a" / "day=2026-01-01" / "part-2.parquet", [("s", 0, 1, 1, 3, 0.5, 4, 0.25)])
    real = pq.ParquetFile

    def moving(path, **options):
        if path.name == "part-2.parquet":
            path.parent.joinpath("part-2.parquet").unlink()
        return real(path, **options)

    monkeypatch.setattr(pq, "ParquetFile", moving)
    assert len(read(tmp_path / "a", tmp_path / "absent")) == 1
    assert len(read(tmp_path / "absent")) == 0


METRICS = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="click_model",version="3"} 100
nv_inference_request_success{model="click_model",version="2"} 7000
nv_inference_request_success{model="click_model_canary",version="4"} 10
nv_inference_request_failure{model="click_model",reason="REJECTED",version="3"} 1
nv_inference_request_failure{model="click_model",reason="BACKEND",version="3"} 2
nv_inference_request_failure{model="click_model",reason="OTHER",version="3"} 0
nv_inference_compute_infer_duration_us{model="click_model",version="3"} 1.5e+06
nv_cache_num_hits_per_model{model="click_model",version="3"} 25
nv_cpu_utilization 0.5
nv_inference_count{model="click_model",version="3"} 6400
"""


def test_counters_are_read_per_model_version_and_failures_of_all_reasons(tmp_path):
    found = counted(METRICS, {"stable": STABLE, "canary": CANARY})
    assert found == {"stable": one(100, 3, 1.5e6, 25), "canary": one(10)}


def one(success, failure=0.0, infer_us=0.0, cache_hits=0.0):
    return {"success": success, "failure": failure, "infer_us": infer_us, "cache_hits": cache_hits}


NOTHING = one(0.0)


def test_replicas_are_added_before_anything_is_divided():
    before = {
        "a": {"stable": one(100.0, infer_us=100.0), "canary": NOTHING},
        "b": {"stable": NOTHING, "canary": NOTHING},
    }
    after = {
        "a": {"stable": one(101.0, infer_us=10_100.0), "canary": NOTHING},
        "b": {"stable": one(99.0, infer_us=99_000.0), "canary": NOTHING},
    }
    found = counts_since(before, after).stable
    assert found == ArmCounts(success=100, failure=0, infer_us=109_000)
    assert found.mean_ms == pytest.approx(1.09), "the mean of the means would be 5.5"


def test_restarted_or_new_server_counts_only_once_it_has_baseline():
    """Earlier counts include the slow warm-up, in which the canary answers no client."""
    before = {
        "a": {"stable": one(500.0, 9.0), "canary": one(50.0)},
        "gone": {"stable": one(5.0), "canary": NOTHING},
    }
    after = {
        "a": {"stable": one(20.0, 1.0), "canary": one(60.0)},
        "new": {"stable": one(7.0), "canary": one(3.0)},
    }
    found = counts_since(before, after)
    assert (found.stable.success, found.stable.failure, found.canary.success) == (0, 0, 0)
    fresh = {**before, **uncounted(before, after)}
    assert set(uncounted(before, after)) == {"a", "new"}
    assert counts_since(fresh, after) == counts_since({}, {})
    assert uncounted(fresh, after) == {}


def test_metrics_are_read_from_server_whatever_proxy_is_named(monkeypatch):
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:9")
    with closing(Page(METRICS)) as page:
        address = page.url.removeprefix("http://")
        assert read_baseline([address], STABLE, CANARY)[address]["stable"]["success"] == 100
    with pytest.raises(TemporaryError, match=address):
        fetch(address)
