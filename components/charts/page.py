"""The HTML pages that steps write for people: one frame and style sheet, tables, line charts, the format of numbers.

A page is one file, readable on a phone, without a network and without a script; a chart is inline SVG. A number that
does not exist is a dash. What a page shows is its step's concern; text that comes from data is escaped there, because
cells are markup.
"""

import html
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
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


def refusal_page(step: str, reason: str) -> str:
    """Return the page of a step that refused before it had a report: Kubeflow shows an error for an absent one."""
    return html_page(f"{step} refused", intro=f"<p>{escape(reason)}</p>", sections={}, decision="refused")


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


def utc_time(time: float) -> str:
    """A moment, given in seconds since the epoch.

    >>> utc_time(0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def probability(value: float | None) -> str:
    """A p-value or q-value.

    >>> probability(0.00002), probability(0.0312)
    ('< 0.0001', '0.031')
    """
    return ABSENT if value is None else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


WIDTH, HEIGHT = 920, 300
LEFT = 56
RIGHT = 14
TOP = 42
BOTTOM = 34
MARK_ROWS = 3
"""Rows above the chart for the names of events, which may lie close together."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart; None breaks it. With `low` and `high` (as long as `y`) a band is drawn behind it."""

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = field(default=())
    high: Sequence[float | None] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at an event."""

    x: float
    text: str
    color: str = "#555"


def line_chart(
    lines: Sequence[Line],
    *,
    y_label: str,
    marks: Sequence[Mark] = (),
    levels: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
    x_unit: str = "s",
) -> str:
    """The chart as SVG text; an empty string where there is no point to draw.

    `levels` are horizontal lines, (value, label); `x_unit` is written beside the numbers of the horizontal axis.
    """
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.low, line.high) for y in values if y is not None]
    ys += [value for value, _ in levels]
    if not xs or not ys:
        return ""
    xs += [mark.x for mark in marks]
    x_low, x_high = min(xs), max([*xs, min(xs) + 1e-9])
    pad = (max(ys) - min(ys) or abs(max(ys)) or 1.0) * 0.08
    y_low, y_high = (0.0 if from_zero else min(ys) - pad), max(ys) + pad

    def at_x(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    label = html.escape(y_label)
    parts = [
        f'<div class="scroll newest"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        f'<text x="4" y="{TOP - 12}">{label}</text>',
    ]
    for y in ticks(y_low, y_high, 5):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for x in ticks(x_low, x_high, 8):
        parts.append(
            f'<text x="{at_x(x):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{x:g} {html.escape(x_unit)}</text>'
        )
    for value, label in levels:
        parts.append(
            f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(value):.1f}" y2="{at_y(value):.1f}"/>'
        )
        parts.append(f'<text class="halo" x="{LEFT + 4}" y="{at_y(value) - 4:.1f}">{html.escape(label)}</text>')
    for line in lines:
        parts += _band(line, at_x, at_y)
        parts += [
            f'<polyline fill="none" stroke="{line.color}" stroke-width="2" points="{points}"/>'
            for points in _polylines(line, at_x, at_y)
        ]
    parts += _marks(marks, at_x)
    legend = "".join(f'<span><i style="background:{line.color}"></i>{html.escape(line.label)}</span>' for line in lines)
    return "".join([*parts, "</svg></div>", f'<p class="legend">{legend}</p>'])


def _marks(marks: Sequence[Mark], at_x) -> list[str]:  # type: ignore[no-untyped-def]
    """Vertical lines with names in turns at different heights."""
    parts = []
    for number, mark in enumerate(sorted(marks, key=lambda mark: mark.x)):
        x = at_x(mark.x)
        # Near the right edge a name goes to the left of its line.
        at, anchor = (x - 3, "end") if x > WIDTH - 130 else (x + 3, "start")
        height = TOP - 4 - 12 * (MARK_ROWS - 1 - number % MARK_ROWS)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height - 8}" y2="{HEIGHT - BOTTOM}" stroke="{mark.color}" '
            f'stroke-dasharray="3 3"/><text class="mark halo" x="{at:.1f}" y="{height}" text-anchor="{anchor}" '
            f'style="fill:{mark.color}">{html.escape(mark.text)}</text>'
        )
    return parts


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in [low, high], about so many.

    >>> ticks(0.583, 0.882, 5)
    [0.6, 0.65, 0.7, 0.75, 0.8, 0.85]
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.8)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _polylines(line: Line, at_x, at_y) -> list[str]:  # type: ignore[no-untyped-def]
    """Point lists of the line's unbroken stretches."""
    stretches: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y):
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{at_x(x):.1f},{at_y(y):.1f}")
    return [" ".join(stretch) for stretch in stretches if stretch]


def _band(line: Line, at_x, at_y) -> list[str]:  # type: ignore[no-untyped-def]
    """The polygon between `low` and `high`, where both exist."""
    both = [(x, a, b) for x, a, b in zip(line.x, line.low, line.high) if a is not None and b is not None]
    if not both:
        return []
    there = [f"{at_x(x):.1f},{at_y(b):.1f}" for x, _, b in both]
    back = [f"{at_x(x):.1f},{at_y(a):.1f}" for x, a, _ in reversed(both)]
    return [f'<polygon fill="{line.color}" opacity="0.15" points="{" ".join(there + back)}"/>']
