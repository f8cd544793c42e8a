"""Checks that no panel of a dashboard is empty: a real Prometheus answers each query with numbers.

The tests' Prometheus scrapes a real tritonserver under traffic, and the monitor's own server with a
snapshot in which every number is present. The file not_here.prom contains the metrics of a cluster
and a GPU with their names and labels: kube-state-metrics, the DCGM exporter, and Triton with a GPU.
"""

import math
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from demo.stack import LOOPBACK
from demo.triton import TritonServer, TritonSettings
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from monitoring.web.exposition import Exposition
from monitoring.web.server import HttpSettings, MonitorServer
from testing.processes import wait_for
from tests.k8s.grafana import DASHBOARDS, PanelQuery, offered, queries
from tests.support.http_double import Page
from tests.support.prometheus import Prometheus
from tests.support.snapshots import FULL
from tests.support.triton import write_model

NOT_HERE = (Path(__file__).parent / "not_here.prom").read_text()
MODELS = {"click_model": True, "click_model_canary": False}
"""Model names, and whether their answers may be cached. Models with cached answers have no
quantiles."""


class QueryClient(Prometheus):
    """Client of Prometheus' query API."""

    def numbers(self, query: str) -> list[float]:
        """Return every sample's value."""
        return [float(sample["value"][1]) for sample in self._get("query", query=query)["result"]]


def monitor(stack: ExitStack, snapshot) -> str:
    """Return the URL of a metrics page that shows the monitor's snapshot `snapshot`."""
    exposition = Exposition()
    exposition.show(snapshot)
    server = MonitorServer(exposition, HttpSettings(http_host=LOOPBACK, http_port=0))
    stack.callback(server.close)
    return f"http://{LOOPBACK}:{server.port}/metrics"


def triton(stack: ExitStack, folder):
    """Start a server with a cached and an uncached model.

    Returns a function that sends the same row twice to each model.
    """
    for name, cached in MODELS.items():
        write_model(folder / "repository", name, options=ServingOptions(response_cache=cached))
    settings = TritonSettings(cache_bytes=1 << 20)
    server = stack.enter_context(
        TritonServer(folder / "repository", log=folder / "triton.log", settings=settings)
    )
    client = Triton(server.grpc_url)
    stack.callback(client.close)

    def send(count: int) -> None:
        for name in MODELS:
            row = np.full((1, 2), count, np.float32), np.zeros((1, 8), np.int64)
            client.infer(name, *row)
            client.infer(name, *row)

    return server, send


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus that has scraped every target several times, with traffic in between."""
    folder = tmp_path_factory.mktemp("dashboards")
    with ExitStack() as stack:
        server, send = triton(stack, folder)
        released = replace(
            FULL,
            store_status=replace(
                FULL.store_status,
                promotions=replace(FULL.store_status.promotions, live_action="release"),
            ),
        )
        pods = {
            "triton-0": server.metrics_url,
            "monitor-0": monitor(stack, FULL),
            "monitor-1": monitor(stack, released),
            "stated": f"{stack.enter_context(closing(Page(NOT_HERE))).url}/metrics",
        }
        started = stack.enter_context(QueryClient(folder / "prometheus", pods))
        sent = 0

        def is_scraped() -> bool:
            nonlocal sent
            send(sent)
            sent += 1
            return (
                started.query("min(count_over_time(up[1m]))").get("", 0) >= 4
                and min(started.query("up").values()) == 1
            )

        wait_for(is_scraped)
        yield started


@pytest.mark.parametrize("query", list(queries()), ids=str)
def test_query_is_answered_with_numbers(prometheus, query: PanelQuery):
    numbers = prometheus.numbers(query.expr)
    assert numbers, query.expr
    assert all(math.isfinite(number) for number in numbers), numbers


def answer(prometheus, dashboard, title, letter="A"):
    (query,) = [
        a for a in queries() if (a.dashboard, a.title, a.letter) == (dashboard, title, letter)
    ]
    return prometheus.numbers(query.expr)


@pytest.mark.parametrize(
    ("dashboard", "title", "letter", "number"),
    [
        ("model", "AUC", "A", 0.75),
        ("model", "AUC of version $version", "D", 0.74),
        ("model", "Drifted columns", "A", 1),
        ("model", "Dead letters", "A", 0),
        ("pipeline", "Live version", "A", 2),
        ("pipeline", "Budget left", "A", 1),
        ("pipeline", "Live since", "A", 900_000),
        ("pipeline", "Rollbacks", "mark", 900_000),
        ("serving", "Queue time per request", "B", 2000),
        ("serving", "Replicas", "D", 8),
        ("serving", "GPU memory", "A", 0.25),
    ],
)
def test_panel_shows_number_that_was_planted(prometheus, dashboard, title, letter, number):
    assert answer(prometheus, dashboard, title, letter) == [pytest.approx(number)]


def test_half_of_cached_models_requests_are_hits(prometheus):
    """Each row was sent twice. A scrape may fall between two requests with the same row."""
    assert answer(prometheus, "serving", "Cache hits") == [pytest.approx(0.5, abs=0.2)]


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_every_variable_offers_value(prometheus, name):
    for variable, series, label in offered(DASHBOARDS[name]):
        values = {found.get(label) for found in prometheus.series(series)}
        assert values - {None}, variable
