"""Export the snapshot as Prometheus metrics.

Metric names are an interface, because dashboards and alert rules query them. A test checks that the
names do not change. `monitoring.metrics` and `monitoring.state.store` document the numbers. A gauge
is absent if its number does not exist. Every metric has the label `recommender`, which
distinguishes several monitors of one installation. Before its first iteration, a monitor exports
only `ctr_monitor_info`, which does not have this label.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from evergreen.registry import promotion_journal
from monitoring.retraining.actions import ActionStatus
from monitoring.retraining.retraining import IDLE
from monitoring.state.database import VERSION
from monitoring.web.exposition import Snapshot
from monitoring.web.store_status import VERDICTS, StoreStatus

_PREFIX = "ctr_monitor_"
PROMOTIONS = tuple(
    action for action in promotion_journal.ACTIONS if action != promotion_journal.INTENT
)
RECORD_OUTCOMES = {
    "predicted": "rows of stored prediction batches",
    "outcome": "stored outcomes",
    "matured": "rows whose label became final",
    "archived": "rows in sealed archive files",
    "duplicate": "messages delivered again",
    "reused_id": "requests with the id of another request, which become dead letters",
    "late_outcome": "outcomes after their attribution window",
    "unmatched_outcome": "outcomes of rows or requests that were never predicted",
    "dead_letter": "messages that could not be used",
    "passed_over": "requests that arrived after their decision point, used in no decision",
}
DRIFT_OUTCOMES = {
    "drift_bucket": "buckets of predictions compared with the training rows",
    "drifted_bucket": "buckets with a column that drifted",
    "outlying_bucket": "buckets with a column whose share of outliers rose",
    "drift_late_row": "rows too late for their bucket",
    "drift_no_reference_row": "rows of a version whose training rows are unknown",
    "drift_too_many_versions_row": "rows of further versions, if a bucket has too many versions",
}
REQUEST_OUTCOMES = ("started", "released", "canary", "evaluated", "refused", "failed", "notified")
_KPI_GAUGES = {
    "auc": ("rolling_auc", "AUC of the window; absent while undefined"),
    "auc_low": ("rolling_auc_low", "Lower end of the AUC's 95 % interval"),
    "auc_high": ("rolling_auc_high", "Upper end of the AUC's 95 % interval"),
    "log_loss": ("log_loss", "Mean negative log likelihood of the window, nats"),
    "normalized_entropy": (
        "normalized_entropy",
        "Log loss divided by the entropy of the window's click rate; 1 is no better than that rate",
    ),
    "calibration": ("calibration", "Expected clicks per observed click in the window; 1 is right"),
    "calibration_error": (
        "calibration_error",
        "Expected calibration error of the window, from 0 to 1",
    ),
    "ctr": ("click_rate", "Clicks per row of the window"),
    "conversion_rate": (
        "conversion_rate",
        "Conversions per row whose conversion window has closed",
    ),
    "gauc": (
        "gauc",
        "Mean AUC within users, weighted by their rows; absent if the recommender names no user",
    ),
    "hit_rate": ("hit_rate", "Ranked lists with a click among the first k, per list"),
    "ndcg": ("ndcg", "Mean NDCG at k of the ranked lists with a click"),
    "rows": ("window_rows", "Matured rows in the window"),
    "clicks": ("window_clicks", "Clicks in the window"),
}
"""Metric name and help text of each field of `metrics.window.Kpis`."""


def metrics_page(snapshot: Snapshot) -> bytes:
    """Render the snapshot in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))  # type: ignore[arg-type]  # the stub requires a base class, the library does not
    return generate_latest(registry)


def described() -> list[tuple[str, tuple[str, ...], str]]:
    """Return each metric's name, labels except `recommender`, and help text, in page order."""
    empty = Snapshot(time=0.0, store_status=StoreStatus())
    return [
        (
            family.name + ("_total" if isinstance(family, CounterMetricFamily) else ""),
            tuple(getattr(family, "_labelnames", ())),
            family.documentation,
        )
        for family in _Collector(empty).collect()
    ]


class _Collector:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        of = {"recommender": self._snapshot.recommender} if self._snapshot.recommender else {}
        for family in self._families():
            family.samples = [
                each._replace(labels={**of, **each.labels}) for each in family.samples
            ]
            yield family

    def _families(self) -> Iterator[Metric]:
        shown = self._snapshot
        info = GaugeMetricFamily(
            _PREFIX + "info", "1; the versions of this monitor", labels=["version", "state_version"]
        )
        info.add_metric([_distribution_version(), str(VERSION)], 1.0)
        yield info
        if shown.time is None:
            # At each restart, counters of 0 would look like resets. After such a reset, the rate in
            # an alert rule would include the same increase again.
            return
        for field, (name, text) in _KPI_GAUGES.items():
            by_version = {str(kpis.version): getattr(kpis, field) for kpis in shown.windows}
            yield _labelled_gauge(name, text, label="version", values=by_version)
        yield _counter(
            "records",
            "Records by outcome",
            outcomes=RECORD_OUTCOMES,
            counts=shown.counters,
        )
        yield _counter(
            "drift_checks",
            "Feature drift: buckets by result, and rows that are in no bucket",
            outcomes=DRIFT_OUTCOMES,
            counts=shown.counters,
        )
        yield from _drift_metrics(shown.drift["columns"] if shown.drift else ())
        yield from _open_label_metrics(shown)
        decisions = GaugeMetricFamily(
            _PREFIX + "decision", "1 at each policy's last decision", labels=["policy", "action"]
        )
        for decision in shown.decisions:
            decisions.add_metric([decision.policy, decision.action.value], 1.0)
        yield decisions
        yield from _loop_metrics(shown)
        yield from _action_metrics(shown.actions or ActionStatus(), shown.counters)
        text = "Finished runs in the model registry by verdict"
        yield _counter("runs", text, outcomes=VERDICTS, counts=shown.counters, label="verdict")
        if shown.store_status is not None:
            yield from _store_metrics(shown.store_status)


_PREFIX_OF_COUNTS = {
    "runs": "run_",
    "retrain_requests": "request_",
    "notifications": "notification_",
}
"""Prefix of the counters that belong to each metric. The name of a counter in the state is the
prefix plus an outcome."""


def _counter(
    name: str,
    text: str,
    *,
    outcomes: Iterable[str],
    counts: Mapping[str, float],
    label: str = "outcome",
) -> CounterMetricFamily:
    """Return a counter with the label `label`. An outcome that never happened has the value 0."""
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for outcome in outcomes:
        family.add_metric([outcome], counts.get(_PREFIX_OF_COUNTS.get(name, "") + outcome, 0))
    return family


def _gauges(*gauges: tuple[str, str, float | None]) -> Iterator[GaugeMetricFamily]:
    """Yield one gauge for each triple of name, help text and number. The gauges have no labels.

    A gauge has no sample if its number does not exist.
    """
    for name, text, value in gauges:
        yield GaugeMetricFamily(_PREFIX + name, text, value=None if value is None else float(value))


def _labelled_gauge(
    name: str, text: str, *, label: str, values: Mapping[str, float | None]
) -> GaugeMetricFamily:
    """Return a gauge with one sample per value of a label.

    A sample whose number is undefined is left out.
    """
    gauge = GaugeMetricFamily(_PREFIX + name, text, labels=[label])
    for key, value in values.items():
        if value is not None:
            gauge.add_metric([key], float(value))
    return gauge


def _loop_metrics(shown: Snapshot) -> Iterator[Metric]:
    yield from _gauges(
        (
            "last_turn_timestamp_seconds",
            "End of the last complete iteration of the loop",
            shown.time,
        ),
        (
            "last_record_timestamp_seconds",
            "Time of the newest prediction",
            shown.last_record_time,
        ),
        ("serving_version", "Model version of the newest prediction", shown.serving_version),
        (
            "log_backlog",
            "Published messages without acknowledgement; absent if the log does not report them",
            shown.log_backlog,
        ),
        (
            "log_read_up_to_timestamp_seconds",
            "All records that were published before this time are read",
            shown.log_read_up_to,
        ),
        (
            "log_connected",
            "1 while the log can deliver, idle or not",
            shown.log_problem is None,
        ),
        ("pending_rows", "Rows whose attribution window is open", shown.pending_rows),
        (
            "set_apart_rows",
            "Rows that could not be archived; the next start tries them again",
            shown.set_apart_rows,
        ),
        (
            "auc_threshold",
            "AUC threshold of the policies; absent if no policy has a threshold",
            shown.threshold,
        ),
        (
            "last_decision_timestamp_seconds",
            "Event time of the last decision point",
            shown.decided_at,
        ),
    )


def _open_label_metrics(shown: Snapshot) -> Iterator[Metric]:
    estimates = {str(estimate.version): estimate for estimate in shown.open_labels}
    for field, text in (
        ("auc", "Estimated AUC of the rows with open labels"),
        ("auc_low", "Lowest AUC that the rows with open labels can have"),
        ("auc_high", "Highest AUC that the rows with open labels can have"),
    ):
        values = {version: getattr(estimate, field) for version, estimate in estimates.items()}
        yield _labelled_gauge(f"open_{field}", text, label="version", values=values)


def _drift_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    compared = [row for row in rows if row["effect"] is not None]
    for name, text, field, counted in (
        (
            "drift_distance",
            "Distance to the training rows: Jensen-Shannon divergence for numbers and the score, "
            "largest change of a category's share for categories",
            "effect",
            compared,
        ),
        (
            "drifted",
            "1 if the column drifted, after adjustment for all tests of the bucket",
            "drifted",
            compared,
        ),
        (
            "outlying",
            "1 if the share of outliers rose, for example because a unit or a join broke",
            "outlying",
            rows,
        ),
    ):
        yield _labelled_gauge(
            name, text, label="column", values={row["feature"]: row[field] for row in counted}
        )


def _action_metrics(actions: ActionStatus, counters: Mapping[str, float]) -> Iterator[Metric]:
    yield _counter(
        "retrain_requests",
        "Runs that the monitor requested",
        outcomes=REQUEST_OUTCOMES,
        counts=counters,
    )
    text = "Messages to the webhook. Messages are dropped after a day, or if too many wait"
    yield _counter("notifications", text, outcomes=("delivered", "dropped"), counts=counters)
    yield from _gauges(
        (
            "notifications_waiting",
            "Messages that wait for the webhook; absent without a webhook",
            actions.messages_waiting,
        ),
        ("retrain_budget", "Runs that may be requested within 24 hours", actions.daily_budget),
        ("retrain_budget_left", "Remaining runs of that budget", actions.budget_left),
        (
            "retrain_blocked_until_timestamp_seconds",
            "No run is requested before this time; absent if a run may start",
            actions.blocked_until,
        ),
        (
            "runs_without_release_in_a_row",
            "Consecutive runs of this monitor that released nothing",
            actions.failures,
        ),
        ("failed_runs_in_a_row", "Consecutive runs of this monitor that failed", actions.failed),
        ("run_under_way", "1 from a decision to retrain to its end", actions.phase != IDLE),
        (
            "run_started_timestamp_seconds",
            "Start of the active run; absent without an active run",
            actions.started_at,
        ),
    )


def _store_metrics(status: StoreStatus) -> Iterator[Metric]:
    yield from _gauges(
        (
            "model_registry_readable",
            "1 while the model registry can be read",
            status.store_problem is None,
        )
    )
    promotions, runs = status.promotions, status.runs
    if status.store_problem is None:
        text = "Lines of the promotion journal by action"
        yield _counter(
            "promotions", text, outcomes=PROMOTIONS, counts=promotions.counts, label="action"
        )
    by_action = {promotions.live_action: promotions.live_since} if promotions.live_action else {}
    text = "Time at which the live version became live, with the action that made it live"
    yield _labelled_gauge("live_since_timestamp_seconds", text, label="action", values=by_action)
    last = runs.last_run
    yield from _gauges(
        (
            "live_version",
            "Live version in the promotion journal",
            promotions.live_version,
        ),
        ("gate_refusals_in_a_row", "Consecutive runs that the gate refused", runs.gate_refusals),
        (
            "last_run_end_timestamp_seconds",
            "End of the last run in the model registry",
            last.ended_at if last else None,
        ),
        (
            "last_run_duration_seconds",
            "Seconds from the first step's start to the end of the last run",
            last.seconds if last else None,
        ),
        (
            "unuploaded_files",
            "Sealed archive files that are not in the lake yet",
            status.unuploaded_files,
        ),
        (
            "oldest_unuploaded_timestamp_seconds",
            "Time of the oldest archive file that is not in the lake; absent if there is none",
            status.oldest_unuploaded,
        ),
    )
    for name, text, field in (
        (
            "disk_free_bytes",
            "Free space on the disk of a folder. Folders of one disk show the same number",
            "free",
        ),
        ("disk_size_bytes", "Size of the disk of a folder", "size"),
    ):
        values = {folder: getattr(disk, field) for folder, disk in status.disks.items()}
        yield _labelled_gauge(name, text, label="folder", values=values)


def _distribution_version() -> str:
    """Return the version of the installed distribution.

    The result is empty if Evergreen runs from source without an installation. Prometheus treats an
    empty label as absent.
    """
    try:
        return version("evergreen")
    except PackageNotFoundError:
        return ""
