"""The demo's numbers: counted from files, absent where they do not exist, and held against the promises."""

import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from pipelines.local.observations import JsonLines
from pipelines.local.summary import count_served_rows, failed_promises

GOOD = {
    "requests": {"sent": 10, "failed": 0},
    "records": {"archived": 640, "published": 640},
    "serving_parity_max_abs_diff": 3e-7,
    "trigger": {"runs": 1},
    "auc": {"regained_share": 0.9},
}


def _with(path, value):
    summary = copy.deepcopy(GOOD)
    *folders, name = path.split(".")
    target = summary
    for folder in folders:
        target = target[folder]
    target[name] = value
    return summary


def test_good_run_fails_no_promise():
    assert failed_promises(GOOD, simulated=True) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("requests.failed", 2, "2 of 10 requests failed"),
        ("records.archived", 639, "639 records archived, expected the 640 published"),
        ("serving_parity_max_abs_diff", 2e-5, "parity is 2e-05"),
        ("serving_parity_max_abs_diff", None, "parity is None"),
        ("trigger.runs", 2, "2 runs were triggered"),
        ("trigger.runs", 0, "0 runs were triggered"),
        ("auc.regained_share", 0.69, "regained 0.69"),
        ("auc.regained_share", None, "regained None"),
    ],
)
def test_broken_promise_is_named_with_its_number(path, value, words):
    failures = failed_promises(_with(path, value), simulated=True)
    assert len(failures) == 1
    assert words in failures[0]


def test_own_data_may_end_without_a_run_but_not_with_two():
    assert failed_promises(_with("trigger.runs", 0) | {"auc": {"regained_share": None}}, simulated=False) == []
    assert len(failed_promises(_with("trigger.runs", 2), simulated=False)) == 1


def test_served_rows_are_counted_by_identity(tmp_path, raw_table):
    day = tmp_path / "day=2026-01-01"
    day.mkdir()
    table = raw_table(40)
    version = table.schema.get_field_index(criteo.MODEL_VERSION)
    served = table.set_column(version, criteo.MODEL_VERSION, pa.array([1] * 40, pa.int32()))
    pq.write_table(table, day / "simulated.parquet")
    pq.write_table(served, day / "a.parquet")
    pq.write_table(served.slice(0, 10), day / "b.parquet")
    assert count_served_rows(tmp_path) == (50, 40)


def test_line_being_written_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    assert lines.update() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert lines.update() == [{"a": 1}]
    with open(path, "a") as file:
        file.write("2}\n")
    assert lines.update() == [{"a": 2}]
    assert lines.lines == [{"a": 1}, {"a": 2}]
