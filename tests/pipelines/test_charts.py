"""Charts: a number that does not exist is a gap, text is escaped, nothing to draw is nothing."""

import xml.etree.ElementTree as ElementTree

from pipelines.local.charts import Line, Mark, line_chart


def _svg(chart):
    return ElementTree.fromstring(chart[: chart.index("</svg>") + len("</svg>")])


def test_missing_value_breaks_the_line():
    line = Line(label="auc", color="#000", x=[0, 1, 2, 3, 4], y=[0.5, 0.6, None, 0.7, 0.8])
    assert len(_svg(line_chart([line], y_label="AUC")).findall("polyline")) == 2


def test_event_text_cannot_break_out_of_the_chart():
    line = Line(label="a", color="#000", x=[0, 1], y=[0, 1])
    chart = line_chart([line], y_label="x", marks=[Mark(x=0.5, text="<script>alert(1)</script>")])
    assert "<script>" not in chart
    assert "&lt;script&gt;" in chart


def test_no_points_draw_nothing():
    assert line_chart([Line(label="a", color="#000", x=[], y=[])], y_label="x") == ""
    assert line_chart([Line(label="a", color="#000", x=[0.0], y=[None])], y_label="x") == ""
