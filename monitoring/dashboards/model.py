"""The dashboard of the models: how good each version is, how sure that is, what has drifted, what was decided.

Metrics are the monitor's; what each number means is documented in docs/monitor.md and docs/observability.md. A stand-by
replica shows none of them: `max` over replicas is the leader's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from monitoring.dashboards.board import Dashboard, Variable
from monitoring.dashboards.panels import ALARM_ABOVE_ZERO, ALARM_BELOW_ONE, GREEN, RED, YELLOW, Panel, Query, Row

_HERE = 'namespace="$namespace"'
_VERSION = f'{_HERE},version=~"$version"'


def model() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        uid="evergreen-model",
        title="Evergreen / Model",
        description="The monitor: quality by version, open labels, drift, decisions, the record log.",
        variables=[
            Variable(name="namespace", series="ctr_monitor_leader", label="namespace", default="evergreen"),
            Variable(name="version", series=f"ctr_monitor_window_rows{{{_HERE}}}", label="version"),
        ],
        rows=[
            Row("Now", _now()),
            Row("Quality by version, over the window of matured rows", _quality()),
            Row("Rows whose labels are still open", _open_labels()),
            Row("Feature drift and decisions", _drift()),
            Row("Record log", _log()),
        ],
        time_from="now-24h",
    )


def leaders(name: str, *by: str, where: str = _HERE) -> str:
    """The leader's gauge of that name, one series per value of the labels `by`."""
    over = f"max by ({', '.join(by)}) " if by else "max"
    return f"{over}(ctr_monitor_{name}{{{where}}})"


def per_second(name: str, by: str) -> str:
    """Rate of the counter of that name, one series per value of `by`."""
    return f"sum by ({by}) (rate(ctr_monitor_{name}_total{{{_HERE}}}[$__rate_interval]))"


def _by_version(title: str, description: str, name: str, unit: str = "short", width: int = 6) -> Panel:
    query = Query(leaders(name, "version", where=_VERSION), "v{{version}}")
    return Panel(title=title, description=description, queries=[query], unit=unit, width=width)


def _now() -> list[Panel]:
    stat = partial(Panel, kind="stat", width=4, height=4)
    return [
        stat(
            title="Serving version",
            description="Model version of the newest prediction in the log.",
            queries=[Query(leaders("serving_version"))],
            unit="none",
            decimals=0,
        ),
        stat(
            title="AUC",
            description="AUC of the chosen versions over the window; undefined until it holds clicks and non-clicks.",
            queries=[Query(leaders("rolling_auc", "version", where=_VERSION), "v{{version}}")],
            decimals=3,
        ),
        stat(
            title="Drifted columns",
            description="Columns that drifted in the newest bucket, all tests of the bucket adjusted together.",
            queries=[Query(f"sum({leaders('drifted', 'column')})")],
            steps=((None, GREEN), (1, YELLOW), (4, RED)),
        ),
        stat(
            title="Newest record",
            description="Age of the newest prediction: no traffic, or clients that do not publish.",
            queries=[Query(f"time() - {leaders('last_record_timestamp_seconds')}")],
            unit="s",
            steps=((None, GREEN), (600, YELLOW), (3600, RED)),
        ),
        stat(
            title="Log connected",
            description="1 while the log can deliver, idle or not.",
            queries=[Query(leaders("log_connected"))],
            steps=ALARM_BELOW_ONE,
        ),
        stat(
            title="Leaders",
            description="Replicas that hold the lease and act. None for more than a lease's length: nobody monitors.",
            queries=[Query(f"sum(ctr_monitor_leader{{{_HERE}}})")],
            steps=ALARM_BELOW_ONE,
        ),
    ]


def _quality() -> list[Panel]:
    band = [
        Query(leaders("rolling_auc", where=_VERSION), "AUC"),
        Query(leaders("rolling_auc_high", where=_VERSION), "upper end"),
        Query(leaders("rolling_auc_low", where=_VERSION), "lower end"),
        Query(leaders("auc_threshold"), "threshold"),
    ]
    return [
        Panel(
            title="AUC of version $version",
            description="With its 95 % interval (DeLong). The threshold policy fires when all of the interval lies "
            "below the threshold, several times in a row.",
            queries=band,
            band=("upper end", "lower end"),
            dashed=["threshold"],
            repeat="version",
            width=24,
            height=8,
            decimals=3,
        ),
        _by_version("Log loss", "Mean negative log likelihood, nats. Lower is better.", "log_loss"),
        _by_version(
            "Normalized entropy",
            "Log loss divided by that of always predicting the click rate: at 1 the model knows nothing.",
            "normalized_entropy",
        ),
        _by_version(
            "Calibration",
            "Expected clicks per observed click: 1 is right, 1.1 promises a tenth too many.",
            "calibration",
        ),
        _by_version(
            "Calibration error",
            "Expected calibration error: mean distance between promised and observed click rate, by bins of score.",
            "calibration_error",
            "percentunit",
        ),
        _by_version("Click rate", "Clicks per row of the window.", "click_rate", "percentunit"),
        _by_version(
            "Conversion rate",
            "Conversions per row whose conversion window has closed; absent where nobody tells of conversions.",
            "conversion_rate",
            "percentunit",
        ),
        _by_version(
            "Hit rate",
            "Ranked lists with a click among the first k, per list; absent where clients send no lists.",
            "hit_rate",
            "percentunit",
        ),
        _by_version("NDCG", "Mean NDCG at k of the ranked lists with a click; absent without lists.", "ndcg"),
        _window(),
    ]


def _window() -> Panel:
    return Panel(
        title="Size of the window",
        description="Matured rows and clicks that the numbers above are made of. Few clicks: wide intervals.",
        queries=[
            Query(leaders("window_rows", "version", where=_VERSION), "rows v{{version}}"),
            Query(leaders("window_clicks", "version", where=_VERSION), "clicks v{{version}}"),
        ],
        width=24,
        height=6,
    )


def _open_labels() -> list[Panel]:
    return [
        Panel(
            title="AUC that version $version will have",
            description="Of rows whose attribution window is open: estimated from the delays of matured clicks, with "
            "the least and the greatest value that the open labels still allow. The bounds are hard and wide.",
            queries=[
                Query(leaders("open_auc", where=_VERSION), "estimate"),
                Query(leaders("open_auc_high", where=_VERSION), "greatest"),
                Query(leaders("open_auc_low", where=_VERSION), "least"),
                Query(leaders("open_cbpe_auc", where=_VERSION), "promised by the scores alone"),
            ],
            band=("greatest", "least"),
            repeat="version",
            width=24,
            height=8,
            least=0,
            most=1,
        ),
        Panel(
            title="Open rows",
            description="Rows whose attribution window is open.",
            queries=[Query(leaders("pending_rows"), "rows")],
            width=24,
            height=5,
        ),
    ]


def _drift() -> list[Panel]:
    return [
        Panel(
            title="Drift by column",
            description="The newest closed bucket against the training rows of the version that served it. Distance: "
            "Jensen-Shannon for integers and the score, L-infinity for categories. Outlying: outliers rose, which is "
            "a broken unit or join rather than new behaviour.",
            queries=[Query(leaders(name, "column")) for name in ("drift_distance", "drifted", "outlying")],
            kind="table",
            columns={"column": "Column", "Value #A": "Distance", "Value #B": "Drifted", "Value #C": "Outlying"},
            height=12,
            decimals=3,
            steps=ALARM_ABOVE_ZERO,
        ),
        Panel(
            title="Columns that drifted, over time",
            description="Number of columns by verdict. The data_drift policy asks for several, in several buckets "
            "in a row.",
            queries=[
                Query(f"sum({leaders('drifted', 'column')})", "drifted"),
                Query(f"sum({leaders('outlying', 'column')})", "outlying"),
            ],
            height=12,
            least=0,
            decimals=0,
        ),
        Panel(
            title="What each policy said last",
            description="Policy and its action at the last decision point. The reason and the numbers are on the "
            "monitor's status page.",
            queries=[Query(f"{leaders('decision', 'policy', 'action')} == 1")],
            kind="table",
            columns={"policy": "Policy", "action": "Action"},
            height=12,
        ),
        Panel(
            title="Drift checks",
            description="Buckets per second by verdict, and rows that no bucket took.",
            queries=[Query(per_second("drift_checks", "outcome"), "{{outcome}}")],
            unit="cps",
            width=12,
        ),
        Panel(
            title="Decision lag",
            description="Age of the last decision point in event time. Grows while the log stands still.",
            queries=[Query(f"time() - {leaders('last_decision_timestamp_seconds')}", "lag")],
            unit="s",
            width=6,
        ),
        Panel(
            title="Turn of the loop",
            description="How long ago the loop ended a whole turn, by replica. A loop that hangs is restarted by its "
            "liveness probe.",
            queries=[
                Query(f"time() - max by (pod) (ctr_monitor_last_turn_timestamp_seconds{{{_HERE}}})", "{{pod}}"),
            ],
            unit="s",
            width=6,
        ),
    ]


def _log() -> Sequence[Panel]:
    return [
        Panel(
            title="Log lag",
            description="Until when every record is in, as age; and messages published but not acknowledged, where the "
            "log can tell.",
            queries=[Query(f"time() - {leaders('log_read_up_to_timestamp_seconds')}", "lag")],
            unit="s",
        ),
        Panel(
            title="Backlog",
            description="Messages published and not acknowledged; absent where the log cannot tell.",
            queries=[Query(leaders("log_backlog"), "messages")],
        ),
        Panel(
            title="Dead letters",
            description="Messages that could not be used, since the state folder was made. Read them with "
            "`evergreen log dead-letters list`.",
            queries=[Query(f'max(ctr_monitor_records_total{{{_HERE},outcome="dead_letter"}})', "messages")],
            steps=ALARM_ABOVE_ZERO,
        ),
        Panel(
            title="Records by outcome",
            description="Rows and messages per second by what became of them.",
            queries=[Query(per_second("records", "outcome"), "{{outcome}}")],
            unit="cps",
            width=16,
        ),
        Panel(
            title="Files not uploaded",
            description="Sealed archive files that are not in the lake yet.",
            queries=[Query(leaders("unuploaded_files"), "files")],
            width=4,
        ),
        Panel(
            title="Oldest of them",
            description="Age of the oldest file that is not in the lake; absent while there is none.",
            queries=[Query(f"time() - {leaders('oldest_unuploaded_timestamp_seconds')}", "age")],
            unit="s",
            width=4,
        ),
    ]
