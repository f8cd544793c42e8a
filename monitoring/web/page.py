"""Status page: one HTML file without script or external asset, readable on a phone.

The page is rendered for each request from the exposition, the time and the recent history. The
history is read from the ends of the monitor's journal files and of the promotion journal. The
history therefore survives a restart, and the loop spends no time on it. `evergreen.reports` renders
the HTML, and `web.server` answers requests.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from evergreen.registry import promotion_journal
from evergreen.reports.events import ShownEvent, event_list
from evergreen.reports.formats import utc_time
from evergreen.reports.page import (
    Banner,
    CheckRow,
    Checks,
    Code,
    Link,
    PageTable,
    Text,
    Tiles,
    facts_table,
    html_page,
)
from evergreen.reports.rendering import PageBlock
from evergreen.reports.svg import SERIES, Line, LineChart, Mark, line_chart
from evergreen.runtime.errors import ContractError
from monitoring.journal import EVENTS_FILE, TIMELINE_FILE
from monitoring.metrics.open_labels import OpenEstimate
from monitoring.metrics.window import Kpis
from monitoring.policies.baking import BakingPolicy
from monitoring.policies.policies import SchedulePolicy
from monitoring.policies.policy import Action, Decision
from monitoring.retraining.actions import ActionStatus
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.server import CARDS, link_to

_REFRESH_SECONDS = 15
_TAIL_BYTES = 2 * 2**20
"""Bytes read from the end of each file. Two MiB contain about 4,000 points of the timeline or 7,000
events. Reading and parsing takes about 30 ms."""
MAX_POINTS = 600
"""Maximum number of points per version in the chart. More points would not be visible on the screen
of a phone."""
_MARKED_EVENTS = {
    "decision": "trigger",
    "release": "release",
    "rollback": "rollback",
    "promote": "promote",
    "drift": "feature drift",
}
"""Kinds of events with a mark in the chart, and the text of the mark."""
ROUTINE_EVENTS = ("archived", "uploaded", "started", "stopped", "drift")
"""Kinds of routine events. The list of events folds routine events. Routine events occur every
minute. If a decision follows from a routine event, the decision has its own event."""
_MAX_EVENTS = 80
"""Maximum number of unfolded lines in the list of events."""
_MAX_DRIFT_ROWS = 12
_UNITS = (
    (120.0, 1.0, "s"),
    (7200.0, 60.0, "min"),
    (172_800.0, 3600.0, "h"),
    (float("inf"), 86_400.0, "d"),
)
"""Units for durations, ascending. Each unit has the exclusive upper limit of its durations in
seconds, its length in seconds, and its name."""


class History(NamedTuple):
    """Recent events and points, oldest first."""

    points: list[dict[str, Any]]
    """Lines of the timeline: `time`, `version`, and the fields of `metrics.window.Kpis`."""
    events: list[dict[str, Any]]
    """Events with `time`, `kind` and `text`: the monitor's own, and the registry's releases and
    rollbacks."""


def read_history(state: Path, store: Path) -> History:
    """Read the newest lines in `state`, and the promotions of the model registry `store`."""
    points = tail(state / TIMELINE_FILE)
    events = tail(state / EVENTS_FILE) + _promotion_events(store)
    return History(_downsampled(points), sorted(events, key=lambda event: float(event["time"])))


def tail(path: Path, num_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the complete JSON lines within the last `num_bytes` of a file.

    The result is empty if the file is missing.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - num_bytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    if size > num_bytes:
        lines = lines[1:]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the line is being written, or is incomplete after a crash
    return found


def _downsampled(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Downsample the points of each version to at most `MAX_POINTS`, including the newest."""
    by_version: dict[int, list[dict[str, Any]]] = {}
    for point in points:
        by_version.setdefault(int(point["version"]), []).append(point)
    found: list[dict[str, Any]] = []
    for of_version in by_version.values():
        every = -(-len(of_version) // MAX_POINTS)
        found += of_version[::-1][::every][::-1]
    return sorted(found, key=lambda point: float(point["time"]))


def _promotion_events(store: Path) -> list[dict[str, Any]]:
    try:
        entries = promotion_journal.read_journal(store)
    except (ContractError, OSError):
        return []  # the release controller reports a corrupt journal, and the page omits it
    return [
        {
            "time": promotion_journal.moment_of(entry.time).timestamp(),
            "kind": entry.action,
            "text": f"model version {entry.version} serves: {entry.reason}",
        }
        for entry in entries
    ]


def status_page(exposition: Exposition, history: History, *, now: float) -> str:
    """Render the page as of `now`, in seconds since the epoch."""
    shown = exposition.snapshot
    foot: list[object] = [
        f"As of {_format_time(now)}; loaded again every {_REFRESH_SECONDS} s. For machines: "
    ]
    for path in ("/status", "/metrics", "/healthz", "/readyz"):
        foot += [Code(path), " "]
    return html_page(
        f"Evergreen monitor {shown.recommender}".rstrip(),
        first=[
            _health_banner(exposition, now),
            _auc_chart(shown, history, now) or Text("No window has an AUC yet."),
            _decisions(shown),
            _tiles(shown, now),
        ],
        sections={
            "Model versions": [_versions(shown.windows, shown.serving_version)],
            "Open labels": [_open_labels(shown.open_labels, now)],
            "Feature drift": _drift(shown.drift, now),
            "Retraining": [_actions(shown, now), *_last_run(shown, now)],
            "Events": [_events(history.events, now), Text(*foot, soft=True)],
        },
        refresh_seconds=_REFRESH_SECONDS,
    )


def _health_banner(exposition: Exposition, now: float) -> Banner:
    last = exposition.snapshot.last_record_time
    if reason := exposition.unhealthy():
        state, text = "bad", f"Not working: {reason}"
    elif reason := exposition.unready():
        state, text = "bad", f"Not ready: {reason}"
    elif last is None:
        state, text = "wait", "Connected to the log; no prediction has arrived yet."
    elif concern := _model_concern(exposition.snapshot, now):
        state, text = concern
    else:
        state, more = _evaluated(exposition.snapshot, now)
        text = f"Working; the newest prediction is {_format_duration(now - last)} old. {more}"
    return Banner(text=text, tone=state, identifier="health")


def _model_concern(shown: Snapshot, now: float) -> tuple[str, str] | None:
    """Return the banner's state and text for the worst problem of the serving version, or None.

    The reason of each policy is in the table of decisions below the banner.
    """
    actions = shown.actions
    policies = {each.action: each.policy for each in reversed(shown.decisions)}
    since = (
        ""
        if actions is None or actions.incident_since is None
        else _format_duration(now - actions.incident_since)
    )
    if policy := policies.get(Action.ROLLBACK):
        return (
            "bad",
            f"Version {shown.serving_version} is bad and must be rolled back (policy {policy}).",
        )
    if policy := policies.get(Action.RETRAIN) or policies.get(Action.HELD):
        phase = "" if actions is None else f" What is being done: {actions.phase}."
        return (
            "bad",
            f"Drift of version {shown.serving_version}{since and f' for {since}'} "
            f"(policy {policy}).{phase}",
        )
    if policy := policies.get(Action.BREACH):
        return (
            "warn",
            f"A drift of version {shown.serving_version} is "
            f"suspected{since and f' for {since}'} (policy {policy}).",
        )
    last = shown.store_status.runs.last_run if shown.store_status else None
    if last is not None and last.state == "failed":
        return (
            "warn",
            f"The last run failed {_format_duration(now - last.ended_at)} ago at {last.step}: "
            f"{last.reason}",
        )
    return None


_WITHOUT_ROWS = (SchedulePolicy.name, BakingPolicy.name)
"""Policies that report OK without evaluating rows: the calendar policy, and the baking policy after
the end of baking."""


def _evaluated(shown: Snapshot, now: float) -> tuple[str, str]:
    """Return the banner's state and text, which say whether the version's rows were evaluated.

    The banner is green only if rows were evaluated. Labels become final one attribution window
    after the prediction, so a newly released version has no final labels yet.
    """
    version, decisions = shown.serving_version, shown.decisions
    if not decisions or shown.decided_at is None:
        return "wait", "Nothing has been evaluated yet: no label is final."
    until = f"rows up to {_format_time(shown.decided_at, now)}"
    if (evaluated := decisions[0].numbers.get("version")) != version:
        return (
            "wait",
            f"Version {version} has not been evaluated yet; the last decision, on {until}, is "
            f"about {evaluated:.0f}.",
        )
    well = [
        each for each in decisions if each.action is Action.OK and each.policy not in _WITHOUT_ROWS
    ]
    if not well:
        return "wait", f"Version {version} could not be evaluated on {until}."
    if (scorer := well[0].numbers.get("window_version")) != version:
        of = "an earlier version" if scorer is None else f"version {scorer:g}"
        text = (
            f"No row of version {version} has matured yet; {until} were evaluated, the newest "
            f"of {of}."
        )
        return "good", text
    return "good", f"Version {version} was evaluated on {until}."


def _tiles(shown: Snapshot, now: float) -> Tiles:
    by_version = {kpis.version: kpis for kpis in shown.windows}
    scorers = [each.numbers.get("window_version") for each in shown.decisions]
    # Until a row of the serving version has matured, show the rows of the previous version.
    measured = [shown.serving_version, *(int(each) for each in scorers if each is not None)]
    serving = next((by_version[version] for version in measured if version in by_version), None)
    whose = (
        ""
        if serving is None or serving.version == shown.serving_version
        else f" of version {serving.version}"
    )
    lag = None if shown.log_read_up_to is None else max(0.0, now - shown.log_read_up_to)
    live = shown.store_status.promotions.live_version if shown.store_status else None
    return Tiles(
        {
            "seen last in the log": _version_link(shown.serving_version, "version "),
            "live by the journal": _version_link(live, "version "),
            f"AUC, 95 %{whose}": _format_band(serving.auc, serving.auc_low, serving.auc_high)
            if serving
            else "undefined",
            f"click rate{whose}": _format_share(serving.ctr if serving else None),
            "log lag": "unknown" if lag is None else _format_duration(lag),
            "messages waiting": "unknown"
            if shown.log_backlog is None
            else f"{shown.log_backlog:,}",
            "rows with open labels": f"{shown.pending_rows:,}",
            "dead letters": f"{int(shown.counters.get('dead_letter', 0)):,}",
            "rows archived": f"{int(shown.counters.get('archived', 0)):,}",
        }
    )


def _version_link(version: int | None, before: str = "") -> Link | str:
    """Return a link to the card of the version's model."""
    return "none yet" if version is None else Link(f"{before}{version}", f"{CARDS}{version}")


def _auc_chart(shown: Snapshot, history: History, now: float) -> LineChart | None:
    versions = sorted({int(point["version"]) for point in history.points})
    if not versions:
        return None
    start = min(float(point["time"]) for point in history.points)
    scale, unit = _unit_of(now - start)
    lines = []
    for number, version in enumerate(versions):
        points = [point for point in history.points if int(point["version"]) == version]
        lines.append(
            Line(
                label=f"version {version}",
                color=SERIES[number % len(SERIES)],
                x=[(float(point["time"]) - now) / scale for point in points],
                y=[point["auc"] for point in points],
                low=[point["auc_low"] for point in points],
                high=[point["auc_high"] for point in points],
            )
        )
    marks = [
        Mark(x=(float(event["time"]) - now) / scale, text=_MARKED_EVENTS[event["kind"]])
        for event in history.events
        if event["kind"] in _MARKED_EVENTS and float(event["time"]) >= start
    ]
    levels = (
        [] if shown.threshold is None else [(shown.threshold, f"threshold {shown.threshold:.3f}")]
    )
    return line_chart(
        lines, y_label="AUC with its 95 % interval", marks=marks, levels=levels, x_unit=unit
    )


def _decisions(shown: Snapshot) -> PageBlock:
    if not shown.decisions:
        return Text("No decision point has passed yet.")
    return Checks(
        caption="What the policies decided", rows=[_check_row(each) for each in shown.decisions]
    )


def _check_row(decision: Decision) -> CheckRow:
    """Return one policy's decision.

    The column for the value shows the number that the policy compares with its limit.
    """
    numbers = decision.numbers
    drifted, threshold = numbers.get("drifted_columns"), numbers.get("threshold")
    auc, low, high = (numbers.get(name) for name in ("auc", "auc_low", "auc_high"))
    value: float | str | None = None
    if drifted is not None:
        value = f"{drifted:g} of {numbers.get('compared_columns'):g} columns"
    elif threshold is not None:
        value = auc
    return CheckRow(
        name=decision.policy,
        value=value,
        interval=None if value is not auc or low is None or high is None else (low, high),
        limit=None if threshold is None else f"AUC at least {_format_number(threshold)}",
        result=decision.action.value,
        detail=f"{decision.reason}.",
    )


def _versions(windows: Sequence[Kpis], serving: int | None) -> PageBlock:
    if not windows:
        return Text("No label is final yet.")
    head = [
        "version",
        "serves",
        "rows",
        "clicks",
        "AUC, 95 %",
        "log loss",
        "norm. entropy",
        "calibration",
        "ECE",
    ]
    rows = []
    for kpis in windows:
        numbers = (kpis.log_loss, kpis.normalized_entropy, kpis.calibration, kpis.calibration_error)
        rows.append(
            [
                _version_link(kpis.version),
                "serving" if kpis.version == serving else "",
                f"{kpis.rows:,}",
                f"{kpis.clicks:,}",
                _format_band(kpis.auc, kpis.auc_low, kpis.auc_high),
                *map(_format_number, numbers),
                *map(_format_share, (kpis.ctr, kpis.conversion_rate)),
                *map(_format_number, (kpis.hit_rate, kpis.ndcg, kpis.gauc)),
            ]
        )
    head += ["click rate", "conversion rate", "hit rate@k", "NDCG@k", "GAUC"]
    return PageTable(
        caption="KPIs of the windows", head=head, rows=rows, numbers=range(2, len(head))
    )


def _open_labels(open_labels: Sequence[OpenEstimate], now: float) -> PageBlock:
    if not open_labels:
        return Text("No row's attribution window is open.")
    rows = [
        [
            estimate.version,
            f"{estimate.open_rows:,}",
            f"{estimate.open_clicks:,}",
            _format_number(estimate.auc),
            "now"
            if estimate.final_at is None
            else f"in {_format_duration(estimate.final_at - now)}",
        ]
        for estimate in open_labels
    ]
    head = ["version", "open rows", "clicks so far", "AUC, estimated", "known"]
    return PageTable(caption="While labels are open", head=head, rows=rows, numbers=range(1, 4))


def _drift(drift: Mapping[str, Any] | None, now: float) -> list[PageBlock]:
    if drift is None:
        return [Text("No bucket of predictions has been evaluated yet.")]
    columns = sorted(drift["columns"], key=_worst_first)
    num_drifted = sum(bool(row["drifted"]) for row in columns)
    summary = (
        f"{num_drifted} of {len(columns)} columns drifted in the {drift['rows']:,} predictions "
        "up to "
        f"{_format_time(drift['bucket_end'], now)}, against the training rows of version "
        f"{drift['version']}."
    )
    rows = [
        [
            row["feature"],
            ", ".join(row["changes"]),
            _format_effect(row),
            "< 0.001"
            if row["q_value"] is not None and row["q_value"] < 0.001
            else _format_number(row["q_value"]),
            f"{_format_share(row['missing_before'])} to {_format_share(row['missing_now'])}",
            _format_share(row["outliers_now"]),
        ]
        for row in columns[: max(_MAX_DRIFT_ROWS, num_drifted)]
    ]
    head = ["column", "change", "effect [95 %]", "q", "missing", "outliers"]
    return [Text(summary), PageTable(caption="Columns", head=head, rows=rows)]


def _format_effect(row: Mapping[str, Any]) -> str:
    """Format the effect with its interval, and as a multiple of the limit."""
    if row["effect"] is None:
        return _format_number(None)
    interval = f"[{_format_number(row['effect_low'])}, {_format_number(row['effect_high'])}]"
    times = f", {row['excess']:.1f} times the limit" if row["excess"] else ""
    return f"{_format_number(row['effect'])} {interval}{times}"


def _worst_first(row: Mapping[str, Any]) -> tuple[bool, float, float]:
    p_value = row["p_value"]
    quiet = not row["drifted"] and not row["outlying"]
    return (quiet, 1.0 if p_value is None else p_value, -(row["effect"] or 0.0))


def _actions(shown: Snapshot, now: float) -> PageTable:
    status = shown.actions or ActionStatus()
    facts = {"request": f"{status.phase} {status.request_id or ''}"}
    if status.blocked_until is not None:
        wait = _format_duration(status.blocked_until - now)
        facts["next request"] = f"in {wait} at the earliest: {status.blocked_by}"
    if status.daily_budget is not None:
        facts["budget left today"] = f"{status.budget_left} of {status.daily_budget} requests"
    if status.incident_since is not None:
        facts["drifted since"] = (
            f"{_format_duration(now - status.incident_since)} ago: {status.last_action}"
        )
    if status.messages_waiting is not None:
        facts["messages waiting"] = str(status.messages_waiting)
    return facts_table(facts, caption="Requests")


def _last_run(shown: Snapshot, now: float) -> list[PageBlock]:
    """Describe how the last run ended, and link to the reports of its steps."""
    last = shown.store_status.runs.last_run if shown.store_status else None
    if last is None:
        return []
    text = f"Run {last.run}: {last.state} at {last.step}, {_format_time(last.ended_at, now)}. "
    links: list[object] = []
    for step in last.reports:
        links += [" " if not links else ", ", Link(f"report of {step}", link_to(last.run, step))]
    return [Text(text, last.reason, *links, identifier="last-run")]


def _events(events: Sequence[Mapping[str, Any]], now: float) -> PageBlock:
    """Return the list of events, newest first."""
    return event_list(_lines(events, now), routine=ROUTINE_EVENTS) if events else Text("None yet.")


def _lines(events: Sequence[Mapping[str, Any]], now: float) -> Iterator[ShownEvent]:
    """Yield a line for each series of similar events, newest first, up to `_MAX_EVENTS`."""
    prominent = 0
    for _, group in groupby(reversed(events), key=_alike):
        newest, *others = group
        kind, text, time = str(newest["kind"]), str(newest["text"]), float(newest["time"])
        age = f"{_format_duration(now - time)} ago"
        yield ShownEvent(time=time, kind=kind, text=text, times=len(others) + 1, after=age)
        prominent += kind not in ROUTINE_EVENTS
        if prominent == _MAX_EVENTS:
            return


def _alike(event: Mapping[str, Any]) -> tuple[str, frozenset[str], tuple[str, ...]]:
    """Return a key for an event without its measured numbers. Similar events have equal keys.

    The key contains the kind of the event, the words of its text without numbers, and the versions
    in its text.
    """
    words = (word.strip("(),.:;") for word in str(event["text"]).split())
    named = frozenset(word for word in words if not word[:1].isdigit())
    return str(event["kind"]), named, tuple(re.findall(r"version (\d+)", str(event["text"])))


def _format_time(time: float, now: float | None = None) -> str:
    """Format a time in UTC. If `now` is given, add how long ago the time was."""
    text = utc_time(time)
    return text if now is None else f"{text}, {_format_duration(now - time)} ago"


def _format_band(value: float | None, low: float | None, high: float | None) -> str:
    return _format_number(value) + (
        f" ({_format_number(low)} .. {_format_number(high)})" if low is not None else ""
    )


def _format_number(value: float | None) -> str:
    return (
        "undefined"
        if value is None
        else f"{value:.3f}"
        if 0.0005 <= abs(value) < 100
        else f"{value:.3g}"
    )


def _format_share(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.3g} %"


def _format_duration(seconds: float) -> str:
    scale, unit = _unit_of(seconds)
    return f"{seconds / scale:.0f} {unit}"


def _unit_of(seconds: float) -> tuple[float, str]:
    return next((scale, unit) for longest, scale, unit in _UNITS if abs(seconds) < longest)
