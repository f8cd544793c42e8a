"""The snapshot as Prometheus metrics; a gauge whose number does not exist is absent.

Names are an interface: dashboards and alert rules ask for them, and a test freezes them. What the numbers mean is
`monitoring.measures`' and `monitoring.memory.store`'s. Here: what is measured and judged; runs, releases, messages and
files are `showing.operations`'. A standby, and a monitor before its first turn, shows what it is and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from monitoring.showing.operations import PREFIX, counters, operations, software
from monitoring.showing.snapshot import Snapshot

RECORD_OUTCOMES = {
    "predicted": "rows of stored prediction batches",
    "outcome": "stored outcomes",
    "matured": "rows whose label became final",
    "archived": "rows in sealed archive files",
    "duplicate": "messages delivered again",
    "late_outcome": "outcomes after their attribution window",
    "unmatched_outcome": "outcomes on rows or requests that were never predicted",
    "dead_letter": "messages that could not be used",
    "passed_over": "requests after their decision point: archived, in no judgement",
}
DRIFT_OUTCOMES = {
    "drift_bucket": "buckets of predictions compared with the training rows",
    "drifted_bucket": "of them, with a column that drifted",
    "outlying_bucket": "of them, with a column whose outliers rose",
    "drift_late_row": "rows too late for their bucket",
    "drift_no_reference_row": "rows of a version whose training rows are not known",
    "drift_too_many_buckets_row": "rows of more buckets at a time than are held",
}
REQUEST_OUTCOMES = ("started", "released", "refused", "failed", "notified")
KPI_GAUGES = {
    "auc": ("rolling_auc", "AUC of the window; absent while undefined"),
    "auc_low": ("rolling_auc_low", "Lower end of the AUC's 95 % interval"),
    "auc_high": ("rolling_auc_high", "Upper end of the AUC's 95 % interval"),
    "log_loss": ("log_loss", "Mean negative log likelihood of the window, nats"),
    "normalized_entropy": ("normalized_entropy", "Log loss divided by the entropy of the window's click rate"),
    "calibration": ("calibration", "Expected clicks per observed click in the window"),
    "calibration_error": ("calibration_error", "Expected calibration error of the window"),
    "ctr": ("click_rate", "Clicks per row of the window"),
    "conversion_rate": ("conversion_rate", "Conversions per row whose conversion window has closed"),
    "hit_rate": ("hit_rate", "Ranked lists with a click among the first k, per list"),
    "ndcg": ("ndcg", "Mean NDCG at k of the ranked lists with a click"),
    "rows": ("window_rows", "Matured rows in the window"),
    "clicks": ("window_clicks", "Clicks in the window"),
}
"""Field of `measures.kpis.Kpis` to name and text."""


def metrics_page(snapshot: Snapshot) -> bytes:
    """The snapshot in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))  # type: ignore[arg-type]  # the stub asks for a base class, the library not
    return generate_latest(registry)


class _Collector:
    def __init__(self, snapshot: Snapshot) -> None:
        self._shown = snapshot

    def collect(self) -> Iterator[Metric]:
        shown = self._shown
        leads = float(shown.is_at_work)
        yield GaugeMetricFamily(PREFIX + "leader", "1 on the replica that holds the lease and has begun", value=leads)
        yield from software(shown)
        if not shown.is_at_work:
            # Zeros here would be counters that fall at each restart, and an alert's rate would see them rise again.
            return
        yield from _kpis(shown)
        yield counters("records", "Records by what became of them", RECORD_OUTCOMES, shown.counters, "")
        yield counters("retrain_requests", "Retraining runs", REQUEST_OUTCOMES, shown.counters, "request_")
        yield counters(
            "drift_checks", "Feature drift: buckets by verdict, rows passed over", DRIFT_OUTCOMES, shown.counters, ""
        )
        yield from _drift(shown.drift)
        yield from _open_labels(shown)
        yield from _decisions(shown)
        for name, text, value in (
            ("last_record_timestamp_seconds", "Time of the newest prediction", shown.last_record_time),
            ("serving_version", "Model version of the newest prediction", shown.serving_version),
            ("log_backlog", "Messages published and not acknowledged; absent where unknown", shown.log_backlog),
            ("log_read_up_to_timestamp_seconds", "Every record published before is in", shown.log_read_up_to),
            ("log_connected", "1 while the log can deliver, idle or not", float(shown.log_problem is None)),
            ("pending_rows", "Rows whose attribution window is open", shown.pending_rows),
            ("auc_threshold", "AUC below which the threshold policy fires; absent without it", shown.threshold),
            ("last_decision_timestamp_seconds", "Event time of the last decision point", shown.decided_at),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield from operations(shown)


def _kpis(shown: Snapshot) -> Iterator[Metric]:
    for field, (name, text) in KPI_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["version"])
        for kpis in shown.windows:
            if (value := getattr(kpis, field)) is not None:
                gauge.add_metric([str(kpis.version)], value)
        yield gauge


def _open_labels(shown: Snapshot) -> Iterator[Metric]:
    for name, text in (
        ("auc", "AUC that the rows with open labels will have, as estimated now"),
        ("auc_low", "Least AUC that the rows with open labels can have"),
        ("auc_high", "Greatest AUC that the rows with open labels can have"),
        ("cbpe_auc", "AUC that the scores of the rows with open labels promise; blind to concept drift"),
    ):
        gauge = GaugeMetricFamily(f"{PREFIX}open_{name}", text, labels=["version"])
        for estimate in shown.open_labels:
            if (value := estimate.get(name)) is not None:
                gauge.add_metric([str(estimate["version"])], value)
        yield gauge


def _drift(drift: Mapping[str, Any] | None) -> Iterator[Metric]:
    labels = ["column"]
    distance = GaugeMetricFamily(PREFIX + "drift_distance", "Distance to the training rows, by column", labels=labels)
    drifted = GaugeMetricFamily(PREFIX + "drifted", "1 where the column drifted, all columns tested", labels=labels)
    outlying = GaugeMetricFamily(PREFIX + "outlying", "1 where outliers rose: a unit or a join broke", labels=labels)
    for row in drift["columns"] if drift else ():
        outlying.add_metric([row["column"]], float(row["outlying"]))
        if row["distance"] is not None:
            distance.add_metric([row["column"]], row["distance"])
            drifted.add_metric([row["column"]], float(row["drifted"]))
    yield distance
    yield drifted
    yield outlying


def _decisions(shown: Snapshot) -> Iterator[Metric]:
    gauge = GaugeMetricFamily(PREFIX + "decision", "1 at what each policy said last", labels=["policy", "action"])
    for decision in shown.decisions:
        gauge.add_metric([decision["policy"], decision["action"]], 1.0)
    yield gauge
