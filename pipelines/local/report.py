"""The demo's one-page report: AUC over time with every event on it, versions, gate, findings, latency.

The numbers are `summary`'s; page, tables and lines are drawn by `components.charts`.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.charts.page import Line, Mark, html_page, line_chart, number, text_table, utc_time
from components.runtime.durable import write_whole
from components.store.runs import RunOutcome, read_outcomes
from pipelines.local.plan import NOTIFY_ONLY
from pipelines.local.summary import (
    DemoSummary,
    Lines,
    Observations,
    decision_sentences,
    journal_events,
    serving_sentences,
)

MARKED_EVENTS = {"decision": "decision", "run_started": "run started", "run_ended": "run ended"}
ROUTINE_EVENTS = ("drift", "archived")
MIN_DRAWN_CLICKS = 10
COLORS = {1: "#2563eb", 2: "#059669", 3: "#9333ea"}


def write_report(observed: Observations, summary: DemoSummary) -> Path:
    """Writes `report.html` into the demo's folder and returns its path."""
    timeline, traffic = observed.timeline, observed.traffic
    events = sorted([*observed.events, *journal_events(observed.folders.store)], key=lambda event: float(event["time"]))
    start = min((line["time"] for line in (*traffic[:1], *timeline[:1], *events[:1])), default=0.0)
    happened = fold_repeated(events, start=start)
    again = escape(f"evergreen open {shlex.quote(str(observed.folders.root))}")
    back = escape(f'evergreen rollback --store {shlex.quote(str(observed.folders.store))} --reason "trying it"')
    stages = [[name.replace("_", " "), number(seconds)] for name, seconds in summary.seconds.items()]
    page = html_page(
        "Evergreen: one turn of the loop",
        intro=f"<p>{escape(headline_sentence(summary))}</p>"
        f"<p>{escape(_describe_drift(summary.drift))} {escape(summary.created_at)}.</p>"
        + _banner("What these rows are too few to tell", summary.uncertain)
        + _banner("What the gate warns of", summary.warnings)
        + _banner("What would make the loop turn", summary.to_turn)
        + _number_boxes(summary),
        sections={
            "AUC over time, as the monitor saw it": _auc_chart(observed, events, summary, start=start),
            "Events": text_table(["after", "time", "what", "details"], happened, caption="What happened, in order"),
            "Versions and the gate": _version_table(summary),
            "Runs": "".join(map(_run_links, read_outcomes(observed.folders.store))),
            "What was served": _sentences(serving_sentences(summary)),
            "How it was decided": _sentences(decision_sentences(summary)),
            "Where the time went": text_table(["stage", "seconds"], stages, caption="Seconds of each stage"),
            "Afterwards": f"<p>This serves the live version and the monitor's page until Ctrl-C:</p><pre>{again}</pre>"
            f"<p>Meanwhile this goes back to the version before it:</p><pre>{back}</pre>",
        },
    )
    path = observed.folders.root / "report.html"
    write_whole(path, page)
    return path


def _run_links(outcome: RunOutcome) -> str:
    """How the run ended, with its steps' reports, which lie below this page's folder."""
    links = (
        f'<a href="store/runs/{quote(outcome.run)}/{quote(step)}_report.html">report of {escape(step)}</a>'
        for step in outcome.reports
    )
    return f"<p>{escape(outcome.run)}: {escape(outcome.state)}. {', '.join(links)}</p>"


def _sentences(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence[0].upper() + sentence[1:])}.</p>" for sentence in sentences)


def _banner(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="banner"><b>{title}</b><ul>{items}</ul></div>' if items else ""


def fold_repeated(events: Lines, *, start: float) -> list[list[str]]:
    """Rows of the table of events: when since `start`, what, details.

    Events of a routine kind that lie between two others are one row, with their number and the details of the first.
    """
    rows: list[list[str]] = []
    for is_routine, stretch in groupby(events, key=lambda event: event["kind"] in ROUTINE_EVENTS):
        kinds: dict[Any, list[Mapping[str, Any]]] = {}
        for place, event in enumerate(stretch):
            kinds.setdefault(event["kind"] if is_routine else place, []).append(event)
        for same in kinds.values():
            begin, end = (f"{event['time'] - start:.1f}" for event in (same[0], same[-1]))
            what = same[0]["kind"].replace("_", " ")
            when, what = (
                (f"{begin} s", what) if len(same) == 1 else (f"{begin} to {end} s", f"{what}, {len(same)} times")
            )
            rows.append([when, utc_time(same[0]["time"]), what, same[0]["text"]])
    return rows


def headline_sentence(summary: DemoSummary) -> str:
    """What became of the change, in a sentence or two."""
    auc, trigger = summary.auc, summary.trigger
    if trigger.reason is None:
        sure = [name for name, seconds in summary.policies.items() if seconds is not None]
        if not sure:
            return "The monitor saw nothing that it could be sure of, and asked for no run."
        if sure == [NOTIFY_ONLY]:
            return (
                f"The monitor asked for no run: {NOTIFY_ONLY} was sure that features moved, and only notifies people; "
                "no policy was sure that the model is worse."
            )
        return f"The monitor asked for no run, though {' and '.join(sure)} confirmed a change: the run was held back."
    asked = f"The monitor asked for a run ({trigger.reason})"
    if summary.alarm_came_first:
        asked = f"The monitor asked for a run before anything was changed ({trigger.reason})"
    if auc.recovered is None:
        released = any(version.version > 1 for version in summary.versions)
        end = "whose new version came too late to be measured" if released else "which released no new version"
        newest = summary.runs[-1] if summary.runs else None
        why = f": {newest.reason}" if newest and newest.state != "released" else ""
        return f"{asked}, {end}{why}."
    if summary.alarm_came_first or auc.baseline is None or auc.trough is None:
        return f"{asked}, and the new version serves with an AUC of {number(auc.recovered)}."
    share = auc.regained_share
    regained = f"; {share:.0%} of what drift cost is regained" if share is not None else ""
    return (
        f"Drift took the live AUC from {number(auc.baseline)} to {number(auc.trough)}. The monitor asked for a "
        f"run, the new version serves with an AUC of {number(auc.recovered)}{regained}."
    )


def _describe_drift(drift: Mapping[str, Any]) -> str:
    columns = ", ".join(drift.get("columns", ()))
    if drift.get("kind") == "permutation":
        return (
            f"Drift: the values of {columns} change places: categories at random (seed {drift['seed']}), numbers with "
            "those on the other side of the median."
        )
    new = ", ".join(drift.get("new_category_columns", ()))
    return f"Drift: what the values of {columns} mean rotates; new values appear in {new}." if columns else ""


def _number_boxes(summary: DemoSummary) -> str:
    bayes, records, requests = summary.bayes_auc or {}, summary.records, summary.requests
    shown = [
        ("requests sent / failed", f"{requests['sent']:,} / {requests['failed']}"),
        ("records published / archived", f"{records.published:,} / {records.archived:,}"),
        ("serving parity, largest difference", number(summary.serving_parity_max_abs_diff)),
    ]
    if bayes.get("before") is not None:
        best = f"{number(bayes['before'])} / {number(bayes.get('after'))}"
        shown.insert(0, ("best possible AUC before / after drift", best))
    if (bad := summary.bad_release) is not None:
        failed = bad.during.requests_failed
        shown.append(("bad release taken back after / requests failed", f"{bad.taken_back.seconds:.1f} s / {failed}"))
    for name, words in (("drift_to_detection", "drift to detection"), ("trigger_to_serving", "decision to serving")):
        if (seconds := summary.seconds[name]) is not None:
            shown.append((words, f"{number(seconds)} s"))
    return '<div class="tiles">' + "".join(f"<div>{escape(k)}<b>{escape(v)}</b></div>" for k, v in shown) + "</div>"


def _auc_chart(observed: Observations, events: Lines, summary: DemoSummary, *, start: float) -> str:
    lines, timeline = [], observed.timeline
    for version in sorted({t["version"] for t in timeline if t["version"] is not None}):
        # With a handful of clicks the AUC is anything, and its interval not to be believed.
        own = [t for t in timeline if t["version"] == version and t["clicks"] >= MIN_DRAWN_CLICKS]
        lines.append(
            Line(
                label=f"version {version}, with 95 % interval",
                color=COLORS.get(version, "#666"),
                x=[t["time"] - start for t in own],
                y=[t["auc"] for t in own],
                low=[t["auc_low"] for t in own],
                high=[t["auc_high"] for t in own],
            )
        )
    marks = [
        Mark(x=e["time"] - start, text=MARKED_EVENTS[e["kind"]], color="#92400e")
        for e in events
        if e["kind"] in MARKED_EVENTS
    ]
    drifted = next((t["time"] for t in observed.traffic if t["phase"] != "before"), None)
    if drifted is not None:
        marks.append(Mark(x=drifted - start, text="drift", color="#dc2626"))
    if (bad := summary.bad_release) is not None:
        back_at = bad.taken_back.started_at + bad.taken_back.seconds
        for at, words in ((bad.made.started_at, "bad release"), (back_at, "taken back")):
            marks.append(Mark(x=at - start, text=words, color="#6d28d9"))
    level = summary.auc.threshold
    levels = [] if level is None else [(level, f"threshold {level:.3f}")]
    return line_chart(lines, y_label="AUC", marks=marks, levels=levels) or "<p>No window was full.</p>"


def _version_table(summary: DemoSummary) -> str:
    rows = [
        [
            str(version.version),
            f"{version.trained_rows:,}, up to {version.learned_until[:19]}",
            f"{version.judged_rows:,} newer ones",
            version.parent or "from scratch",
            version.gate,
            version.reason,
            number(version.parity_max_abs_diff),
        ]
        for version in summary.versions
    ]
    head = ["version", "rows learned from", "rows judged by", "parent", "gate", "because", "parity"]
    return text_table(head, rows, caption="Released versions and what the gate said of them")
