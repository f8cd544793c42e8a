"""Runs, releases, messages and files of the snapshot as Prometheus metrics; what is not known is absent.

The metrics of what is measured and judged are `showing.metrics`'; names are frozen there and here by one test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from components.store import promotion_journal
from monitoring.acting.progress import IDLE, RUNNING
from monitoring.memory.database import VERSION
from monitoring.showing.snapshot import Snapshot, Surroundings
from monitoring.showing.surroundings import VERDICTS

PREFIX = "ctr_monitor_"
PROMOTIONS = tuple(action for action in promotion_journal.ACTIONS if action != promotion_journal.INTENT)
CORRECTIONS = (("rollback", "done"), ("rollback", "failed"), ("shadow", "done"), ("shadow", "failed"))


def software(shown: Snapshot) -> Iterator[Metric]:
    """What runs here, and the loop's last turn; also of a standby."""
    info = GaugeMetricFamily(PREFIX + "info", "1; the versions of this monitor", labels=["version", "state_version"])
    info.add_metric([_version(), str(VERSION)], 1.0)
    yield info
    yield _gauge("last_turn_timestamp_seconds", "When the loop ended a whole turn last", shown.time)


def operations(shown: Snapshot) -> Iterator[Metric]:
    """What was asked for, what came of it, what is live, whom it was told, and what waits."""
    yield from _retraining(shown)
    yield counters("runs", "Finished runs in the store by how they ended", VERDICTS, shown.counters, "run_", "verdict")
    corrections = CounterMetricFamily(
        PREFIX + "corrections", "Rollbacks and shadows that the monitor began", labels=["kind", "outcome"]
    )
    for kind, outcome in CORRECTIONS:
        corrections.add_metric([kind, outcome], shown.counters.get(f"{kind}_{outcome}", 0))
    yield corrections
    yield counters(
        "notifications",
        "Messages to the webhook; dropped: refused, older than a day, or too many",
        ("delivered", "dropped"),
        shown.counters,
        "notification_",
    )
    waiting = shown.retraining.get("told", {}).get("messages_waiting")
    yield _gauge("notifications_waiting", "Messages that wait for the webhook; absent without one", waiting)
    if shown.around is not None:
        yield from _around(shown.around)


def counters(
    name: str, text: str, outcomes: Iterable[str], values: Mapping[str, float], prefix: str, label: str = "outcome"
) -> CounterMetricFamily:
    """A counter by `label`; each outcome's number is kept under its name with `prefix`, 0 until it happens."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for outcome in outcomes:
        family.add_metric([outcome], values.get(prefix + outcome, 0))
    return family


def _retraining(shown: Snapshot) -> Iterator[Metric]:
    doing = shown.retraining
    told, restraint, phase = doing.get("told", {}), doing.get("restraint", {}), doing.get("phase")
    started_at = doing.get("started_at") if phase == RUNNING else None
    for name, text, value in (
        ("retrain_budget", "Most retraining requests in 24 hours", told.get("daily_budget")),
        ("retrain_budget_left", "Of them, what is left now", told.get("budget_left")),
        (
            "retrain_blocked_until_timestamp_seconds",
            "No retraining request before this time; absent while nothing forbids one",
            told.get("blocked_until"),
        ),
        (
            "runs_without_release_in_a_row",
            "Runs that this monitor asked for, in a row, that released nothing",
            restraint.get("failures"),
        ),
        ("failed_runs_in_a_row", "The last of them in a row that failed", restraint.get("failed")),
        ("run_under_way", "1 from a decision to retrain to its end", None if phase is None else phase != IDLE),
        ("run_started_timestamp_seconds", "When the run at work was started; absent without one", started_at or None),
    ):
        yield _gauge(name, text, value)


def _around(around: Surroundings) -> Iterator[Metric]:
    yield _gauge("model_store_readable", "1 while the model store can be read", around.store_problem is None)
    if around.store_problem is None:
        yield counters(
            "promotions", "Lines of the promotion journal", PROMOTIONS, around.promotions, "", label="action"
        )
    since = GaugeMetricFamily(
        PREFIX + "live_since_timestamp_seconds", "When the live version became live, and by what", labels=["action"]
    )
    if around.live_since is not None and around.live_action is not None:
        since.add_metric([around.live_action], around.live_since)
    yield since
    for name, text, value in (
        ("live_version", "Model version that the promotion journal says is live", around.live_version),
        ("gate_refusals_in_a_row", "Runs in a row that the gate refused", around.gate_refusals),
        ("last_run_end_timestamp_seconds", "When the last run in the model store ended", around.last_run_end),
        ("last_run_duration_seconds", "From its first step's start to its end", around.last_run_seconds),
        ("unuploaded_files", "Sealed archive files not in the lake yet", around.unuploaded_files),
        (
            "oldest_unuploaded_timestamp_seconds",
            "When the first of them was written; absent where none waits",
            around.oldest_unuploaded,
        ),
    ):
        yield _gauge(name, text, value)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """A gauge without labels; without a sample where the number does not exist."""
    return GaugeMetricFamily(PREFIX + name, text, value=None if value is None else float(value))


def _version() -> str:
    """Of the installed distribution; empty, as Prometheus writes what is unknown, where only its source lies here."""
    try:
        return version("evergreen")
    except PackageNotFoundError:
        return ""
