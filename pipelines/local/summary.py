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
from components.contracts.uris import local_path
from pipelines.local.demo_plan import DemoPlan, read_verdicts
from pipelines.local.run import LocalFolders

MIN_REGAINED_SHARE = 0.7
MAX_PARITY_DIFFERENCE = 1e-5

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
    """
    releases = [Release.read(p) for p in sorted((folders.store / "releases").glob("*.json"), key=lambda p: int(p.stem))]
    drift_time = traffic["drift_time"]
    decision = next((e for e in events if e["kind"] == "decision"), None)
    decided_at = decision["time"] if decision else None
    served_at = next((e["time"] for e in events if e["kind"] == "version_seen" and e["version"] == 2), None)
    return {
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "load_average": [round(x, 2) for x in os.getloadavg()]},
        "bayes_auc": traffic["bayes_auc"],
        "auc": _aucs(timeline, drift_time, decision, threshold),
        "versions": [_version(release, read_verdicts(folders)) for release in releases],
        "requests": traffic["requests"],
        "latency_ms": traffic["latency_ms"],
        "records": _records(folders.lake, traffic, timeline),
        "trigger": _trigger(events, decision, traffic, drift_time, timeline),
        "seconds": {
            **seconds,
            "drift_to_detection": _between(drift_time, decided_at),
            "trigger_to_serving": _between(decided_at, served_at),
        },
        "serving_parity_max_abs_diff": max((r.parity_max_abs_diff for r in releases), default=None),
        "window_rows": plan.window_rows,
        "drift": traffic["drift"],
    }


def _aucs(
    timeline: Lines, drift_time: float | None, decision: Mapping[str, Any] | None, threshold: float
) -> dict[str, float | None]:
    """Live AUCs: before drift, when the monitor fired, at the old version's worst, and of the new version."""
    first = [t for t in timeline if t["version"] == 1 and t["auc"] is not None]
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
        "set_aside": last.get("set_aside"),
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


def _between(start: float | None, end: float | None) -> float | None:
    return round(end - start, 2) if start is not None and end is not None else None


def failed_promises(summary: Mapping[str, Any], *, simulated: bool) -> list[str]:
    """What the demo promised and this run did not hold, one sentence each.

    On a user's own rows the monitor may rightly not fire and a model may rightly not recover: only what holds for any
    data is asked.
    """
    records, requests, auc = summary["records"], summary["requests"], summary["auc"]
    parity, runs = summary["serving_parity_max_abs_diff"], summary["trigger"]["runs"]
    promises = [
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
    return [sentence for held, sentence in promises if not held]
