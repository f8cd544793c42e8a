"""The report for people: findings, and the columns as small multiples, those with the strongest evidence first.

Drawn from the document of `validate` alone; judges nothing. Each chart's numbers are a folded table too, for those who
cannot see the chart; its bars differ by shape, not by colour alone. All text that comes from the rows or their file
names is escaped.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from components.charts.page import html_page, html_table, number, percent, probability

Entry = Mapping[str, Any]
Cells = Mapping[str, Callable[[Entry], str]]
"""Head of a table's column -> the cell of an entry, as markup."""


def draw_page(document: Entry) -> str:
    """The page's HTML."""
    return html_page(
        f"Validation of run {document['run']}",
        decision=document["decision"],
        intro=_tiles(document),
        sections={
            "Findings": _findings(document["findings"]),
            "Columns": _cards(document),
            "Served rows": _skew(document["skew"], document["served"]),
            "Schema": _schema(document["schema"]["differences"]),
            "Quarantine": _quarantine(document["quarantine"]),
        },
    )


def _tiles(document: Entry) -> str:
    before, findings, drift, served = (document[key] for key in ("num_rows_before", "findings", "drift", "served"))
    severities = [finding["severity"] for finding in findings]
    joined = "not compared"
    if served:
        rows = served["num_joined"] + served["num_only_training"]
        joined = f"{percent(served['num_joined'] / rows if rows else None)} of the rows joined"
    tiles = {
        "training rows": f"{document['num_rows']:,}",
        "the champion's rows": "no champion" if before is None else f"{before:,}",
        "findings": f"{severities.count('block')} block, {severities.count('warn')} warn",
        "features that drifted": f"{sum(each['drifted'] for each in drift)} of {len(drift)}"
        if drift
        else "not compared",
        "clicks": _clicks(document["label"], document["columns"]),
        "quarantined rows": f"{document['quarantine']['num_rows']:,}",
        "served rows": joined,
    }
    drawn = "".join(f"<div>{name}<b>{escape(text)}</b></div>" for name, text in tiles.items())
    return f'<div class="tiles">{drawn}</div>'


def _clicks(label: Entry | None, columns: Sequence[Entry]) -> str:
    if label:
        change = f"{percent(label['rate_now'])}, before {percent(label['rate_before'])}"
        return f"{change} (p {probability(label['p_value'])})"
    return percent(next((column["mean"] for column in columns if column["kind"] == "label"), None))


# -- cards


def _cards(document: Entry) -> str:
    entries = {entry["feature"]: entry for entry in document["drift"]}
    columns = sorted(document["columns"], key=lambda column: _evidence_rank(entries.get(column["column"])))
    key = '<p class="key soft" aria-hidden="true">Shares of the rows with a value:<i class="k1"></i>these rows'
    key += '<i class="k2"></i>the champion\'s</p>' if document["num_rows_before"] is not None else "</p>"
    return f'{key}<div class="cards">{"".join(_card(c, entries.get(c["column"])) for c in columns)}</div>'


def _evidence_rank(entry: Entry | None) -> tuple[bool, float, float]:
    """Sorts drifted features first, then by their adjusted p-value, then by their effect; unmeasured ones last."""
    if entry is None:
        return True, 2.0, 0.0
    q_value, effect = entry["q_value"], entry["effect"]
    return not entry["drifted"], 1.5 if q_value is None else q_value, -abs(effect or 0.0)


def _card(column: Entry, entry: Entry | None) -> str:
    name, bars, before = escape(column["column"]), column["bars"], column["missing_before"]
    missing = f"missing {percent(column['missing'])}" + (f", before {percent(before)}" if before is not None else "")
    facts = [_describe_effect(entry), missing, _describe_values(column, entry)]
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in facts if text)
    cells: Cells = {
        "value": lambda bar: escape(bar["label"]),
        "now": lambda bar: percent(bar["now"]),
        "before": lambda bar: percent(bar["before"]),
    }
    table = _entries_table(bars, cells, caption=f"shares of {name}")
    numbers = f"<details><summary>numbers of {name}</summary>{table}</details>" if bars else ""
    chart = draw_bars(bars, _describe_chart(column))
    marker = " moved" if entry and entry["drifted"] else ""
    return f'<article class="card{marker}"><h3>{name} {_state_badge(entry)}</h3>{paragraphs}{chart}{numbers}</article>'


def _state_badge(entry: Entry | None) -> str:
    if entry and entry["drifted"]:
        return f'<span class="badge warn">{escape(", ".join(entry.get("changes", ["differs"])))}</span>'
    return '<span class="badge info">learned</span>' if entry and entry.get("learned") else ""


def _describe_effect(entry: Entry | None) -> str:
    if entry is None or entry["effect"] is None:
        return ""
    interval = f"{number(entry['effect_low'])} to {number(entry['effect_high'])}"
    text = f"change {number(entry['effect'])} ({interval}), matters from {number(entry['threshold'])}"
    if entry["q_value"] is not None:
        text += f", q {probability(entry['q_value'])}"
    text += f"; detectable from {number(entry['detectable'])} on"
    if moved := entry["moved_value"]:
        text += f"; {moved['value'] or 'a user'}: {percent(moved['share_before'])} to {percent(moved['share_now'])}"
    return text


def _describe_values(column: Entry, entry: Entry | None) -> str:
    if column["kind"] == "category":
        new = entry["new_value_share"] if entry else None
        return f"about {column['distinct']:,} values" + (f", new ones in {percent(new)} of the rows" if new else "")
    if column["least"] is None:
        return ""
    parts = {name: number(column[name]) for name in ("least", "most", "median", "mean", "std")}
    return f"{parts.pop('least')} to {parts.pop('most')}, " + ", ".join(f"{n} {text}" for n, text in parts.items())


def _describe_chart(column: Entry) -> str:
    """The chart in words: where the largest change is, or without a champion, the largest share."""
    bars, text = column["bars"], f"distribution of {column['column']}"
    if not bars:
        return text
    most = max(bars, key=lambda bar: abs(bar["now"] - (bar["before"] or 0.0)))
    if most["before"] is None:
        return f"{text}; most rows at {most['label']}: {percent(most['now'])}"
    return f"{text}; largest change at {most['label']}: {percent(most['before'])} before, {percent(most['now'])} now"


# -- tables


def _entries_table(entries: Sequence[Entry], cells: Cells, *, caption: str, texts: int = 1) -> str:
    """One row per entry; the first `texts` columns are text, the others numbers."""
    rows = [[cell(entry) for cell in cells.values()] for entry in entries]
    return html_table(list(cells), rows, caption=caption, numbers=range(texts, len(cells)))


def _findings(findings: Sequence[Entry]) -> str:
    if not findings:
        return "<p>Nothing was found.</p>"
    cells: Cells = {
        "action": lambda f: f'<span class="badge {escape(f["severity"])}">{escape(f["action"])}</span>',
        "column": lambda f: escape(f["feature"]),
        "rule": lambda f: escape(f["rule"]),
        "what was found": lambda f: escape(f["description"]),
    }
    return _entries_table(findings, cells, caption="worst first", texts=len(cells))


def _skew(skew: Sequence[Entry], served: Entry | None) -> str:
    if not served:
        return "<p>No archive of served rows was named.</p>"
    text = (
        f"<p>{served['num_joined']:,} training rows were joined with served ones; {served['num_only_training']:,} were "
        f"never served, {served['num_only_served']:,} served rows of the same time are not trained on.</p>"
    )
    if not skew:
        return f"{text}<p>Nothing could be compared.</p>"
    cells: Cells = {
        "column": lambda e: f"{escape(e['feature'])} {_state_badge(e)}",
        "rows that differ": lambda e: f"{e['differing']:,}",
        "share": lambda e: percent(e["effect"]),
        "value in training only": lambda e: f"{e['only_training']:,}",
        "as served only": lambda e: f"{e['only_served']:,}",
        "factor": lambda e: number(e["factor"]),
    }
    ranked = sorted(skew, key=lambda entry: -entry["effect"])
    return text + _entries_table(ranked, cells, caption="joined rows, value by value")


def _schema(differences: Mapping[str, str]) -> str:
    if not differences:
        return "<p>These rows ask for no change of the schema.</p>"
    text = "What the schema would have to say for these rows to fit; nothing changes until people accept it."
    lines = "\n".join(differences.values())
    return f"<p>{text}</p><pre>{escape(lines)}</pre>"


def _quarantine(quarantine: Entry) -> str:
    if not quarantine["num_rows"]:
        return "<p>No row was quarantined.</p>"
    num_rows, place = quarantine["num_rows"], escape(quarantine["uri"])
    return f"<p>{num_rows:,} rows, each with its reason, lie in <code>{place}</code>.</p>"


# -- charts

_WIDTH, _HEIGHT = 280, 72


def draw_bars(bars: Sequence[Entry], title: str) -> str:
    """An SVG of `bars` (`label`, `now`, `before`), read out as `title`; empty text without bars."""
    if not bars:
        return ""
    top = max(max(bar["now"], bar["before"] or 0.0) for bar in bars) or 1.0
    step = _WIDTH / len(bars)
    drawn = "".join(_draw_bar(bar, index * step, step=step, top=top) for index, bar in enumerate(bars))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" preserveAspectRatio="none">'
        f"{drawn}</svg>"
    )


def _draw_bar(bar: Entry, left: float, *, step: float, top: float) -> str:
    text = f"{bar['label']}: {bar['now']:.2%}"
    if bar["before"] is not None:
        text += f", before {bar['before']:.2%}"
    shapes = ""
    for name, margin, share in (("before", 0.05, (bar["before"] or 0.0) / top), ("now", 0.25, bar["now"] / top)):
        x, width, height = left + margin * step, (1 - 2 * margin) * step, share * _HEIGHT
        y = _HEIGHT - height
        shapes += f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    return f"<g><title>{escape(text)}</title>{shapes}</g>"
