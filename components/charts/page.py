"""The HTML pages that steps write for people: one frame, one style sheet, tables and the format of numbers.

A page is one file, readable on a phone, without a network and without a script. A number that does not exist is a dash.
What a page shows is its step's concern; text that comes from data is escaped there, because cells are markup.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
ABSENT = "–"


def html_page(
    title: str, *, intro: str, sections: Mapping[str, str], decision: str = "", refresh_seconds: int | None = None
) -> str:
    """The page: title and decision first, `intro`, then links to the sections and the sections, each under its name.

    A browser loads it again every `refresh_seconds`.
    """
    anchors = {name: name.lower().replace(" ", "-") for name in sections}
    links = "".join(f'<li><a href="#{anchor}">{name}</a></li>' for name, anchor in anchors.items())
    drawn = "".join(
        f'<section id="{anchor}" aria-labelledby="h-{anchor}"><h2 id="h-{anchor}">{name}</h2>{sections[name]}</section>'
        for name, anchor in anchors.items()
    )
    refresh = "" if refresh_seconds is None else f'<meta http-equiv="refresh" content="{refresh_seconds}">'
    badge = f' <span class="badge {escape(decision)}">{escape(decision)}</span>' if decision else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">{refresh}'
        f"<title>{escape(title)}{': ' if decision else ''}{escape(decision)}</title><style>{STYLE}</style></head><body>"
        '<a class="skip" href="#main">Skip to the findings</a>'
        f"<header><h1>{escape(title)}{badge}</h1>"
        f'{intro}<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="main">{drawn}</main></body></html>\n'
    )


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numbers: Collection[int] = ()
) -> str:
    """A table whose cells are markup already; the first names its row. It scrolls in its own box, by keys too.

    `numbers` are the places of the columns that hold numbers.
    """

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


def text_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str, numbers: Collection[int] = ()
) -> str:
    """`html_table` of plain values, which are escaped."""
    return html_table(head, ([escape(str(cell)) for cell in row] for row in rows), caption=caption, numbers=numbers)


def number(value: float | None) -> str:
    """Four digits.

    >>> number(0.123456), number(None)
    ('0.1235', '–')
    """
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share.

    >>> percent(0.0123), percent(0.00005), percent(None)
    ('1.23 %', '0.005 %', '–')
    """
    return ABSENT if value is None or not math.isfinite(value) else f"{100 * value:.3g} %"


def probability(value: float | None) -> str:
    """A p-value or q-value.

    >>> probability(0.00002), probability(0.0312)
    ('< 0.0001', '0.031')
    """
    return ABSENT if value is None else "< 0.0001" if value < 0.0001 else f"{value:.2g}"
