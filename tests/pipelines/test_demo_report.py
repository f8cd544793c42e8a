"""Tests of the demo's report: it fits its pane for any number of rows, and links the reports."""

from dataclasses import replace

import pytest

from demo.report import write_report
from demo.runner import LocalFolders
from demo.summary import AucNumbers, DemoSummary, Observations, TriggerNumbers
from evergreen.registry.runs import RunOutcome, keep_report, write_outcome
from tests.support.browser import DARK, cut_texts, needs_browser, pixels_too_wide, serious_findings
from tests.support.demo_summaries import GOOD, START
from tests.support.html_pages import parse_page, table_of, text_of

LONG = (
    "evidence 101 of 100 that the auc is below 0.778 after 4228 clicks of "
    "a_column_with_a_very_long_name_indeed; " * 4
)
EVIL = "<script>alert(1)</script>"


def report_of(tmp_path, summary: DemoSummary, *, events=(), timeline=()) -> str:
    folders = LocalFolders(root=tmp_path)
    known = {
        "plan": None,
        "decisions": [],
        "traffic_summary": {},
        "stage_seconds": {},
        "traffic": [],
    }
    observed = Observations(folders=folders, timeline=list(timeline), events=list(events), **known)
    return write_report(observed, summary).read_text()


@pytest.fixture
def good():
    return replace(GOOD, seconds={"drift_to_detection": 30.6, "trigger_to_serving": 12.1})


def window(second, version=1):
    measured = {"auc": 0.8 - second / 1000, "auc_low": 0.78, "auc_high": 0.82, "clicks": 500}
    return {"time": START + second, "version": version, **measured}


@needs_browser
@pytest.mark.parametrize("rows", [0, 1, 60])
def test_report_of_long_texts_fits_its_pane_however_many_rows(tmp_path, good, rows):
    kinds = ("decision", "drift", "run_ended", "archived")
    events = [{"time": START + i, "kind": kinds[i % 4], "text": LONG} for i in range(rows)]
    summary = replace(
        good,
        uncertain=[LONG] * rows,
        warnings=[LONG],
        to_complete=[LONG],
        drift={"columns": [LONG]},
    )
    page = report_of(tmp_path, summary, events=events, timeline=map(window, range(rows)))
    assert pixels_too_wide(tmp_path, page, 360, 480, 768, 1280) == [0] * 4
    assert cut_texts(tmp_path, page, 360, 480, 768, 1280) == [[]] * 4
    assert serious_findings(tmp_path, page, DARK) == []


def test_report_starts_with_actions_and_escapes_all_text(tmp_path, good):
    summary = replace(
        good, auc=AucNumbers(), trigger=TriggerNumbers(reason=EVIL, runs=1), uncertain=[EVIL]
    )
    page = report_of(tmp_path, summary, events=[{"time": START, "kind": EVIL, "text": EVIL}])
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parse_page(page)}
    assert text_of(page).count(EVIL) >= 4
    first = page.partition("<nav")[0]
    assert '<div class="banner warn">The monitor requested a run' in first
    assert '<div class="tiles">' in first


def test_report_links_to_reports_of_its_runs(tmp_path, good):
    outcome = RunOutcome(
        run="a run",
        trigger_id="t",
        state="refused",
        step="evaluation",
        reason="fail over 9 rows",
        version=None,
        ended_at="2026-01-01T00:00:00+00:00",
        reports={"validation": "file:///gone"},
    )
    store = LocalFolders(root=tmp_path).store
    keep_report(store, outcome.run, "validation", html="<p>1</p>")
    write_outcome(store, outcome)
    links = [
        attributes["href"]
        for tag, attributes in parse_page(report_of(tmp_path, good))
        if tag == "a"
    ]
    assert "store/runs/a%20run/validation_report.html" in links


def test_versions_have_decision_of_gate(tmp_path, good):
    page = report_of(tmp_path, good)
    assert [row[4] for row in table_of(page, "Released versions")] == ["gate", "pass", "pass"]
