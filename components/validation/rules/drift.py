"""What measured drift means: a finding per drifted feature, and per feature with many new categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.validation.rules.catalogue import INFO, Finding
from components.validation.rules.judging import Judging


def judge_drift(drift: Sequence[dict[str, Any]], judging: Judging) -> list[Finding]:
    """Findings on drifted features and on many new categories; the surest first, then the largest."""
    found: list[Finding] = []
    for entry in sorted(drift, key=_rank):
        name = entry["feature"]
        if entry["drifted"]:
            found += judging.find(name, "drift", "drift", f"{name} drifted: {describe_change(entry)}")
        elif entry["learnt"]:
            text = f"{name} differs from earlier windows as the champion's newest one does: {describe_change(entry)}"
            found += judging.find(name, "drift", "drift", text, at_most=INFO)
        new = entry["new_value_share"]
        if new is not None and new > judging.settings.new_value_share:
            text = f"{name} has categories that the champion never saw in at least {new:.1%} of the rows"
            found += judging.find(name, "drift", "new_categories", text)
    return found


def _rank(entry: dict[str, Any]) -> tuple[float, float]:
    return (1.0 if entry["q_value"] is None else entry["q_value"], -(entry["effect"] or 0.0))


def describe_change(entry: Mapping[str, Any]) -> str:
    """What changed, by how much, and how sure that is."""
    said = []
    if "values" in entry["changes"]:
        said.append(_values_told(entry))
    if "mean" in entry["changes"]:
        shift = entry["mean_shift"]
        said.append("its mean moved" if shift is None else f"its mean moved by {shift:+.2f} standard deviations")
    if "missing" in entry["changes"]:
        said.append(f"missing in {entry['missing_now']:.1%} of the rows, was in {entry['missing_before']:.1%}")
    return f"{'; '.join(said)} (q = {entry['q_value']:.2g})"


def _values_told(entry: Mapping[str, Any]) -> str:
    moved, sure = entry["moved_value"], f"{entry['effect_low']:.4f} to {entry['effect_high']:.4f}"
    if moved and entry["effect"] >= entry["threshold"]:
        return (
            f"value {moved['value']} went from {moved['share_before']:.1%} to {moved['share_now']:.1%} "
            f"(change {sure}, matters from {entry['threshold']:.4f})"
        )
    if moved or entry["new_value_share"] is not None:
        return f"many of its values changed their shares (divergence {entry['divergence']:.4f} bits)"
    return f"divergence {entry['effect']:.4f} bits ({sure}, matters from {entry['threshold']:.4f})"
