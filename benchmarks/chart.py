"""Write a line chart as a separate file for a web page."""

from collections.abc import Sequence

from markupsafe import escape

from evergreen.reports.svg import HEIGHT, WIDTH, Line, line_chart

COLORS = (
    "#2563eb",
    "#dc2626",
    "#059669",
    "#d97706",
    "#7c3aed",
    "#0891b2",
    "#777",
    "#db2777",
    "#65a30d",
    "#111",
)


def chart_file(lines: Sequence[Line], *, y_label: str, x_unit: str) -> str:
    """Return the SVG file of a `line_chart` with its legend.

    Entries of the legend that do not fit above the chart go below it.
    """
    drawn = str(escape(line_chart(lines, y_label=y_label, x_unit=x_unit)))
    body = drawn[drawn.index("<svg") : drawn.rindex("</svg>") + len("</svg>")]
    legend, x, row = "", 40.0, 0
    for line in lines:
        width = 20.0 + 6.5 * len(line.label)
        if x + width > WIDTH:
            x, row = 40.0, row + 1
        height = HEIGHT + 16 * row - 5 if row else 14
        legend += f'<text x="{x:g}" y="{height}" style="fill:{line.color}">{line.label}</text>'
        x += width
    size = f"{WIDTH} {HEIGHT + 16 * row}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><style>text{{font:12px '
        "sans-serif;"
        f'fill:#333}}.grid{{stroke:#e5e5e5}}</style><rect width="{WIDTH}" '
        f'height="{HEIGHT + 16 * row}" fill="#fff"/>'
        f'<text x="4" y="30">{escape(y_label)}</text>{body}{legend}</svg>\n'
    )
