"""Compute the demo's numbers, describe them, and compare them with the demo's promises.

The sources are the monitor's timeline, events and decisions, the traffic's lines (one per second),
the promotion journal and the runs' notes. An undefined number is None. `report` draws the page.
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
from evergreen.registry.promotion_journal import (
    INTENT,
    LIVE_ACTIONS,
    RELEASE,
    moment_of,
    read_entries,
    read_journal,
)
from evergreen.registry.runs import RunOutcome, read_notes, read_outcomes
from evergreen.runtime.errors import flags_to_run_again
from evergreen.storage.uris import local_path

_MIN_REGAINED_SHARE = 0.7
_MAX_PARITY_DIFFERENCE = 1e-5
_MAX_ROLLBACK_SECONDS = 60.0
_WIDE_INTERVAL = 0.06
"""Maximum width of an AUC's 95 % interval. With a wider interval, the AUC is called uncertain."""
_SECONDS_BESIDE_RELEASE = 10
"""Seconds of traffic that are evaluated before a release and after it."""

Lines = Sequence[Mapping[str, Any]]
"""Lines of a JSON-lines file, as defined by its writer."""


@dataclass(frozen=True, kw_only=True)
class LiveChange:
    """One change of the live version under traffic. Times are in seconds since the epoch."""

    version: int
    """The version that became live."""
    started_at: float
    seconds: float
    """Duration of the change in seconds."""
    why: str
    """Reason in the journal."""
    answered_at: float | None = None
    """End of the first second in which only this version served requests. None if there is no
    second in which only this version served, or if the demo did not wait for such a second."""


@dataclass(frozen=True, kw_only=True)
class VerifiedVersion:
    """Findings of `evergreen audit verify` about one version."""

    version: int
    same: bool
    num_rows: int
    num_different: int
    max_abs_diff: float | None
    wrong_checks: list[str]
    """Names of the hashes that differ from the released hashes."""


@dataclass(frozen=True, kw_only=True)
class ReplayedDecisions:
    """Findings of `evergreen audit replay`, which replays decisions from the lake's rows."""

    points: int
    equal: bool
    """Whether all decisions equal the monitor's decisions."""
    digest: str
    late_requests: int = 0
    """Number of requests that reached the monitor after their decision point. Requests that arrive
    too late are in the lake, but the decision did not use them."""
    late_rows: int = 0
    """Number of rows that reached the monitor after the end of their feature bucket."""

    @property
    def could_differ(self) -> bool:
        """Whether the lake contains late rows. Late rows can change a replayed decision.

        On a busy machine, records can be late.
        """
        return bool(self.late_requests or self.late_rows)


@dataclass(frozen=True, kw_only=True)
class Observations:
    """Files of the demo's processes, and observations of the demo itself."""

    folders: LocalFolders
    plan: DemoPlan
    timeline: Lines
    """The monitor's windows over time."""
    events: Lines
    """The monitor's events."""
    decisions: Lines
    """The monitor's decisions, one line per decision point."""
    traffic: Lines
    """Lines of the replay, one per second."""
    traffic_summary: Mapping[str, Any]
    stage_seconds: Mapping[str, float]
    planted: Sequence[LiveChange] = ()
    """The bad release and its rollback, or empty if the demo did not get so far."""
    verified: Sequence[VerifiedVersion] = ()
    replayed: ReplayedDecisions | None = None

    @property
    def drift_time(self) -> float | None:
        """Time when the drift began in seconds since the epoch, or None if there was no drift."""
        time: float | None = self.traffic_summary["drift_time"]
        return time


@dataclass(frozen=True, kw_only=True)
class AucNumbers:
    """Live AUCs of the old version (before, during and after the alarm) and of the new version."""

    threshold: float | None = None
    """Threshold of the monitor for version 1, or None if the gate had no AUC for it."""
    baseline: float | None = None
    at_detection: float | None = None
    trough: float | None = None
    recovered: float | None = None
    regained_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class VersionNumbers:
    """One released version, and the gate's verdict about it."""

    version: int
    model_id: str
    trained_rows: int
    trained_until: str
    """Time of the newest training row of the version."""
    evaluation_rows: int
    """Number of evaluation rows, which are all newer than the training rows."""
    parent: str | None
    gate: str
    reason: str
    parity_max_abs_diff: float


@dataclass(frozen=True, kw_only=True)
class TrafficDuring:
    """Requests of the callers during a span of time."""

    requests_sent: int
    requests_failed: int
    p99_ms: float | None
    """Maximum over all seconds of the 99th percentile within a second. With a few dozen requests
    per second, the percentile is nearly the latency of the slowest request."""


@dataclass(frozen=True, kw_only=True)
class ReleaseNumbers:
    """Duration of a release, and the requests during its deployment step."""

    version: int
    seconds: float | None
    during: TrafficDuring
    p99_ms_before: float | None
    """Median of the per-second p99 latencies before the release, in milliseconds."""
    p99_ms_after: float | None


@dataclass(frozen=True, kw_only=True)
class BadReleaseNumbers:
    """Numbers about the planted bad release, its rollback, and the requests between the two."""

    made: LiveChange
    rolled_back: LiveChange
    """The rollback, which starts when the bad version is live on all servers."""
    during: TrafficDuring


@dataclass(frozen=True, kw_only=True)
class RecordNumbers:
    """Numbers of rows that the client published, and of rows archived in the lake."""

    published: int
    archived: int
    duplicates: int | None
    dead_letters: int | None


@dataclass(frozen=True, kw_only=True)
class TriggerNumbers:
    """Reason of the monitor's retrain request, and the number of runs that it started."""

    reason: str | None
    runs: int


@dataclass(frozen=True, kw_only=True)
class FeatureDriftNumbers:
    """Findings of the drift watch about the features of version 1, without labels."""

    seconds: float | None
    """Seconds from the drift to the end of the first later bucket that shows the drift."""
    columns: dict[str, float]
    """Largest effect size of each drifted column, in descending order."""


@dataclass(frozen=True, kw_only=True)
class RunNumbers(RunOutcome):
    """Outcome of one pipeline run, and the duration of each of its steps."""

    step_seconds: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DemoSummary:
    """All numbers of one demo, for `summary.json`."""

    created_at: str
    bayes_auc: dict[str, float | None] | None
    """Bayes-optimal AUC before and after the drift, or None unless the clicks are simulated."""
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
    """Seconds from the drift to the last row that each policy needed for its alarm. None means no
    alarm. A negative number means a false alarm before the drift."""
    feature_drift: FeatureDriftNumbers
    decisions: ReplayedDecisions | None
    seconds: dict[str, float | None]
    """Duration of each stage, and of the spans `drift_to_detection` and `trigger_to_serving`."""
    serving_parity_max_abs_diff: float | None
    runs: list[RunNumbers]
    """Pipeline runs, oldest first."""
    uncertain: list[str]
    """Results that are uncertain because of too few rows, one sentence each."""
    warnings: list[str] = field(default_factory=list)
    """The gate's warnings, one sentence each."""
    to_complete: list[str] = field(default_factory=list)
    """Changes that would complete the loop, one sentence each. The list is empty if the loop was
    completed."""

    @property
    def alarm_came_first(self) -> bool:
        """Whether a run was requested before the drift, or without a drift."""
        seconds = self.seconds.get("drift_to_detection")
        return self.trigger.reason is not None and (
            not self.drift or (seconds is not None and seconds < 0)
        )


def summarize(observed: Observations) -> DemoSummary:
    """Return the numbers of one demo."""
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
        auc=_auc_numbers(observed),
        versions=_version_numbers(releases, read_verdicts(folders)),
        release=release_numbers(folders.store, observed.traffic, releases[-1].version)
        if releases[1:]
        else None,
        bad_release=bad_release_numbers(observed.planted, observed.traffic),
        verified=list(observed.verified),
        records=RecordNumbers(
            published=traffic["rows"],
            archived=count_served_rows(folders.lake),
            duplicates=last.get("duplicates"),
            dead_letters=last.get("dead_letters"),
        ),
        trigger=trigger,
        policies=first_alarms(observed.decisions, drift_time),
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
        to_complete=list(ways_to_complete(observed, summary, read_verdicts(folders))),
    )


def _auc_numbers(observed: Observations) -> AucNumbers:
    """Return the live AUCs, measured before the planted bad release."""
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
        threshold=_threshold_of_first(observed.decisions),
        baseline=baseline,
        at_detection=decision["auc"] if decision else None,
        trough=trough,
        recovered=recovered,
        regained_share=regained,
    )


def _threshold_of_first(decisions: Lines) -> float | None:
    """Return the AUC threshold of the monitor's policies for version 1, or None."""
    own = (
        each["numbers"]["threshold"]
        for line in decisions
        if line["version"] == 1
        for each in line["decisions"]
    )
    return next((level for level in own if level is not None), None)


def retrain_decision(events: Lines) -> Mapping[str, Any] | None:
    """Return the event of the first decision that requested a run, or None if there is none.

    A decision that only notified people has no request id.
    """
    return next((e for e in events if e["kind"] == "decision" and "request_id" in e), None)


def first_alarms(decisions: Lines, drift_time: float | None) -> dict[str, float | None]:
    """Return the seconds of event time from the drift to each policy's first alarm."""
    found: dict[str, float | None] = {}
    for line in decisions:
        for each in line["decisions"]:
            found.setdefault(each["policy"], None)
            if (
                each["action"] == "retrain"
                and found[each["policy"]] is None
                and drift_time is not None
            ):
                found[each["policy"]] = round(line["time"] - drift_time, 2)
    return found


def feature_drift(events: Lines, drift_time: float | None) -> FeatureDriftNumbers:
    """Return the findings of the drift watch after the planted drift."""
    drifted = [e for e in events if e["kind"] == "drift" and e["version"] == 1 and e["drifted"]]
    after = [e for e in drifted if drift_time is not None and e["bucket_end"] > drift_time]
    columns: dict[str, float] = {}
    for row in (row for event in after for row in event["columns"] if row["drifted"]):
        columns[row["feature"]] = max(columns.get(row["feature"], 0.0), row["effect"] or 0.0)
    return FeatureDriftNumbers(
        seconds=round(after[0]["bucket_end"] - drift_time, 2)
        if after and drift_time is not None
        else None,
        columns=dict(sorted(columns.items(), key=lambda item: -item[1])),
    )


def release_numbers(store: Path, traffic: Lines, version: int) -> ReleaseNumbers | None:
    """Return the numbers of the release of `version`, or None if it was not released."""
    entries = [entry for entry in read_entries(store) if entry.version == version]
    live = next((entry for entry in entries if entry.action in LIVE_ACTIONS), None)
    outcome = next((o for o in read_outcomes(store) if o.version == version), None)
    note = (
        next((n for n in read_notes(store, outcome.run) if n.step == "deployment"), None)
        if outcome
        else None
    )
    if live is None or note is None:
        return None
    started_at, live_at = _epoch_seconds(note.started_at), _epoch_seconds(live.time)
    before = [line for line in traffic if line["time"] < started_at][-_SECONDS_BESIDE_RELEASE:]
    after = [line for line in traffic if line["time"] > live_at + 1][:_SECONDS_BESIDE_RELEASE]
    return ReleaseNumbers(
        version=version,
        seconds=note.seconds,
        during=_traffic_during(_overlapping(traffic, started_at, live_at)),
        p99_ms_before=_median_p99(before),
        p99_ms_after=_median_p99(after),
    )


def bad_release_numbers(planted: Sequence[LiveChange], traffic: Lines) -> BadReleaseNumbers | None:
    """Return the planted bad release, its rollback and the requests between the two, or None."""
    if len(planted) != 2:
        return None
    made, back = planted
    until = back.answered_at or back.started_at + back.seconds
    during = _traffic_during(_overlapping(traffic, made.started_at, until))
    return BadReleaseNumbers(made=made, rolled_back=back, during=during)


def count_served_rows(lake: Path) -> int:
    """Count the distinct (request_id, row) pairs in the lake that have a score of our models."""
    key, is_served = (
        [raw_rows.REQUEST_ID, raw_rows.ROW],
        ds.field(raw_rows.MODEL_VERSION).is_valid(),
    )
    files = [str(path) for path in lake.glob("day=*/*.parquet")]
    count: int = ds.dataset(files).to_table(key, is_served).group_by(key).aggregate([]).num_rows
    return count


def journal_events(store: Path) -> list[dict[str, Any]]:
    """Return the journal's entries about live versions, in the form of the monitor's events."""
    return [
        {
            "time": _epoch_seconds(entry.time),
            "kind": entry.action,
            "text": f"version {entry.version}, before it {entry.previous_version or 'none'}: "
            f"{entry.reason}",
        }
        for entry in read_entries(store)
        if entry.action != INTENT
    ]


def uncertainties(observed: Observations, summary: DemoSummary) -> Iterator[str]:
    """Yield one sentence for each result that is uncertain because of too few rows."""
    auc = summary.auc
    for version in summary.versions:
        if version.gate == "inconclusive":
            yield f"the verdict on version {version.version} is {version.reason}"
    for run in summary.runs:
        if run.state == "refused" and "inconclusive" in run.reason:
            yield f"the run {run.trigger_id} released nothing: {run.reason}"
    if auc.threshold is None:
        yield "the gate has no auc of version 1, so no policy has a threshold for it"
    elif auc.threshold < 0.5:
        yield (
            f"the threshold for version 1 is an auc of {auc.threshold:.3f}, worse than chance: the "
            "gate's interval is wide"
        )
    for number, name, value in ((1, "baseline", auc.baseline), (2, "recovered", auc.recovered)):
        if value is None:
            continue
        timeline = reversed(observed.timeline)
        window = next(
            line for line in timeline if line["version"] == number and line["auc"] == value
        )
        few = (
            window["rows"] < observed.plan.window_rows
            or window["clicks"] < observed.plan.min_clicks
        )
        if (
            few
            or window["auc_low"] is None
            or window["auc_high"] - window["auc_low"] > _WIDE_INTERVAL
        ):
            yield f"the {name} auc {_auc_with_interval(window)}"
    if summary.trigger.reason is None:
        last = observed.timeline[-1] if observed.timeline else None
        note = (
            f"; the last auc {_auc_with_interval(last)}" if last and last["auc"] is not None else ""
        )
        change = (
            "the monitor had enough evidence against the model"
            if summary.drift
            else "the drift began"
        )
        yield f"the rows ran out before {change}{note}"
    elif auc.recovered is None and any(version.version == 2 for version in summary.versions):
        yield "the rows ran out before version 2 could be measured"


def ways_to_complete(
    observed: Observations, summary: DemoSummary, verdicts: Sequence[Verdict]
) -> Iterator[str]:
    """Yield advice on how to complete the loop, with numbers from this demo.

    Yields nothing if a new version was released and measured.

    Args:
        observed: What the demo recorded while it ran.
        summary: Numbers of the demo.
        verdicts: Verdicts of the gate, oldest first.
    """
    if summary.trigger.reason is None:
        first = verdicts[0] if verdicts else None
        if first is not None and first.candidate.auc_low is None:
            yield from (
                advice_in_demo(first, observed.folders.root)
                or [
                    "more rows: the gate has no auc of version 1, so the monitor has no threshold "
                    "for it"
                ]
            )
        yield from _ways_to_alarm(observed, summary)
    elif len(summary.versions) < 2:
        yield from advice_in_demo(verdicts[-1], observed.folders.root) if len(verdicts) > 1 else ()
    elif summary.auc.recovered is None:
        rows = max((line["rows"] for line in observed.timeline if line["version"] == 2), default=0)
        yield (
            f"more rows: {observed.plan.window_rows:,} labelled rows of version 2 fill a window, "
            f"and {rows:,} came before the file ended"
        )


def _ways_to_alarm(observed: Observations, summary: DemoSummary) -> Iterator[str]:
    """Yield changes that would give the monitor enough evidence against version 1."""
    drift_time = observed.drift_time
    sent = sum(
        line["rows"]
        for line in observed.traffic
        if drift_time is not None and line["time"] > drift_time
    )
    if drift_time is None:
        yield (
            f"more rows: {observed.plan.window_rows:,} labelled rows fill the window before the "
            f"drift, and all {observed.traffic_summary['rows']:,} rows were sent by then"
        )
        return
    evaluated = [
        each["numbers"]
        for line in observed.decisions
        for each in line["decisions"]
        if line["version"] == 1
        and each["policy"] == SEQUENTIAL
        and each["numbers"].get("evidence") is not None
    ]
    if not evaluated:
        return  # the gate's advice explains why there is no threshold
    evidence, needed, since = (
        evaluated[-1][name] for name in ("evidence", "evidence_needed", "rows_since_breach")
    )
    if evidence >= needed or since:
        yield (
            "more rows: the alarm was raised, but training needs "
            f"{observed.plan.min_rows_since_breach:,} rows after it, and only {since:,} came"
        )
    elif evidence > 1:
        # The logarithm of the evidence is proportional to the number of rows.
        factor = math.log(needed) / math.log(evidence)
        yield (
            f"more rows: {sent:,} rows after the drift gave evidence {evidence:.3g} of {needed:g}, "
            f"so that about {math.ceil(sent * factor):,} rows would suffice, {factor:.1f} times as "
            "many"
        )
    else:
        low = "none" if summary.auc.trough is None else f"{summary.auc.trough:.3f}"
        columns = ", ".join(summary.drift.get("columns", ())) or "the columns"
        yield (
            f"a larger drift: after {sent:,} rows with other values of {columns} the evidence is "
            f"{evidence:.3g} of {needed:g}, because the auc (lowest {low}) is not clearly below "
            f"{evaluated[-1]['threshold']:.3f}: name columns with more influence on the clicks by "
            "--drift-columns, or use more rows"
        )


def advice_in_demo(verdict: Verdict, folder: Path) -> list[str]:
    """Return the gate's advice for a user of the demo.

    If a sentence advises a setting, the result also explains how to set it in the demo.
    """
    found = []
    for sentence in verdict.advice:
        flags = flags_to_run_again(sentence)
        path, _, value = flags[-1].partition("=") if "--set" in flags else ("", "", "")
        section, _, name = path.partition(".")
        where = (
            f". In the demo, write `{section}: {{{name}: {value}}}` into a copy of the "
            "recommender's file "
        )
        where += (
            f"({folder / 'recommender.yaml'} if it was drafted) and pass the copy by --recommender"
        )
        found.append(sentence + where if path else sentence)
    return found


def first_model_sentence(verdict: Verdict) -> str:
    """Return a sentence on the first model's AUC, and on the monitor's threshold."""
    quality = verdict.candidate
    if quality.auc is None or quality.auc_low is None:
        known = "unknown" if quality.auc is None else f"{quality.auc:.4f} without an interval"
        return f"its auc at the gate is {known}, so the monitor has no threshold for it"
    return f"its auc at the gate is {quality.auc:.4f}, which sets the monitor's threshold"


def ingested_sentences(
    made: Mapping[str, Any], replay: Path, *, max_rows: int, has_times: bool
) -> Iterator[str]:
    """Yield sentences on what happened to a user's rows.

    Args:
        made: Output of `evergreen data ingest`.
        replay: File of the rows to replay.
        max_rows: Maximum number of rows to read.
        has_times: Whether the rows still have their event times.
    """
    yield (
        f"{made['lake_rows']:,} rows for the lake, the next {made['replay_rows']:,} rows for the "
        f"replay, and {made['malformed']:,} malformed rows"
    )
    if has_times:
        times = pq.read_table(replay, columns=[raw_rows.EVENT_TIME])[raw_rows.EVENT_TIME]
        first, last = (f"{time:%Y-%m-%d %H:%M:%S}" for time in pc.min_max(times).as_py().values())
        yield (
            f"the rows are split by time: rows before {first} UTC train and evaluate the first "
            f"model, rows from {first} to {last} are replayed as today's traffic"
        )
    else:
        yield "the rows have no times: they are spread over the last four days in file order"
    if made["lake_rows"] + made["replay_rows"] >= max_rows:
        yield f"only the first {max_rows:,} rows are read, --rows reads more"
    left = {
        "duplicates": "equal copies of rows left out",
        "replaced": "rows replaced by later copies of them",
    }
    for name, words in left.items():
        if made.get(name):
            yield f"{made[name]:,} {words}"
    if made["skipped_files"]:
        yield f"files skipped because they are not click logs: {', '.join(made['skipped_files'])}"


def decision_sentences(summary: DemoSummary) -> Iterator[str]:
    """Yield sentences about the decisions, each with one number."""
    known = {name: seconds for name, seconds in summary.policies.items() if seconds is not None}
    if sure := [f"{name} {seconds:.1f} s" for name, seconds in known.items() if seconds >= 0]:
        yield f"from the drift to the alarm of each policy: {', '.join(sure)}"
    if early := [f"{name} {-seconds:.1f} s" for name, seconds in known.items() if seconds < 0]:
        yield f"false alarms before the drift: {', '.join(early)}"
    drift = summary.feature_drift
    if drift.columns:
        columns = ", ".join(
            f"{name} {distance:.3f}" for name, distance in list(drift.columns.items())[:5]
        )
        more = f" and {len(drift.columns) - 5} more" if len(drift.columns) > 5 else ""
        yield (
            f"features drifted, found without labels {drift.seconds:.1f} s after the drift began: "
            f"{columns}{more}"
        )
    elif planted := summary.drift.get("columns"):
        yield (
            f"the values of {len(planted)} columns changed, but no bucket of rows after that shows "
            "it"
        )
    else:
        yield "no feature drifted"
    if (found := summary.decisions) is not None:
        sentence = (
            f"{found.points} decisions were replayed from the lake, "
            f"{'all' if found.equal else 'not all'} of them equal"
        )
        if found.could_differ:
            sentence += (
                f"; {found.late_requests} requests reached the monitor after their decision point "
                f"and {found.late_rows} rows after their bucket had closed, and the lake contains "
                "them"
            )
        yield sentence


def serving_sentences(summary: DemoSummary) -> Iterator[str]:
    """Yield sentences about serving, each with one number."""
    if (release := summary.release) is not None:
        p99 = (release.p99_ms_before, release.during.p99_ms, release.p99_ms_after)
        yield (
            f"release of version {release.version} under traffic: {_three_digits(release.seconds)} "
            f"s, {release.during.requests_failed} requests failed; p99 of a second before, during, "
            f"after: {', '.join(map(_three_digits, p99))} ms"
        )
    if (bad := summary.bad_release) is not None:
        yield (
            f"bad release of version {bad.made.version} automatically rolled back to version "
            f"{bad.rolled_back.version} after {bad.rolled_back.seconds:.1f} s, "
            f"{bad.during.requests_failed} requests failed: {bad.rolled_back.why}"
        )
    for found in summary.verified:
        yield (
            f"version {found.version}: {found.num_rows:,} logged scores recomputed offline, "
            f"{found.num_different} differ, largest difference {_three_digits(found.max_abs_diff)}"
        )


def failed_promises(summary: DemoSummary, *, simulated: bool) -> list[str]:
    """Return the promises of the demo that this run broke, one sentence each.

    The promises of a stage are checked only if the stage ran. On a user's own rows, it can be
    correct that the monitor raises no alarm, or that the AUC does not recover. With a user's rows,
    the demo therefore checks only the promises that hold for any data.
    """
    promises = [*_loop_promises(summary, simulated=simulated), *_serving_promises(summary)]
    if (found := summary.decisions) is not None:
        sentence = (
            f"the {found.points} decisions replayed from the lake differ from the monitor's "
            "decisions"
        )
        promises.append((found.equal or found.could_differ, sentence))
    return [sentence for held, sentence in promises if not held]


def _loop_promises(summary: DemoSummary, *, simulated: bool) -> Iterator[tuple[bool, str]]:
    records, requests, runs = summary.records, summary.requests, summary.trigger.runs
    parity, share = summary.serving_parity_max_abs_diff, summary.auc.regained_share
    for run in summary.runs:
        yield run.state != "failed", f"run {run.trigger_id} failed: {run.reason}"
    # The first run has an outcome too.
    recorded = len({run.trigger_id for run in summary.runs}) - 1
    yield (
        recorded >= runs,
        f"{runs} runs were triggered, but only {max(recorded, 0)} recorded their outcome",
    )
    yield (
        requests["failed"] == 0,
        f"{requests['failed']} of {requests['sent']} requests failed, expected 0",
    )
    yield (
        records.archived == records.published,
        f"{records.archived} records archived, expected the {records.published} published",
    )
    yield (
        parity is not None and parity <= _MAX_PARITY_DIFFERENCE,
        f"serving parity is {parity}, expected at most 1e-5",
    )
    if simulated:
        yield runs == 1, f"{runs} runs were triggered, expected exactly 1"
        yield (
            share is not None and share >= _MIN_REGAINED_SHARE,
            f"the new version regained {share} of the lost auc, expected at least "
            f"{_MIN_REGAINED_SHARE}",
        )
    else:
        yield runs <= 1, f"{runs} runs were triggered, expected at most 1"


def _serving_promises(summary: DemoSummary) -> Iterator[tuple[bool, str]]:
    if (release := summary.release) is not None:
        failed = release.during.requests_failed
        yield failed == 0, f"{failed} requests failed during the release, expected 0"
    if (bad := summary.bad_release) is not None:
        failed, seconds = bad.during.requests_failed, bad.rolled_back.seconds
        yield (
            failed == 0,
            f"{failed} requests failed during a bad release and its rollback, expected 0",
        )
        yield (
            seconds < _MAX_ROLLBACK_SECONDS,
            f"a bad release was rolled back after {seconds:.1f} s, expected less than "
            f"{_MAX_ROLLBACK_SECONDS:g}",
        )
    for found in summary.verified:
        wrong = ", ".join(found.wrong_checks) or "no hash"
        reason = f"{found.num_different} of {found.num_rows} logged scores, and {wrong}"
        yield found.same, f"version {found.version} differs from its release: {reason} differ"
    if summary.verified:
        rows, archived = sum(found.num_rows for found in summary.verified), summary.records.archived
        yield (
            rows == archived,
            f"{rows} logged scores were recomputed, expected the {archived} archived",
        )


def _version_numbers(
    releases: Sequence[Release], verdicts: Sequence[Verdict]
) -> list[VersionNumbers]:
    found = []
    for release in releases:
        model = Model.read(local_path(release.model_uri) / Model.MANIFEST)
        verdict = next((v for v in verdicts if v.candidate_model_id == release.model_id), None)
        found.append(
            VersionNumbers(
                version=release.version,
                model_id=release.model_id,
                trained_rows=model.num_train_rows,
                trained_until=model.watermark,
                evaluation_rows=verdict.num_rows if verdict else 0,
                parent=model.parent_model_id,
                gate=verdict.decision if verdict else "",
                reason=verdict.reason if verdict else "",
                parity_max_abs_diff=release.parity_max_abs_diff,
            )
        )
    return found


def _run_numbers(store: Path) -> list[RunNumbers]:
    return [
        RunNumbers(
            **vars(each),
            step_seconds={note.step: note.seconds for note in read_notes(store, each.run)},
        )
        for each in read_outcomes(store)
    ]


def _event_spans(
    events: Lines, drift_time: float | None, decision: Mapping[str, Any] | None
) -> dict[str, float | None]:
    """Return the seconds from drift to decision, and from decision to the first new answer."""
    decided_at = decision["time"] if decision else None
    served_at = next(
        (e["time"] for e in events if e["kind"] == "version_seen" and e["version"] == 2), None
    )

    def between(start: float | None, end: float | None) -> float | None:
        return round(end - start, 2) if start is not None and end is not None else None

    return {
        "drift_to_detection": between(drift_time, decided_at),
        "trigger_to_serving": between(decided_at, served_at),
    }


def _overlapping(traffic: Lines, start: float, end: float) -> list[Mapping[str, Any]]:
    """Return the lines that overlap with [start, end].

    A line covers the time since the previous line.
    """
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
    interval = (
        f"95 % {low:.3f}..{high:.3f}" if low is not None and high is not None else "no interval"
    )
    return (
        f"{window['auc']:.3f} ({interval}) is based on {window['rows']} rows with "
        f"{window['clicks']} clicks"
    )


def _three_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
