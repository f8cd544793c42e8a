"""The dashboard of retraining: what ran, how the gate judged, what went live, what holds the next run back.

Metrics are the monitor's, which counts the runs that the model store tells of; Kubeflow's own pages show their steps.
"""

from __future__ import annotations

from functools import partial

from monitoring.dashboards.board import Dashboard, Variable
from monitoring.dashboards.model import leaders
from monitoring.dashboards.panels import ALARM_BELOW_ONE, GREEN, RED, YELLOW, Panel, Query, Row

_HERE = 'namespace="$namespace"'
_IN_A_ROW = ((None, GREEN), (1, YELLOW), (2, RED))


def pipeline() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        uid="evergreen-pipeline",
        title="Evergreen / Pipeline",
        description="Retraining runs, the gate's verdicts, releases and rollbacks, budget, notifications.",
        variables=[Variable(name="namespace", series="ctr_monitor_leader", label="namespace", default="evergreen")],
        rows=[Row("Now", _now()), Row("Runs", _runs()), Row("Live", _live()), Row("Acting", _acting())],
        time_from="now-7d",
        refresh="1m",
    )


def _total(name: str, by: str) -> str:
    """The counter of that name as it stands, one series per value of `by`; it outlives restarts of the monitor."""
    return f"max by ({by}) (ctr_monitor_{name}_total{{{_HERE}}})"


def _now() -> list[Panel]:
    stat = partial(Panel, kind="stat", width=4, height=4)
    return [
        stat(
            title="Live version",
            description="The model store's live version. The model dashboard shows which one answers.",
            queries=[Query(leaders("live_version"))],
            unit="none",
            decimals=0,
        ),
        stat(
            title="Live since",
            description="When the live version went live.",
            queries=[Query(f"{leaders('live_since_timestamp_seconds')} * 1000")],
            unit="dateTimeFromNow",
        ),
        stat(
            title="Run under way",
            description="1 while a run that the monitor asked for is under way.",
            queries=[Query(leaders("run_under_way"))],
        ),
        stat(
            title="Budget left",
            description="Runs that the monitor may still ask for within 24 h.",
            queries=[Query(leaders("retrain_budget_left"))],
            steps=((None, RED), (1, YELLOW), (2, GREEN)),
        ),
        stat(
            title="Refused in a row",
            description="Newest runs in the model store that the gate refused, one after the other: no run can better "
            "the live version, or the gate is wrong.",
            queries=[Query(leaders("gate_refusals_in_a_row"))],
            steps=_IN_A_ROW,
        ),
        stat(
            title="Failed in a row",
            description="Newest runs that the monitor asked for and that failed, one after the other.",
            queries=[Query(leaders("failed_runs_in_a_row"))],
            steps=_IN_A_ROW,
        ),
    ]


def _runs() -> list[Panel]:
    return [
        Panel(
            title="Finished runs by verdict",
            description="All runs in the model store, whoever asked for them: released, refused by the gate or for "
            "want of evidence, stopped by the data's checks, refused at deployment, failed.",
            queries=[Query(_total("runs", "verdict"), "{{verdict}}")],
            is_stacked=True,
            width=12,
            decimals=0,
        ),
        Panel(
            title="Runs that the monitor asked for",
            description="Requests by outcome since the state folder was made.",
            queries=[Query(_total("retrain_requests", "outcome"), "{{outcome}}")],
            width=12,
            decimals=0,
        ),
        Panel(
            title="Duration of the last run",
            description="From the start to the end of the newest finished run.",
            queries=[Query(leaders("last_run_duration_seconds"), "duration")],
            unit="s",
            least=0,
        ),
        Panel(
            title="Last run ended",
            description="Age of the newest finished run's end, and how long the run under way has been running.",
            queries=[
                Query(f"time() - {leaders('last_run_end_timestamp_seconds')}", "since the last end"),
                Query(f"time() - {leaders('run_started_timestamp_seconds')}", "under way for"),
            ],
            unit="s",
        ),
        Panel(
            title="Runs without a release, in a row",
            description="Newest runs that the monitor asked for and that released nothing, whatever the reason; of all "
            "runs in the store, those that the gate refused.",
            queries=[
                Query(leaders("runs_without_release_in_a_row"), "without release"),
                Query(leaders("gate_refusals_in_a_row"), "refused by the gate"),
                Query(leaders("failed_runs_in_a_row"), "failed"),
            ],
            least=0,
            decimals=0,
        ),
    ]


def _live() -> list[Panel]:
    return [
        Panel(
            title="Live and serving version",
            description="The store's live version and that of the newest prediction. They differ while a release "
            "reaches the pods and the log; for longer, see the runbook.",
            queries=[
                Query(leaders("live_version"), "live"),
                Query(leaders("serving_version"), "serving"),
            ],
            unit="none",
            decimals=0,
            width=12,
        ),
        Panel(
            title="Promotions by action",
            description="Releases, rollbacks, canaries and their ends, as the model store's journal tells.",
            queries=[Query(_total("promotions", "action"), "{{action}}")],
            decimals=0,
            width=12,
        ),
    ]


def _acting() -> list[Panel]:
    return [
        Panel(
            title="Budget",
            description="Runs left of those that the monitor may ask for within 24 h.",
            queries=[Query(leaders("retrain_budget_left"), "left"), Query(leaders("retrain_budget"), "budget")],
            dashed=["budget"],
            least=0,
            decimals=0,
        ),
        Panel(
            title="Next run held back",
            description="How long cool-down or back-off still hold the next run back; absent while nothing does.",
            queries=[Query(f"{leaders('retrain_blocked_until_timestamp_seconds')} - time()", "held back for")],
            unit="s",
        ),
        Panel(
            title="Corrections",
            description="Rollbacks and shadows that the monitor asked for by its own policies.",
            queries=[Query(_total("corrections", "kind, outcome"), "{{kind}} {{outcome}}")],
            decimals=0,
        ),
        Panel(
            title="Notifications",
            description="Messages to the webhook by outcome, and those that wait; absent without a webhook.",
            queries=[
                Query(_total("notifications", "outcome"), "{{outcome}}"),
                Query(leaders("notifications_waiting"), "waiting"),
            ],
            decimals=0,
            width=12,
        ),
        Panel(
            title="Model store readable",
            description="1 while the monitor can read the model store. Without it, runs and versions are not known.",
            queries=[Query(leaders("model_store_readable"), "readable")],
            kind="stat",
            steps=ALARM_BELOW_ONE,
            width=12,
        ),
    ]
