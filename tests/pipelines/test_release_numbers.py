"""What the demo says of releases: read off journal, notes and traffic, and held against what it promises."""

from __future__ import annotations

import copy
import json
from datetime import datetime, timezone

import pytest

from components.store import promotion_journal
from components.store.promotion_journal import Promotion, append_promotion
from components.store.run_notes import RunOutcome, run_folder, write_outcome
from pipelines.local.release_numbers import (
    journal_events,
    release_numbers,
    released_failures,
    rollback_numbers,
    told_release,
)

START = 1_800_000_000.0


def _iso(offset):
    return datetime.fromtimestamp(START + offset, timezone.utc).isoformat()


def _line(second, version, *, p99=4.0, failed=0):
    return {
        "time": START + second, "requests_sent": 31, "requests_failed": failed, "p99_ms": p99,
        "versions": version if isinstance(version, dict) else {str(version): 1984},
    }  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """A journal with two releases, the second by a run whose deployment step worked from 100 s to 103 s."""
    for version, intent, live in ((1, 0, 1), (2, 101, 102.5)):
        for action, at in ((promotion_journal.INTENT, intent), (promotion_journal.RELEASE, live)):
            append_promotion(
                tmp_path,
                Promotion(
                    time=_iso(at), action=action, version=version, previous_version=version - 1 or None,
                    model_id=f"m{version}", model_uri="", release_uri="", trigger_id=None, reason="better",
                ),
            )  # fmt: skip
        run = f"run-{version}"
        note = {"step": "deployment", "state": "done", "started_at": _iso(100), "seconds": 3.0}
        run_folder(tmp_path, run).mkdir(parents=True)
        (run_folder(tmp_path, run) / "deployment.json").write_text(json.dumps(note))
        write_outcome(
            tmp_path,
            RunOutcome(
                run=run, trigger_id=run, state="released", step="deployment", reason="", version=version,
                ended_at=_iso(version),
            ),
        )  # fmt: skip
    return tmp_path


def test_release_is_told_by_the_seconds_that_it_overlaps(store):
    traffic = [_line(second, 1) for second in range(80, 100)]
    traffic += [_line(100.5, 1, p99=8.0), _line(101.5, 1, p99=11.0, failed=2), _line(102.4, {"1": 900, "2": 100})]
    traffic += [_line(103.4, 2, p99=9.0), *(_line(second, 2, p99=5.0) for second in range(105, 125))]
    found = release_numbers(store, traffic, 2)
    assert found == {
        "version": 2, "started_at": START + 100, "live_at": START + 102.5, "seconds": 3.0,
        "intent_to_live_seconds": 1.5, "p99_ms": {"before": 4.0, "during": 11.0, "after": 5.0},
        "requests_sent": 4 * 31, "requests_failed": 2,
    }  # fmt: skip


def test_seconds_without_an_answer_have_no_p99_and_count_all_the_same(store):
    found = release_numbers(store, [_line(102, {}, p99=None, failed=31)], 2)
    assert found["p99_ms"] == {"before": None, "during": None, "after": None}
    assert found["requests_failed"] == 31


def test_version_that_was_never_live_has_no_release(store):
    assert release_numbers(store, [], 3) is None


WALKS = [
    {
        "version": 1, "started_at": START + 200.2, "ended_at": START + 201.4, "answered_at": START + 203.0,
        "traffic_ended": False,
    },
    {
        "version": 2, "started_at": START + 203.2, "ended_at": START + 204.7, "answered_at": START + 206.0,
        "traffic_ended": False,
    },
]  # fmt: skip


def test_walk_back_counts_the_requests_from_its_start_to_the_last_answer():
    traffic = [_line(200, 2, failed=9), _line(201, {"2": 1000, "1": 984}), _line(202, 1), _line(203, 1)]
    traffic += [_line(204, {"1": 984, "2": 1000}, p99=7.5), _line(205, 2), _line(206, 2), _line(207.5, 2, failed=9)]
    # The last line begins at 206, the moment of the answer: it is counted, as the window is closed.
    assert rollback_numbers(WALKS, traffic) == {
        "from_version": 2, "to_version": 1, "seconds": 1.2, "forward_seconds": 1.5,
        "started_at": START + 200.2, "forward_at": START + 203.2,
        "old_version_answered": True, "new_version_answered": True,
        "rows_by_version": {"1": 984 + 2 * 1984 + 984, "2": 1000 + 1000 + 3 * 1984}, "p99_ms": 7.5,
        "requests_sent": 7 * 31, "requests_failed": 9,
    }  # fmt: skip
    assert rollback_numbers([], traffic) is None


@pytest.mark.parametrize(("traffic_ended", "answered"), [(True, None), (False, False)])
def test_a_version_is_not_blamed_for_traffic_that_ended_before_it_could_answer(traffic_ended, answered):
    walks = [WALKS[0], {**WALKS[1], "answered_at": None, "traffic_ended": traffic_ended}]
    found = rollback_numbers(walks, [_line(second, 1) for second in range(198, 206)])
    assert (found["old_version_answered"], found["new_version_answered"]) == (True, answered)
    failures = released_failures({**_summary(), "rollback": found})
    assert failures == ([] if traffic_ended else ["version 2 did not answer after its return"])


def _summary():
    return {
        "release": {
            "version": 2, "seconds": 0.5, "requests_failed": 0, "p99_ms": {"before": 4.0, "during": 6.0, "after": None},
        },
        "rollback": rollback_numbers(WALKS, [_line(second, 1) for second in range(198, 208)]),
        "verified": [
            {
                "version": version, "same": True, "num_rows": 320, "num_different": 0, "max_abs_diff": 1e-7,
                "checks": [{"name": "graph", "held": True}, {"name": "weights", "held": True}],
            }
            for version in (1, 2)
        ],
        "records": {"archived": 640},
    }  # fmt: skip


def _with(change):
    summary = copy.deepcopy(_summary())
    change(summary)
    return summary


def test_what_held_fails_no_promise_and_what_was_not_shown_promised_nothing():
    assert released_failures(_summary()) == []
    assert released_failures({**_summary(), "release": None, "rollback": None, "verified": []}) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["release"].update(requests_failed=3), "3 requests failed during the release, expected 0"),
        (lambda s: s["rollback"].update(requests_failed=3), "3 requests failed while the version was rolled back"),
        (lambda s: s["rollback"].update(seconds=5.1), "a rollback took 5.1 s, expected less than 5"),
        (lambda s: s["rollback"].update(forward_seconds=5.0), "a rollback took 5.0 s"),
        (lambda s: s["rollback"].update(old_version_answered=False), "version 1 did not answer after the rollback"),
        (lambda s: s["rollback"].update(new_version_answered=False), "version 2 did not answer after its return"),
        (lambda s: s["verified"][0].update(num_rows=319), "639 logged scores were recomputed, expected the 640"),
        (
            lambda s: s["verified"][1].update(same=False, num_different=7),
            "version 2 is not what was released: 7 of 320 logged scores, and no hash differ",
        ),
        (
            lambda s: s["verified"][1].update(same=False, checks=[{"name": "weights", "held": False}]),
            "0 of 320 logged scores, and weights differ",
        ),
    ],
)
def test_broken_promise_is_one_sentence_with_its_number(change, words):
    (failure,) = released_failures(_with(change))
    assert words in failure


def test_sentences_tell_each_number_and_none_where_there_is_none():
    release, rollback, first, second = told_release(_summary())
    assert "version 2 under traffic: 0.5 s, 0 requests failed" in release
    assert release.endswith("4, 6, none ms")
    assert rollback == "rollback to version 1 in 1.2 s and forward again in 1.5 s, 0 requests failed"
    assert first == "version 1: 320 logged scores recomputed offline, 0 differ, largest difference 1e-07"
    assert told_release({"release": None, "rollback": None, "verified": []}) == []
    assert second.startswith("version 2")


def test_events_name_who_became_live_and_not_what_was_only_intended(store):
    events = journal_events(store)
    assert [(event["kind"], event["time"] - START) for event in events] == [("release", 1), ("release", 102.5)]
    assert events[0]["text"] == "version 1, before it none: better"
