"""Snapshot of a monitor in which no number is missing, and a parser of its Prometheus metrics."""

from prometheus_client.parser import text_string_to_metric_families

from monitoring.metrics.open_labels import OpenEstimate
from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Action, Decision
from monitoring.retraining.actions import ActionStatus
from monitoring.web.exposition import Snapshot
from monitoring.web.metrics import metrics_page
from monitoring.web.store_status import Disk, LastRun, Promotions, RunCounts, StoreStatus

NOW = 10_000.0
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
    gauc=0.7,
)
EMPTY = Kpis(
    version=4,
    rows=9,
    clicks=0,
    auc=None,
    auc_low=None,
    auc_high=None,
    log_loss=0.1,
    calibration=None,
    ctr=0.0,
)
DRIFT = {
    "bucket_end": 1000.0,
    "version": 3,
    "rows": 5000,
    "columns": [
        {
            "feature": feature,
            "effect": effect,
            "effect_low": effect,
            "effect_high": effect,
            "excess": 0.0,
        }
        | {"p_value": p_value, "q_value": p_value, "drifted": drifted, "outlying": False}
        | {"changes": ["values"] if drifted else [], "missing_before": 0.0, "missing_now": 0.0}
        | {"outliers_now": outliers}
        for feature, effect, p_value, drifted, outliers in (
            ("I1", 0.2, 1e-9, True, 0.01),
            ("C2", 0.01, 0.4, False, None),
            ("C3", None, None, False, None),
        )
    ],
}
DECISION = Decision(
    policy="threshold",
    action=Action.BREACH,
    reason="auc 0.6 < 0.7",
    numbers={"version": 3, "window_version": 3, "threshold": 0.74},
)
OPEN_LABELS = OpenEstimate(
    version=3, open_rows=1200, open_clicks=0, final_at=NOW + 600, auc=0.5, auc_low=0.5, auc_high=0.5
)
LAST_RUN = LastRun(
    run="r",
    state="released",
    step="deployment",
    reason="passed",
    reports=(),
    ended_at=800.0,
    seconds=60.0,
)
FULL = Snapshot(
    recommender="shop",
    time=2000.0,
    windows=(KPIS,),
    last_record_time=1.0,
    log_read_up_to=2.0,
    serving_version=3,
    log_backlog=0,
    drift=DRIFT,
    decisions=(DECISION,),
    decided_at=1990.0,
    open_labels=(OPEN_LABELS,),
    actions=ActionStatus(
        phase="running",
        request_id="drift-1",
        started_at=1500.0,
        daily_budget=4,
        budget_left=1,
        blocked_until=2600.0,
        blocked_by="cooldown",
        failures=3,
        failed=2,
        messages_waiting=5,
    ),
    store_status=StoreStatus(
        promotions=Promotions(
            counts={"release": 3, "rollback": 1},
            live_version=2,
            live_action="rollback",
            live_since=900.0,
        ),
        runs=RunCounts(gate_refusals=2, last_run=LAST_RUN),
        unuploaded_files=4,
        oldest_unuploaded=700.0,
        disks={"lake": Disk(free=3, size=9)},
    ),
)
POINTS = [
    {
        "time": NOW - 300 + 3 * i,
        "version": 3,
        "auc": 0.75 - i / 1000,
        "auc_low": 0.7,
        "auc_high": 0.8,
    }
    for i in range(100)
]
EVENTS = [
    {"time": NOW - 200, "kind": "decision", "text": "auc 0.6 < 0.7"},
    {"time": NOW - 100, "kind": "release", "text": "model version 3 serves: passed the gate"},
    {"time": NOW - 50, "kind": "rollback", "text": "model version 2 serves: it was worse"},
    {"time": NOW - 20, "kind": "archived", "text": "rows in a file"},
]


def samples(snapshot: Snapshot) -> dict[tuple, float]:
    """Map (name, labels) to a number.

    The label `recommender`, which all metrics have, is left out.
    """
    families = text_string_to_metric_families(metrics_page(snapshot).decode())
    found = [sample for family in families for sample in family.samples]
    assert {sample.labels.pop("recommender", "") for sample in found} == {snapshot.recommender}
    return {(s.name, *sorted(s.labels.items())): s.value for s in found}
