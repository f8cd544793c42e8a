"""The report's tables, and how its numbers are written; a number that does not exist is a dash."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from components.validation.reports.charts import draw_interval

ABSENT = "–"

Entries = Sequence[Mapping[str, Any]]


def findings_table(findings: Entries) -> str:
    """Every finding with its rule and what the rule does."""
    if not findings:
        return "<p>Nothing was found.</p>"
    rows = [
        [
            f'<span class="badge {escape(f["severity"])}">{escape(f.get("action", f["severity"]))}</span>',
            escape(f["feature"]),
            escape(f.get("rule", f["kind"])),
            escape(f["description"]),
        ]
        for f in findings
    ]
    return html_table(["action", "column", "rule", "what was found"], rows, caption="worst first")


def drift_table(drift: Entries, *, has_champion: bool) -> str:
    """The numbers of all compared features, strongest evidence first."""
    if not drift:
        return f"<p>{'No feature could be compared.' if has_champion else 'There is no champion to compare with.'}</p>"
    rows = []
    for entry in sorted(drift, key=by_evidence):
        moved = entry.get("moved_value")
        rows.append(
            [
                f"{escape(entry['feature'])} {_state(entry)}",
                _interval(entry),
                escape(number(entry.get("effect"))),
                escape(number(entry.get("threshold"))),
                escape(number(entry.get("detectable"))),
                escape(probability(entry.get("q_value"))),
                escape(number(entry.get("design_effect"))),
                escape(number(entry.get("mean_shift"))),
                escape(percent(entry.get("missing_now"))),
                escape(percent(entry.get("new_value_share"))),
                escape(f"{moved['value']}: {percent(moved['share_before'])} to {percent(moved['share_now'])}")
                if moved
                else ABSENT,
                f"{escape(number(entry['distance']))} <small>{escape(entry['measure'])}</small>",
            ]
        )
    head = ["column", "effect, 95 %", "effect", "matters from", "seen from", "q-value", "design effect", "mean, sd"]
    head += ["missing", "new values", "most moved value", "TFDV's distance"]
    told = "Effect: change of the share of one value, or divergence in bits. The mark is where an effect matters."
    return html_table(head, rows, caption=told, numbers=range(2, 10))


def by_evidence(entry: Mapping[str, Any] | None) -> tuple[bool, float, float]:
    """Sorts drifted features first, then by their adjusted p-value, then by their effect; unmeasured ones last."""
    if entry is None:
        return True, 2.0, 0.0
    q_value, effect = entry.get("q_value"), entry.get("effect")
    return not entry.get("drifted"), 1.5 if q_value is None else q_value, -abs(effect or 0.0)


def _state(entry: Mapping[str, Any]) -> str:
    if entry.get("drifted"):
        what = ", ".join(entry.get("changes") or ["drifted"])
        return f'<span class="badge warn">{escape(what)}</span>'
    return '<span class="badge info">learnt</span>' if entry.get("learnt") else ""


def _interval(entry: Mapping[str, Any]) -> str:
    effect, low, high = (entry.get(key) for key in ("effect", "effect_low", "effect_high"))
    if effect is None or low is None or high is None:
        return ABSENT
    limit = max(abs(high), 2 * (entry.get("threshold") or 0.0), 1e-12)
    title = f"{entry['feature']}: {number(effect)}, 95 % interval {number(low)} to {number(high)}"
    return draw_interval(abs(effect), max(low, 0.0), abs(high), limit=limit, mark=entry.get("threshold"), title=title)


def skew_table(skew: Entries, served: Mapping[str, Any] | None) -> str:
    """Training rows against served rows."""
    if not served:
        return "<p>No archive of served rows was named.</p>"
    told = (
        f"<p>{served['num_joined']:,} training rows were joined with served ones; {served['num_only_training']:,} were "
        f"never served, {served['num_only_served']:,} served rows of the same time are not trained on.</p>"
    )
    if not skew:
        return f"{told}<p>Nothing could be compared.</p>"
    if served["method"] != "rows":
        told += "<p>Rows could not be joined: distributions are compared, which is weaker evidence.</p>"
        return told + drift_table(skew, has_champion=True)
    rows = [
        [
            f"{escape(entry['feature'])} {_state(entry)}",
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
    return told + html_table(head, rows, caption="joined rows, value by value", numbers=range(1, 7))


def schema_table(schema: Mapping[str, Any]) -> str:
    """What these rows would change in the schema in force."""
    if not schema["differences"]:
        return "<p>These rows ask for no change of the schema.</p>"
    keys = ("feature", "rule", "kind", "old", "new")
    rows = [[escape(str(each.get(key, ""))) for key in keys] for each in schema["differences"]]
    told = "What the schema would have to say for these rows to fit; nothing changes until people accept it."
    return html_table(["column", "rule", "direction", "in force", "these rows"], rows, caption=told)


def quarantine_table(quarantine: Mapping[str, Any]) -> str:
    """Rows set aside, by rule."""
    if not quarantine["num_rows"]:
        return "<p>No row was set aside.</p>"
    rows = [[escape(rule), f"{rows:,}"] for rule, rows in sorted(quarantine["num_by_rule"].items())]
    place = f"<p>They lie in <code>{escape(str(quarantine['uri']))}</code>.</p>" if quarantine["uri"] else ""
    return place + html_table(
        ["rule", "rows"], rows, caption="rows set aside, with their reason beside them", numbers=(1,)
    )


def label_text(label: Mapping[str, Any] | None, columns: Entries) -> str:
    """The click rate now, and how it changed."""
    if label and label.get("rate_now") is not None:
        told = f"{percent(label['rate_now'])}, before {percent(label.get('rate_before'))}"
        if label.get("p_value") is not None:
            told += f" (p {probability(label['p_value'])})"
        return told
    share = next((c.get("mean") for c in columns if c["kind"] == "label"), None)
    return percent(share)


def simple_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, numbers: Collection[int]) -> str:
    """A table of plain texts."""
    return html_table(head, [[escape(cell) for cell in row] for row in rows], caption=caption, numbers=numbers)


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
