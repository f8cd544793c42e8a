"""The demo's one-page report: AUC over time with every event on it, versions, gate, findings, latency.

Self-contained HTML. The numbers are `summary`'s; the lines are drawn by `components.charts.line_chart`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from components.charts.line_chart import Line, Mark, line_chart
from components.contracts.manifests import ValidationReport
from components.runtime.durable import write_whole
from pipelines.local.runner import LocalFolders
from pipelines.local.summary import (
    DemoSummary,
    Lines,
    Observations,
    decision_sentences,
    journal_events,
    memory_sentences,
    serving_sentences,
)

MARKED_EVENTS = {"decision": "decision", "run_started": "run started", "run_ended": "run ended"}
MIN_DRAWN_CLICKS = 10
COLORS = {1: "#2563eb", 2: "#059669", 3: "#9333ea"}

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:980px;padding:16px;color:#111}
h1{font-size:1.5em;margin:.3em 0}h2{font-size:1.1em;margin:1.6em 0 .4em;border-bottom:1px solid #ddd}
svg{width:100%;min-width:660px;height:auto}svg text{font:12px system-ui,sans-serif;fill:#444}svg .mark{font-weight:600}
svg .halo{paint-order:stroke;stroke:#fff;stroke-width:3px}
.note{background:#fffbeb;border:1px solid #fcd34d;border-radius:6px;padding:8px 12px;margin:0 0 12px}
.note ul{margin:.3em 0;padding-left:1.2em}
.grid{stroke:#eee}.level{stroke:#dc2626;stroke-dasharray:6 4}table{border-collapse:collapse;width:100%;
font-size:.92em}
td:first-child{white-space:nowrap}td,th{text-align:left;padding:4px 8px;border-bottom:1px solid #eee;vertical-align:top}
.legend span{margin-right:1.2em}
.legend i{display:inline-block;width:1em;height:.35em;margin-right:.4em;
vertical-align:middle}
.numbers{display:flex;flex-wrap:wrap;gap:10px}.numbers div{border:1px solid #ddd;border-radius:6px;
padding:8px 12px}
.numbers b{display:block;font-size:1.25em}.scroll{overflow-x:auto}.wide table{min-width:660px}
"""


def write_report(observed: Observations, summary: DemoSummary) -> Path:
    """Writes `report.html` into the demo's folder and returns its path."""
    timeline, traffic = observed.timeline, observed.traffic
    events = sorted([*observed.events, *journal_events(observed.folders.store)], key=lambda event: float(event["time"]))
    start = min((line["time"] for line in (*traffic[:1], *timeline[:1], *events[:1])), default=0.0)
    body = [
        "<h1>Evergreen: one turn of the loop</h1>",
        f"<p>{escape(_headline_sentence(summary))}</p>",
        f"<p>{escape(_describe_drift(summary.drift))} {escape(summary.created_at)}.</p>",
        _html_list("What these rows are too few to tell", summary.uncertain),
        _number_boxes(summary),
        "<h2>AUC over time, as the monitor saw it</h2>",
        _auc_chart(observed, events, summary, start=start),
        "<h2>Events</h2>",
        _html_table(
            ["time", "what", "details"],
            [[f"{e['time'] - start:.1f} s", e["kind"].replace("_", " "), e["text"]] for e in events],
        ),
        "<h2>Versions and the gate</h2>",
        _version_table(summary),
        *_sentences(memory_sentences(summary)),
        "<h2>What was served</h2>",
        *_sentences(serving_sentences(summary)),
        "<h2>How it was decided</h2>",
        *_sentences(decision_sentences(summary)),
        _backtest_table(summary.backtests),
        "<h2>What validation found</h2>",
        _validation_findings(observed.folders),
        "<h2>Where the time went</h2>",
        _html_table(
            ["stage", "seconds"], [[name.replace("_", " "), _digits(s)] for name, s in summary.seconds.items()]
        ),
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Evergreen demo</title><style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )
    path = observed.folders.root / "report.html"
    write_whole(path, page)
    return path


def _sentences(sentences: Iterable[str]) -> list[str]:
    return [f"<p>{escape(sentence[0].upper() + sentence[1:])}.</p>" for sentence in sentences]


def _headline_sentence(summary: DemoSummary) -> str:
    auc, trigger = summary.auc, summary.trigger
    if trigger.reason is None:
        return "The monitor saw nothing that it could be sure of, and asked for no run."
    if auc.recovered is None:
        released = any(version.version > 1 for version in summary.versions)
        end = "whose new version came too late to be measured" if released else "which released no new version"
        newest = summary.runs[-1] if summary.runs else None
        why = f": {newest.reason}" if newest and newest.state != "released" else ""
        return f"The monitor asked for a run ({trigger.reason}), {end}{why}."
    share = auc.regained_share
    regained = f"; {share:.0%} of what drift cost is regained" if share is not None else ""
    return (
        f"Drift took the live AUC from {_digits(auc.baseline)} to {_digits(auc.trough)}. The monitor asked for a "
        f"run, the new version serves with an AUC of {_digits(auc.recovered)}{regained}."
    )


def _describe_drift(drift: Mapping[str, Any]) -> str:
    columns = ", ".join(drift.get("columns", ()))
    if drift.get("kind") == "permutation":
        return f"Drift: the values of {columns} change places, at random (seed {drift['seed']})."
    new = ", ".join(drift.get("new_category_columns", ()))
    return f"Drift: what the values of {columns} mean rotates; new values appear in {new}." if columns else ""


def _number_boxes(summary: DemoSummary) -> str:
    bayes, records, requests = summary.bayes_auc or {}, summary.records, summary.requests
    shown = [
        ("requests sent / failed", f"{requests['sent']:,} / {requests['failed']}"),
        ("records published / archived", f"{records.published:,} / {records.archived:,}"),
        ("serving parity, largest difference", _digits(summary.serving_parity_max_abs_diff)),
    ]
    if bayes.get("before") is not None:
        best = f"{_digits(bayes['before'])} / {_digits(bayes.get('after'))}"
        shown.insert(0, ("best possible AUC before / after drift", best))
    if (rollback := summary.rollback) is not None:
        failed = rollback.during.requests_failed
        shown.append(("rollback / requests failed", f"{rollback.seconds:.1f} s / {failed}"))
    for name, words in (("drift_to_detection", "drift to detection"), ("trigger_to_serving", "decision to serving")):
        if (seconds := summary.seconds[name]) is not None:
            shown.append((words, f"{_digits(seconds)} s"))
    return '<div class="numbers">' + "".join(f"<div>{escape(k)}<b>{escape(v)}</b></div>" for k, v in shown) + "</div>"


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
    if (rollback := summary.rollback) is not None:
        for at, words in ((rollback.started_at, "rolled back"), (rollback.forward_at, "forward again")):
            marks.append(Mark(x=at - start, text=words, color="#6d28d9"))
    level = summary.auc.threshold
    return (
        line_chart(lines, y_label="AUC", marks=marks, levels=[(level, f"threshold {level:.3f}")])
        or "<p>No window was full.</p>"
    )


def _version_table(summary: DemoSummary) -> str:
    rows = [
        [
            str(version.version),
            f"{version.trained_rows:,}",
            version.parent or "from scratch",
            version.gate,
            version.reason,
            "" if version.old_auc is None else f"{_digits(version.old_auc)}, {_digits(version.replaced_old_auc)}",
            _digits(version.parity_max_abs_diff),
        ]
        for version in summary.versions
    ]
    old = "AUC on older rows, and of the version it replaced"
    return _html_table(["version", "rows learned from", "parent", "gate", "because", old, "parity"], rows)


def _backtest_table(backtests: Lines) -> str:
    """What each policy alone would have done over the same rows."""
    header = ["policy alone", "runs", "false alarms", "seconds to the first", "rows to it", "held back"]
    rows = [
        [
            each["policies"],
            str(len(each["fires"])),
            _digits(each["false_alarms"]),
            _digits(each["delay_seconds"]),
            "none" if each["delay_rows"] is None else f"{each['delay_rows']:,}",
            str(each["held"]),
        ]
        for each in backtests
    ]
    return _html_table(header, rows) if rows else ""


def _validation_findings(folders: LocalFolders) -> str:
    parts = []
    for path in sorted(folders.artifacts.glob("*/validation/report")):
        report = ValidationReport.read(path)
        parts.append(f"<p>{report.num_rows:,} rows: <b>{escape(report.decision)}</b></p>")
        shown = [f for f in report.findings if f["severity"] != "info"][:15]
        rows = [[f["severity"], f["feature"], f["kind"], f["description"]] for f in shown]
        parts.append(_html_table(["severity", "feature", "kind", "finding"], rows) if rows else "")
        if len(report.findings) > len(shown):
            parts.append(f"<p>{len(report.findings) - len(shown)} more in the step's own report.</p>")
    return "".join(parts)


def _html_list(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<div class="note"><b>{escape(title)}</b><ul>{items}</ul></div>' if items else ""


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll{" wide" if len(header) > 2 else ""}"><table><tr>{head}</tr>{body}</table></div>'


def _digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
