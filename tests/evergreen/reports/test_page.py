"""Tests of pages for people: width, escaping and undefined probabilities."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError
from setuptools import Distribution
from setuptools.command.build_py import build_py

from evergreen.reports.events import MAX_FOLDED, ShownEvent, event_list
from evergreen.reports.formats import probability
from evergreen.reports.page import (
    Badge,
    Banner,
    Bullets,
    Card,
    Cards,
    CheckRow,
    Checks,
    Code,
    Fold,
    Link,
    PageTable,
    Preformatted,
    Strong,
    Text,
    Tiles,
    html_page,
    refusal_page,
)
from evergreen.reports.rendering import render
from evergreen.reports.svg import Bar, BarChart, Interval, Line, Mark, interval_chart, line_chart
from testing.paths import REPOSITORY
from tests.support.browser import DARK, cut_texts, needs_browser, pixels_too_wide, serious_findings
from tests.support.html_pages import parse_page, table_of, text_of

LONG = "file:///home/somebody/evergreen_" + "of_a_long_name_" * 12 + "/scores.parquet"
SENTENCE = (
    "the columns of which nobody knows what they mean were compared and found to be the same as "
    "before; " * 4
)
EVIL = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&"
WIDTHS = (360, 480, 720, 768, 1100, 1280)


def page_of(text: str, *, rows: int) -> str:
    """Return a page with every kind of block, in which every text is `text`.

    The tables have 2 to 14 columns.
    """
    check = CheckRow(
        name=text,
        value=-0.0012345,
        interval=(-0.123456, 0.123456),
        limit=text,
        result="inconclusive",
    )
    lines = [Line(label=text, color="var(--series-1)", x=[0.0, 100.0], y=[0.5, 0.9])]
    marks = [Mark(x=9.0 * number, text=f"{number} {text[:10]}") for number in range(12)]
    tables = [
        PageTable(
            caption=f"{size} columns",
            head=["name"] + [f"number {i}" for i in range(size - 1)],
            rows=found,
        )
        for size in (2, 3, 5, 9, 14)
        for found in [[[text, *["0.7762 [0.7581, 0.7934]"] * (size - 2), text]] * rows]
    ]
    card = Card(
        name=text,
        badge=Badge(text[:20], "warn"),
        is_moved=True,
        texts=[text],
        chart=BarChart(title=text, bars=[Bar(label=text, now=0.5, before=None)]),
        numbers=Fold(text, [Text(text)]),
    )
    events = [
        ShownEvent(time=60.0 * i, kind=kind, text=text, after="62 s ago")
        for i, kind in enumerate(("drift", "release"))
    ]
    return html_page(
        text,
        badge=Badge("inconclusive"),
        first=[
            Banner(text=text, items=[text]),
            interval_chart(
                [Interval(label=text[:12], value=0.7, low=0.6, high=0.8)], label=text, limit=0.6
            ),
            line_chart(lines, y_label=text, marks=marks, levels=[(0.6, text[:12])]),
            Checks(
                caption="checks",
                rows=[
                    check,
                    CheckRow(name="rows", value=None, result=text[:20], detail=text),
                    CheckRow(name="clicks", value=9, result="pass", detail=text),
                ],
            ),
            Tiles({text: text, "version": Link(text, "#x")}),
        ],
        sections={
            text: [
                Text(text, Code(text), Strong(text)),
                Bullets([text]),
                Preformatted(text),
                Cards([card], False),
            ],
            "Tables": [*tables, event_list(events * rows, routine=["drift"])],
        },
    )


@needs_browser
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("text", [LONG, SENTENCE, "x"], ids=["long name", "long sentence", "short"])
def test_no_element_exceeds_its_pane_and_no_text_is_cut(tmp_path, text, rows):
    page = page_of(text, rows=rows)
    assert pixels_too_wide(tmp_path, page, *WIDTHS) == [0] * len(WIDTHS)
    assert cut_texts(tmp_path, page, *WIDTHS) == [[]] * len(WIDTHS)


@needs_browser
@pytest.mark.parametrize("flags", [(), (DARK,)], ids=["light", "dark"])
def test_no_block_of_page_has_accessibility_faults(tmp_path, flags):
    assert serious_findings(tmp_path, page_of("a text", rows=2), *flags) == []


def test_no_text_becomes_markup():
    page = page_of(EVIL, rows=2)
    tags = parse_page(page)
    assert not {"script", "img"} & {tag for tag, _ in tags}
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert "<script" not in refusal_page(EVIL, EVIL)
    assert text_of(page).count("<script>alert(1)</script>") >= 20


def test_missing_value_of_template_is_error():
    with pytest.raises(UndefinedError):
        render("page.html.j2", title="no sections")


def test_checks_are_table_and_details_of_passed_checks_are_folded():
    rows = [
        CheckRow(
            name="AUC",
            value=0.77621,
            interval=(0.75812, 0.79341),
            limit="at least 0.6",
            result="pass",
            detail="paired",
        ),
        CheckRow(name="rows", value=None, result="inconclusive", detail="too few rows"),
    ]
    page = html_page("t", first=[Checks(caption="c", rows=rows)], sections={})
    assert table_of(page, "c") == [
        ["check", "value, 95 % interval", "limit", "result"],
        ["AUC", "0.7762 0.7581 to 0.7934", "at least 0.6", "pass"],
        ["rows", "–", "–", "inconclusive"],
        ["too few rows"],
    ]
    (fold,) = [attributes for tag, attributes in parse_page(page) if tag == "details"]
    assert "open" not in fold
    assert text_of(page.partition("<details")[2]).endswith("AUC : paired")


def test_routine_events_have_one_fold_for_each_date_and_each_date_is_named_once():
    kinds = ["release", "drift", "archived", "drift", "rollback"]
    events = [
        ShownEvent(time=86_390.0 + 5 * i, kind=kind, text=f"text {i}")
        for i, kind in enumerate(kinds)
    ]
    drawn = event_list(events, routine=("drift", "archived")).__html__()
    expected = (
        "1970-01-01 UTC 1 × drift 23:59:55 drift text 1 23:59:50 release text 0 "
        "1970-01-02 UTC 1 × archived, 1 × drift 00:00:00 archived text 2 00:00:05 drift text 3 "
        "00:00:10 rollback text 4"
    )
    assert text_of(drawn) == expected
    folds = [attributes for tag, attributes in parse_page(drawn) if tag == "details"]
    assert [each["class"] for each in folds].count("routine") == 2
    assert not any("open" in each for each in folds)


def test_long_fold_names_lines_that_it_leaves_out():
    events = [ShownEvent(time=float(i), kind="drift", text="moved") for i in range(MAX_FOLDED + 7)]
    drawn = event_list(events, routine=["drift"]).__html__()
    assert drawn.count("<time>") == MAX_FOLDED
    assert f"{MAX_FOLDED + 7} × drift" in drawn
    assert "and 7 more lines" in drawn


def test_no_p_value_is_printed_as_zero():
    assert [probability(value) for value in (0.0, 1e-12, 0.00009999, 0.0001)] == [
        *["< 0.0001"] * 3,
        "0.0001",
    ]


def test_wheel_has_every_template_and_style(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    command = build_py(distribution)
    command.finalize_options()
    command.manifest_files = {}  # only the files that pyproject.toml names
    folder = Path("evergreen", "reports")
    needed = {str(each) for each in folder.rglob("*") if each.suffix in (".css", ".j2")}
    assert needed
    assert needed == set(command.find_data_files("evergreen.reports", str(folder)))
