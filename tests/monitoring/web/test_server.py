"""Tests of pages over real HTTP."""

import json

import pytest

from evergreen.runtime.errors import PermanentError
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.server import HttpSettings, MonitorServer
from testing.processes import http_get
from tests.support.errors import raises
from tests.support.snapshots import EMPTY


@pytest.fixture
def served(tmp_path):
    exposition = Exposition()
    server = MonitorServer(
        exposition, HttpSettings(http_host="127.0.0.1", http_port=0), page=lambda: "<p>a page</p>"
    )
    server.write_address(tmp_path)
    address = json.loads((tmp_path / "http.json").read_text())

    def get(path: str) -> tuple[int, str]:
        status, text, get.headers = http_get(f"http://{address['host']}:{address['port']}{path}")
        return status, text

    get.exposition, get.port = exposition, address["port"]
    yield get
    server.close()


def test_every_page_is_served(served):
    assert served("/readyz") == (503, "no iteration of the loop has ended yet\n")
    served.exposition.show(Snapshot(time=1.0, windows=(EMPTY,), pending_rows=5))
    assert served("/healthz") == served("/readyz") == (200, "ok\n")
    assert "ctr_monitor_pending_rows 5.0" in served("/metrics")[1]
    status = json.loads(served("/status")[1])
    assert status["windows"][0]["auc"] is None
    assert status["unhealthy"] is None
    assert served("/elsewhere")[0] == 404
    assert served("/healthz?from=probe") == (200, "ok\n")
    served.exposition.end("killed by the test")
    assert (
        served("/healthz") == served("/readyz") == (503, "the loop has ended: killed by the test\n")
    )


def test_status_page_forbids_loading_of_resources(served):
    assert served("/") == (200, "<p>a page</p>")
    assert served.headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_taken_port_is_permanent_error(served, tmp_path):
    with raises(PermanentError, f"http_port {served.port}", "127.0.0.1"):
        MonitorServer(Exposition(), HttpSettings(http_host="127.0.0.1", http_port=served.port))
