from __future__ import annotations

import re
from html.parser import HTMLParser

import pyarrow as pa
import pytest

from components.contracts import criteo
from components.validation import rules
from components.validation.charts import Bar, draw_bars
from components.validation.drift import measure_drift
from components.validation.report import write_html
from components.validation.settings import ValidationSettings
from components.validation.summarize import summarize

HOSTILE = "<script src='//evil'>alert(1)</script>\"&"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(judged):
    now, before = (
        summarize(judged(500, seed=1, I2=pa.nulls(500, pa.float32())).to_batches()),
        summarize(judged(600).to_batches()),
    )
    drift = measure_drift(now, before, ValidationSettings())
    findings = [rules.make_finding(HOSTILE, "rule", "warn", HOSTILE)]
    return write_html(title=HOSTILE, decision="warn", findings=findings, drift=drift, now=now, before=before)


def parse(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags.seen


def test_the_page_needs_no_network(page):
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert not [tag for tag, attributes in parse(page) if {"src", "href"} & attributes.keys()]


def test_hostile_names_are_escaped(page):
    assert "script" not in {tag for tag, _ in parse(page)}
    assert page.count("&lt;script src=") == 4


def test_every_column_has_a_card_and_every_feature_a_row_of_drift(page):
    assert re.findall(r"<h3>(\w+)</h3>", page) == [criteo.LABEL, *criteo.FEATURES]
    charts = re.findall(r"<title>distribution of (\w+)</title>", page)
    assert charts == [criteo.LABEL, *criteo.FEATURES]
    drift = page[page.index("<h2>Drift</h2>") : page.index("<h2>Columns</h2>")]
    assert {m for m in re.findall(r"<tr><td>(\w+) ", drift)} == set(criteo.FEATURES)


def test_the_page_fits_a_phone(page):
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page


def test_a_report_without_champion_rows_or_findings_is_still_a_page():
    page = write_html(title="t", decision="block", findings=[], drift=[], now=summarize([]), before=None)
    parse(page)
    assert "Nothing was found" in page


def test_bars_are_drawn_to_scale():
    svg = draw_bars([Bar("a", 0.5, 0.25), Bar("b", 0.0, None)], "t")
    assert re.findall(r'class="(\w+)"[^>]*height="([\d.]+)"', svg) == [
        ("before", "36.0"),
        ("now", "72.0"),
        ("before", "0.0"),
        ("now", "0.0"),
    ]
    assert draw_bars([], "t") == ""
