"""The demo's numbers: counted from files, absent where they do not exist, and held against the promises."""

import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from pipelines.local.observations import JsonLines
from pipelines.local.summary import count_served_rows, failed_promises, remembered, training_seconds, uncertainties

GOOD = {
    "requests": {"sent": 10, "failed": 0},
    "records": {"archived": 640, "published": 640},
    "serving_parity_max_abs_diff": 3e-7,
    "trigger": {"runs": 1},
    "auc": {"regained_share": 0.9, "threshold": 0.7, "baseline": 0.78, "recovered": 0.77},
    "runs": [
        {"trigger_id": "first", "state": "released", "step": "deployment", "reason": ""},
        {"trigger_id": "drift-1", "state": "released", "step": "deployment", "reason": ""},
    ],
    "versions": [{"version": n, "gate": {"decision": "pass", "reason": "pass"}} for n in (1, 2)],
    "window_rows": 1000,
    "release": None,
    "rollback": None,
    "verified": [],
    "decisions": {"points": 20, "equal": True, "digest": "00"},
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
        ("trigger.runs", 0, "0 runs were triggered"),
        ("auc.regained_share", 0.69, "regained 0.69"),
        ("auc.regained_share", None, "regained None"),
        ("decisions.equal", False, "decision"),
    ],
)
def test_broken_promise_is_named_with_its_number(path, value, words):
    failures = failed_promises(_with(path, value), simulated=True)
    assert len(failures) == 1
    assert words in failures[0]


def test_own_data_may_end_without_a_run_but_not_with_two():
    assert failed_promises(_with("auc.regained_share", None) | {"trigger": {"runs": 0}}, simulated=False) == []
    three = [*GOOD["runs"], {**GOOD["runs"][1], "trigger_id": "drift-2"}]
    assert len(failed_promises(_with("trigger.runs", 2) | {"runs": three}, simulated=False)) == 1


def test_run_that_failed_or_left_no_outcome_is_told_on_own_data_too():
    failed = {"trigger_id": "drift-1", "state": "failed", "step": "training", "reason": "training: out of memory"}
    assert failed_promises(GOOD | {"runs": [GOOD["runs"][0], failed]}, simulated=False) == [
        "run drift-1 failed: training: out of memory"
    ]
    assert failed_promises(GOOD | {"runs": GOOD["runs"][:1]}, simulated=False) == [
        "1 runs were triggered, but only 0 recorded how they ended"
    ]


def _window(version, auc, *, rows=1000, width=0.02):
    return {
        "version": version, "auc": auc, "auc_low": auc - width / 2, "auc_high": auc + width / 2,
        "rows": rows, "clicks": rows // 4,
    }  # fmt: skip


CLEAR = [_window(1, 0.78), _window(2, 0.77)]


def test_full_windows_and_clear_gates_leave_no_doubt():
    assert uncertainties(GOOD | {"trigger": {"reason": "low"}}, CLEAR, min_clicks=50) == []


@pytest.mark.parametrize(
    ("change", "timeline", "words"),
    [
        ({}, [_window(1, 0.78, rows=999), CLEAR[1]], "the baseline auc 0.780 (95 % 0.770..0.790) rests on 999 rows"),
        ({}, [CLEAR[0], _window(2, 0.77, width=0.1)], "the recovered auc 0.770 (95 % 0.720..0.820)"),
        ({"trigger": {"reason": None}}, CLEAR, "the rows ran out before the monitor could be sure"),
        ({"auc": GOOD["auc"] | {"recovered": None}}, CLEAR, "the rows ran out before version 2 could be measured"),
        ({"auc": GOOD["auc"] | {"threshold": 0.41}}, CLEAR, "threshold is 0.410, below what chance gives"),
        (
            {"versions": [{"version": 1, "gate": {"decision": "inconclusive", "reason": "inconclusive: 3 clicks"}}]},
            CLEAR,
            "the gate of version 1 is inconclusive: 3 clicks",
        ),
    ],
)
def test_each_doubt_is_one_sentence_with_its_numbers(change, timeline, words):
    sentences = uncertainties(GOOD | {"trigger": {"reason": "low"}} | change, timeline, min_clicks=50)
    assert len(sentences) == 1
    assert words in sentences[0]


def _remembering(candidate, champion):
    old = {"num_rows": 4979, "candidate": {"auc": candidate}, "champion": champion and {"auc": champion}}
    return {"versions": [{"version": 1, "old_distribution": None}, {"version": 2, "old_distribution": old}]}


def test_a_lower_auc_on_rows_of_before_the_change_comes_with_what_it_means():
    (sentence,) = remembered(_remembering(0.6209, 0.8197))
    assert (
        "on 4,979 rows from before its window, version 2 has an auc of 0.621, the version it replaced 0.820" in sentence
    )
    assert "expected" in sentence
    assert "no part of the gate" in sentence
    assert "replay_share" in sentence


def test_what_is_not_forgotten_or_cannot_be_told_needs_no_excuse():
    (sentence,) = remembered(_remembering(0.83, 0.8197))
    assert "0.830" in sentence
    assert "expected" not in sentence
    assert remembered(_remembering(None, None)) == []
    (alone,) = remembered(_remembering(0.7, None))
    assert alone.endswith("has an auc of 0.700")


def test_training_seconds_are_told_run_by_run():
    runs = [{"step_seconds": {"training": 5.935, "evaluation": 1.0}}, {"step_seconds": {"extraction": 1.0}}]
    assert training_seconds({"runs": [*runs, {"step_seconds": {"training": 4.921}}]}) == [5.935, None, 4.921]


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
