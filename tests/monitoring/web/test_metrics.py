"""Tests of the metrics' names, and of the absence of undefined metrics."""

from dataclasses import replace

from monitoring.retraining.actions import ActionStatus
from monitoring.web.exposition import Snapshot
from monitoring.web.metrics import DRIFT_OUTCOMES, PROMOTIONS, REQUEST_OUTCOMES
from monitoring.web.store_status import VERDICTS, StoreStatus
from tests.support.snapshots import EMPTY, FULL, KPIS, samples

NAMES = """
rolling_auc rolling_auc_low rolling_auc_high log_loss normalized_entropy calibration calibration_error click_rate
conversion_rate gauc hit_rate ndcg window_rows window_clicks records_total retrain_requests_total drift_distance drifted
outlying drift_checks_total open_auc open_auc_low open_auc_high decision last_record_timestamp_seconds
serving_version log_backlog log_read_up_to_timestamp_seconds log_connected pending_rows set_apart_rows info
last_turn_timestamp_seconds auc_threshold last_decision_timestamp_seconds retrain_budget retrain_budget_left
retrain_blocked_until_timestamp_seconds runs_without_release_in_a_row failed_runs_in_a_row gate_refusals_in_a_row
run_under_way run_started_timestamp_seconds runs_total last_run_end_timestamp_seconds last_run_duration_seconds
promotions_total live_version live_since_timestamp_seconds notifications_total notifications_waiting
unuploaded_files oldest_unuploaded_timestamp_seconds model_registry_readable
disk_free_bytes disk_size_bytes
"""  # noqa: E501


def test_metric_names_do_not_change():
    assert {name for name, *_ in samples(FULL)} == {f"ctr_monitor_{name}" for name in NAMES.split()}


def test_names_of_outcomes_do_not_change():
    outcomes: dict[str, list[str]] = {}
    for name, *labels in sorted(samples(FULL)):
        if name.endswith("_total"):
            outcomes.setdefault(name, []).append(" ".join(value for _, value in labels))
    records = [
        "predicted",
        "outcome",
        "matured",
        "archived",
        "duplicate",
        "late_outcome",
        "unmatched_outcome",
    ]
    assert outcomes == {
        "ctr_monitor_records_total": sorted([*records, "dead_letter", "passed_over", "reused_id"]),
        "ctr_monitor_retrain_requests_total": sorted(REQUEST_OUTCOMES),
        "ctr_monitor_drift_checks_total": sorted(DRIFT_OUTCOMES),
        "ctr_monitor_runs_total": sorted(VERDICTS),
        "ctr_monitor_promotions_total": sorted(PROMOTIONS),
        "ctr_monitor_notifications_total": ["delivered", "dropped"],
    }
    assert REQUEST_OUTCOMES == (
        "started",
        "released",
        "canary",
        "evaluated",
        "refused",
        "failed",
        "notified",
    )
    refusals = ("gate_failed", "gate_inconclusive", "blocked_by_data", "refused_at_deployment")
    assert ("released", "canary", "evaluated", *refusals, "failed") == tuple(VERDICTS)
    assert PROMOTIONS == (
        "release",
        "rollback",
        "promote",
        "withdrawn",
        "canary",
        "canary_ended",
        "baked",
    )


def test_undefined_auc_is_absent_and_defined_one_labelled():
    found = samples(Snapshot(time=1.0, windows=(KPIS, EMPTY)))
    assert found["ctr_monitor_rolling_auc", ("version", "3")] == 0.75
    assert ("ctr_monitor_rolling_auc", ("version", "4")) not in found
    assert ("ctr_monitor_calibration", ("version", "4")) not in found
    assert found["ctr_monitor_window_rows", ("version", "4")] == 9


def test_unknown_log_state_is_absent():
    found = samples(Snapshot(time=1.0))
    assert not {("ctr_monitor_log_backlog",), ("ctr_monitor_last_record_timestamp_seconds",)} & set(
        found
    )
    assert found["ctr_monitor_log_connected",] == 1
    assert samples(replace(FULL, log_problem="the stream ended"))["ctr_monitor_log_connected",] == 0


def test_before_its_first_turn_monitor_shows_no_number_but_its_versions():
    """A zero would look like a reset counter.

    The change from zero to the true value would look like an increase, and trigger an alert.
    """
    assert {name for name, *_ in samples(replace(FULL, time=None))} == {"ctr_monitor_info"}


UNKNOWN = """
live_version live_since_timestamp_seconds gate_refusals_in_a_row last_run_end_timestamp_seconds
oldest_unuploaded_timestamp_seconds unuploaded_files retrain_budget_left notifications_waiting auc_threshold
"""  # noqa: E501


def test_unknown_facts_of_runs_and_registry_are_absent():
    found = {name for name, *_ in samples(Snapshot(time=1.0, store_status=StoreStatus()))}
    assert "ctr_monitor_model_registry_readable" in found
    assert not found & {f"ctr_monitor_{name}" for name in UNKNOWN.split()}
    unreadable = samples(Snapshot(time=1.0, store_status=StoreStatus(store_problem="gone")))
    assert unreadable["ctr_monitor_model_registry_readable",] == 0
    assert not any(name == "ctr_monitor_promotions_total" for name, *_ in unreadable)


def test_request_is_running_from_decision_to_end_of_its_run():
    for phase in ("idle", "decided", "uploading", "submitting"):
        found = samples(replace(FULL, actions=ActionStatus(phase=phase)))
        assert ("ctr_monitor_run_started_timestamp_seconds",) not in found
        assert found["ctr_monitor_run_under_way",] == (phase != "idle")
    assert samples(FULL)["ctr_monitor_run_started_timestamp_seconds",] == 1500.0
