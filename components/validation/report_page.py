"""The HTML report: checks, and one small chart per column. The most certain drift comes first.

The only input of the page is the document of `report`. The numbers of each chart are also in a
collapsed table, for people who cannot see the chart. The two series of bars differ in shape and
color.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from evergreen.contracts.checks import FAIL, WARN, RuleCheck
from evergreen.reports.formats import number, percent, probability
from evergreen.reports.page import (
    Badge,
    Banner,
    Card,
    Cards,
    Checks,
    Code,
    Fold,
    PageTable,
    Preformatted,
    Text,
    Tiles,
    check_rows,
    html_page,
)
from evergreen.reports.rendering import PageBlock
from evergreen.reports.svg import Bar, BarChart

Entry = Mapping[str, Any]
Cells = Mapping[str, Callable[[Entry], object]]
"""Function for each column of a table, by the column's heading. The function returns the cell of an
entry."""
_FIRST_CHECKS = 8
"""Maximum number of checks on the first screen."""


def draw_page(document: Entry) -> str:
    """Return the page's HTML."""
    return html_page(
        f"Validation of run {document['run']}",
        badge=Badge(document["decision"]),
        first=[_state(document), *_checks(document), _tiles(document)],
        sections={
            "Columns": [_cards(document)],
            "Served rows": _skew(document["skew"], document["served"]),
            "Schema": _schema(document["schema"]["differences"]),
            "Quarantine": [_quarantine(document["quarantine"])],
        },
    )


def _results(document: Entry, result: str) -> int:
    """Return the number of checks with this result."""
    return sum(check["result"] == result for check in document["checks"])


def _state(document: Entry) -> Banner:
    if document["decision"] == FAIL:
        return Banner(
            text=f"The run ends here. Failed checks: {_results(document, FAIL)}.", tone="bad"
        )
    if document["decision"] == WARN:
        return Banner(
            text=f"The run goes on. Checks with warnings: {_results(document, WARN)}.", tone="warn"
        )
    return Banner(text="The run goes on. All checks passed.", tone="good")


def _checks(document: Entry) -> list[PageBlock]:
    """Return a table of the worst checks, and a collapsed table of the other checks.

    The first table contains the checks that did not pass and the checks with a value. If there are
    no such checks, the first table contains the worst checks.
    """
    names = [each.name for each in fields(RuleCheck)]
    checks = [RuleCheck(**{name: check[name] for name in names}) for check in document["checks"]]
    first_checks = [check for check in checks if not check.passed or check.value is not None]
    first = (first_checks or checks)[:_FIRST_CHECKS]
    others = [check for check in checks if check not in first]
    found: list[PageBlock] = [Checks(caption="What was checked", rows=check_rows(first))]
    if others:
        table = Checks(caption="Other checks", rows=check_rows(others))
        found.append(Fold(f"{len(others)} more checks", [table]))
    return found


def _tiles(document: Entry) -> Tiles:
    before, drift, served = (document[key] for key in ("num_rows_before", "drift", "served"))
    joined = "not compared"
    if served:
        rows = served["num_joined"] + served["num_only_training"]
        joined = f"{percent(served['num_joined'] / rows if rows else None)} of the rows joined"
    return Tiles(
        {
            "training rows": f"{document['num_rows']:,}",
            "the champion's rows": "no champion" if before is None else f"{before:,}",
            "checks": f"{_results(document, FAIL)} fail, {_results(document, WARN)} warn",
            "features that drifted": f"{sum(each['drifted'] for each in drift)} of {len(drift)}"
            if drift
            else "not compared",
            "clicks": _clicks(document["label"], document["columns"]),
            "quarantined rows": f"{document['quarantine']['num_rows']:,}",
            "served rows": joined,
        }
    )


def _clicks(label: Entry | None, columns: Sequence[Entry]) -> str:
    if label:
        change = f"{percent(label['rate_now'])}, before {percent(label['rate_before'])}"
        return f"{change} (p {probability(label['p_value'])})"
    return percent(next((column["mean"] for column in columns if column["kind"] == "label"), None))


# -- cards


def _cards(document: Entry) -> Cards:
    entries = {entry["feature"]: entry for entry in document["drift"]}
    columns = sorted(
        document["columns"], key=lambda column: _evidence_rank(entries.get(column["column"]))
    )
    cards = [_card(column, entries.get(column["column"])) for column in columns]
    return Cards(cards, document["num_rows_before"] is not None)


def _evidence_rank(entry: Entry | None) -> tuple[bool, float, float]:
    """Return a key that sorts drifted features first, then by adjusted p-value, then by effect.

    Features without a measurement come last.
    """
    if entry is None:
        return True, 2.0, 0.0
    q_value, effect = entry["q_value"], entry["effect"]
    return not entry["drifted"], 1.5 if q_value is None else q_value, -abs(effect or 0.0)


def _card(column: Entry, entry: Entry | None) -> Card:
    name, bars, before = column["column"], column["bars"], column["missing_before"]
    missing = f"missing {percent(column['missing'])}" + (
        f", before {percent(before)}" if before is not None else ""
    )
    cells: Cells = {
        "value": lambda bar: bar["label"],
        "now": lambda bar: percent(bar["now"]),
        "before": lambda bar: percent(bar["before"]),
    }
    return Card(
        name=name,
        badge=_state_badge(entry),
        is_moved=bool(entry and entry["drifted"]),
        texts=[
            text
            for text in (_describe_effect(entry), missing, _describe_values(column, entry))
            if text
        ],
        chart=BarChart(
            title=_describe_chart(column),
            bars=[Bar(label=bar["label"], now=bar["now"], before=bar["before"]) for bar in bars],
        )
        if bars
        else None,
        numbers=Fold(
            f"numbers of {name}", [_entries_table(bars, cells, caption=f"shares of {name}")]
        )
        if bars
        else None,
    )


def _state_badge(entry: Entry | None) -> Badge | None:
    if entry and entry["drifted"]:
        return Badge(", ".join(entry.get("changes", ["differs"])), "warn")
    return Badge("already trained on") if entry and entry.get("is_trained_on") else None


def _describe_effect(entry: Entry | None) -> str:
    if entry is None or entry["effect"] is None:
        return ""
    interval = f"{number(entry['effect_low'])} to {number(entry['effect_high'])}"
    text = f"change {number(entry['effect'])} ({interval}), threshold {number(entry['threshold'])}"
    if entry["q_value"] is not None:
        text += f", q {probability(entry['q_value'])}"
    text += f"; detectable from {number(entry['detectable'])} on"
    if moved := entry["moved_value"]:
        text += (
            f"; {moved['value'] or 'a user'}: {percent(moved['share_before'])} to "
            f"{percent(moved['share_now'])}"
        )
    return text


def _describe_values(column: Entry, entry: Entry | None) -> str:
    if column["kind"] == "category":
        new = entry["new_value_share"] if entry else None
        return f"about {column['distinct']:,} values" + (
            f", new ones in {percent(new)} of the rows" if new else ""
        )
    if column["least"] is None:
        return ""
    parts = {name: number(column[name]) for name in ("least", "most", "median", "mean", "std")}
    return f"{parts.pop('least')} to {parts.pop('most')}, " + ", ".join(
        f"{n} {text}" for n, text in parts.items()
    )


def _describe_chart(column: Entry) -> str:
    """Return a sentence about the largest change in a chart.

    Without a champion, the sentence is about the largest share.
    """
    bars, text = column["bars"], f"distribution of {column['column']}"
    if not bars:
        return text
    most = max(bars, key=lambda bar: abs(bar["now"] - (bar["before"] or 0.0)))
    if most["before"] is None:
        return f"{text}; most rows at {most['label']}: {percent(most['now'])}"
    return (
        f"{text}; largest change at {most['label']}: {percent(most['before'])} before, "
        f"{percent(most['now'])} now"
    )


# -- tables


def _entries_table(entries: Sequence[Entry], cells: Cells, *, caption: str) -> PageTable:
    """Return a table with one row per entry.

    The first column contains text, and the other columns contain numbers.
    """
    rows = [[cell(entry) for cell in cells.values()] for entry in entries]
    return PageTable(caption=caption, head=list(cells), rows=rows, numbers=range(1, len(cells)))


def _skew(skew: Sequence[Entry], served: Entry | None) -> list[PageBlock]:
    if not served:
        return [Text("No archive of served rows was given.")]
    text = Text(
        f"{served['num_joined']:,} training rows were joined with served rows. "
        f"{served['num_only_training']:,} training rows were never served. "
        f"{served['num_only_served']:,} served rows of the same time are not training rows."
    )
    if not skew:
        return [text, Text("Nothing could be compared.")]
    cells: Cells = {
        "column": lambda entry: entry["feature"],
        "state": lambda entry: _state_badge(entry) or "",
        "rows that differ": lambda entry: f"{entry['differing']:,}",
        "share": lambda entry: percent(entry["effect"]),
        "value in training only": lambda entry: f"{entry['only_training']:,}",
        "as served only": lambda entry: f"{entry['only_served']:,}",
        "factor": lambda entry: number(entry["factor"]),
    }
    ranked = sorted(skew, key=lambda entry: -entry["effect"])
    return [text, _entries_table(ranked, cells, caption="joined rows, value by value")]


def _schema(differences: Mapping[str, str]) -> list[PageBlock]:
    if not differences:
        return [Text("These rows need no change of the schema.")]
    text = (
        "Changes with which the schema would accept these rows. Nothing changes until a person "
        "accepts them."
    )
    return [Text(text), Preformatted("\n".join(differences.values()))]


def _quarantine(quarantine: Entry) -> Text:
    if not quarantine["num_rows"]:
        return Text("No row was quarantined.")
    return Text(
        f"{quarantine['num_rows']:,} rows, each with its reason, are in ",
        Code(quarantine["uri"]),
        ".",
    )
