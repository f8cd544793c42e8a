"""Tests of the report's page and document: complete, correct, safe and accessible."""

import json
import re

import numpy as np
import pytest

from components.validation import report
from components.validation.report_page import draw_page
from evergreen.contracts import criteo, raw_rows
from evergreen.reports.rendering import STYLE
from evergreen.reports.svg import Bar, BarChart
from evergreen.statistics.column_profile import DENSE_EDGES
from tests.support.html_pages import assert_needs_nothing, parse_page, table_of
from tests.support.validation_reports import NUM_CARDS, document_of, document_with_drift


@pytest.fixture
def document(checked):
    return document_with_drift(checked)


@pytest.fixture
def page(document):
    return draw_page(document)


def section(page, name):
    start = page.index(f'<section id="{name}"')
    return page[start : page.index("</section>", start)]


def test_page_needs_no_network_and_no_script(page):
    assert_needs_nothing(page)


def test_hostile_names_are_escaped_wherever_they_come_from(page):
    parse_page(page)
    assert "<script" not in page
    # The text occurs twice in the title, and once each in the check's name, the check's detail, the
    # schema difference and the quarantine's path.
    assert page.count("&lt;script src=") == 6


def test_every_column_has_card_and_strongest_evidence_comes_first(document, page):
    names = re.findall(r"<h3>(\w+)", page)
    assert sorted(names) == sorted([raw_rows.LABEL, *criteo.FEATURES])
    assert len(names) == NUM_CARDS
    drifted = {entry["feature"] for entry in document["drift"] if entry["drifted"]}
    assert {"I2", "C5"} <= drifted
    assert set(names[: len(drifted)]) == drifted
    order = {name: position for position, name in enumerate(names)}
    quiet = [e for e in document["drift"] if not e["drifted"] and e["q_value"] is not None]
    q_values = [e["q_value"] for e in sorted(quiet, key=lambda e: order[e["feature"]])]
    assert q_values == sorted(q_values)


def test_page_can_be_read_without_seeing_it(page):
    tags = parse_page(page)
    charts = [attributes for tag, attributes in tags if tag == "svg"]
    assert charts
    assert all(chart.get("role") == "img" and chart.get("aria-label") for chart in charts)
    identifiers = {attributes["id"] for _, attributes in tags if "id" in attributes}
    for tag, attributes in tags:
        if tag == "section":
            assert attributes["aria-labelledby"] in identifiers
        if tag == "a":
            assert attributes["href"].removeprefix("#") in identifiers
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    tables = [tag for tag, _ in tags].count("table")
    assert tables == [tag for tag, _ in tags].count("caption") >= 6
    assert re.search(r"distribution of C5; largest change at 7: .* before, 100 % now", page)


def luminance(colour):
    """Return the relative luminance of `#rgb` or `#rrggbb` (WCAG 2.1)."""
    text = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_has_contrast_on_light_and_on_dark():
    light, dark = re.findall(r":root\{([^}]*--paper[^}]*)\}", STYLE)
    for ground in (light, dark):
        colours = dict(re.findall(r"--(\w+):(#\w+)", ground))
        for name in ("ink", "soft", "link"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, (name, colours)
        for name in ("now", "mark"):
            assert contrast(colours[name], colours["paper"]) >= 3, (name, colours)
    for name in ("fail", "warn", "pass", "info"):
        (badge,) = re.findall(rf"\.badge\.{name}[^{{]*\{{background:(#\w+)\}}", STYLE)
        assert contrast(badge, "#ffffff") >= 4.5, name


def test_report_without_champion_rows_or_findings_is_still_page(checked):
    document = document_of(checked(10).slice(0, 0), None, run="r")
    document |= {
        "checks": [],
        "decision": "pass",
        "skew": [],
        "served": None,
        "quarantine": {"num_rows": 0, "uri": None},
    }
    page = draw_page(document)
    parse_page(page)
    for text in (
        "All checks passed",
        "no champion",
        "No archive of served rows",
        "No row was quarantined",
    ):
        assert text in page


def test_sections_show_skew_schema_and_quarantine(page):
    (row,) = table_of(page, "joined rows, value by value")[1:]
    assert row == ["I3", "differs", "100", "50 %", "0", "0", "1000"]
    assert "<pre>--- I1" in section(page, "schema")
    assert "13 rows, each with its reason" in section(page, "quarantine")
    assert "<b>13</b>" in page


def test_document_is_json_with_its_documented_keys(document):
    again = json.loads(json.dumps(document, allow_nan=False))
    assert again == document
    documented = set(re.findall(r"`(\w+)`", report.__doc__))
    assert set(document) <= documented
    assert {key for column in document["columns"] for key in column} <= documented


def test_documents_columns_are_numpys(checked):
    now, before = checked(3000, seed=1), checked(3000)
    columns = {column["column"]: column for column in document_of(now, before)["columns"]}
    assert list(columns) == [raw_rows.LABEL, *criteo.FEATURES]
    for name in ("I1", "I7"):
        values = now.column(name).drop_null().to_numpy()
        column = columns[name]
        assert column["missing"] == pytest.approx(now.column(name).null_count / 3000)
        assert column["missing_before"] == pytest.approx(before.column(name).null_count / 3000)
        assert (column["least"], column["most"]) == (values.min(), values.max())
        assert column["mean"] == pytest.approx(values.mean(dtype=np.float64))
        counts, _ = np.histogram(values, DENSE_EDGES)
        occupied = np.flatnonzero(
            counts + np.histogram(before.column(name).drop_null().to_numpy(), DENSE_EDGES)[0]
        )
        expected = counts[occupied[0] : occupied[-1] + 1] / len(values)
        assert [bar["now"] for bar in column["bars"]] == pytest.approx(expected)
    labels = [bar["label"] for bar in columns["I1"]["bars"]]
    assert labels[:3] == ["0", "1", "2"]
    values, counts = np.unique(now.column("C3").drop_null().to_numpy(), return_counts=True)
    shares = {str(value): count / counts.sum() for value, count in zip(values, counts)}
    assert {bar["label"]: pytest.approx(bar["now"]) for bar in columns["C3"]["bars"]} == {
        bar["label"]: shares.get(bar["label"], 0.0) for bar in columns["C3"]["bars"]
    }
    assert sum(bar["now"] for bar in columns[raw_rows.LABEL]["bars"]) == pytest.approx(1)


def test_bars_are_drawn_to_scale():
    bars = [Bar(label="a", now=0.5, before=0.25), Bar(label="b", now=0.0, before=None)]
    svg = BarChart(title="t", bars=bars).__html__()
    assert re.findall(r'class="(\w+)"[^>]*height="([\d.]+)"', svg) == [
        ("before", "36.0"),
        ("now", "72.0"),
        ("before", "0.0"),
        ("now", "0.0"),
    ]


def test_first_screen_has_checks_with_findings_and_fold_has_all_others(document):
    calm = {**document["checks"][0], "value": None, "low": None, "high": None, "detail": ""}
    document["checks"] += [{**calm, "name": f"rule {i}", "result": "pass"} for i in range(9)]
    page = draw_page(document)
    drifted = {entry["feature"]: entry for entry in document["drift"] if entry["drifted"]}
    first, others = table_of(page, "What was checked")[1:], table_of(page, "Other checks")[1:]
    names = [row[0] for row in first + others if len(row) > 1]
    assert sorted(names) == sorted(check["name"] for check in document["checks"])
    open_ = [check["name"] for check in document["checks"] if check["result"] != "pass"]
    assert [name for name in names if name in open_] == open_
    assert names[: len(open_)] == open_
    assert page.index("What was checked") < page.index("<details") < page.index("Other checks")
    (c5,) = [row for row in first if row[0] == "C5: drift"]
    entry = drifted["C5"]
    assert [float(value) for value in c5[1].replace(" to ", " ").split()] == pytest.approx(
        [entry["effect"], entry["effect_low"], entry["effect_high"]], rel=1e-3
    )
