"""The report for people: one self-contained HTML page, readable on a phone, without a network and without a script.

Says the decision first, then the findings, the columns as small multiples with the strongest evidence first, and the
numbers of drift, skew, schema and quarantine. Drawn from `document` alone; judges nothing. Everything that comes from
the rows or their file names is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from components.validation.reports.cards import draw_cards
from components.validation.reports.style import STYLE
from components.validation.reports.tables import (
    drift_table,
    findings_table,
    label_text,
    percent,
    quarantine_table,
    schema_table,
    skew_table,
)

Document = Mapping[str, Any]

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
    moved = sum(bool(entry.get("drifted")) for entry in drift)
    tiles = [
        ("training rows", f"{document['num_rows']:,}"),
        ("the champion's rows", "no champion" if before is None else f"{before:,}"),
        ("findings", f"{_count(findings, 'block')} block, {_count(findings, 'warn')} warn"),
        ("features that drifted", f"{moved} of {len(drift)}" if drift else "not compared"),
        ("clicks", label_text(document["label"], document["columns"])),
        ("rows set aside", f"{document['quarantine']['num_rows']:,}"),
        ("served rows", _served(document)),
    ]
    return '<div class="tiles">' + "".join(f"<div>{name}<b>{escape(text)}</b></div>" for name, text in tiles) + "</div>"


def _count(findings: Sequence[Mapping[str, Any]], severity: str) -> int:
    return sum(finding["severity"] == severity for finding in findings)


def _served(document: Document) -> str:
    served = document["served"]
    if not served:
        return "not compared"
    rows = served["num_joined"] + served["num_only_training"]
    return f"{percent(served['num_joined'] / rows if rows else None)} of the rows joined"
