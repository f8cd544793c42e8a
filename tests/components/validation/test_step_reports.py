"""The step's reports and its comparison with served rows, through its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from components.storage.uris import local_path
from components.store.run_reports import report_path
from components.validation.__main__ import metric_values


def replaced(table, name, column):
    return table.set_column(table.schema.get_field_index(name), name, column)


@pytest.fixture
def archive(tmp_path):
    """Writes a table as the served rows of its days."""

    def write(table):
        days = pc.strftime(table.column("event_time"), format="%Y-%m-%d").to_pylist()
        for day in sorted(set(days)):
            folder = tmp_path / "archive" / f"day={day}"
            folder.mkdir(parents=True)
            pq.write_table(table.filter(pa.array([each == day for each in days])), folder / "part-x.parquet")
        return tmp_path / "archive"

    return write


def test_a_feature_served_in_another_unit_is_named_by_the_step(step, write_rows, raw_table, archive):
    rows = raw_table(2000)
    served = replaced(rows, "I4", pc.multiply(rows.column("I4"), pa.scalar(0.001, pa.float32())))
    code, report = step(write_rows(rows), f"--served={archive(served)}", champion="none")
    assert (code, report.decision) == (0, "warn")
    (finding,) = [finding for finding in report.findings if finding["rule"] == "skew"]
    assert finding["feature"] == "I4"
    assert "1000 times the served value" in finding["description"]
    assert report.served["num_joined"] == 2000
    metrics = metric_values(report)
    assert (metrics["num_skewed"], metrics["num_joined"]) == (1, 2000)


def test_a_rule_may_block_on_skew_and_rows_served_as_trained_pass(step, write_rows, raw_table, archive):
    rows = raw_table(2000)
    served = replaced(rows, "C9", pa.nulls(2000, pa.int64()))
    manifest, flag = write_rows(rows), f"--served={archive(served)}"
    code, report = step(manifest, flag, '--rules={"skew": "block"}', champion="none")
    assert (code, report.decision) == (1, "block")
    code, report = step(manifest, flag, '--rules={"skew": {"skew_share": 1.0}}', champion="none", run="r2")
    assert (code, report.decision) == (0, "pass")
    assert next(entry for entry in report.skew if entry["feature"] == "C9")["effect"] > 0.9


def test_served_rows_that_do_not_join_are_compared_by_their_distributions(step, write_rows, raw_table, archive):
    other = raw_table(20_000, seed=9)
    served = replaced(other, "I4", pc.multiply(other.column("I4"), pa.scalar(1000, pa.float32())))
    code, report = step(write_rows(raw_table(20_000)), f"--served={archive(served)}", champion="none")
    assert (code, report.decision) == (0, "warn")
    assert report.served["method"] == "distributions"
    assert [f["feature"] for f in report.findings if f["rule"] == "skew"] == ["I4"]


def test_reports_are_kept_in_the_store_whatever_becomes_of_the_work_folder(step, write_rows, raw_table, store):
    _, report = step(write_rows(raw_table(500)), champion="none", run="r7")
    kept = report_path(store, "r7", "validation")
    assert kept.read_bytes() == local_path(report.report_uri).read_bytes()
    document = json.loads(report_path(store, "r7", "validation", "json").read_text())
    assert document == json.loads(Path(local_path(report.json_uri)).read_text())
    assert (document["run"], document["decision"], document["num_rows"]) == ("r7", report.decision, 500)
    assert len(document["columns"]) == 40


def test_a_repeated_run_that_fails_leaves_no_report_of_the_try_before(step, write_rows, raw_table, store, tmp_path):
    manifest = write_rows(raw_table(500))
    step(manifest, champion="none")
    assert report_path(store, "r1", "validation").exists()
    (tmp_path / "raw" / "train" / "part-0.parquet").write_bytes(b"damaged")
    code, _ = step(manifest, champion="none")
    assert code == 2
    assert not report_path(store, "r1", "validation").exists()
