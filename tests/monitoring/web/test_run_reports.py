"""Tests that the status page links to the last run's reports, and to no other file."""

import os

import pytest

from components.run_outcome.__main__ import record
from evergreen.registry.runs import forget_report, keep_report, report_path, reports_of, step_note
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.page import History, status_page
from monitoring.web.server import HttpSettings, MonitorServer, read_report
from monitoring.web.store_status import RunCounter, StoreStatus
from testing.processes import http_get
from tests.support.kept_documents import KeptDocuments
from tests.support.snapshots import NOW

RUN = "hourly 7&8"
SECRET = "<p>of another folder</p>"


@pytest.fixture
def store(tmp_path):
    """A registry with a run that validation refused, and a file outside of it."""
    store = tmp_path / "store"
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "validation_report.html").write_text(SECRET)
    with step_note(store, RUN, "validation") as note:
        keep_report(store, RUN, "validation", html="<p>ä report</p>", document="{}")
        note.state, note.reason = "refused", "too <few> rows"
    record(run=RUN, store=store.as_uri(), trigger_id="", trigger_reason="", kfp_state="SUCCEEDED")
    return store


@pytest.fixture
def get(store):
    server = MonitorServer(
        Exposition(), HttpSettings(http_port=0), report=lambda path: read_report(store, path)
    )
    yield lambda path: http_get(f"http://{server.host}:{server.port}{path}")
    server.close()


def test_report_of_earlier_try_is_removed(store):
    assert reports_of(store, RUN) == {"validation": report_path(store, RUN, "validation").as_uri()}
    forget_report(store, RUN, "validation")
    assert reports_of(store, RUN) == {}
    assert not report_path(store, RUN, "validation", kind="json").exists()


def test_page_links_to_report_and_server_returns_it(store, get):
    found = RunCounter(store, KeptDocuments()).count(NOW)
    exposition = Exposition()
    exposition.show(Snapshot(time=NOW, store_status=StoreStatus(runs=found)))
    page = status_page(exposition, History([], []), now=NOW)
    assert "Run hourly 7&amp;8: refused at validation" in page
    assert "too &lt;few&gt; rows" in page
    link = "/reports/hourly%207%268/validation"
    assert f'<a href="{link}">report of validation</a>' in page
    status, body, headers = get(link)
    assert (status, body) == (200, "<p>ä report</p>")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'"), (
        "reports must not run scripts"
    )


@pytest.mark.parametrize(
    "path",
    [
        "/reports/../secret/validation",
        "/reports/%2e%2e/validation",
        "/reports/..%2f..%2fsecret/validation",
        "/reports/%2fetc/passwd",
        "/reports/hourly%207%268/../../secret/validation",
        "/reports/hourly%207%268/outcome",
        "/reports/hourly%207%268/validation%00",
        "/reports/hourly%00/validation",
        "/reports/hourly%207%268/evaluation",
        "/reports/linked/validation",
        "/reports/pointing/validation",
        "/reports/pipe/validation",
        "/reports//validation",
        "/reports/",
        "/models/7",
        "/models/../secret",
        "/reports/" + 5000 * "x" + "/validation",
    ],
)
def test_no_path_leads_out_of_runs_reports(store, get, path):
    runs = store / "runs"
    (runs / "linked").symlink_to(store.parent / "secret")
    for name in ("pointing", "pipe"):
        (runs / name).mkdir()
    (runs / "pointing" / "validation_report.html").symlink_to(
        store.parent / "secret" / "validation_report.html"
    )
    os.mkfifo(runs / "pipe" / "validation_report.html")
    status, body, _ = get(path)
    assert status == 404
    assert SECRET not in body
