"""Shares of alarms with their intervals, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.policies import wilson
from benchmarks.validation_study.plan import Case, Seen

FOUND_TARGET = 0.95
"""Least share of the windows with a shift whose shifted features are named."""


def of_case(case: Case, rows: int, seen: dict[str, Seen]) -> dict[str, Any]:
    """The counts of one case by setting: `false_alarm` pairs with any alarm, or `found` with every shifted feature."""
    return {
        "case": case.name,
        "rows": rows,
        "kind": case.shift.kind if case.shift else None,
        "columns": list(case.shift.columns) if case.shift else [],
        "settings": {setting: _counts(case, each) for setting, each in seen.items()},
    }


def _counts(case: Case, seen: Seen) -> dict[str, Any]:
    wanted = set(case.shift.columns) if case.shift else set()
    hits = [wanted <= set(alarms) if wanted else bool(alarms) for alarms in seen.alarms]
    others = [set(alarms) - wanted for alarms in seen.alarms]
    features = sorted({name for names in others for name in names})
    return {
        "windows": len(hits),
        "hits": sum(hits),
        "windows_with_others": sum(bool(names) for names in others),
        "others_per_window": sum(map(len, others)) / len(others),
        "others": {name: sum(name in names for names in others) for name in features},
        "seconds": median(seen.seconds),
    }


def pooled(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The cases of one name taken together, by name, then setting: hits, windows, their share and its interval."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        for setting, counts in result["settings"].items():
            sums = found.setdefault(result["case"], {}).setdefault(
                setting, {"hits": 0, "windows": 0, "stationary": result["kind"] is None, "seconds": []}
            )
            sums["hits"] += counts["hits"]
            sums["windows"] += counts["windows"]
            sums["seconds"].append(counts["seconds"])
    for settings in found.values():
        for sums in settings.values():
            sums["share"] = sums["hits"] / sums["windows"]
            sums["low"], sums["high"] = wilson(sums["hits"], sums["windows"])
            sums["seconds"] = median(sums["seconds"])
    return found


def verdict(sums: dict[str, Any], false_alarm_rate: float) -> str:
    """Whether the share meets its target: a stationary case's at most the rate, a shifted one's at least 95 %."""
    met = sums["share"] <= false_alarm_rate if sums["stationary"] else sums["share"] >= FOUND_TARGET
    return "met" if met else "MISSED"


def table(found: dict[str, dict[str, dict[str, Any]]], *, ours: str, false_alarm_rate: float) -> str:
    """The shares for people; `ours` is the setting whose targets are told."""
    lines = []
    for case, settings in found.items():
        stationary = next(iter(settings.values()))["stationary"]
        what = "pairs with any alarm" if stationary else "windows whose shift was named"
        target = f"at most {false_alarm_rate:g}" if stationary else f"at least {FOUND_TARGET:g}"
        lines += ["", f"{case} ({what}; target {target})"]
        for setting, sums in settings.items():
            share = f"{sums['hits']}/{sums['windows']} = {sums['share']:.3f} [{sums['low']:.3f}, {sums['high']:.3f}]"
            told = f"  {verdict(sums, false_alarm_rate)}" if setting == ours else ""
            lines.append(f"  {setting:<28}{share:<36}{sums['seconds']:>8.2f} s a window{told}")
    return "\n".join(lines)


def missed(results: Sequence[dict[str, Any]], *, setting: str) -> list[str]:
    """The places, of one setting, whose shift was overlooked in some window: what to look into."""
    return [
        f"{result['kind']} in {' and '.join(result['columns'])} ({result['rows']:,} rows): "
        f"{counts['hits']} of {counts['windows']}"
        for result in results
        if result["kind"] is not None and (counts := result["settings"].get(setting)) is not None
        if counts["hits"] < counts["windows"]
    ]
