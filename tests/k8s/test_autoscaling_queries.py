"""Tests that the shipped queries are correct for recorded servers, by Prometheus' own engine.

The query of NVIDIA's reference is not correct. The series are counters of real Tritons
(`queue_series.json`). The expected values are computed from the same counters, and the answers that
clients counted verify these counters.
"""

import pytest

from tests.k8s.promql_units import Question, ask, close_to
from tests.support.recorded_queues import (
    PENDING,
    PODS,
    QUEUE,
    RECORD,
    SUCCESS,
    counted,
    recorded_series,
    truth,
)
from tests.support.scaler_queries import KEDA, of_pods, read_queries
from tools.autoscaling.hpa import PENDING_METRIC, QUEUE_METRIC

REFERENCE = (
    f'1000 * avg(delta({QUEUE}{{namespace="evergreen",pod=~"triton-.+"}}[30s])'
    f'/(1+delta({SUCCESS}{{namespace="evergreen",pod=~"triton-.+"}}[30s]))/1000) by (namespace)'
)
"""Query of NVIDIA-Merlin/gcp-ml-ops,
yamls/Autoscaling_custom_metrics/1_custom-metric-server-config.yaml, by namespace as deployed there.
The factor 1000 converts its milliseconds."""
ONE = {"{}": 1}
"""Result of a fleet's query whose comparison is true."""


def shipped(*pods):
    """Return the queries as sent, restricted to these pods."""
    return {name: of_pods(query, *pods) for name, query in read_queries(KEDA).items()}


def test_recorded_servers_counted_what_their_clients_got_answered():
    for pod in PODS:
        lost = counted(pod, SUCCESS, 0, 150)
        after_the_last_reading = sum(RECORD["last"][pod][SUCCESS].values()) - sum(
            RECORD["readings"][pod][-1][SUCCESS].values()
        )
        assert lost + after_the_last_reading == RECORD["answered"][pod]


# At 75 s one of three models has traffic. At 90 s a second model starts with slow and rare
# requests. At 120 s a server was killed within the window.
@pytest.mark.parametrize(
    ("pods", "moment"),
    [
        (("busy",), 75),
        (("busy",), 90),
        (("busy",), 150),
        (("restarted",), 75),
        (("restarted",), 120),
        (("quiet",), 90),
        (PODS, 75),
        (PODS, 150),
    ],
)
def test_queue_time_per_request_is_truth(pods, moment):
    query = shipped(*pods)[QUEUE_METRIC]
    between = truth(moment, pods, window=55)
    ask(
        f"queue_{'_'.join(pods)}_{moment}",
        recorded_series(),
        [
            Question(close_to(query, truth(moment, pods)), f"{moment}s", ONE),
            # If the window starts between two readings, it contains 55 s of samples. Prometheus
            # extrapolates both counters of a model by the same factor. If a model's first requests
            # fall into the window, the factor differs by up to one reading.
            Question(close_to(query, between, share=0.01), f"{moment + 2}s", ONE),
            Question(
                close_to(query, 1.02 * truth(moment, pods), share=0.01), f"{moment}s", {"{}": 0}
            ),
        ],
    )


def test_reference_query_misses_truth_of_same_series():
    def off_by(pods, moment, low, high):
        ratio = f"{of_pods(REFERENCE, *pods)} / {truth(moment, pods, window=30)!r}"
        return Question(
            f"({ratio} > bool {low}) * ({ratio} < bool {high})",
            f"{moment}s",
            {'{namespace="evergreen"}': 1},
        )

    ask(
        "reference",
        recorded_series(),
        [
            # With two models without traffic, the reference's query gives a third of the true
            # value.
            off_by(["busy"], 75, 0.32, 0.35),
            # With one more model that has few slow requests, it gives nearly six times the true
            # value.
            off_by(["busy"], 150, 5.5, 5.7),
            # With three requests, adding one to the count loses a quarter of the value.
            off_by(["quiet"], 85, 0.74, 0.76),
            # All pods, one of which hangs.
            off_by(PODS, 60, 0.33, 0.35),
            off_by(PODS, 150, 2.9, 3.1),
        ],
    )


def test_servers_that_complete_nothing_report_zero_queue_time_and_waiting():
    waiting = RECORD["readings"]["stuck"][-1][PENDING]["click_model"]
    assert waiting >= 10
    queries = shipped("stuck")
    ask(
        "stuck",
        recorded_series(["stuck"]),
        [
            Question(queries[QUEUE_METRIC], "120s", {"{}": 0}),
            Question(queries[PENDING_METRIC], "120s", {"{}": waiting}),
            Question(queries[PENDING_METRIC], "15s", {"{}": 0}),
        ],
    )


def test_no_traffic_is_zero_and_pod_counts_after_two_readings():
    labels = 'namespace="evergreen",model="click_model",version="1"'
    # The server of this pod answers from the eighth quarter of a minute on. A pod has no series at
    # all until its server has a model.
    series = {
        f'{metric}{{{labels},pod="new"}}': "_x7 0 0 0 0 0" for metric in (QUEUE, SUCCESS, PENDING)
    }
    queries = shipped("new", "without-a-model")
    ask(
        "idle_and_new",
        series,
        [
            Question(queries[QUEUE_METRIC], "105s", {}),
            Question(queries[PENDING_METRIC], "105s", {"{}": 0}),
            Question(queries[QUEUE_METRIC], "120s", {"{}": 0}),
        ],
        interval="15s",
    )


def test_lone_request_keeps_its_queue_time_and_late_count_is_no_spike():
    labels = 'namespace="evergreen",model="click_model",version="1"'
    ask(
        "floor",
        {
            f'{QUEUE}{{{labels},pod="lone"}}': "0 0 0 0 9000 9000 9000 9000",
            f'{SUCCESS}{{{labels},pod="lone"}}': "0 0 0 0 1 1 1 1",
            # The reading is between the server's two additions: the time is counted, but the
            # request is not counted yet.
            f'{QUEUE}{{{labels},pod="late"}}': "0 0 0 0 9000 9000 9000 9000",
            f'{SUCCESS}{{{labels},pod="late"}}': "0x7",
        },
        [
            Question(close_to(shipped("lone")[QUEUE_METRIC], 9000.0), "75s", ONE),
            Question(close_to(shipped("lone")[QUEUE_METRIC], 9000.0), "80s", ONE),
            Question(f"({shipped('late')[QUEUE_METRIC]}) <= bool 9000.001", "75s", ONE),
        ],
        interval="15s",
    )
