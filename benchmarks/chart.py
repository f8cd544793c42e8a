"""A line chart as a file of its own, for a page on the web."""

from collections.abc import Sequence

import numpy as np

from components.charts.page import HEIGHT, WIDTH, Line, line_chart

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#777")


def chart_file(lines: Sequence[Line], *, y_label: str, x_unit: str) -> str:
    """The chart with its legend as the text of an SVG file; see `line_chart`."""
    drawn = line_chart(lines, y_label=y_label, x_unit=x_unit)
    body = drawn[drawn.index("<svg") : drawn.index("</svg>")].partition(">")[2]
    places = np.cumsum([40.0, *(20.0 + 6.5 * len(line.label) for line in lines)])
    legend = "".join(
        f'<text x="{place:g}" y="14" style="fill:{line.color}">{line.label}</text>'
        for place, line in zip(places, lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>text{{font:12px sans-serif;'
        f'fill:#333}}.grid{{stroke:#e5e5e5}}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f"{body}{legend}</svg>\n"
    )
