"""Tests of the metric by which Triton is scaled, with a real Prometheus.

The expected values do not come from Prometheus. The server's statistics extension counts
nanoseconds, and the clients count answers. The counters of both servers are zero before the first
scrape. All load is in the query's window, so the query covers everything that the servers counted.
"""

import pytest

from testing.processes import wait_for
from testing.served_names import CANARY_NAME, MODEL_NAME
from tests.support.prometheus import Prometheus
from tests.support.scaler_queries import KEDA, adapter_rules, metric_name, of_pods, read_queries
from tests.support.sleeping_triton import Client, sleeping_triton

QUEUE, PENDING = "triton_queue_microseconds_per_request", "triton_pending_requests"
BUSY, IDLE = PODS = ("triton-7d9f-busy", "triton-7d9f-idle")
SECONDS = {MODEL_NAME: 0.004, CANARY_NAME: 0.03}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with (
        sleeping_triton(folder / "busy", SECONDS) as busy,
        sleeping_triton(folder / "idle", SECONDS) as idle,
    ):
        yield dict(zip(PODS, (busy, idle)))


@pytest.fixture(scope="module")
def prometheus(servers, tmp_path_factory):
    urls = {pod: server.metrics_url for pod, (server, _) in servers.items()}
    with Prometheus(tmp_path_factory.mktemp("prometheus") / "it", urls) as running_prometheus:
        yield running_prometheus


def statistics(client: Client):
    """Return the queue time in microseconds and the number of successful requests.

    The server's statistics contain both numbers.
    """
    models = client.grpc.get_inference_statistics(as_json=True)["model_stats"]
    queue_ns = sum(int(each["inference_stats"]["queue"].get("ns", 0)) for each in models)
    return queue_ns / 1000, sum(
        int(each["inference_stats"]["success"].get("count", 0)) for each in models
    )


def send(client: Client):
    """Send 246 requests to two models with different traffic.

    A mean of the models' means would be wrong.
    """
    threads = client.send_at_once(240) + client.send_at_once(6, CANARY_NAME)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_shipped_query_equals_mean_of_server_under_load_and_zero_when_idle(servers, prometheus):
    queries, client = read_queries(KEDA), servers[BUSY][1]
    # A rate needs values from before the load, so the test waits for three scrapes.
    scrapes = (
        f'min by (pod) (count_over_time(nv_inference_request_success{{model="{MODEL_NAME}"}}[1m]))'
    )
    wait_for(
        lambda: (
            prometheus.query(scrapes).keys() == set(PODS)
            and min(prometheus.query(scrapes).values()) >= 3
        )
    )
    assert prometheus.query(queries[QUEUE]) == prometheus.query(queries[PENDING]) == {"": 0.0}

    # The load is sent again until a scrape has seen pending requests.
    wait_for(lambda: send(client) or prometheus.query(queries[PENDING])[""] > 0)
    # The server counts a request after it has answered it.
    wait_for(lambda: statistics(client)[1] >= client.answered)
    microseconds, requests = statistics(client)
    assert requests == client.answered >= 246
    # Every server is scraped twice, because one scrape may contain newer and older counters.
    counted = f'sum by (pod) (nv_inference_request_success{{pod="{BUSY}"}})'
    wait_for(lambda: prometheus.query(f"min_over_time(({counted})[2s:1s])") == {BUSY: requests})

    # The metrics hold whole microseconds, rounded down for each request, so they are up to 1
    # microsecond lower than the statistics. Prometheus extrapolates all counters over the same
    # interval, because all start at zero. The ratio is exact except for float rounding.
    expected = microseconds / requests
    assert expected > 1000, "the requests must wait in the queue"
    # The idle pod has no requests, so the overall mean is the busy pod's.
    for query in (queries[QUEUE], of_pods(queries[QUEUE], BUSY)):
        assert expected - 1 <= prometheus.query(query)[""] * (1 + 1e-6)
        assert prometheus.query(query)[""] <= expected * (1 + 1e-6)
    for name in (QUEUE, PENDING):
        assert prometheus.query(of_pods(queries[name], IDLE)) == {"": 0.0}


def test_adapter_finds_every_rules_series_by_pod_and_namespace(servers, prometheus):
    for rule in adapter_rules():
        wait_for(
            lambda rule=rule: (
                {s["pod"] for s in prometheus.series(rule["seriesQuery"])} == set(PODS)
            )
        )
        found = prometheus.series(rule["seriesQuery"])
        assert {s["namespace"] for s in found} == {"evergreen"}
        assert {s["model"] for s in found} == set(SECONDS)
        assert metric_name(rule) in (QUEUE, PENDING)
