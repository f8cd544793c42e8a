"""Small inline SVG charts: one column's distribution now, over its distribution in the champion's rows.

Takes bars of shares and gives markup; which statistics they come from is `report`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 280, 72


class Bar(NamedTuple):
    """One bucket or value: its name, and its share of the rows now and before (None without a champion)."""

    label: str
    now: float
    before: float | None


def draw_bars(bars: Sequence[Bar], title: str) -> str:
    """An SVG of `bars`, rows before as wide grey bars and rows now as narrow ones; empty text without bars."""
    if not bars:
        return ""
    top = max(max(bar.now, bar.before or 0.0) for bar in bars) or 1.0
    step = _WIDTH / len(bars)
    drawn = "".join(_draw_bar(bar, index * step, step, top) for index, bar in enumerate(bars))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" preserveAspectRatio="none">'
        f"<title>{escape(title)}</title>{drawn}</svg>"
    )


def _draw_bar(bar: Bar, left: float, step: float, top: float) -> str:
    text = f"{bar.label}: {bar.now:.2%}"
    if bar.before is not None:
        text += f", before {bar.before:.2%}"
    before = _rectangle("before", left + 0.05 * step, 0.9 * step, (bar.before or 0.0) / top)
    now = _rectangle("now", left + 0.25 * step, 0.5 * step, bar.now / top)
    return f"<g><title>{escape(text)}</title>{before}{now}</g>"


def _rectangle(name: str, left: float, width: float, share: float) -> str:
    height = share * _HEIGHT
    return f'<rect class="{name}" x="{left:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
