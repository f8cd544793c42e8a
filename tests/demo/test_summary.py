"""Tests of the demo's numbers: parsed from files and lines, compared with limits."""

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo import summary as numbers
from demo.plan import DemoSettings, plan_for_simulator, read_verdicts
from demo.report import headline_sentence
from demo.runner import LocalFolders
from demo.summary import AucNumbers, Observations, ReleaseNumbers, ReplayedDecisions, TrafficDuring
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import ModelQuality
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.registry.runs import RunOutcome, run_folder, write_outcome
from evergreen.runtime.errors import run_again
from testing.releases import passing_verdict
from tests.support.demo_summaries import (
    DRIFT_TIME,
    GOOD,
    PLANTED,
    RUNS,
    START,
    VERSIONS,
    traffic_line,
)


def changed(path, value, summary=GOOD):
    """Return the summary with one field changed, such as `verified.0.num_rows`."""
    name, _, rest = path.partition(".")
    if isinstance(summary, dict):
        return {**summary, name: value}
    if isinstance(summary, list):
        number = int(name)
        return [*summary[:number], changed(rest, value, summary[number]), *summary[number + 1 :]]
    return replace(
        summary, **{name: changed(rest, value, getattr(summary, name)) if rest else value}
    )


def test_good_run_fails_no_promise_and_absent_parts_promise_nothing():
    assert numbers.failed_promises(GOOD, simulated=True) == []
    bare = replace(GOOD, release=None, bad_release=None, verified=[], decisions=None)
    assert numbers.failed_promises(bare, simulated=True) == []


@pytest.mark.parametrize("late", [{"late_requests": 1}, {"late_rows": 64}])
def test_decisions_without_late_record_may_differ_and_are_reported(late):
    summary = replace(
        GOOD, decisions=ReplayedDecisions(points=20, equal=False, digest="00", **late)
    )
    assert numbers.failed_promises(summary, simulated=True) == []
    (sentence,) = [each for each in numbers.decision_sentences(summary) if "replayed" in each]
    assert "not all of them equal" in sentence
    assert (
        f"{late.get('late_requests', 0)} requests reached the monitor after their decision point"
        in sentence
    )
    assert f"{late.get('late_rows', 0)} rows after their bucket had closed" in sentence


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("requests.failed", 2, "2 of 10 requests failed"),
        ("serving_parity_max_abs_diff", 2e-5, "parity is 2e-05"),
        ("serving_parity_max_abs_diff", None, "parity is None"),
        ("trigger.runs", 0, "0 runs were triggered"),
        ("auc.regained_share", 0.69, "regained 0.69"),
        ("auc.regained_share", None, "regained None"),
        ("decisions.equal", False, "decision"),
        ("release.during.requests_failed", 3, "3 requests failed during the release, expected 0"),
        (
            "bad_release.during.requests_failed",
            3,
            "3 requests failed during a bad release and its rollback",
        ),
        (
            "bad_release.rolled_back.seconds",
            60.5,
            "rolled back after 60.5 s, expected less than 60",
        ),
        ("verified.0.num_rows", 319, "639 logged scores were recomputed, expected the 640"),
        (
            "verified.1.same",
            False,
            "version 2 differs from its release: 0 of 320 logged scores, and no hash differ",
        ),
        ("records.published", 641, "640 records archived, expected the 641 published"),
    ],
)
def test_broken_promise_is_one_sentence_with_its_number(path, value, words):
    (failure,) = numbers.failed_promises(changed(path, value), simulated=True)
    assert words in failure


def test_demo_on_own_data_may_end_without_run_but_not_with_two_runs():
    without = changed("auc.regained_share", None, changed("trigger.runs", 0))
    assert numbers.failed_promises(without, simulated=False) == []
    assert numbers.retrain_decision([NOTICE]) is None, "a notification requests no run"
    failed = [RUNS[0], replace(RUNS[1], state="failed", reason="training: out of memory")]
    for runs, words in (
        (failed, "run drift-1 failed: training: out of memory"),
        (RUNS[:1], "1 runs were triggered, but only 0 recorded their outcome"),
    ):
        assert numbers.failed_promises(changed("runs", runs), simulated=False) == [words]
    three = [*RUNS, replace(RUNS[1], trigger_id="drift-2")]
    assert (
        len(
            numbers.failed_promises(
                changed("runs", three, changed("trigger.runs", 2)), simulated=False
            )
        )
        == 1
    )


def window(version, auc, *, rows=8000, width=0.02):
    return {
        "version": version,
        "auc": auc,
        "auc_low": auc - width / 2,
        "auc_high": auc + width / 2,
        "rows": rows,
        "clicks": rows // 4,
    }


CLEAR = [window(1, 0.78), window(2, 0.77)]


def doubts(summary=GOOD, timeline=CLEAR):
    plan = plan_for_simulator(DemoSettings(folder=Path("demo"), rows=60_000))
    observed = Observations(
        folders=LocalFolders(root=Path("demo")),
        plan=plan,
        timeline=timeline,
        events=[],
        decisions=[],
        traffic=[],
        traffic_summary={},
        stage_seconds={},
    )
    return list(numbers.uncertainties(observed, summary))


@pytest.mark.parametrize(
    ("path", "value", "timeline", "words"),
    [
        (
            *("created_at", "", [window(1, 0.78, rows=7999), CLEAR[1]]),
            "auc 0.780 (95 % 0.770..0.790) is based on 7999 rows",
        ),
        (
            "created_at",
            "",
            [CLEAR[0], window(2, 0.77, width=0.1)],
            "the recovered auc 0.770 (95 % 0.720..0.820)",
        ),
        ("trigger.reason", None, CLEAR, "the rows ran out before the drift began"),
        ("auc.recovered", None, CLEAR, "the rows ran out before version 2 could be measured"),
        (
            "auc.threshold",
            0.41,
            CLEAR,
            "threshold for version 1 is an auc of 0.410, worse than chance",
        ),
        (
            "auc.threshold",
            None,
            CLEAR,
            "the gate has no auc of version 1, so no policy has a threshold for it",
        ),
        (
            "versions",
            [replace(VERSIONS[0], gate="inconclusive", reason="inconclusive: 3 clicks")],
            CLEAR,
            "the verdict on version 1 is inconclusive: 3 clicks",
        ),
    ],
)
def test_each_doubt_is_one_sentence_with_its_numbers(path, value, timeline, words):
    (sentence,) = doubts(changed(path, value), timeline)
    assert words in sentence


def test_served_rows_are_counted_by_identity(tmp_path, criteo_table):
    day = tmp_path / "day=2026-01-01"
    day.mkdir()
    table = criteo_table(40)
    version = table.schema.get_field_index(raw_rows.MODEL_VERSION)
    served = table.set_column(version, raw_rows.MODEL_VERSION, pa.array([1] * 40, pa.int32()))
    pq.write_table(table, day / "simulated.parquet")
    pq.write_table(served, day / "a.parquet")
    pq.write_table(served.slice(0, 10), day / "b.parquet")
    assert numbers.count_served_rows(tmp_path) == 40


def decision_line(time, **actions):
    decisions = [
        {"policy": name, "action": action, "reason": f"{name} at {time}"}
        for name, action in actions.items()
    ]
    return {"time": time, "version": 1, "decisions": decisions}


DECISIONS = [
    decision_line(90.0, threshold="ok", sequential="undecidable", data_drift="ok"),
    decision_line(104.5, threshold="ok", sequential="ok", data_drift="retrain"),
    decision_line(110.0, threshold="retrain", sequential="breach", data_drift="retrain"),
    decision_line(112.0, threshold="retrain", sequential="retrain", data_drift="retrain"),
]
NOTICE = {"time": 108.0, "kind": "decision", "policy": "data_drift", "text": "data_drift at 104.5"}


def test_first_sure_decision_of_each_policy_counts_and_none_before_change():
    never = {"threshold": None, "sequential": None, "data_drift": None}
    assert numbers.first_alarms(DECISIONS, DRIFT_TIME) == {
        "threshold": 10.0,
        "sequential": 12.0,
        "data_drift": 4.5,
    }
    assert (
        numbers.first_alarms(DECISIONS, None)
        == numbers.first_alarms(DECISIONS[:1], DRIFT_TIME)
        == never
    )


def drift_event(bucket_end, version=1, **distances):
    columns = [
        {"feature": name, "effect": value, "drifted": True} for name, value in distances.items()
    ]
    return {
        "time": bucket_end + 2,
        "kind": "drift",
        "version": version,
        "bucket_end": bucket_end,
        "drifted": list(distances),
        "columns": columns,
    }


def test_features_that_moved_show_largest_distance_with_worst_first():
    events = [
        drift_event(98.0, C2=0.03),
        drift_event(102.0, C2=0.03),
        drift_event(104.0, C2=0.1, C14=0.2),
    ]
    found = numbers.feature_drift([*events, drift_event(120.0, version=2, I1=0.9)], DRIFT_TIME)
    assert found.seconds == 2.0
    assert list(found.columns.items()) == [("C14", 0.2), ("C2", 0.1)]


def iso(offset):
    return datetime.fromtimestamp(START + offset, timezone.utc).isoformat()


@pytest.fixture
def store(tmp_path):
    """A journal with two releases.

    The second release is from a run whose deployment step lasted from 100 s to 103 s.
    """
    for version, intent, live in ((1, 0, 1), (2, 101, 102.5)):
        for action, at in ((promotion_journal.INTENT, intent), (promotion_journal.RELEASE, live)):
            append_promotion(
                tmp_path,
                Promotion(
                    time=iso(at),
                    action=action,
                    version=version,
                    previous_version=version - 1 or None,
                    model_id=f"m{version}",
                    model_uri="",
                    release_uri="",
                    trigger_id=None,
                    reason="better",
                ),
            )
        run = f"run-{version}"
        note = {"step": "deployment", "state": "done", "started_at": iso(100), "seconds": 3.0}
        run_folder(tmp_path, run).mkdir(parents=True)
        (run_folder(tmp_path, run) / "deployment.json").write_text(json.dumps(note))
        write_outcome(
            tmp_path,
            RunOutcome(
                run=run,
                trigger_id=run,
                state="released",
                step="deployment",
                reason="",
                version=version,
                ended_at=iso(103 + version),
            ),
        )
    return tmp_path


def test_release_covers_seconds_in_which_versions_overlap(store):
    traffic = [traffic_line(second, 1) for second in range(80, 100)]
    traffic += [traffic_line(100.5, 1, p99=8.0), traffic_line(101.5, 1, p99=11.0, failed=2)]
    traffic += [traffic_line(102.4, {"1": 900, "2": 100}), traffic_line(103.4, 2, p99=9.0)]
    traffic += [traffic_line(second, 2, p99=5.0) for second in range(105, 125)]
    assert numbers.release_numbers(store, traffic, 2) == ReleaseNumbers(
        version=2,
        seconds=3.0,
        during=TrafficDuring(requests_sent=4 * 31, requests_failed=2, p99_ms=11.0),
        p99_ms_before=4.0,
        p99_ms_after=5.0,
    )


def test_bad_release_counts_requests_from_start_to_answer_of_old_version():
    traffic = [traffic_line(200, 2, failed=9), traffic_line(201, {"2": 1000, "1": 984})]
    traffic += [
        traffic_line(202, 1),
        traffic_line(203, 1),
        traffic_line(204, {"1": 984, "2": 1000}, p99=7.5),
    ]
    traffic += [traffic_line(205, 2), traffic_line(206, 2), traffic_line(207.5, 2, failed=9)]
    found = numbers.bad_release_numbers(PLANTED, traffic)
    assert (found.made, found.rolled_back) == tuple(PLANTED)
    # The last line of the replay begins at 206 s, exactly when the rollback ends. The interval
    # includes its end, so the line at 206 s is included.
    assert found.during == TrafficDuring(requests_sent=7 * 31, requests_failed=9, p99_ms=7.5)
    assert numbers.bad_release_numbers([], traffic) is None


def test_sentences_state_each_number_and_none_where_there_is_none():
    release, bad, first, second = numbers.serving_sentences(GOOD)
    assert "version 2 under traffic: 0.5 s, 0 requests failed" in release
    assert release.endswith("4, 6, none ms")
    assert bad.startswith(
        "bad release of version 3 automatically rolled back to version 2 after 3.1 s, 0 requests "
        "failed: "
    )
    assert (
        first
        == "version 1: 320 logged scores recomputed offline, 0 differ, largest difference 1e-07"
    )
    assert second.startswith("version 2")
    still, replayed = numbers.decision_sentences(GOOD)
    assert still == "no feature drifted"
    assert replayed == "20 decisions were replayed from the lake, all of them equal"


def test_run_without_retrain_request_is_no_doubt_about_sure_policy():
    unasked = changed(
        "trigger.reason", None, replace(GOOD, policies={"sequential": None, "data_drift": 4.5})
    )
    sentence = headline_sentence(unasked)
    assert "no significant change" not in sentence
    assert "data_drift found drifting features" in sentence
    assert "requested no run" in sentence


CHANGED = replace(GOOD, drift={"kind": "permutation", "columns": ["price", "shop"], "seed": 7})


def test_alarm_before_change_is_never_called_drift():
    for early in (
        replace(GOOD, drift={}),
        replace(
            CHANGED,
            seconds={"drift_to_detection": -3.25},
            policies={"sequential": -3.25, "data_drift": 2.0},
        ),
    ):
        sentence = headline_sentence(early)
        assert sentence.startswith("The monitor requested a run before the drift began (low)")
        assert "Drift reduced" not in sentence
        assert "an AUC of 0.77" in sentence
    sentences = list(numbers.decision_sentences(early))
    assert "false alarms before the drift: sequential 3.2 s" in sentences
    assert "from the drift to the alarm of each policy: data_drift 2.0 s" in sentences
    late = replace(CHANGED, seconds={"drift_to_detection": 3.25}, auc=replace(GOOD.auc, trough=0.6))
    assert headline_sentence(late).startswith("Drift reduced the live AUC from 0.78 to 0.6")


def test_auc_that_was_not_measured_is_in_no_sentence():
    unmeasured = replace(
        CHANGED, seconds={"drift_to_detection": 3.2}, auc=AucNumbers(recovered=0.77)
    )
    assert "Drift reduced" not in headline_sentence(unmeasured)
    assert "AUC of 0.77" in headline_sentence(unmeasured)


def evaluated_line(time, *, policy="sequential", version=1, **figures):
    known = {"threshold": 0.64, "evidence_needed": 100.0, "rows_since_breach": 0, **figures}
    return {
        "time": time,
        "version": version,
        "decisions": [{"policy": policy, "action": "ok", "numbers": known}],
    }


def ways(summary, *, decisions=(), timeline=(), verdicts=(), drift_time=DRIFT_TIME):
    plan = plan_for_simulator(DemoSettings(folder=Path("demo"), rows=60_000))
    traffic = [{"time": 10.0 * second, "rows": 50} for second in range(21)]
    observed = Observations(
        folders=LocalFolders(root=Path("demo")),
        plan=plan,
        timeline=timeline,
        events=[],
        decisions=decisions,
        traffic=traffic,
        traffic_summary={"drift_time": drift_time, "rows": 1050},
        stage_seconds={},
    )
    return list(numbers.ways_to_complete(observed, summary, verdicts))


def verdict(tmp_path, **changes):
    return passing_verdict("m1", tmp_path / "scores", num_rows=120, **changes)


UNASKED = changed("trigger.reason", None, CHANGED)


def test_successful_loop_needs_no_person():
    assert ways(CHANGED) == []


def test_rows_needed_for_certainty_grow_with_logarithm_of_evidence(tmp_path):
    """500 rows since the drift gave an e-value of 10.

    The logarithm of 100 is twice that of 10, so evidence of 100 needs twice as many rows.
    """
    known = verdict(tmp_path, candidate=ModelQuality(auc=0.7, auc_low=0.66, auc_high=0.74))
    decisions = [
        evaluated_line(90.0, evidence=3.0),
        evaluated_line(200.0, evidence=10.0),
        evaluated_line(200.0, policy="data_drift", evidence=None),
        evaluated_line(205.0, version=2, evidence=50.0),
    ]
    (way,) = ways(UNASKED, decisions=decisions, verdicts=[known])
    assert (
        "500 rows after the drift gave evidence 10 of 100, so that about 1,000 rows would suffice, "
        "2.0 times" in way
    )


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (
            evaluated_line(200.0, evidence=0.4),
            ("a larger drift", "values of price, shop", "0.4 of 100", "below 0.640"),
        ),
        (
            evaluated_line(200.0, evidence=140.0, rows_since_breach=90),
            ("the alarm was raised", "6,400 rows after it", "90"),
        ),
    ],
)
def test_change_without_effect_and_alarm_without_rows_name_missing_part(tmp_path, decision, words):
    known = verdict(tmp_path, candidate=ModelQuality(auc=0.7, auc_low=0.66, auc_high=0.74))
    (way,) = ways(UNASKED, decisions=[decision], verdicts=[known])
    for word in words:
        assert word in way


def test_rows_that_were_counted_before_change_are_excluded(tmp_path):
    known = verdict(tmp_path, candidate=ModelQuality(auc=0.7, auc_low=0.66, auc_high=0.74))
    (way,) = ways(replace(UNASKED, drift={}), verdicts=[known], drift_time=None)
    assert (
        "8,000 labelled rows fill the window before the drift, and all 1,050 rows were sent by then"
        in way
    )


def test_gate_without_auc_gives_its_own_advice_and_source_of_settings(tmp_path):
    advice = [
        "about 600 held-out rows are needed",
        f"good enough? {run_again('--set gate.min_auc=0.52')}",
    ]
    unknown = verdict(tmp_path, decision="inconclusive", advice=advice)
    first, second = ways(UNASKED, verdicts=[unknown])
    assert first == advice[0]
    assert second.startswith(advice[1])
    assert (
        "write `gate: {min_auc: 0.52}` into a copy of the recommender's file (demo/recommender.yaml"
        in second
    )
    assert ways(UNASKED, verdicts=[verdict(tmp_path)])[0].startswith(
        "more rows: the gate has no auc"
    )


def test_verdicts_come_in_order_of_models_whatever_their_runs_are_called(tmp_path):
    folders = LocalFolders(root=tmp_path)
    for run, model in (
        ("first", "20261129T110607Z-73762cc8"),
        ("drift-v1", "20261129T110711Z-789af7f6"),
    ):
        folder = folders.artifacts / run / "evaluation"
        folder.mkdir(parents=True)
        passing_verdict(model, tmp_path / "scores", num_rows=120).write(folder / "verdict")
    found = [each.candidate_model_id for each in read_verdicts(folders)]
    assert found == ["20261129T110607Z-73762cc8", "20261129T110711Z-789af7f6"]


def test_refused_run_gives_advice_of_its_own_verdict(tmp_path):
    refused = replace(CHANGED, versions=VERSIONS[:1])
    assert ways(
        refused, verdicts=[verdict(tmp_path), verdict(tmp_path, advice=["bring newer rows"])]
    ) == ["bring newer rows"]


def test_unmeasured_version_reports_number_of_rows():
    (way,) = ways(changed("auc.recovered", None, CHANGED), timeline=[{"version": 2, "rows": 310}])
    assert "8,000 labelled rows of version 2 fill a window, and 310 came" in way


@pytest.mark.parametrize(
    ("quality", "sentence"),
    [
        (
            ModelQuality(auc=0.71, auc_low=0.7, auc_high=0.72),
            "its auc at the gate is 0.7100, which sets the monitor's threshold",
        ),
        (
            ModelQuality(auc=0.71),
            "its auc at the gate is 0.7100 without an interval, so the monitor has no threshold "
            "for it",
        ),
        (ModelQuality(), "its auc at the gate is unknown, so the monitor has no threshold for it"),
    ],
)
def test_monitor_measures_version_only_against_auc_that_gate_knows(tmp_path, quality, sentence):
    assert numbers.first_model_sentence(verdict(tmp_path, candidate=quality)) == sentence


def test_ingested_rows_are_identified_by_their_files(tmp_path):
    times = [datetime(2026, 3, 4, 5, 6, second, tzinfo=timezone.utc) for second in (9, 7, 8)]
    pq.write_table(
        pa.table({"event_time": pa.array(times, pa.timestamp("us", tz="UTC"))}),
        tmp_path / "replay.parquet",
    )
    made = {
        "lake_rows": 600,
        "replay_rows": 400,
        "malformed": 2,
        "duplicates": 0,
        "replaced": 3,
        "skipped_files": ["a.md"],
    }
    sentences = list(
        numbers.ingested_sentences(made, tmp_path / "replay.parquet", max_rows=1000, has_times=True)
    )
    assert "rows before 2026-03-04 05:06:07 UTC train" in sentences[1]
    assert "to 2026-03-04 05:06:09 are replayed" in sentences[1]
    assert sentences[2:] == [
        "only the first 1,000 rows are read, --rows reads more",
        "3 rows replaced by later copies of them",
        "files skipped because they are not click logs: a.md",
    ]
    sentences = list(
        numbers.ingested_sentences(
            {**made, "replaced": 0, "skipped_files": []}, tmp_path, max_rows=2000, has_times=False
        )
    )
    assert sentences[1:] == [
        "the rows have no times: they are spread over the last four days in file order"
    ]
