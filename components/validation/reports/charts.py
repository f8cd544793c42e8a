"""Small inline SVG charts: one column's distribution now, over its distribution in the champion's rows.

Before is a wide grey bar, now a narrow coloured one inside it: told apart by shape too, not by colour alone. What the
bars stand for is `document`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

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


def draw_interval(value: float, low: float, high: float, *, limit: float, mark: float | None, title: str) -> str:
    """An SVG of an interval on a line from 0 to `limit`, with its value, and a threshold's mark where there is one.

    What lies beyond an end of the line is drawn at the end.
    """
    width, height = 120, 14

    def at(number: float) -> float:
        return 3 + min(max(number / limit, 0.0), 1.0) * (width - 6) if limit > 0 else 3.0

    line = f'<line class="axis" x1="3" x2="{width - 3}" y1="7" y2="7"/>'
    band = f'<line class="band" x1="{at(low):.1f}" x2="{at(high):.1f}" y1="7" y2="7"/>'
    dot = f'<circle class="dot" cx="{at(value):.1f}" cy="7" r="3"/>'
    tick = f'<line class="mark" x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="1" y2="13"/>' if mark is not None else ""
    return (
        f'<svg class="interval" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{line}{tick}{band}{dot}</svg>"
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
