"""The demo's numbers about what was served: a release under traffic, a walk back and forth, the proof of the answers.

Read off the journal, the runs' notes and the traffic's lines, one a second; what does not exist is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from components.store.promotion_journal import INTENT, LIVE_ACTIONS, moment_of, read_entries
from components.store.run_notes import read_notes, read_outcomes

MAX_ROLLBACK_SECONDS = 5.0
BESIDE_SECONDS = 10
"""Seconds of traffic before and after a release that it is held against."""

Lines = Sequence[Mapping[str, Any]]


def release_numbers(store: Path, traffic: Lines, version: int) -> dict[str, Any] | None:
    """How long the release of `version` took and what callers felt meanwhile; None where it was not released.

    `p99_ms` are of single seconds of traffic: the worst of those that the deployment step overlaps, and the medians of
    the seconds before and after it. With a few dozen requests a second such a p99 is the slowest request or nearly.

    Args:
        store: The model store.
        traffic: The replay's lines.
        version: Which release.
    """
    entries = [entry for entry in read_entries(store) if entry.version == version]
    live = next((entry for entry in entries if entry.action in LIVE_ACTIONS), None)
    outcome = next((o for o in read_outcomes(store) if o.version == version), None)
    note = next((n for n in read_notes(store, outcome.run) if n.step == "deployment"), None) if outcome else None
    if live is None or note is None:
        return None
    told = next((entry for entry in entries if entry.action == INTENT), None)
    started_at, live_at = _seconds(note.started_at), _seconds(live.time)
    during = _overlapping(traffic, started_at, live_at)
    before = [line for line in traffic if line["time"] < started_at][-BESIDE_SECONDS:]
    after = [line for line in traffic if line["time"] > live_at + 1][:BESIDE_SECONDS]
    return {
        "version": version,
        "started_at": started_at,
        "live_at": live_at,
        "seconds": note.seconds,
        "intent_to_live_seconds": round(live_at - _seconds(told.time), 3) if told else None,
        "p99_ms": {"before": _typical(before), "during": _worst(during), "after": _typical(after)},
        **_requests(during),
    }


def rollback_numbers(walks: Lines, traffic: Lines) -> dict[str, Any] | None:
    """The walk back and the walk forth, and what callers felt from the first's start to the second's end.

    Args:
        walks: As `demo_rollback.show_rollback` tells them: the way back, then the way forth; empty = none was shown.
        traffic: The replay's lines.
    """
    if len(walks) != 2:
        return None
    back, forth = walks
    during = _overlapping(traffic, back["started_at"], forth["answered_at"] or forth["ended_at"])
    rows: dict[str, int] = {}
    for line in during:
        for version, count in line["versions"].items():
            rows[version] = rows.get(version, 0) + count
    return {
        "from_version": forth["version"],
        "to_version": back["version"],
        "seconds": _between(back["started_at"], back["ended_at"]),
        "forward_seconds": _between(forth["started_at"], forth["ended_at"]),
        "started_at": back["started_at"],
        "forward_at": forth["started_at"],
        "old_version_answered": _answered(back),
        "new_version_answered": _answered(forth),
        "rows_by_version": dict(sorted(rows.items())),
        "p99_ms": _worst(during),
        **_requests(during),
    }


def released_failures(summary: Mapping[str, Any]) -> list[str]:
    """What was promised about serving and did not hold, one sentence each; what was not shown promised nothing."""
    release, rollback = summary["release"], summary["rollback"]
    promises: list[tuple[bool, str]] = []
    if release is not None:
        failed = release["requests_failed"]
        promises.append((failed == 0, f"{failed} requests failed during the release, expected 0"))
    if rollback is not None:
        slowest = max(rollback["seconds"], rollback["forward_seconds"])
        failed = rollback["requests_failed"]
        promises += [
            (failed == 0, f"{failed} requests failed while the version was rolled back, expected 0"),
            (
                slowest < MAX_ROLLBACK_SECONDS,
                f"a rollback took {slowest:.1f} s, expected less than {MAX_ROLLBACK_SECONDS:g}",
            ),
            (
                rollback["old_version_answered"] is not False,
                f"version {rollback['to_version']} did not answer after the rollback",
            ),
            (
                rollback["new_version_answered"] is not False,
                f"version {rollback['from_version']} did not answer after its return",
            ),
        ]
    for found in summary["verified"]:
        wrong = [check["name"] for check in found["checks"] if check["held"] is False]
        reason = f"{found['num_different']} of {found['num_rows']} logged scores, and {', '.join(wrong) or 'no hash'}"
        promises.append((found["same"], f"version {found['version']} is not what was released: {reason} differ"))
    rows, archived = sum(found["num_rows"] for found in summary["verified"]), summary["records"]["archived"]
    if summary["verified"]:
        promises.append((rows == archived, f"{rows} logged scores were recomputed, expected the {archived} archived"))
    return [sentence for held, sentence in promises if not held]


def told_release(summary: Mapping[str, Any]) -> list[str]:
    """What the numbers say, a sentence each."""
    release, rollback, sentences = summary["release"], summary["rollback"], []
    if release is not None:
        p99 = release["p99_ms"]
        sentences.append(
            f"release of version {release['version']} under traffic: {_text(release['seconds'])} s, "
            f"{release['requests_failed']} requests failed; p99 of a second before, during, after: "
            f"{_text(p99['before'])}, {_text(p99['during'])}, {_text(p99['after'])} ms"
        )
    if rollback is not None:
        sentences.append(
            f"rollback to version {rollback['to_version']} in {rollback['seconds']:.1f} s and forward again in "
            f"{rollback['forward_seconds']:.1f} s, {rollback['requests_failed']} requests failed"
        )
    for found in summary["verified"]:
        sentences.append(
            f"version {found['version']}: {found['num_rows']:,} logged scores recomputed offline, "
            f"{found['num_different']} differ, largest difference {_text(found['max_abs_diff'])}"
        )
    return sentences


def journal_events(store: Path) -> list[dict[str, Any]]:
    """What the journal says of who is live, in the form of the monitor's events."""
    return [
        {
            "time": _seconds(entry.time),
            "kind": entry.action,
            "text": f"version {entry.version}, before it {entry.previous_version or 'none'}: {entry.reason}",
        }
        for entry in read_entries(store)
        if entry.action != INTENT
    ]


def _answered(walk: Mapping[str, Any]) -> bool | None:
    """Whether the version was seen to answer alone; None where the traffic ended before it could."""
    return True if walk["answered_at"] is not None else None if walk["traffic_ended"] else False


def _overlapping(traffic: Lines, start: float, end: float) -> list[Mapping[str, Any]]:
    """The lines about any time in [start, end]; a line tells of the time since the one before it."""
    begins = [0.0, *(line["time"] for line in traffic)]
    return [line for line, begin in zip(traffic, begins) if begin <= end and line["time"] >= start]


def _requests(lines: Lines) -> dict[str, int]:
    return {f"requests_{what}": sum(line[f"requests_{what}"] for line in lines) for what in ("sent", "failed")}


def _typical(lines: Lines) -> float | None:
    values = [line["p99_ms"] for line in lines if line["p99_ms"] is not None]
    return round(median(values), 3) if values else None


def _worst(lines: Lines) -> float | None:
    return max((line["p99_ms"] for line in lines if line["p99_ms"] is not None), default=None)


def _seconds(text: str) -> float:
    return round(moment_of(text).timestamp(), 3)


def _between(start: float, end: float) -> float:
    return round(end - start, 3)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
