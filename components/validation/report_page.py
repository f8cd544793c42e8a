"""The report for people: one self-contained HTML page, readable on a phone, without a network and without a script.

Shows the decision first, then the findings, the columns as small multiples with the strongest evidence first, and the
numbers of drift, skew, schema and quarantine. Drawn from the document of `report` alone; judges nothing. Each chart's
numbers are a folded table too, for those who cannot see the chart; its bars differ by shape, not by colour alone. All
text that comes from the rows or their file names is escaped. A number that does not exist is a dash.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
ABSENT = "–"

Document = Mapping[str, Any]
Entries = Sequence[Mapping[str, Any]]

_SECTIONS = ("Findings", "Columns", "Drift", "Served rows", "Schema", "Quarantine")


def draw_page(document: Document) -> str:
    """The page's HTML."""
    title = f"Validation of run {document['run']}"
    content = {
        "Findings": findings_table(document["findings"]),
        "Columns": draw_cards(document),
        "Drift": drift_table(document["drift"], has_champion=document["num_rows_before"] is not None),
        "Served rows": skew_table(document["skew"], document["served"]),
        "Schema": schema_table(document["schema"]),
        "Quarantine": quarantine_table(document["quarantine"]),
    }
    sections = "".join(
        f'<section id="{_anchor(name)}" aria-labelledby="h-{_anchor(name)}">'
        f'<h2 id="h-{_anchor(name)}">{name}</h2>{content[name]}</section>'
        for name in _SECTIONS
    )
    links = "".join(f'<li><a href="#{_anchor(name)}">{name}</a></li>' for name in _SECTIONS)
    decision = escape(document["decision"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}: {decision}</title><style>{STYLE}</style></head><body>"
        '<a class="skip" href="#main">Skip to the findings</a>'
        f'<header><h1>{escape(title)} <span class="badge {decision}">{decision}</span></h1>'
        f'{_tiles(document)}<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{sections}</main></body></html>\n'
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _tiles(document: Document) -> str:
    before, findings = document["num_rows_before"], document["findings"]
    drift = document["drift"]
    moved = sum(bool(entry["drifted"]) for entry in drift)
    tiles = [
        ("training rows", f"{document['num_rows']:,}"),
        ("the champion's rows", "no champion" if before is None else f"{before:,}"),
        ("findings", f"{_count(findings, 'block')} block, {_count(findings, 'warn')} warn"),
        ("features that drifted", f"{moved} of {len(drift)}" if drift else "not compared"),
        ("clicks", label_text(document["label"], document["columns"])),
        ("quarantined rows", f"{document['quarantine']['num_rows']:,}"),
        ("served rows", _joined_share(document)),
    ]
    return '<div class="tiles">' + "".join(f"<div>{name}<b>{escape(text)}</b></div>" for name, text in tiles) + "</div>"


def _count(findings: Sequence[Mapping[str, Any]], severity: str) -> int:
    return sum(finding["severity"] == severity for finding in findings)


def _joined_share(document: Document) -> str:
    served = document["served"]
    if not served:
        return "not compared"
    rows = served["num_joined"] + served["num_only_training"]
    return f"{percent(served['num_joined'] / rows if rows else None)} of the rows joined"


# -- cards


def draw_cards(document: Document) -> str:
    """All judged columns."""
    entries = {entry["feature"]: entry for entry in document["drift"]}
    columns = sorted(document["columns"], key=lambda column: by_evidence(entries.get(column["column"])))
    key = '<p class="key soft" aria-hidden="true">Shares of the rows with a value:<i class="k1"></i>these rows'
    key += '<i class="k2"></i>the champion\'s</p>' if document["num_rows_before"] is not None else "</p>"
    return f'{key}<div class="cards">{"".join(_draw_card(c, entries.get(c["column"])) for c in columns)}</div>'


def _draw_card(column: Mapping[str, Any], entry: Mapping[str, Any] | None) -> str:
    name, bars = column["column"], column["bars"]
    marker, badge = "", ""
    if entry and entry["drifted"]:
        marker, badge = " moved", '<span class="badge warn">drifted</span>'
    elif entry and entry["learned"]:
        badge = '<span class="badge info">learned already</span>'
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in _card_facts(column, entry) if text)
    rows = [[escape(bar["label"]), percent(bar["now"]), percent(bar["before"])] for bar in bars]
    table = html_table(["value", "now", "before"], rows, caption=f"shares of {name}", numbers=(1, 2))
    numbers = f"<details><summary>numbers of {escape(name)}</summary>{table}</details>" if bars else ""
    chart = draw_bars(bars, _describe_chart(column))
    return f'<article class="card{marker}"><h3>{escape(name)} {badge}</h3>{paragraphs}{chart}{numbers}</article>'


def _card_facts(column: Mapping[str, Any], entry: Mapping[str, Any] | None) -> list[str]:
    before = column["missing_before"]
    facts = [
        _describe_effect(entry) if entry else "",
        f"missing {percent(column['missing'])}" + (f", before {percent(before)}" if before is not None else ""),
    ]
    if column["kind"] == "category":
        new = entry["new_value_share"] if entry else None
        text = f"about {column['distinct']:,} values"
        facts.append(text + (f", new ones in {percent(new)} of the rows" if new is not None else ""))
    elif column["least"] is not None:
        facts.append(
            f"{number(column['least'])} to {number(column['most'])}, median {number(column['median'])}, "
            f"mean {number(column['mean'])}, std {number(column['std'])}"
        )
    return facts


def _describe_effect(entry: Mapping[str, Any]) -> str:
    if entry["effect"] is None:
        return ""
    text = f"change {number(entry['effect'])} ({number(entry['effect_low'])} to {number(entry['effect_high'])})"
    if entry["q_value"] is not None:
        text += f", q {probability(entry['q_value'])}"
    return f"{text}; detectable from {number(entry['detectable'])} on"


def _describe_chart(column: Mapping[str, Any]) -> str:
    """The chart in words: where the largest change is, or without a champion, the largest share."""
    bars, text = column["bars"], f"distribution of {column['column']}"
    if not bars:
        return text
    most = max(bars, key=lambda bar: abs(bar["now"] - (bar["before"] or 0.0)))
    if most["before"] is None:
        return f"{text}; most rows at {most['label']}: {percent(most['now'])}"
    return f"{text}; largest change at {most['label']}: {percent(most['before'])} before, {percent(most['now'])} now"


# -- tables


def findings_table(findings: Entries) -> str:
    """Every finding with its rule and what the rule does."""
    if not findings:
        return "<p>Nothing was found.</p>"
    rows = [
        [
            f'<span class="badge {escape(f["severity"])}">{escape(f["action"])}</span>',
            escape(f["feature"]),
            escape(f["rule"]),
            escape(f["description"]),
        ]
        for f in findings
    ]
    return html_table(["action", "column", "rule", "what was found"], rows, caption="worst first")


def drift_table(drift: Entries, *, has_champion: bool) -> str:
    """The numbers of all compared features, strongest evidence first."""
    if not drift:
        return f"<p>{'No feature could be compared.' if has_champion else 'There is no champion to compare with.'}</p>"
    rows = [
        [
            f"{escape(entry['feature'])} {_state_badge(entry)}",
            number(entry["effect"]),
            f"{number(entry['effect_low'])} to {number(entry['effect_high'])}",
            number(entry["threshold"]),
            number(entry["detectable"]),
            probability(entry["q_value"]),
            number(entry["design_effect"]),
            number(entry["mean_shift"]),
            _describe_moved_value(entry["moved_value"]),
        ]
        for entry in sorted(drift, key=by_evidence)
    ]
    head = ["column", "effect", "95 %", "matters from", "detectable from", "q-value", "design effect", "mean, sd"]
    text = "Effect: change of the share of one value, or divergence in bits."
    return html_table([*head, "most moved value"], rows, caption=text, numbers=range(1, 8))


def _describe_moved_value(moved: Mapping[str, Any] | None) -> str:
    if moved is None:
        return ABSENT
    return escape(f"{moved['value']}: {percent(moved['share_before'])} to {percent(moved['share_now'])}")


def by_evidence(entry: Mapping[str, Any] | None) -> tuple[bool, float, float]:
    """Sorts drifted features first, then by their adjusted p-value, then by their effect; unmeasured ones last."""
    if entry is None:
        return True, 2.0, 0.0
    q_value, effect = entry["q_value"], entry["effect"]
    return not entry["drifted"], 1.5 if q_value is None else q_value, -abs(effect or 0.0)


def _state_badge(entry: Mapping[str, Any]) -> str:
    if entry["drifted"]:
        return f'<span class="badge warn">{escape(", ".join(entry.get("changes", ["differs"])))}</span>'
    return '<span class="badge info">learned</span>' if entry.get("learned") else ""


def skew_table(skew: Entries, served: Mapping[str, Any] | None) -> str:
    """Training rows against served rows."""
    if not served:
        return "<p>No archive of served rows was named.</p>"
    text = (
        f"<p>{served['num_joined']:,} training rows were joined with served ones; {served['num_only_training']:,} were "
        f"never served, {served['num_only_served']:,} served rows of the same time are not trained on.</p>"
    )
    if not skew:
        return f"{text}<p>Nothing could be compared.</p>"
    if served["method"] != "rows":
        text += "<p>Rows could not be joined: distributions are compared, which is weaker evidence.</p>"
        return text + drift_table(skew, has_champion=True)
    rows = [
        [
            f"{escape(entry['feature'])} {_state_badge(entry)}",
            f"{entry['differing']:,}",
            percent(entry["effect"]),
            f"{percent(entry['effect_low'])} to {percent(entry['effect_high'])}",
            f"{entry['only_training']:,}",
            f"{entry['only_served']:,}",
            number(entry["factor"]),
        ]
        for entry in sorted(skew, key=lambda entry: -entry["effect"])
    ]
    head = ["column", "rows that differ", "share", "95 %", "value in training only", "as served only", "factor"]
    return text + html_table(head, rows, caption="joined rows, value by value", numbers=range(1, 7))


def schema_table(schema: Mapping[str, Any]) -> str:
    """What these rows would change in the schema in force."""
    if not schema["differences"]:
        return "<p>These rows ask for no change of the schema.</p>"
    keys = ("feature", "rule", "kind", "old", "new")
    rows = [[escape(str(each.get(key, ""))) for key in keys] for each in schema["differences"]]
    text = "What the schema would have to say for these rows to fit; nothing changes until people accept it."
    return html_table(["column", "rule", "direction", "in force", "these rows"], rows, caption=text)


def quarantine_table(quarantine: Mapping[str, Any]) -> str:
    """Quarantined rows, by rule."""
    if not quarantine["num_rows"]:
        return "<p>No row was quarantined.</p>"
    rows = [[escape(rule), f"{rows:,}"] for rule, rows in sorted(quarantine["num_by_rule"].items())]
    place = f"<p>They lie in <code>{escape(str(quarantine['uri']))}</code>.</p>" if quarantine["uri"] else ""
    return place + html_table(
        ["rule", "rows"], rows, caption="quarantined rows, with their reason beside them", numbers=(1,)
    )


def label_text(label: Mapping[str, Any] | None, columns: Entries) -> str:
    """The click rate now, and how it changed."""
    if label:
        change = f"{percent(label['rate_now'])}, before {percent(label['rate_before'])}"
        return f"{change} (p {probability(label['p_value'])})"
    return percent(next((column["mean"] for column in columns if column["kind"] == "label"), None))


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, numbers: Collection[int] = ()
) -> str:
    """A table whose cells are markup already; the first names its row. It scrolls in its own box, by keys too."""

    def cell(place: int, text: str) -> str:
        if place == 0:
            return f'<th scope="row">{text}</th>'
        return f'<td class="number">{text}</td>' if place in numbers else f"<td>{text}</td>"

    heads = "".join(
        f'<th scope="col"{" class=number" if place in numbers else ""}>{escape(name)}</th>'
        for place, name in enumerate(head)
    )
    lines = "".join("<tr>" + "".join(cell(i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def number(value: Any) -> str:
    """Four digits.

    >>> number(0.123456), number(None)
    ('0.1235', '–')
    """
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.4g}"


def percent(value: Any) -> str:
    """A share.

    >>> percent(0.0123), percent(0.00005), percent(None)
    ('1.23 %', '0.005 %', '–')
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{100 * value:.3g} %"


def probability(value: Any) -> str:
    """A p-value or q-value.

    >>> probability(0.00002), probability(0.0312)
    ('< 0.0001', '0.031')
    """
    if value is None:
        return ABSENT
    return "< 0.0001" if value < 0.0001 else f"{value:.2g}"


# -- charts

_WIDTH, _HEIGHT = 280, 72


def draw_bars(bars: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG of `bars` (`label`, `now`, `before`), read out as `title`; empty text without bars."""
    if not bars:
        return ""
    top = max(max(bar["now"], bar["before"] or 0.0) for bar in bars) or 1.0
    step = _WIDTH / len(bars)
    drawn = "".join(_draw_bar(bar, index * step, step, top) for index, bar in enumerate(bars))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" preserveAspectRatio="none">'
        f"{drawn}</svg>"
    )


def _draw_bar(bar: Mapping[str, Any], left: float, step: float, top: float) -> str:
    text = f"{bar['label']}: {bar['now']:.2%}"
    if bar["before"] is not None:
        text += f", before {bar['before']:.2%}"
    before = _rectangle("before", left + 0.05 * step, 0.9 * step, (bar["before"] or 0.0) / top)
    now = _rectangle("now", left + 0.25 * step, 0.5 * step, bar["now"] / top)
    return f"<g><title>{escape(text)}</title>{before}{now}</g>"


def _rectangle(name: str, left: float, width: float, share: float) -> str:
    height = share * _HEIGHT
    return f'<rect class="{name}" x="{left:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
