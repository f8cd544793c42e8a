"""The demo's numbers about what was decided: every policy's say, features that drifted, decisions made again.

Read off the monitor's decisions and events and the proofs' findings; what does not exist is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Lines = Sequence[Mapping[str, Any]]
CONFIRMED = "retrain"
"""A policy's word that it is sure; what follows it is the monitor's settings'."""


def retrain_decision(events: Lines) -> Mapping[str, Any] | None:
    """The event of the first decision that asked for a run; a decision that only told people names no request."""
    return next((e for e in events if e["kind"] == "decision" and "request_id" in e), None)


def policies_say(decisions: Lines, decision: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Every policy's own word at the decision point at which the run was asked for; empty where none was.

    Args:
        decisions: The lines of the monitor's `decisions.jsonl`.
        decision: See `retrain_decision`.
    """
    if decision is None:
        return []
    for line in reversed(decisions):
        own = next((each for each in line["decisions"] if each["policy"] == decision.get("policy")), None)
        if line["time"] <= decision["time"] and own and decision["text"].startswith(own["reason"]):
            return [{name: each[name] for name in ("policy", "action", "reason")} for each in line["decisions"]]
    return []


def first_sure(decisions: Lines, drift_time: float | None) -> dict[str, Any]:
    """By policy: seconds of event time from the change to the first decision point at which it was sure.

    None where it never was, or nobody changed the world; negative = a false alarm.
    """
    found: dict[str, Any] = {}
    for line in decisions:
        for each in line["decisions"]:
            found.setdefault(each["policy"], None)
            if each["action"] == CONFIRMED and found[each["policy"]] is None and drift_time is not None:
                found[each["policy"]] = round(line["time"] - drift_time, 2)
    return found


def feature_drift(events: Lines, drift_time: float | None) -> dict[str, Any]:
    """What the drift watch told of the features that version 1 was shown, without a label.

    `buckets_before` and `buckets_after` the change in which a column drifted, `seconds` from the change to the end of
    the first after it (None = none), `columns` with the largest distance of each.
    """
    told = [e for e in events if e["kind"] == "drift" and e["version"] == 1 and e["drifted"]]
    after = [e for e in told if drift_time is not None and e["bucket_end"] > drift_time]
    columns: dict[str, float | None] = {}
    for event in after:
        for row in event["columns"]:
            if row["drifted"]:
                columns[row["column"]] = max(columns.get(row["column"]) or 0.0, row["distance"] or 0.0)
    return {
        "buckets_before": len(told) - len(after),
        "buckets_after": len(after),
        "seconds": round(after[0]["bucket_end"] - drift_time, 2) if after and drift_time is not None else None,
        "columns": dict(sorted(columns.items(), key=lambda item: -(item[1] or 0.0))),
    }


def told_decisions(summary: Mapping[str, Any]) -> list[str]:
    """What the numbers say, a sentence each."""
    sentences = []
    for each in summary["trigger"]["policies"]:
        sentences.append(f"{each['policy']} said {each['action']}: {each['reason']}")
    sure = {name: seconds for name, seconds in summary["policies"].items() if seconds is not None}
    if sure:
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sure.items())
        sentences.append(f"from the change to the rows by which a policy was sure: {told}")
    sentences.append(_told_features(summary["feature_drift"]))
    if (found := summary["decisions"]) is not None:
        equal = "all equal" if found["equal"] else "not all equal"
        sentences.append(f"{found['points']} decisions replayed from the lake, {equal}")
    return sentences


def _told_features(drift: Mapping[str, Any]) -> str:
    if not drift["columns"]:
        return "no feature moved, as far as the rows can tell: what changed is what they mean"
    columns = ", ".join(f"{name} {distance:.3f}" for name, distance in list(drift["columns"].items())[:5])
    more = f" and {len(drift['columns']) - 5} more" if len(drift["columns"]) > 5 else ""
    return f"features moved, seen without a label {drift['seconds']:.1f} s after the change: {columns}{more}"


def decided_failures(summary: Mapping[str, Any]) -> list[str]:
    """What was promised about decisions and did not hold, one sentence each."""
    found = summary["decisions"]
    if found is None or found["equal"]:
        return []
    return [f"the {found['points']} decisions replayed from the lake are not those that the monitor wrote"]
