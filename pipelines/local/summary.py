"""The demo's numbers: read off what every process wrote, and held against what the demo promises."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.manifests import Model, Release, Verdict
from components.storage.uris import local_path
from components.store.run_notes import read_notes, read_outcomes
from pipelines.local.decision_numbers import decided_failures, feature_drift, first_sure, policies_say, retrain_decision
from pipelines.local.demo_plan import DemoPlan, read_verdicts
from pipelines.local.release_numbers import release_numbers, released_failures, rollback_numbers
from pipelines.local.run import LocalFolders

MIN_REGAINED_SHARE = 0.7
MAX_PARITY_DIFFERENCE = 1e-5
WIDE_INTERVAL = 0.06
"""Width of a 95 % interval of the AUC above which a measured AUC is called uncertain."""

Lines = Sequence[Mapping[str, Any]]


def summarize(
    *,
    folders: LocalFolders,
    plan: DemoPlan,
    timeline: Lines,
    events: Lines,
    traffic: Mapping[str, Any],
    seconds: Mapping[str, float],
    threshold: float,
    seconds_of_traffic: Lines = (),
    walks: Lines = (),
    verified: Lines = (),
    decisions: Lines = (),
    replayed: Mapping[str, Any] | None = None,
    backtests: Lines = (),
    status_page: str | None = None,
) -> dict[str, Any]:
    """All numbers of one demo, JSON-ready; what does not exist is None.

    Args:
        folders: The demo's folders.
        plan: Its sizes.
        timeline: The monitor's windows over time.
        events: The monitor's events.
        traffic: The replay's summary.
        seconds: Seconds per stage.
        threshold: AUC below which the monitor asked for a run.
        seconds_of_traffic: The replay's lines, one a second.
        walks: The rollback that was shown, see `release_numbers.rollback_numbers`.
        verified: What `evergreen verify` found, version by version.
        decisions: The monitor's decisions, one a decision point.
        replayed: What `evergreen replay` found of them, see `demo_proofs`; None = they were not replayed.
        backtests: What `evergreen backtest` said, policy by policy.
        status_page: Where the monitor's page was.
    """
    releases = [Release.read(p) for p in sorted((folders.store / "releases").glob("*.json"), key=lambda p: int(p.stem))]
    drift_time = traffic["drift_time"]
    decision = retrain_decision(events)
    summary = {
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "load_average": [round(x, 2) for x in os.getloadavg()]},
        **{name: traffic[name] for name in ("bayes_auc", "requests", "latency_ms", "drift")},
        "auc": _aucs(timeline, drift_time, decision, threshold, until=walks[0]["started_at"] if walks else None),
        "versions": [_version(release, read_verdicts(folders)) for release in releases],
        "release": release_numbers(folders.store, seconds_of_traffic, releases[-1].version) if releases[1:] else None,
        "rollback": rollback_numbers(walks, seconds_of_traffic),
        "verified": list(verified),
        "records": _records(folders.lake, traffic, timeline),
        "trigger": _trigger(events, decision, traffic, drift_time, timeline)
        | {"policies": policies_say(decisions, decision)},
        **_judged(events, decisions, drift_time),
        **{"decisions": replayed, "backtests": list(backtests), "status_page": status_page},
        "seconds": {**seconds, **_spans(events, drift_time, decision)},
        "serving_parity_max_abs_diff": max((r.parity_max_abs_diff for r in releases), default=None),
        "window_rows": plan.window_rows,
        "runs": _runs(folders.store),
    }
    return {**summary, "uncertain": uncertainties(summary, timeline, min_clicks=plan.min_clicks)}


def _spans(events: Lines, drift_time: float | None, decision: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Seconds from the change to the decision, and from there to the new version's first answer."""
    decided_at = decision["time"] if decision else None
    served_at = next((e["time"] for e in events if e["kind"] == "version_seen" and e["version"] == 2), None)
    return {
        "drift_to_detection": _between(drift_time, decided_at),
        "trigger_to_serving": _between(decided_at, served_at),
    }


def _judged(events: Lines, decisions: Lines, drift_time: float | None) -> dict[str, Any]:
    """When each policy was sure, and what moved in the features."""
    return {"policies": first_sure(decisions, drift_time), "feature_drift": feature_drift(events, drift_time)}


def _aucs(
    timeline: Lines,
    drift_time: float | None,
    decision: Mapping[str, Any] | None,
    threshold: float,
    *,
    until: float | None,
) -> dict[str, float | None]:
    """Live AUCs: before drift, when the monitor fired, at the old version's worst, and of the new version.

    The old version's answers after `until`, when it was shown once more, say nothing about the loop.
    """
    first = [
        t for t in timeline if t["version"] == 1 and t["auc"] is not None and (until is None or t["time"] <= until)
    ]
    second = [t for t in timeline if t["version"] == 2 and t["auc"] is not None]
    before = [t for t in first if drift_time is None or t["time"] <= drift_time]
    baseline = before[-1]["auc"] if before else None
    trough = min((t["auc"] for t in first if drift_time is not None and t["time"] > drift_time), default=None)
    recovered = second[-1]["auc"] if second else None
    regained = None
    if baseline is not None and trough is not None and recovered is not None and baseline > trough:
        regained = (recovered - trough) / (baseline - trough)
    return {
        "threshold": threshold,
        "baseline": baseline,
        "at_detection": decision["auc"] if decision else None,
        "trough": trough,
        "recovered": recovered,
        "regained_share": regained,
    }


def _version(release: Release, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    model = Model.read(local_path(release.model_uri) / Model.MANIFEST)
    verdict = next((v for v in verdicts if v.candidate_model_id == release.model_id), None)
    return {
        "version": release.version,
        "model_id": release.model_id,
        "trained_rows": model.num_train_rows,
        "parent": model.parent_model_id,
        "gate": verdict and {"decision": verdict.decision, "reason": verdict.reason, "difference": verdict.difference},
        "old_distribution": verdict and verdict.old_distribution,
        "parity_max_abs_diff": release.parity_max_abs_diff,
        "parity_rows": release.parity_rows,
    }


def _records(lake: Path, traffic: Mapping[str, Any], timeline: Lines) -> dict[str, Any]:
    """Published by the client against archived in the lake, row by row."""
    archived, distinct = count_served_rows(lake)
    last = timeline[-1] if timeline else {}
    return {
        "published": traffic["rows"],
        "archived": distinct,
        "archived_twice": archived - distinct,
        "duplicates": last.get("duplicates"),
        "dead_letters": last.get("dead_letters"),
    }


def count_served_rows(lake: Path) -> tuple[int, int]:
    """Rows in the lake that a model of ours served, and how many of them are distinct by (request_id, row)."""
    keys: set[tuple[str, int]] = set()
    total = 0
    for path in sorted(lake.glob("day=*/*.parquet")):
        table = pq.ParquetFile(path).read([criteo.REQUEST_ID, criteo.ROW, criteo.MODEL_VERSION])
        served = np.asarray(table[criteo.MODEL_VERSION].is_valid())
        ids = np.asarray(table[criteo.REQUEST_ID])[served]
        total += len(ids)
        keys.update(zip(ids, np.asarray(table[criteo.ROW])[served].tolist()))
    return total, len(keys)


def _trigger(
    events: Lines,
    decision: Mapping[str, Any] | None,
    traffic: Mapping[str, Any],
    drift_time: float | None,
    timeline: Lines,
) -> dict[str, Any]:
    """Why a run was asked for, after how many drifted rows, and how many runs there were."""
    since = None
    if decision is not None and drift_time is not None:
        at = [t["matured_total"] for t in timeline if t["time"] <= decision["time"]]
        before = [t["matured_total"] for t in timeline if t["time"] <= drift_time]
        since = at[-1] - before[-1] if at and before else None
    return {
        "reason": decision["text"] if decision else None,
        "records_since_drift": since,
        "runs": sum(1 for e in events if e["kind"] == "run_started"),
    }


def _runs(store: Path) -> list[dict[str, Any]]:
    """How each run ended, and how long each of its steps worked, oldest first."""
    names = ("trigger_id", "state", "step", "reason", "version")
    return [
        {
            **{name: getattr(outcome, name) for name in names},
            "step_seconds": {note.step: note.seconds for note in read_notes(store, outcome.run)},
        }
        for outcome in read_outcomes(store)
    ]


def uncertainties(summary: Mapping[str, Any], timeline: Lines, *, min_clicks: int) -> list[str]:
    """What the demo's rows were too few to say, one sentence each; empty where all is clear."""
    sentences = []
    for version in summary["versions"]:
        if version["gate"] and version["gate"]["decision"] == "inconclusive":
            sentences.append(f"the gate of version {version['version']} is {version['gate']['reason']}")
    for run in summary["runs"]:
        if run["state"] == "refused" and "inconclusive" in run["reason"]:
            sentences.append(f"the run {run['trigger_id']} released nothing: {run['reason']}")
    if summary["auc"]["threshold"] < 0.5:
        threshold = summary["auc"]["threshold"]
        sentences.append(
            f"the monitor's threshold is {threshold:.3f}, below what chance gives: the gate's interval is wide"
        )
    for number, what in ((1, "baseline"), (2, "recovered")):
        if summary["auc"][what] is None:
            continue
        window = _window_of(timeline, number, summary["auc"][what])
        few = window["rows"] < summary["window_rows"] or window["clicks"] < min_clicks
        if few or window["auc_low"] is None or window["auc_high"] - window["auc_low"] > WIDE_INTERVAL:
            sentences.append(f"the {what} auc {_interval(window)}")
    if summary["trigger"]["reason"] is None:
        last = timeline[-1] if timeline else None
        word = f"; the last auc {_interval(last)}" if last and last["auc"] is not None else ""
        sentences.append(f"the rows ran out before the monitor could be sure that the model is worse{word}")
    elif summary["auc"]["recovered"] is None and any(v["version"] == 2 for v in summary["versions"]):
        sentences.append("the rows ran out before version 2 could be measured")
    return sentences


def remembered(summary: Mapping[str, Any]) -> list[str]:
    """How each version does on rows of before its window, and what that means; one sentence per version that has it."""
    sentences = []
    for version in summary["versions"]:
        old = version["old_distribution"]
        if not old or old["candidate"]["auc"] is None:
            continue
        auc, replaced = old["candidate"]["auc"], (old["champion"] or {}).get("auc")
        sentence = (
            f"on {old['num_rows']:,} rows from before its window, version {version['version']} has an auc of {auc:.3f}"
        )
        if replaced is not None:
            sentence += f", the version it replaced {replaced:.3f}"
            if auc < replaced:
                sentence += (
                    ": expected where the world changed, since what is true now was not then, and no part of the gate; "
                    "where the old world may come back, replay_share keeps more of it"
                )
        sentences.append(sentence)
    return sentences


def training_seconds(summary: Mapping[str, Any]) -> list[float | None]:
    """Seconds of each run's training step, oldest first; None where a run had none."""
    return [run["step_seconds"].get("training") for run in summary["runs"]]


def _window_of(timeline: Lines, version: int, auc: float) -> Mapping[str, Any]:
    return next(line for line in reversed(timeline) if line["version"] == version and line["auc"] == auc)


def _interval(window: Mapping[str, Any]) -> str:
    low, high = window["auc_low"], window["auc_high"]
    interval = f"95 % {low:.3f}..{high:.3f}" if low is not None and high is not None else "no interval"
    return f"{window['auc']:.3f} ({interval}) rests on {window['rows']} rows with {window['clicks']} clicks"


def _between(start: float | None, end: float | None) -> float | None:
    return round(end - start, 2) if start is not None and end is not None else None


def failed_promises(summary: Mapping[str, Any], *, simulated: bool) -> list[str]:
    """What the demo promised and this run did not hold, one sentence each.

    On a user's own rows the monitor may rightly not fire and a model may rightly not recover: only what holds for any
    data is asked.
    """
    records, requests, auc = summary["records"], summary["requests"], summary["auc"]
    parity, runs = summary["serving_parity_max_abs_diff"], summary["trigger"]["runs"]
    known = {run["trigger_id"] for run in summary["runs"]}
    promises = [
        *((run["state"] != "failed", f"run {run['trigger_id']} failed: {run['reason']}") for run in summary["runs"]),
        # The first run has an outcome too.
        (len(known) > runs, f"{runs} runs were triggered, but only {max(len(known) - 1, 0)} recorded how they ended"),
        (requests["failed"] == 0, f"{requests['failed']} of {requests['sent']} requests failed, expected 0"),
        (
            records["archived"] == records["published"],
            f"{records['archived']} records archived, expected the {records['published']} published",
        ),
        (parity is not None and parity <= MAX_PARITY_DIFFERENCE, f"serving parity is {parity}, expected at most 1e-5"),
    ]
    if simulated:
        share = auc["regained_share"]
        promises += [
            (runs == 1, f"{runs} runs were triggered, expected exactly 1"),
            (
                share is not None and share >= MIN_REGAINED_SHARE,
                f"the new version regained {share} of what drift cost, expected at least {MIN_REGAINED_SHARE}",
            ),
        ]
    else:
        promises.append((runs <= 1, f"{runs} runs were triggered, expected at most 1"))
    unheld = [sentence for held, sentence in promises if not held]
    return [*unheld, *released_failures(summary), *decided_failures(summary)]
