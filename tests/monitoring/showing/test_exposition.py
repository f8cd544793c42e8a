"""Names of the metrics, absence of what is undefined, and health."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from components.contracts.errors import PermanentError
from monitoring.measures.kpis import Kpis
from monitoring.showing.exposition import Exposition, Server, Snapshot
from tests.monitoring.conftest import Clock

KPIS = Kpis(version=3, rows=100, clicks=20, auc=0.75, auc_low=0.7, auc_high=0.8, log_loss=0.5, calibration=1.1, ctr=0.2)
EMPTY = Kpis(
    version=4, rows=9, clicks=0, auc=None, auc_low=None, auc_high=None, log_loss=0.1, calibration=None, ctr=0.0
)


def samples(exposition: Exposition) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(exposition.metrics_page().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_metric_names_are_frozen():
    exposition = Exposition()
    exposition.beat(Snapshot(windows=(KPIS,), last_record_time=1.0, serving_version=3, log_backlog=0))
    assert {name for name, *_ in samples(exposition)} == {
        "ctr_monitor_rolling_auc",
        "ctr_monitor_rolling_auc_low",
        "ctr_monitor_rolling_auc_high",
        "ctr_monitor_log_loss",
        "ctr_monitor_calibration",
        "ctr_monitor_click_rate",
        "ctr_monitor_window_rows",
        "ctr_monitor_window_clicks",
        "ctr_monitor_records_total",
        "ctr_monitor_retrain_requests_total",
        "ctr_monitor_last_record_timestamp_seconds",
        "ctr_monitor_serving_version",
        "ctr_monitor_log_backlog",
        "ctr_monitor_pending_rows",
    }


def test_outcomes_are_frozen():
    outcomes: dict[str, list[str]] = {}
    for name, *labels in sorted(samples(Exposition())):
        if name.endswith("_total"):
            outcomes.setdefault(name, []).append(labels[0][1])
    assert outcomes == {
        "ctr_monitor_records_total": sorted(
            [
                "predicted",
                "outcome",
                "matured",
                "archived",
                "duplicate",
                "late_outcome",
                "unmatched_outcome",
                "set_aside",
            ]
        ),
        "ctr_monitor_retrain_requests_total": sorted(["started", "released", "refused", "failed", "notified"]),
    }


def test_an_undefined_auc_is_absent_and_a_defined_one_labelled():
    exposition = Exposition()
    exposition.beat(Snapshot(windows=(KPIS, EMPTY)))
    found = samples(exposition)
    assert found["ctr_monitor_rolling_auc", ("version", "3")] == 0.75
    assert ("ctr_monitor_rolling_auc", ("version", "4")) not in found
    assert ("ctr_monitor_calibration", ("version", "4")) not in found
    assert found["ctr_monitor_window_rows", ("version", "4")] == 9
    assert ("ctr_monitor_last_record_timestamp_seconds",) not in found


def test_counters_follow_the_store():
    exposition = Exposition()
    exposition.beat(Snapshot(counters={"archived": 7, "request_failed": 2}))
    found = samples(exposition)
    assert found["ctr_monitor_records_total", ("outcome", "archived")] == 7
    assert found["ctr_monitor_retrain_requests_total", ("outcome", "failed")] == 2


def test_a_stalled_or_ended_loop_is_unhealthy():
    clock = Clock()
    exposition = Exposition(stall_seconds=10.0, clock=clock)
    clock.time += 10
    assert exposition.unhealthy() is None
    clock.time += 1
    assert exposition.unhealthy() == "the loop is silent for 11 s"
    exposition.beat(Snapshot())
    assert exposition.unhealthy() is None
    exposition.end("OSError: disk full")
    exposition.beat(Snapshot())
    assert exposition.unhealthy() == "the loop has ended: OSError: disk full"


@pytest.fixture
def served(tmp_path):
    exposition = Exposition()
    server = Server(exposition, host="127.0.0.1", port=0, state=tmp_path)
    address = json.loads((tmp_path / "http.json").read_text())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(path: str) -> tuple[int, str]:
        try:
            with direct.open(f"http://{address['host']}:{address['port']}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    get.exposition, get.port = exposition, address["port"]
    yield get
    server.close()


def test_pages_answer(served):
    served.exposition.beat(Snapshot(windows=(EMPTY,), pending_rows=5))
    assert served("/healthz") == (200, "ok\n")
    assert "ctr_monitor_pending_rows 5.0" in served("/metrics")[1]
    status = json.loads(served("/status")[1])
    assert status["windows"][0]["auc"] is None
    assert status["unhealthy"] is None
    assert served("/elsewhere")[0] == 404
    assert served("/healthz?from=probe") == (200, "ok\n")
    served.exposition.end("killed by the test")
    assert served("/healthz") == (503, "the loop has ended: killed by the test\n")


def test_a_taken_port_is_a_permanent_error(served, tmp_path):
    with pytest.raises(PermanentError, match=f"http_port {served.port} on 127.0.0.1 cannot be used"):
        Server(Exposition(), host="127.0.0.1", port=served.port, state=tmp_path)
