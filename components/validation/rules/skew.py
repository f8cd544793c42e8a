"""What measured train/serve skew means: a finding per feature that differs, and one where nothing could be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.validation.rules.catalogue import DATASET, INFO, Finding
from components.validation.rules.drift import describe_change
from components.validation.rules.judging import Judging


def judge_skew(entries: Sequence[dict[str, Any]], facts: Mapping[str, Any], judging: Judging) -> list[Finding]:
    """Findings on features that were not served as they are trained on; those that differ in most rows first.

    Args:
        entries: `ValidationReport.skew`.
        facts: `ValidationReport.served`; empty = no archive was named, and nothing is said.
        judging: The rules.
    """
    if not facts:
        return []
    if not entries:
        text = f"{facts['served_uri']} holds no row of the training rows' days: serving was not compared"
        return judging.find(DATASET, "skew", "skew", text, at_most=INFO)
    found: list[Finding] = []
    for entry in sorted(entries, key=lambda e: -abs(e["effect"] or 0.0)):
        if entry["severity"] != INFO:
            found += judging.find(entry["feature"], "skew", "skew", _describe(entry))
    return found


def _describe(entry: Mapping[str, Any]) -> str:
    name = entry["feature"]
    if entry["method"] != "rows":
        change = describe_change(entry)
        return f"{name} is distributed otherwise in served rows: {change}; rows did not join: weaker evidence"
    text = (
        f"{name} is not what was served in {entry['differing']:,} of {entry['num_rows_now']:,} joined rows: "
        f"{entry['distance']:.2%} (95 %: {entry['effect_low']:.2%} to {entry['effect_high']:.2%})"
    )
    if entry["factor"] is not None:
        text += f"; training has {entry['factor']:.4g} times the served value"
    elif entry["only_training"] == entry["differing"]:
        text += "; served rows lack the value"
    elif entry["only_served"] == entry["differing"]:
        text += "; training rows lack the value"
    if entry["example"]:
        e = entry["example"]
        text += f"; in row {e['row']} of request {e['request_id']} training has {_said(e['training'])}"
        text += f", served was {_said(e['served'])}"
    return text


def _said(value: float | int | None) -> str:
    return "no value" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)
