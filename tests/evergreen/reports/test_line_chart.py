"""Tests of charts: gaps for absent numbers, escaped text, and no chart without data."""

import xml.etree.ElementTree as ElementTree

import pytest

from evergreen.reports.svg import Interval, Line, Mark, interval_chart, line_chart, ticks


def _svg(chart):
    """Return the chart's plot as SVG, without the axis."""
    return ElementTree.fromstring(chart.__html__()).find("div")[1]


def _names(chart):
    return [text for text in _svg(chart).iter("text") if "mark" in text.get("class", "")]


def test_missing_value_breaks_line():
    line = Line(label="auc", color="#000", x=[0, 1, 2, 3, 4], y=[0.5, 0.6, None, 0.7, 0.8])
    assert len(list(_svg(line_chart([line], y_label="AUC")).iter("polyline"))) == 2


def test_event_text_cannot_break_out_of_chart():
    line = Line(label="a", color="#000", x=[0, 1], y=[0, 1])
    chart = line_chart(
        [line], y_label="x", marks=[Mark(x=0.5, text="<script>alert(1)</script>")]
    ).__html__()
    assert "<script>" not in chart
    assert "&lt;script&gt;" in chart


def test_no_points_draw_nothing():
    assert line_chart([Line(label="a", color="#000", x=[], y=[])], y_label="x") is None
    assert line_chart([Line(label="a", color="#000", x=[0.0], y=[None])], y_label="x") is None


def test_events_close_together_have_names_at_different_heights():
    line = Line(label="a", color="#000", x=[0, 100], y=[0, 1])
    marks = [Mark(x=50.0 + 0.1 * i, text=f"event {i}") for i in range(3)]
    names = _names(line_chart([line], y_label="x", marks=marks))
    assert len({name.get("y") for name in names}) == 3


def test_series_of_one_event_has_one_marker_and_names_do_not_overlap():
    line = Line(label="a", color="#000", x=[0, 100], y=[0, 1])
    marks = [Mark(x=2.0 + i, text=text) for i, text in enumerate(("drift", "run", "run", "over"))]
    marks += [Mark(x=40.0, text="run")]
    names = _names(line_chart([line], y_label="x", marks=marks))
    assert ["".join(name.itertext()) for name in names] == ["1 drift", "2 run", "3 over", "4 run"]
    assert len({name.get("y") for name in names[:3]}) == 3
    assert names[3].get("y") == names[0].get("y")


def test_interval_chart_names_every_number_for_those_who_cannot_see_it():
    found = [Interval(label="candidate", value=0.76, low=0.75, high=0.77)]
    chart = interval_chart(found, label="AUC", limit=0.65)
    assert 'aria-label="AUC: candidate 0.76 (0.75 to 0.77), limit 0.65"' in chart.__html__()
    (row,) = chart.rows
    assert 0 < chart.limit.at < row.start < row.at < row.end < 100
    assert "limit" not in interval_chart(found, label="AUC").__html__()


def test_event_after_last_point_is_drawn_at_its_own_time():
    line = Line(label="a", color="#000", x=[0, 50], y=[0.5, 0.6])
    marks = [Mark(x=75, text="later"), Mark(x=100, text="last")]
    drawn = [
        t
        for t in _svg(line_chart([line], y_label="x", marks=marks)).findall("line")
        if t.get("stroke-dasharray")
    ]
    assert [each.get("x1") for each in drawn] == ["75.00%", "100.00%"]


def test_name_of_event_at_right_edge_stays_inside():
    line = Line(label="a", color="#000", x=[0, 100], y=[0, 1])
    (name,) = _names(line_chart([line], y_label="x", marks=[Mark(x=100, text="run ended")]))
    assert ("".join(name.itertext()), name.get("text-anchor")) == ("1 run ended", "end")


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 97.4), (0.583, 0.882), (0.7, 0.7001), (-3.5, 68.0), (0.0, 1e-9)]
)
def test_axis_has_few_round_numbers_inside_its_range(low, high):
    numbers = ticks(low, high, 5)
    assert 2 <= len(numbers) <= 8
    assert all(low - 1e-9 <= number <= high + 1e-9 for number in numbers)


def test_axis_from_zero_shows_no_negative_number():
    chart = line_chart(
        [Line(label="p99", color="#000", x=[0, 1], y=[1, 90])], y_label="ms", from_zero=True
    ).__html__()
    assert ">0</text>" in chart
    assert ">-" not in chart
