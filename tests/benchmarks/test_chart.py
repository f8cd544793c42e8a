"""Tests of the charts in docs/, which are self-contained SVG files."""

import xml.etree.ElementTree as ElementTree

from benchmarks.chart import chart_file
from evergreen.reports.svg import Line

SVG = "{http://www.w3.org/2000/svg}"


def test_chart_file_is_one_svg_with_its_lines_and_labels():
    lines = [Line(label=name, color="#111", x=[0, 1], y=[0.5, 0.6]) for name in ("hourly", "never")]
    drawn = ElementTree.fromstring(chart_file(lines, y_label="points <best>", x_unit="h"))
    assert drawn.tag == f"{SVG}svg"
    assert len(list(drawn.iter(f"{SVG}polyline"))) == 2
    assert {"points <best>", "hourly", "never", "0.2 h"} <= {
        text.text for text in drawn.iter(f"{SVG}text")
    }
