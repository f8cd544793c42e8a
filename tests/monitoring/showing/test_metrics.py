"""Names of the metrics, and absence of what is undefined."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from monitoring.measures.kpis import Kpis
from monitoring.showing.metrics import DRIFT_OUTCOMES, metrics_page
from monitoring.showing.operations import PROMOTIONS
from monitoring.showing.snapshot import STANDBY, Snapshot, Surroundings
from monitoring.showing.surroundings import VERDICTS

KPIS = Kpis(
    version=3,
    rows=100,
    clicks=20,
    auc=0.75,
    auc_low=0.7,
    auc_high=0.8,
    log_loss=0.5,
    calibration=1.1,
    ctr=0.2,
    normalized_entropy=0.9,
    calibration_error=0.01,
    conversion_rate=0.02,
    hit_rate=0.5,
    ndcg=0.4,
)
EMPTY = Kpis(
    version=4, rows=9, clicks=0, auc=None, auc_low=None, auc_high=None, log_loss=0.1, calibration=None, ctr=0.0
)
DRIFT = {
    "bucket_end": 1000.0,
    "version": 3,
    "rows": 5000,
    "columns": [
        {"column": column, "measure": measure, "distance": distance, "p_value": p_value, "drifted": drifted}
        | {"outlying": False, "outlier_rate": outlier_rate}
        for column, measure, distance, p_value, drifted, outlier_rate in (
            ("I1", "JS", 0.2, 1e-9, True, 0.01),
            ("C2", "L-inf", 0.01, 0.4, False, None),
            ("C3", "L-inf", None, None, False, None),
        )
    ],
}
DECISION = {"policy": "threshold", "action": "breach", "reason": "auc 0.6 < 0.7", "numbers": {"version": 3}}
FULL = Snapshot(
    time=2000.0,
    windows=(KPIS,),
    last_record_time=1.0,
    log_read_up_to=2.0,
    serving_version=3,
    log_backlog=0,
    drift=DRIFT,
    decisions=(DECISION,),
    decided_at=1990.0,
    threshold=0.74,
    open_labels=({"version": 3, "auc": 0.7, "auc_low": 0.1, "auc_high": 0.9, "cbpe_auc": 0.72},),
    retraining={
        "phase": "running",
        "started_at": 1500.0,
        "restraint": {"failures": 3, "failed": 2},
        "told": {"daily_budget": 4, "budget_left": 1, "blocked_until": 2600.0, "messages_waiting": 5},
    },
    around=Surroundings(
        promotions={"release": 3, "rollback": 1},
        live_version=2,
        live_action="rollback",
        live_since=900.0,
        gate_refusals=2,
        last_run_end=800.0,
        last_run_seconds=60.0,
        unuploaded_files=4,
        oldest_unuploaded=700.0,
    ),
)


def samples(snapshot: Snapshot) -> dict[tuple, float]:
    families = text_string_to_metric_families(metrics_page(snapshot).decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_metric_names_are_frozen():
    assert {name for name, *_ in samples(FULL)} == {
        f"ctr_monitor_{name}"
        for name in (
            "rolling_auc",
            "rolling_auc_low",
            "rolling_auc_high",
            "log_loss",
            "normalized_entropy",
            "calibration",
            "calibration_error",
            "click_rate",
            "conversion_rate",
            "hit_rate",
            "ndcg",
            "window_rows",
            "window_clicks",
            "records_total",
            "retrain_requests_total",
            "drift_distance",
            "drifted",
            "outlying",
            "drift_checks_total",
            "open_auc",
            "open_auc_low",
            "open_auc_high",
            "open_cbpe_auc",
            "decision",
            "last_record_timestamp_seconds",
            "serving_version",
            "log_backlog",
            "log_read_up_to_timestamp_seconds",
            "log_connected",
            "leader",
            "pending_rows",
            "info",
            "last_turn_timestamp_seconds",
            "auc_threshold",
            "last_decision_timestamp_seconds",
            "retrain_budget",
            "retrain_budget_left",
            "retrain_blocked_until_timestamp_seconds",
            "runs_without_release_in_a_row",
            "failed_runs_in_a_row",
            "gate_refusals_in_a_row",
            "run_under_way",
            "run_started_timestamp_seconds",
            "runs_total",
            "last_run_end_timestamp_seconds",
            "last_run_duration_seconds",
            "promotions_total",
            "live_version",
            "live_since_timestamp_seconds",
            "corrections_total",
            "notifications_total",
            "notifications_waiting",
            "unuploaded_files",
            "oldest_unuploaded_timestamp_seconds",
            "model_store_readable",
        )
    }


def test_outcomes_are_frozen():
    outcomes: dict[str, list[str]] = {}
    for name, *labels in sorted(samples(FULL)):
        if name.endswith("_total"):
            outcomes.setdefault(name, []).append(" ".join(value for _, value in labels))
    records = ["predicted", "outcome", "matured", "archived", "duplicate", "late_outcome", "unmatched_outcome"]
    assert outcomes == {
        "ctr_monitor_records_total": sorted([*records, "dead_letter", "passed_over"]),
        "ctr_monitor_retrain_requests_total": sorted(["started", "released", "refused", "failed", "notified"]),
        "ctr_monitor_drift_checks_total": sorted(DRIFT_OUTCOMES),
        "ctr_monitor_runs_total": sorted(VERDICTS),
        "ctr_monitor_promotions_total": sorted(PROMOTIONS),
        "ctr_monitor_corrections_total": ["rollback done", "rollback failed", "shadow done", "shadow failed"],
        "ctr_monitor_notifications_total": ["delivered", "dropped"],
    }
    assert VERDICTS == (
        "released",
        "gate_failed",
        "gate_inconclusive",
        "blocked_by_data",
        "refused_at_deployment",
        "failed",
    )
    assert PROMOTIONS == ("release", "rollback", "promote", "withdrawn", "canary", "canary_ended")


def test_an_undefined_auc_is_absent_and_a_defined_one_labelled():
    found = samples(Snapshot(time=1.0, windows=(KPIS, EMPTY)))
    assert found["ctr_monitor_rolling_auc", ("version", "3")] == 0.75
    assert ("ctr_monitor_rolling_auc", ("version", "4")) not in found
    assert ("ctr_monitor_calibration", ("version", "4")) not in found
    assert found["ctr_monitor_window_rows", ("version", "4")] == 9


def test_what_the_log_cannot_tell_is_absent():
    found = samples(Snapshot(time=1.0))
    assert not {("ctr_monitor_log_backlog",), ("ctr_monitor_last_record_timestamp_seconds",)} & set(found)
    assert found["ctr_monitor_log_connected",] == 1
    assert samples(replace(FULL, log_problem="the stream ended"))["ctr_monitor_log_connected",] == 0


def test_drift_is_told_by_column_and_absent_where_it_was_not_judged():
    found = samples(FULL)
    assert found["ctr_monitor_drifted", ("column", "I1")] == 1
    assert found["ctr_monitor_drifted", ("column", "C2")] == 0
    assert ("ctr_monitor_drift_distance", ("column", "C3")) not in found


def test_counters_follow_the_store():
    found = samples(Snapshot(time=1.0, counters={"archived": 7, "request_failed": 2}))
    assert found["ctr_monitor_records_total", ("outcome", "archived")] == 7
    assert found["ctr_monitor_retrain_requests_total", ("outcome", "failed")] == 2


def test_before_the_first_turn_and_as_a_standby_a_monitor_tells_no_number_of_its_work():
    """A zero there is a counter that was reset, and when the true one comes back an alert sees it grow from nothing."""
    whole = replace(FULL, counters={"dead_letter": 7})
    assert samples(whole)["ctr_monitor_records_total", ("outcome", "dead_letter")] == 7
    for idle in (replace(whole, time=None), replace(whole, role=STANDBY)):
        found = samples(idle)
        assert {name for name, *_ in found} <= {
            f"ctr_monitor_{name}" for name in ("leader", "info", "last_turn_timestamp_seconds")
        }
        assert found["ctr_monitor_leader",] == 0
    assert ("ctr_monitor_last_turn_timestamp_seconds",) in samples(replace(whole, role=STANDBY))


def test_what_is_not_known_of_runs_and_the_store_is_absent():
    found = {name for name, *_ in samples(Snapshot(time=1.0, around=Surroundings()))}
    assert "ctr_monitor_model_store_readable" in found
    assert not found & {
        f"ctr_monitor_{name}"
        for name in (
            "live_version",
            "live_since_timestamp_seconds",
            "gate_refusals_in_a_row",
            "last_run_end_timestamp_seconds",
            "oldest_unuploaded_timestamp_seconds",
            "unuploaded_files",
            "run_under_way",
            "retrain_budget_left",
            "notifications_waiting",
            "auc_threshold",
        )
    }
    unreadable = samples(Snapshot(time=1.0, around=Surroundings(store_problem="gone")))
    assert unreadable["ctr_monitor_model_store_readable",] == 0
    assert not any(name == "ctr_monitor_promotions_total" for name, *_ in unreadable)


def test_a_run_has_a_start_only_while_it_is_at_work():
    for phase in ("idle", "decided", "uploading", "submitting"):
        found = samples(replace(FULL, retraining={**FULL.retraining, "phase": phase}))
        assert ("ctr_monitor_run_started_timestamp_seconds",) not in found
        assert found["ctr_monitor_run_under_way",] == (phase != "idle")
    assert samples(FULL)["ctr_monitor_run_started_timestamp_seconds",] == 1500.0
