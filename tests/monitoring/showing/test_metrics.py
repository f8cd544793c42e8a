"""Names of the metrics, and absence of what is undefined."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from monitoring.measures.kpis import Kpis
from monitoring.showing.metrics import DRIFT_OUTCOMES, metrics_page
from monitoring.showing.snapshot import Snapshot

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
    open_labels=({"version": 3, "auc": 0.7, "auc_low": 0.1, "auc_high": 0.9, "cbpe_auc": 0.72},),
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
        )
    }


def test_outcomes_are_frozen():
    outcomes: dict[str, list[str]] = {}
    for name, *labels in sorted(samples(Snapshot())):
        if name.endswith("_total"):
            outcomes.setdefault(name, []).append(labels[0][1])
    records = ["predicted", "outcome", "matured", "archived", "duplicate", "late_outcome", "unmatched_outcome"]
    assert outcomes == {
        "ctr_monitor_records_total": sorted([*records, "set_aside", "passed_over"]),
        "ctr_monitor_retrain_requests_total": sorted(["started", "released", "refused", "failed", "notified"]),
        "ctr_monitor_drift_checks_total": sorted(DRIFT_OUTCOMES),
    }


def test_an_undefined_auc_is_absent_and_a_defined_one_labelled():
    found = samples(Snapshot(windows=(KPIS, EMPTY)))
    assert found["ctr_monitor_rolling_auc", ("version", "3")] == 0.75
    assert ("ctr_monitor_rolling_auc", ("version", "4")) not in found
    assert ("ctr_monitor_calibration", ("version", "4")) not in found
    assert found["ctr_monitor_window_rows", ("version", "4")] == 9


def test_what_the_log_cannot_tell_is_absent():
    found = samples(Snapshot())
    assert not {("ctr_monitor_log_backlog",), ("ctr_monitor_last_record_timestamp_seconds",)} & set(found)
    assert found["ctr_monitor_log_connected",] == 1
    assert samples(replace(FULL, log_problem="the stream ended"))["ctr_monitor_log_connected",] == 0


def test_drift_is_told_by_column_and_absent_where_it_was_not_judged():
    found = samples(FULL)
    assert found["ctr_monitor_drifted", ("column", "I1")] == 1
    assert found["ctr_monitor_drifted", ("column", "C2")] == 0
    assert ("ctr_monitor_drift_distance", ("column", "C3")) not in found


def test_counters_follow_the_store():
    found = samples(Snapshot(counters={"archived": 7, "request_failed": 2}))
    assert found["ctr_monitor_records_total", ("outcome", "archived")] == 7
    assert found["ctr_monitor_retrain_requests_total", ("outcome", "failed")] == 2
