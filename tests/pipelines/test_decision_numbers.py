"""What the demo says of decisions: who was sure when, which features moved, whether the replay decided alike."""

from __future__ import annotations

import pytest

from pipelines.local.decision_numbers import (
    decided_failures,
    feature_drift,
    first_sure,
    policies_say,
    retrain_decision,
    told_decisions,
)
from pipelines.local.observations import printed_json

DRIFT_TIME = 100.0


def line(time, **actions):
    decisions = [{"policy": name, "action": action, "reason": f"{name} at {time}"} for name, action in actions.items()]
    return {"time": time, "version": 1, "decisions": decisions}


DECISIONS = [
    line(90.0, threshold="ok", sequential="undecidable", data_drift="ok"),
    line(104.5, threshold="ok", sequential="ok", data_drift="retrain"),
    line(110.0, threshold="retrain", sequential="breach", data_drift="retrain"),
    line(112.0, threshold="retrain", sequential="retrain", data_drift="retrain"),
]
NOTICE = {"time": 108.0, "kind": "decision", "policy": "data_drift", "text": "data_drift at 104.5"}
REQUEST = {
    "time": 113.5,
    "kind": "decision",
    "policy": "threshold",
    "text": "threshold at 110.0 (incremental run)",
    "request_id": "drift-1",
}


def drift_event(bucket_end, version=1, **distances):
    columns = [{"column": name, "distance": value, "drifted": True} for name, value in distances.items()]
    return {
        "time": bucket_end + 2,
        "kind": "drift",
        "version": version,
        "bucket_end": bucket_end,
        "drifted": list(distances),
        "columns": columns,
    }


def test_notice_without_a_run_is_not_the_decision_that_asked_for_one():
    assert retrain_decision([NOTICE]) is None
    assert retrain_decision([NOTICE, REQUEST]) is REQUEST


def test_every_policys_word_is_that_of_the_point_at_which_the_run_was_asked_for():
    told = policies_say(DECISIONS, REQUEST)
    assert [(each["policy"], each["action"]) for each in told] == [
        ("threshold", "retrain"),
        ("sequential", "breach"),
        ("data_drift", "retrain"),
    ]
    assert told[0]["reason"] == "threshold at 110.0"
    assert policies_say(DECISIONS, None) == []


def test_each_policy_is_sure_when_it_says_so_first_and_never_where_nothing_changed():
    assert first_sure(DECISIONS, DRIFT_TIME) == {"threshold": 10.0, "sequential": 12.0, "data_drift": 4.5}
    assert first_sure(DECISIONS, None) == {"threshold": None, "sequential": None, "data_drift": None}
    assert first_sure(DECISIONS[:1], DRIFT_TIME) == {"threshold": None, "sequential": None, "data_drift": None}


def test_features_that_moved_are_told_with_their_largest_distance_worst_first():
    events = [drift_event(102.0, C2=0.03), drift_event(104.0, C2=0.1, C14=0.2), drift_event(120.0, version=2, I1=0.9)]
    found = feature_drift(events, DRIFT_TIME)
    assert found == {"buckets_before": 0, "buckets_after": 2, "seconds": 2.0, "columns": {"C14": 0.2, "C2": 0.1}}
    assert list(found["columns"]) == ["C14", "C2"]


def test_drift_before_the_change_is_counted_apart():
    found = feature_drift([drift_event(98.0, C2=0.03)], DRIFT_TIME)
    assert found == {"buckets_before": 1, "buckets_after": 0, "seconds": None, "columns": {}}


def summary(**changes):
    return {
        "trigger": {"policies": policies_say(DECISIONS, REQUEST)},
        "policies": first_sure(DECISIONS, DRIFT_TIME),
        "feature_drift": feature_drift([], DRIFT_TIME),
        "decisions": {"points": 177, "equal": True, "digest": "ab"},
        **changes,
    }


def test_world_whose_features_stay_is_told_so():
    told = told_decisions(summary())
    assert "no feature moved, as far as the rows can tell: what changed is what they mean" in told
    assert "177 decisions replayed from the lake, all equal" in told


@pytest.mark.parametrize(
    ("decisions", "failures"),
    [
        ({"points": 9, "equal": True, "digest": "ab"}, 0),
        ({"points": 9, "equal": False, "digest": "ab"}, 1),
        (None, 0),
    ],
)
def test_replay_that_decides_otherwise_breaks_the_demos_promise(decisions, failures):
    assert len(decided_failures(summary(decisions=decisions))) == failures


def test_printed_json_is_read_behind_warnings(tmp_path):
    log = tmp_path / "a.log"
    log.write_text('a warning\n[\n  {\n    "a": 1\n  }\n]\n')
    assert printed_json(log) == [{"a": 1}]
