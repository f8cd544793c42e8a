"""The demo's numbers: read from what every process wrote, put into sentences, and held against what the demo promises.

Sources are the monitor's timeline, events and decisions, the traffic's lines (one a second), the promotion journal and
the runs' notes. What does not exist is None. Drawing the page is `report`'s.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from demo.plan import SEQUENTIAL, DemoPlan, read_verdicts
from demo.runner import LocalFolders
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model, Release, Verdict
from evergreen.registry.models import read_release
from evergreen.registry.promotion_journal import INTENT, LIVE_ACTIONS, RELEASE, moment_of, read_entries, read_journal
from evergreen.registry.runs import RunOutcome, read_notes, read_outcomes
from evergreen.runtime.errors import flags_to_run_again
from evergreen.storage.uris import local_path

MIN_REGAINED_SHARE = 0.7
MAX_PARITY_DIFFERENCE = 1e-5
MAX_TAKE_BACK_SECONDS = 60.0
WIDE_INTERVAL = 0.06
"""Width of a 95 % interval of the AUC above which a measured AUC is called uncertain."""
SECONDS_BESIDE_RELEASE = 10
"""Seconds of traffic before and after a release with which it is compared."""

Lines = Sequence[Mapping[str, Any]]
"""Lines of a JSON-lines file, as their writer defines them."""


@dataclass(frozen=True, kw_only=True)
class LiveChange:
    """One change of the live version under traffic; times are since the epoch."""

    version: int
    """Live by it."""
    started_at: float
    seconds: float
    """How long it took."""
    why: str
    """The journal's reason."""
    answered_at: float | None = None
    """End of the first second in which this version alone answered; None where that was not awaited, or never came."""


@dataclass(frozen=True, kw_only=True)
class VerifiedVersion:
    """What `evergreen verify` found of one version."""

    version: int
    same: bool
    num_rows: int
    num_different: int
    max_abs_diff: float | None
    wrong_checks: list[str]
    """Names of the hashes that differ from the released ones."""


@dataclass(frozen=True, kw_only=True)
class ReplayedDecisions:
    """What `evergreen replay` found of the decisions, made again from the lake's rows."""

    points: int
    equal: bool
    """Whether all are those that the monitor wrote."""
    digest: str
    late_requests: int = 0
    """Requests that reached the monitor after their decision point: the lake has them, the decision had not."""
    late_rows: int = 0
    """Rows that reached it after their bucket of features had closed."""

    @property
    def could_differ(self) -> bool:
        """Whether the lake holds rows that a decision did not know, as where a busy machine delays a record."""
        return bool(self.late_requests or self.late_rows)


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What the demo's processes wrote and the demo saw."""

    folders: LocalFolders
    plan: DemoPlan
    timeline: Lines
    """The monitor's windows over time."""
    events: Lines
    """The monitor's events."""
    decisions: Lines
    """The monitor's decisions, one line per decision point."""
    traffic: Lines
    """The replay's lines, one a second."""
    traffic_summary: Mapping[str, Any]
    stage_seconds: Mapping[str, float]
    planted: Sequence[LiveChange] = ()
    """A bad release and the way back; empty = none was shown."""
    verified: Sequence[VerifiedVersion] = ()
    replayed: ReplayedDecisions | None = None

    @property
    def drift_time(self) -> float | None:
        """When the world changed; None = it did not."""
        time: float | None = self.traffic_summary["drift_time"]
        return time


@dataclass(frozen=True, kw_only=True)
class AucNumbers:
    """Live AUCs: before drift, when the monitor fired, at the old version's worst, and of the new version."""

    threshold: float | None = None
    """What the monitor held version 1 to; None where the gate could not tell its AUC."""
    baseline: float | None = None
    at_detection: float | None = None
    trough: float | None = None
    recovered: float | None = None
    regained_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class VersionNumbers:
    """One released version, and what the gate said of it."""

    version: int
    model_id: str
    trained_rows: int
    learned_until: str
    """Time of the newest row that it learned."""
    judged_rows: int
    """Rows that judged it, all newer."""
    parent: str | None
    gate: str
    reason: str
    parity_max_abs_diff: float


@dataclass(frozen=True, kw_only=True)
class TrafficDuring:
    """What callers felt during a span of time."""

    requests_sent: int
    requests_failed: int
    p99_ms: float | None
    """The worst of single seconds; with a few dozen requests a second it is the slowest request or nearly."""


@dataclass(frozen=True, kw_only=True)
class ReleaseNumbers:
    """How long a release took, and what callers felt during its deployment step."""

    version: int
    seconds: float | None
    during: TrafficDuring
    p99_ms_before: float | None
    """Median of single seconds before the release."""
    p99_ms_after: float | None


@dataclass(frozen=True, kw_only=True)
class BadReleaseNumbers:
    """A bad release that was made on purpose, the way back, and what callers felt from its start to the end of it."""

    made: LiveChange
    taken_back: LiveChange
    """Begins when the bad version was live everywhere."""
    during: TrafficDuring


@dataclass(frozen=True, kw_only=True)
class RecordNumbers:
    """Rows published by the client against rows archived in the lake."""

    published: int
    archived: int
    duplicates: int | None
    dead_letters: int | None


@dataclass(frozen=True, kw_only=True)
class TriggerNumbers:
    """Why the monitor asked for a run, and how many runs it started."""

    reason: str | None
    runs: int


@dataclass(frozen=True, kw_only=True)
class FeatureDriftNumbers:
    """What the drift watch saw of the features that version 1 was shown, without a label."""

    seconds: float | None
    """From the change to the end of the first bucket after it."""
    columns: dict[str, float]
    """Largest effect of each column that drifted after the change, largest first."""


@dataclass(frozen=True, kw_only=True)
class RunNumbers(RunOutcome):
    """How one pipeline run ended, and how long each of its steps worked."""

    step_seconds: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DemoSummary:
    """All numbers of one demo: `summary.json`."""

    created_at: str
    bayes_auc: dict[str, float | None] | None
    """Best possible AUC before and after the drift, where the world is simulated."""
    requests: dict[str, int]
    latency_ms: dict[str, float | None]
    drift: dict[str, Any]
    auc: AucNumbers
    versions: list[VersionNumbers]
    release: ReleaseNumbers | None
    bad_release: BadReleaseNumbers | None
    verified: list[VerifiedVersion]
    records: RecordNumbers
    trigger: TriggerNumbers
    policies: dict[str, float | None]
    """Seconds from the change to the rows by which each policy was sure; None = never, negative = a false alarm."""
    feature_drift: FeatureDriftNumbers
    decisions: ReplayedDecisions | None
    seconds: dict[str, float | None]
    """Of each stage, and of the spans `drift_to_detection` and `trigger_to_serving`."""
    serving_parity_max_abs_diff: float | None
    runs: list[RunNumbers]
    """Oldest first."""
    uncertain: list[str]
    """What the demo's rows were too few to tell, one sentence each."""
    warnings: list[str] = field(default_factory=list)
    """The gate's warnings, one sentence each."""
    to_turn: list[str] = field(default_factory=list)
    """What would make the loop turn, one sentence each; empty if it did."""

    @property
    def alarm_came_first(self) -> bool:
        """Whether a run was asked for before the world was changed, or without a change."""
        seconds = self.seconds.get("drift_to_detection")
        return self.trigger.reason is not None and (not self.drift or (seconds is not None and seconds < 0))


def summarize(observed: Observations) -> DemoSummary:
    """The numbers of one demo."""
    folders, traffic, drift_time = observed.folders, observed.traffic_summary, observed.drift_time
    by_a_run = {each.version for each in read_journal(folders.store) if each.action == RELEASE}
    releases = [read_release(folders.store, version) for version in sorted(by_a_run)]
    decision = retrain_decision(observed.events)
    trigger = TriggerNumbers(
        reason=decision["text"] if decision else None,
        runs=sum(1 for event in observed.events if event["kind"] == "run_started"),
    )
    last: Mapping[str, Any] = observed.timeline[-1] if observed.timeline else {}
    summary = DemoSummary(
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        bayes_auc=traffic["bayes_auc"],
        requests=traffic["requests"],
        latency_ms=traffic["latency_ms"],
        drift={} if drift_time is None else traffic["drift"],
        auc=auc_numbers(observed),
        versions=_version_numbers(releases, read_verdicts(folders)),
        release=release_numbers(folders.store, observed.traffic, releases[-1].version) if releases[1:] else None,
        bad_release=bad_release_numbers(observed.planted, observed.traffic),
        verified=list(observed.verified),
        records=RecordNumbers(
            published=traffic["rows"],
            archived=count_served_rows(folders.lake),
            duplicates=last.get("duplicates"),
            dead_letters=last.get("dead_letters"),
        ),
        trigger=trigger,
        policies=first_sure(observed.decisions, drift_time),
        feature_drift=feature_drift(observed.events, drift_time),
        decisions=observed.replayed,
        seconds={**observed.stage_seconds, **_event_spans(observed.events, drift_time, decision)},
        serving_parity_max_abs_diff=max((r.parity_max_abs_diff for r in releases), default=None),
        runs=_run_numbers(folders.store),
        uncertain=[],
        warnings=[
            f"model {each.candidate_model_id}: {sentence}"
            for each in read_verdicts(folders)
            for sentence in each.warnings
        ],
    )
    return replace(
        summary,
        uncertain=list(uncertainties(observed, summary)),
        to_turn=list(ways_to_turn(observed, summary, read_verdicts(folders))),
    )


def auc_numbers(observed: Observations) -> AucNumbers:
    """Live AUCs; what was measured after a bad release was made on purpose is not counted."""
    until = observed.planted[0].started_at if observed.planted else float("inf")
    drift_time, decision = observed.drift_time, retrain_decision(observed.events)
    measured = [line for line in observed.timeline if line["auc"] is not None]
    first = [line for line in measured if line["version"] == 1 and line["time"] <= until]
    before = [line["auc"] for line in first if drift_time is None or line["time"] <= drift_time]
    after = [line["auc"] for line in first if drift_time is not None and line["time"] > drift_time]
    second = [line["auc"] for line in measured if line["version"] == 2 and line["time"] <= until]
    baseline, trough = before[-1] if before else None, min(after, default=None)
    recovered = second[-1] if second else None
    regained = None
    if baseline is not None and trough is not None and recovered is not None and baseline > trough:
        regained = (recovered - trough) / (baseline - trough)
    return AucNumbers(
        threshold=_held_to(observed.decisions),
        baseline=baseline,
        at_detection=decision["auc"] if decision else None,
        trough=trough,
        recovered=recovered,
        regained_share=regained,
    )


def _held_to(decisions: Lines) -> float | None:
    """The AUC that the monitor's policies held version 1 to; None where they knew none."""
    own = (each["numbers"]["threshold"] for line in decisions if line["version"] == 1 for each in line["decisions"])
    return next((level for level in own if level is not None), None)


def retrain_decision(events: Lines) -> Mapping[str, Any] | None:
    """The event of the first decision that asked for a run; a decision that only notified people names no request."""
    return next((e for e in events if e["kind"] == "decision" and "request_id" in e), None)


def first_sure(decisions: Lines, drift_time: float | None) -> dict[str, float | None]:
    """By policy: seconds of event time from the change to the first decision point at which it was sure."""
    found: dict[str, float | None] = {}
    for line in decisions:
        for each in line["decisions"]:
            found.setdefault(each["policy"], None)
            if each["action"] == "retrain" and found[each["policy"]] is None and drift_time is not None:
                found[each["policy"]] = round(line["time"] - drift_time, 2)
    return found


def feature_drift(events: Lines, drift_time: float | None) -> FeatureDriftNumbers:
    """What the drift watch saw after the change."""
    drifted = [e for e in events if e["kind"] == "drift" and e["version"] == 1 and e["drifted"]]
    after = [e for e in drifted if drift_time is not None and e["bucket_end"] > drift_time]
    columns: dict[str, float] = {}
    for row in (row for event in after for row in event["columns"] if row["drifted"]):
        columns[row["feature"]] = max(columns.get(row["feature"], 0.0), row["effect"] or 0.0)
    return FeatureDriftNumbers(
        seconds=round(after[0]["bucket_end"] - drift_time, 2) if after and drift_time is not None else None,
        columns=dict(sorted(columns.items(), key=lambda item: -item[1])),
    )


def release_numbers(store: Path, traffic: Lines, version: int) -> ReleaseNumbers | None:
    """How the release of `version` went; None where it was not released."""
    entries = [entry for entry in read_entries(store) if entry.version == version]
    live = next((entry for entry in entries if entry.action in LIVE_ACTIONS), None)
    outcome = next((o for o in read_outcomes(store) if o.version == version), None)
    note = next((n for n in read_notes(store, outcome.run) if n.step == "deployment"), None) if outcome else None
    if live is None or note is None:
        return None
    started_at, live_at = _epoch_seconds(note.started_at), _epoch_seconds(live.time)
    before = [line for line in traffic if line["time"] < started_at][-SECONDS_BESIDE_RELEASE:]
    after = [line for line in traffic if line["time"] > live_at + 1][:SECONDS_BESIDE_RELEASE]
    return ReleaseNumbers(
        version=version,
        seconds=note.seconds,
        during=_traffic_during(_overlapping(traffic, started_at, live_at)),
        p99_ms_before=_median_p99(before),
        p99_ms_after=_median_p99(after),
    )


def bad_release_numbers(planted: Sequence[LiveChange], traffic: Lines) -> BadReleaseNumbers | None:
    """The bad release and the way back, and what callers felt meanwhile; None where none was shown."""
    if len(planted) != 2:
        return None
    made, back = planted
    until = back.answered_at or back.started_at + back.seconds
    during = _traffic_during(_overlapping(traffic, made.started_at, until))
    return BadReleaseNumbers(made=made, taken_back=back, during=during)


def count_served_rows(lake: Path) -> int:
    """Rows in the lake that a model of ours served, distinct by (request_id, row)."""
    key, is_served = [raw_rows.REQUEST_ID, raw_rows.ROW], ds.field(raw_rows.MODEL_VERSION).is_valid()
    files = [str(path) for path in lake.glob("day=*/*.parquet")]
    count: int = ds.dataset(files).to_table(key, is_served).group_by(key).aggregate([]).num_rows
    return count


def journal_events(store: Path) -> list[dict[str, Any]]:
    """What the journal says of who is live, in the form of the monitor's events."""
    return [
        {
            "time": _epoch_seconds(entry.time),
            "kind": entry.action,
            "text": f"version {entry.version}, before it {entry.previous_version or 'none'}: {entry.reason}",
        }
        for entry in read_entries(store)
        if entry.action != INTENT
    ]


def uncertainties(observed: Observations, summary: DemoSummary) -> Iterator[str]:
    """What the demo's rows were too few to tell, one sentence each; empty where all is clear."""
    auc = summary.auc
    for version in summary.versions:
        if version.gate == "inconclusive":
            yield f"the gate of version {version.version} is {version.reason}"
    for run in summary.runs:
        if run.state == "refused" and "inconclusive" in run.reason:
            yield f"the run {run.trigger_id} released nothing: {run.reason}"
    if auc.threshold is None:
        yield "the gate could not tell the auc of version 1, so no policy can hold it to one"
    elif auc.threshold < 0.5:
        yield f"version 1 is held to an auc of {auc.threshold:.3f}, worse than chance: the gate's interval is wide"
    for number, name, value in ((1, "baseline", auc.baseline), (2, "recovered", auc.recovered)):
        if value is None:
            continue
        timeline = reversed(observed.timeline)
        window = next(line for line in timeline if line["version"] == number and line["auc"] == value)
        few = window["rows"] < observed.plan.window_rows or window["clicks"] < observed.plan.min_clicks
        if few or window["auc_low"] is None or window["auc_high"] - window["auc_low"] > WIDE_INTERVAL:
            yield f"the {name} auc {_auc_with_interval(window)}"
    if summary.trigger.reason is None:
        last = observed.timeline[-1] if observed.timeline else None
        note = f"; the last auc {_auc_with_interval(last)}" if last and last["auc"] is not None else ""
        change = "the monitor could be sure that the model is worse" if summary.drift else "anything was changed"
        yield f"the rows ran out before {change}{note}"
    elif auc.recovered is None and any(version.version == 2 for version in summary.versions):
        yield "the rows ran out before version 2 could be measured"


def ways_to_turn(observed: Observations, summary: DemoSummary, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what would make the loop turn, with figures; nothing if a new version was released and measured.

    Args:
        observed: What the demo saw.
        summary: Its numbers.
        verdicts: The gate's, oldest first.
    """
    if summary.trigger.reason is None:
        first = verdicts[0] if verdicts else None
        if first is not None and first.candidate.auc_low is None:
            yield from (
                advice_in_demo(first, observed.folders.root)
                or ["more rows: the gate could not tell the auc of version 1, so the monitor holds it to none"]
            )
        yield from _ways_to_alarm(observed, summary)
    elif len(summary.versions) < 2:
        yield from advice_in_demo(verdicts[-1], observed.folders.root) if len(verdicts) > 1 else ()
    elif summary.auc.recovered is None:
        rows = max((line["rows"] for line in observed.timeline if line["version"] == 2), default=0)
        yield (
            f"more rows: {observed.plan.window_rows:,} labelled rows of version 2 fill a window, and {rows:,} came "
            "before the file ended"
        )


def _ways_to_alarm(observed: Observations, summary: DemoSummary) -> Iterator[str]:
    """What would make the monitor sure that version 1 is worse."""
    drift_time = observed.drift_time
    sent = sum(line["rows"] for line in observed.traffic if drift_time is not None and line["time"] > drift_time)
    if drift_time is None:
        yield (
            f"more rows: {observed.plan.window_rows:,} labelled rows fill the window before the change, and all "
            f"{observed.traffic_summary['rows']:,} rows were sent by then"
        )
        return
    judged = [
        each["numbers"]
        for line in observed.decisions
        for each in line["decisions"]
        if line["version"] == 1 and each["policy"] == SEQUENTIAL and each["numbers"].get("evidence") is not None
    ]
    if not judged:
        return  # without a threshold; the gate's advice has said what would give one
    evidence, needed, since = (judged[-1][name] for name in ("evidence", "evidence_needed", "rows_since_breach"))
    if evidence >= needed or since:
        yield (
            f"more rows: the alarm was raised, and {observed.plan.min_rows_since_breach:,} rows after it are needed to "
            f"learn from, {since:,} came"
        )
    elif evidence > 1:
        # The logarithm of the evidence grows in proportion to the rows.
        factor = math.log(needed) / math.log(evidence)
        yield (
            f"more rows: {sent:,} rows after the change made evidence {evidence:.3g} of {needed:g}; at that rate about "
            f"{math.ceil(sent * factor):,} would do, {factor:.1f} times as many"
        )
    else:
        low = "none" if summary.auc.trough is None else f"{summary.auc.trough:.3f}"
        columns = ", ".join(summary.drift.get("columns", ())) or "the columns"
        yield (
            f"a larger change: after {sent:,} rows with other values of {columns} the evidence is {evidence:.3g} of "
            f"{needed:g}, as the auc (lowest {low}) is not surely below {judged[-1]['threshold']:.3f}; name columns "
            "that tell more of the clicks by --drift-columns, or bring more rows"
        )


def advice_in_demo(verdict: Verdict, folder: Path) -> list[str]:
    """Return the gate's advice, and where the demo takes a setting from."""
    found = []
    for sentence in verdict.advice:
        flags = flags_to_run_again(sentence)
        path, _, value = flags[-1].partition("=") if "--set" in flags else ("", "", "")
        section, _, name = path.partition(".")
        where = f"; in the demo, write `{section}: {{{name}: {value}}}` into a copy of the recommender's file "
        where += f"({folder / 'recommender.yaml'} if it was drafted) and give that by --recommender"
        found.append(sentence + where if path else sentence)
    return found


def first_model_sentence(verdict: Verdict) -> str:
    """Return what the gate knows of the first model's AUC, and whether the monitor can hold it to that."""
    quality = verdict.candidate
    if quality.auc is None or quality.auc_low is None:
        known = "unknown" if quality.auc is None else f"{quality.auc:.4f} without an interval"
        return f"its auc is {known} at the gate, so the monitor cannot hold it to any"
    return f"its auc is {quality.auc:.4f} at the gate; the monitor holds it to that"


def ingested_sentences(made: Mapping[str, Any], replay: Path, *, most: int, has_times: bool) -> Iterator[str]:
    """Yield what became of a user's rows.

    Args:
        made: What `evergreen ingest` printed.
        replay: The rows that will be replayed.
        most: Most rows that were to be read.
        has_times: Whether the rows kept their times.
    """
    yield (
        f"{made['lake_rows']:,} rows to learn from, the {made['replay_rows']:,} after them to replay, "
        f"{made['malformed']:,} malformed rows set aside"
    )
    if has_times:
        times = pq.read_table(replay, columns=[raw_rows.EVENT_TIME])[raw_rows.EVENT_TIME]
        first, last = (f"{time:%Y-%m-%d %H:%M:%S}" for time in pc.min_max(times).as_py().values())
        yield (
            f"the rows are divided by their times: those before {first} UTC train and judge the first model, those "
            f"from then to {last} are replayed as today's traffic"
        )
    else:
        yield "the rows have no times: they are taken in the file's order and spread over the last four days"
    if made["lake_rows"] + made["replay_rows"] >= most:
        yield f"{most:,} rows are read, the first of the data; --rows reads more"
    left = {"duplicates": "equal copies of rows left out", "replaced": "rows replaced by later copies of them"}
    for name, words in left.items():
        if made.get(name):
            yield f"{made[name]:,} {words}"
    if made["passed_over"]:
        yield f"passed over, as no click logs: {', '.join(made['passed_over'])}"


def decision_sentences(summary: DemoSummary) -> Iterator[str]:
    """How it was decided, a sentence per number."""
    known = {name: seconds for name, seconds in summary.policies.items() if seconds is not None}
    if sure := [f"{name} {seconds:.1f} s" for name, seconds in known.items() if seconds >= 0]:
        yield f"from the change to the rows by which a policy was sure: {', '.join(sure)}"
    if early := [f"{name} {-seconds:.1f} s" for name, seconds in known.items() if seconds < 0]:
        yield f"sure before the change, so not by it: {', '.join(early)}"
    drift = summary.feature_drift
    if drift.columns:
        columns = ", ".join(f"{name} {distance:.3f}" for name, distance in list(drift.columns.items())[:5])
        more = f" and {len(drift.columns) - 5} more" if len(drift.columns) > 5 else ""
        yield f"features moved, seen without a label {drift.seconds:.1f} s after the change: {columns}{more}"
    elif planted := summary.drift.get("columns"):
        yield f"the values of {len(planted)} columns changed, and no bucket of rows after that shows it"
    else:
        yield "no feature was seen to move"
    if (found := summary.decisions) is not None:
        sentence = f"{found.points} decisions replayed from the lake, {'all' if found.equal else 'not all'} equal"
        if found.could_differ:
            sentence += (
                f"; {found.late_requests} requests reached the monitor after their decision point and "
                f"{found.late_rows} rows after their bucket had closed, and the lake holds them"
            )
        yield sentence


def serving_sentences(summary: DemoSummary) -> Iterator[str]:
    """What was served, a sentence per number."""
    if (release := summary.release) is not None:
        p99 = (release.p99_ms_before, release.during.p99_ms, release.p99_ms_after)
        yield (
            f"release of version {release.version} under traffic: {_three_digits(release.seconds)} s, "
            f"{release.during.requests_failed} requests failed; p99 of a second before, during, after: "
            f"{', '.join(map(_three_digits, p99))} ms"
        )
    if (bad := summary.bad_release) is not None:
        yield (
            f"bad release of version {bad.made.version} taken back to version {bad.taken_back.version} by itself after "
            f"{bad.taken_back.seconds:.1f} s, {bad.during.requests_failed} requests failed: {bad.taken_back.why}"
        )
    for found in summary.verified:
        yield (
            f"version {found.version}: {found.num_rows:,} logged scores recomputed offline, "
            f"{found.num_different} differ, largest difference {_three_digits(found.max_abs_diff)}"
        )


def failed_promises(summary: DemoSummary, *, simulated: bool) -> list[str]:
    """What the demo promised and this run did not hold, one sentence each; what was not shown promised nothing.

    On a user's own rows the monitor may rightly not fire and a model may rightly not recover: only what holds for any
    data is checked.
    """
    promises = [*_loop_promises(summary, simulated=simulated), *_serving_promises(summary)]
    if (found := summary.decisions) is not None:
        sentence = f"the {found.points} decisions replayed from the lake are not those that the monitor wrote"
        promises.append((found.equal or found.could_differ, sentence))
    return [sentence for held, sentence in promises if not held]


def _loop_promises(summary: DemoSummary, *, simulated: bool) -> Iterator[tuple[bool, str]]:
    records, requests, runs = summary.records, summary.requests, summary.trigger.runs
    parity, share = summary.serving_parity_max_abs_diff, summary.auc.regained_share
    for run in summary.runs:
        yield run.state != "failed", f"run {run.trigger_id} failed: {run.reason}"
    # The first run has an outcome too.
    recorded = len({run.trigger_id for run in summary.runs}) - 1
    yield recorded >= runs, f"{runs} runs were triggered, but only {max(recorded, 0)} recorded how they ended"
    yield requests["failed"] == 0, f"{requests['failed']} of {requests['sent']} requests failed, expected 0"
    yield (
        records.archived == records.published,
        f"{records.archived} records archived, expected the {records.published} published",
    )
    yield parity is not None and parity <= MAX_PARITY_DIFFERENCE, f"serving parity is {parity}, expected at most 1e-5"
    if simulated:
        yield runs == 1, f"{runs} runs were triggered, expected exactly 1"
        yield (
            share is not None and share >= MIN_REGAINED_SHARE,
            f"the new version regained {share} of what drift cost, expected at least {MIN_REGAINED_SHARE}",
        )
    else:
        yield runs <= 1, f"{runs} runs were triggered, expected at most 1"


def _serving_promises(summary: DemoSummary) -> Iterator[tuple[bool, str]]:
    if (release := summary.release) is not None:
        failed = release.during.requests_failed
        yield failed == 0, f"{failed} requests failed during the release, expected 0"
    if (bad := summary.bad_release) is not None:
        failed, seconds = bad.during.requests_failed, bad.taken_back.seconds
        yield failed == 0, f"{failed} requests failed while a bad release came and went, expected 0"
        yield (
            seconds < MAX_TAKE_BACK_SECONDS,
            f"a bad release was taken back after {seconds:.1f} s, expected less than {MAX_TAKE_BACK_SECONDS:g}",
        )
    for found in summary.verified:
        wrong = ", ".join(found.wrong_checks) or "no hash"
        reason = f"{found.num_different} of {found.num_rows} logged scores, and {wrong}"
        yield found.same, f"version {found.version} is not what was released: {reason} differ"
    if summary.verified:
        rows, archived = sum(found.num_rows for found in summary.verified), summary.records.archived
        yield rows == archived, f"{rows} logged scores were recomputed, expected the {archived} archived"


def _version_numbers(releases: Sequence[Release], verdicts: Sequence[Verdict]) -> list[VersionNumbers]:
    found = []
    for release in releases:
        model = Model.read(local_path(release.model_uri) / Model.MANIFEST)
        verdict = next((v for v in verdicts if v.candidate_model_id == release.model_id), None)
        found.append(
            VersionNumbers(
                version=release.version,
                model_id=release.model_id,
                trained_rows=model.num_train_rows,
                learned_until=model.last_learned_time,
                judged_rows=verdict.num_rows if verdict else 0,
                parent=model.parent_model_id,
                gate=verdict.decision if verdict else "",
                reason=verdict.reason if verdict else "",
                parity_max_abs_diff=release.parity_max_abs_diff,
            )
        )
    return found


def _run_numbers(store: Path) -> list[RunNumbers]:
    return [
        RunNumbers(**vars(each), step_seconds={note.step: note.seconds for note in read_notes(store, each.run)})
        for each in read_outcomes(store)
    ]


def _event_spans(
    events: Lines, drift_time: float | None, decision: Mapping[str, Any] | None
) -> dict[str, float | None]:
    """Seconds from the change to the decision, and from there to the new version's first answer."""
    decided_at = decision["time"] if decision else None
    served_at = next((e["time"] for e in events if e["kind"] == "version_seen" and e["version"] == 2), None)

    def between(start: float | None, end: float | None) -> float | None:
        return round(end - start, 2) if start is not None and end is not None else None

    return {
        "drift_to_detection": between(drift_time, decided_at),
        "trigger_to_serving": between(decided_at, served_at),
    }


def _overlapping(traffic: Lines, start: float, end: float) -> list[Mapping[str, Any]]:
    """The lines about any time in [start, end]; a line is about the time since the one before it."""
    begins = [0.0, *(line["time"] for line in traffic)]
    return [line for line, begin in zip(traffic, begins) if begin <= end and line["time"] >= start]


def _traffic_during(lines: Lines) -> TrafficDuring:
    return TrafficDuring(
        requests_sent=sum(line["requests_sent"] for line in lines),
        requests_failed=sum(line["requests_failed"] for line in lines),
        p99_ms=max((line["p99_ms"] for line in lines if line["p99_ms"] is not None), default=None),
    )


def _median_p99(lines: Lines) -> float | None:
    values = [line["p99_ms"] for line in lines if line["p99_ms"] is not None]
    return round(median(values), 3) if values else None


def _epoch_seconds(time: str) -> float:
    return round(moment_of(time).timestamp(), 3)


def _auc_with_interval(window: Mapping[str, Any]) -> str:
    low, high = window["auc_low"], window["auc_high"]
    interval = f"95 % {low:.3f}..{high:.3f}" if low is not None and high is not None else "no interval"
    return f"{window['auc']:.3f} ({interval}) rests on {window['rows']} rows with {window['clicks']} clicks"


def _three_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
