"""Write the demo's one-page report.

The report shows the AUC over time with all events, the versions, the gate's checks, the findings
and the latency. `summary` computes the numbers, and `evergreen.reports` draws the page.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from demo.plan import NOTIFY_ONLY
from demo.summary import (
    DemoSummary,
    Lines,
    Observations,
    decision_sentences,
    journal_events,
    serving_sentences,
)
from evergreen.registry.model_cards import ModelCard, card_path
from evergreen.registry.runs import RunOutcome, read_outcomes
from evergreen.reports.events import EventList, ShownEvent, event_list
from evergreen.reports.formats import number
from evergreen.reports.page import (
    Badge,
    Banner,
    Checks,
    Link,
    PageTable,
    Preformatted,
    Text,
    Tiles,
    check_rows,
    html_page,
)
from evergreen.reports.rendering import PageBlock
from evergreen.reports.svg import SERIES, Line, Mark, line_chart
from evergreen.runtime.durable import write_whole
from monitoring.web.page import ROUTINE_EVENTS

_MARKED_EVENTS = {"decision": "decision", "run_started": "run started", "run_ended": "run ended"}
_MIN_DRAWN_CLICKS = 10


def write_report(observed: Observations, summary: DemoSummary) -> Path:
    """Write `report.html` into the demo's folder, and return its path."""
    store, timeline, traffic = observed.folders.store, observed.timeline, observed.traffic
    events = sorted(
        [*observed.events, *journal_events(store)], key=lambda event: float(event["time"])
    )
    start = min((line["time"] for line in (*traffic[:1], *timeline[:1], *events[:1])), default=0.0)
    again = f"evergreen open {shlex.quote(str(observed.folders.root))}"
    back = f'evergreen release rollback --store {shlex.quote(str(store))} --reason "trying it"'
    stages = [
        [name.replace("_", " "), number(seconds)] for name, seconds in summary.seconds.items()
    ]
    checks = _gate_checks(summary, store)
    page = html_page(
        "Evergreen: one turn of the loop",
        first=[
            Banner(
                text=headline_sentence(summary),
                tone="warn" if summary.auc.recovered is None else "good",
            ),
            _auc_chart(observed, events, summary, start=start),
            *([checks[-1]] if checks else []),
            _tiles(summary),
            Text(f"{_describe_drift(summary.drift)} {summary.created_at}."),
            *_warnings("Uncertain for lack of rows", summary.uncertain),
            *_warnings("Warnings of the gate", summary.warnings),
            *_warnings("Changes that would complete the loop", summary.to_complete),
        ],
        sections={
            "Events": [_events(events, start=start)],
            "Versions and the gate": [_versions(summary), *checks[:-1]],
            "Runs": [_run_links(each) for each in read_outcomes(store)],
            "Serving": _sentences(serving_sentences(summary)),
            "Decisions": _sentences(decision_sentences(summary)),
            "Duration of the stages": [
                PageTable(
                    caption="Seconds of each stage",
                    head=["stage", "seconds"],
                    rows=stages,
                    numbers=(1,),
                )
            ],
            "Next steps": [
                Text("Serve the live version and the monitor's page until Ctrl-C:"),
                Preformatted(again),
                Text("Meanwhile, roll back to the previous version:"),
                Preformatted(back),
            ],
        },
    )
    path = observed.folders.root / "report.html"
    write_whole(path, page)
    return path


def _run_links(outcome: RunOutcome) -> Text:
    """Return how the run ended, with links to the reports of its steps.

    The reports are below the folder of this page.
    """
    links: list[object] = []
    for step in outcome.reports:
        address = f"store/runs/{quote(outcome.run)}/{step}_report.html"
        links += [", " if links else "", Link(f"report of {step}", address)]
    return Text(f"{outcome.run}: ", Badge(outcome.state), " ", *links)


def _sentences(sentences: Iterable[str]) -> list[Text]:
    return [Text(f"{sentence[0].upper()}{sentence[1:]}.") for sentence in sentences]


def _warnings(title: str, sentences: Sequence[str]) -> list[Banner]:
    return [Banner(text=title, tone="warn", items=sentences)] if sentences else []


def _events(events: Lines, *, start: float) -> EventList:
    """Return the list of events in order, each with the seconds since `start`."""
    lines = (
        ShownEvent(
            time=float(event["time"]),
            kind=event["kind"],
            text=event["text"],
            after=f"{event['time'] - start:.1f} s",
        )
        for event in events
    )
    return event_list(lines, routine=ROUTINE_EVENTS)


def _gate_checks(summary: DemoSummary, store: Path) -> list[Checks]:
    """Return the gate's checks of each released version, if the registry has the version's card."""
    found = []
    for version in summary.versions:
        path = card_path(store, version.model_id)
        if path.exists():
            caption = f"The gate's checks of version {version.version}: {version.gate}"
            found.append(
                Checks(caption=caption, rows=check_rows(ModelCard.read(path).verdict.checks))
            )
    return found


def headline_sentence(summary: DemoSummary) -> str:
    """Return the result of the drift in one or two sentences."""
    auc, trigger = summary.auc, summary.trigger
    if trigger.reason is None:
        sure = [name for name, seconds in summary.policies.items() if seconds is not None]
        if not sure:
            return "The monitor found no significant change, and requested no run."
        if sure == [NOTIFY_ONLY]:
            return (
                f"The monitor requested no run: {NOTIFY_ONLY} found drifting features, but only "
                "notifies people, and no policy found that the model is worse."
            )
        return (
            f"The monitor requested no run, although {' and '.join(sure)} found a change: the run "
            "was deferred."
        )
    request = f"The monitor requested a run ({trigger.reason})"
    if summary.alarm_came_first:
        request = f"The monitor requested a run before the drift began ({trigger.reason})"
    if auc.recovered is None:
        released = any(version.version > 1 for version in summary.versions)
        end = (
            "whose new version came too late to be measured"
            if released
            else "which released no new version"
        )
        newest = summary.runs[-1] if summary.runs else None
        why = f": {newest.reason}" if newest and newest.state != "released" else ""
        return f"{request}, {end}{why}."
    if summary.alarm_came_first or auc.baseline is None or auc.trough is None:
        return f"{request}, and the new version serves with an AUC of {number(auc.recovered)}."
    share = auc.regained_share
    regained = f"; {share:.0%} of the lost AUC is regained" if share is not None else ""
    return (
        f"Drift reduced the live AUC from {number(auc.baseline)} to {number(auc.trough)}. The "
        "monitor requested a run, and the new version serves with an AUC of "
        f"{number(auc.recovered)}{regained}."
    )


def _describe_drift(drift: Mapping[str, Any]) -> str:
    columns = ", ".join(drift.get("columns", ()))
    if drift.get("kind") == "permutation":
        return (
            f"Drift: the values of {columns} are swapped: categories at random (seed "
            f"{drift['seed']}), numbers with those on the other side of the median."
        )
    new = ", ".join(drift.get("new_category_columns", ()))
    return (
        f"Drift: the meanings of the values of {columns} rotate, and new values appear in {new}."
        if columns
        else ""
    )


def _tiles(summary: DemoSummary) -> Tiles:
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
        shown.append(
            (
                "bad release rolled back after / requests failed",
                f"{bad.rolled_back.seconds:.1f} s / {failed}",
            )
        )
    for name, words in (
        ("drift_to_detection", "drift to detection"),
        ("trigger_to_serving", "decision to serving"),
    ):
        if (seconds := summary.seconds[name]) is not None:
            shown.append((words, f"{number(seconds)} s"))
    return Tiles(dict(shown))


def _auc_chart(
    observed: Observations, events: Lines, summary: DemoSummary, *, start: float
) -> PageBlock:
    lines, timeline = [], observed.timeline
    for version in sorted({t["version"] for t in timeline if t["version"] is not None}):
        # With few clicks, the AUC and its interval are meaningless.
        own = [t for t in timeline if t["version"] == version and t["clicks"] >= _MIN_DRAWN_CLICKS]
        lines.append(
            Line(
                label=f"version {version}",
                color=SERIES[(version - 1) % len(SERIES)],
                x=[t["time"] - start for t in own],
                y=[t["auc"] for t in own],
                low=[t["auc_low"] for t in own],
                high=[t["auc_high"] for t in own],
            )
        )
    marks = [
        Mark(x=e["time"] - start, text=_MARKED_EVENTS[e["kind"]])
        for e in events
        if e["kind"] in _MARKED_EVENTS
    ]
    drifted = next((t["time"] for t in observed.traffic if t["phase"] != "before"), None)
    if drifted is not None:
        marks.append(Mark(x=drifted - start, text="drift", color="var(--mark)"))
    if (bad := summary.bad_release) is not None:
        back_at = bad.rolled_back.started_at + bad.rolled_back.seconds
        for at, words in ((bad.made.started_at, "bad release"), (back_at, "rolled back")):
            marks.append(Mark(x=at - start, text=words, color="var(--series-3)"))
    level = summary.auc.threshold
    levels = [] if level is None else [(level, f"threshold {level:.3f}")]
    return line_chart(
        lines, y_label="AUC with its 95 % interval", marks=marks, levels=levels
    ) or Text("No window was full.")


def _versions(summary: DemoSummary) -> PageTable:
    rows = [
        [
            str(version.version),
            f"{version.trained_rows:,}, up to {version.trained_until[:19]}",
            f"{version.evaluation_rows:,} newer ones",
            version.parent or "from scratch",
            Badge(version.gate),
            number(version.parity_max_abs_diff),
        ]
        for version in summary.versions
    ]
    head = ["version", "training rows", "evaluation rows", "parent", "gate", "parity"]
    return PageTable(caption="Released versions", head=head, rows=rows)
