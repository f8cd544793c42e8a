"""Small multiples: each column's distribution now over the champion's, with what the drift test says of it.

The strongest evidence comes first. Each card holds its chart's numbers as a table too, folded, for those who cannot see
the chart.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from components.validation.reports.charts import draw_bars
from components.validation.reports.tables import by_evidence, number, percent, probability, simple_table


def draw_cards(document: Mapping[str, Any]) -> str:
    """All judged columns."""
    entries = {entry["feature"]: entry for entry in document["drift"]}
    columns = sorted(document["columns"], key=lambda column: by_evidence(entries.get(column["column"])))
    key = '<p class="key soft" aria-hidden="true">Shares of the rows with a value:<i class="k1"></i>these rows'
    key += '<i class="k2"></i>the champion\'s</p>' if document["num_rows_before"] is not None else "</p>"
    return f'{key}<div class="cards">{"".join(_card(c, entries.get(c["column"])) for c in columns)}</div>'


def _card(column: Mapping[str, Any], entry: Mapping[str, Any] | None) -> str:
    name, bars = column["column"], column["bars"]
    moved = bool(entry and entry.get("drifted"))
    badge = '<span class="badge warn">drifted</span>' if moved else ""
    if entry and entry.get("learnt"):
        badge = '<span class="badge info">learnt already</span>'
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in _facts(column, entry) if text)
    chart = draw_bars(bars, _spoken(column))
    return (
        f'<article class="card{" moved" if moved else ""}"><h3>{escape(name)} {badge}</h3>{paragraphs}{chart}'
        f"{_numbers(column)}</article>"
    )


def _facts(column: Mapping[str, Any], entry: Mapping[str, Any] | None) -> list[str]:
    facts = [_effect(entry) if entry else ""]
    missing = f"missing {percent(column['missing'])}"
    facts.append(
        missing + (f", before {percent(column['missing_before'])}" if column["missing_before"] is not None else "")
    )
    if column["kind"] == "category":
        new = entry.get("new_value_share") if entry else None
        told = f"about {column['distinct']:,} values"
        facts.append(told + (f", new ones in {percent(new)} of the rows" if new is not None else ""))
    elif column["least"] is not None:
        facts.append(
            f"{number(column['least'])} to {number(column['most'])}, median {number(column['median'])}, "
            f"mean {number(column['mean'])}, std {number(column['std'])}"
        )
    return facts


def _effect(entry: Mapping[str, Any]) -> str:
    if entry.get("effect") is None:
        return ""
    told = f"change {number(entry['effect'])} ({number(entry['effect_low'])} to {number(entry['effect_high'])})"
    if entry.get("q_value") is not None:
        told += f", q {probability(entry['q_value'])}"
    if entry.get("detectable") is not None:
        told += f"; seen from {number(entry['detectable'])} on"
    return told


def _spoken(column: Mapping[str, Any]) -> str:
    """The chart in words: where the largest change is, or without a champion, the largest share."""
    bars = [bar for bar in column["bars"] if bar["before"] is not None]
    told = f"distribution of {column['column']}"
    if bars:
        most = max(bars, key=lambda bar: abs(bar["now"] - bar["before"]))
        return (
            f"{told}; largest change at {most['label']}: {percent(most['before'])} before, {percent(most['now'])} now"
        )
    if column["bars"]:
        most = max(column["bars"], key=lambda bar: bar["now"])
        return f"{told}; most rows at {most['label']}: {percent(most['now'])}"
    return told


def _numbers(column: Mapping[str, Any]) -> str:
    if not column["bars"]:
        return ""
    rows = [[bar["label"], percent(bar["now"]), percent(bar["before"])] for bar in column["bars"]]
    table = simple_table(["value", "now", "before"], rows, caption=f"shares of {column['column']}", numbers=(1, 2))
    return f"<details><summary>numbers of {escape(column['column'])}</summary>{table}</details>"
