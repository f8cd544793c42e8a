"""Tests of the shipped queries on the counters of recorded servers, with Prometheus' own engine.

NVIDIA's reference query gives wrong results. The series are counters of real Tritons
(`queue_series.json`). The expected values are computed from the recorded counters. One test
compares the recorded counters with the answers that clients received.
"""

import pytest

from tests.k8s.promql_units import Question, assert_answers, close_to
from tests.support.recorded_queues import (
    PENDING,
    PODS,
    QUEUE,
    RECORD,
    SUCCESS,
    counted,
    recorded_series,
    true_queue_time,
)
from tests.support.scaler_queries import KEDA, of_pods, read_queries
from tools.autoscaling.hpa import PENDING_METRIC, QUEUE_METRIC

REFERENCE = (
    f'1000 * avg(delta({QUEUE}{{namespace="evergreen",pod=~"triton-.+"}}[30s])'
    f'/(1+delta({SUCCESS}{{namespace="evergreen",pod=~"triton-.+"}}[30s]))/1000) by (namespace)'
)
"""NVIDIA's reference query. Source: NVIDIA-Merlin/gcp-ml-ops,
yamls/Autoscaling_custom_metrics/1_custom-metric-server-config.yaml. The namespace is that of
NVIDIA's deployment. The factor 1000 converts the query's milliseconds to microseconds."""
TRUE = {"{}": 1}
"""Result that Prometheus returns if a comparison is true."""


def shipped(*pods):
    """Return the queries that KEDA and the adapter send, restricted to the pods `pods`."""
    return {name: of_pods(query, *pods) for name, query in read_queries(KEDA).items()}


def test_recorded_counters_equal_answers_that_clients_received():
    for pod in PODS:
        lost = counted(pod, SUCCESS, 0, 150)
        after_the_last_reading = sum(RECORD["last"][pod][SUCCESS].values()) - sum(
            RECORD["readings"][pod][-1][SUCCESS].values()
        )
        assert lost + after_the_last_reading == RECORD["answered"][pod]


# At 75 s, only one of the three models has traffic. At 90 s, a second model gets its first
# requests, which are slow and rare. At 120 s, the window contains the kill of a server.
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
def test_queue_time_per_request_is_correct(pods, moment):
    query = shipped(*pods)[QUEUE_METRIC]
    between = true_queue_time(moment, pods, window=55)
    assert_answers(
        f"queue_{'_'.join(pods)}_{moment}",
        recorded_series(),
        [
            Question(close_to(query, true_queue_time(moment, pods)), f"{moment}s", TRUE),
            # The query's window has 60 s. A window that starts between two readings contains 12
            # readings, the first and the last of which are 55 s apart. Prometheus extrapolates all
            # counters of a model by the same factor. In the window of a model's first request, two
            # counters can have different numbers of readings, and then their factors differ.
            Question(close_to(query, between, share=0.01), f"{moment + 2}s", TRUE),
            Question(
                close_to(query, 1.02 * true_queue_time(moment, pods), share=0.01),
                f"{moment}s",
                {"{}": 0},
            ),
        ],
    )


def test_reference_query_differs_from_true_value_of_same_series():
    def off_by(pods, moment, low, high):
        ratio = f"{of_pods(REFERENCE, *pods)} / {true_queue_time(moment, pods, window=30)!r}"
        return Question(
            f"({ratio} > bool {low}) * ({ratio} < bool {high})",
            f"{moment}s",
            {'{namespace="evergreen"}': 1},
        )

    assert_answers(
        "reference",
        recorded_series(),
        [
            # With two models without traffic, the reference's query gives a third of the true
            # value.
            off_by(["busy"], 75, 0.32, 0.35),
            # If a model with few slow requests is added, the query's result is nearly six times too
            # high.
            off_by(["busy"], 150, 5.5, 5.7),
            # The query divides by the number of requests plus one. The result for a pod with three
            # requests is a quarter too low.
            off_by(["quiet"], 85, 0.74, 0.76),
            # The next two questions concern all pods. One of the pods hangs.
            off_by(PODS, 60, 0.33, 0.35),
            off_by(PODS, 150, 2.9, 3.1),
        ],
    )


def test_servers_that_complete_nothing_report_zero_queue_time_and_waiting():
    waiting = RECORD["readings"]["stuck"][-1][PENDING]["click_model"]
    assert waiting >= 10
    queries = shipped("stuck")
    assert_answers(
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
    # The readings are 15 s apart. The server of the pod `new` responds from the eighth reading on.
    # A pod has no series at all until its server has a model.
    series = {
        f'{metric}{{{labels},pod="new"}}': "_x7 0 0 0 0 0" for metric in (QUEUE, SUCCESS, PENDING)
    }
    queries = shipped("new", "without-a-model")
    assert_answers(
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
    assert_answers(
        "floor",
        {
            f'{QUEUE}{{{labels},pod="lone"}}': "0 0 0 0 9000 9000 9000 9000",
            f'{SUCCESS}{{{labels},pod="lone"}}': "0 0 0 0 1 1 1 1",
            # Prometheus scraped the pod `late` between two updates of the server's counters. The
            # server has counted the time, but not yet the request.
            f'{QUEUE}{{{labels},pod="late"}}': "0 0 0 0 9000 9000 9000 9000",
            f'{SUCCESS}{{{labels},pod="late"}}': "0x7",
        },
        [
            Question(close_to(shipped("lone")[QUEUE_METRIC], 9000.0), "75s", TRUE),
            Question(close_to(shipped("lone")[QUEUE_METRIC], 9000.0), "80s", TRUE),
            Question(f"({shipped('late')[QUEUE_METRIC]}) <= bool 9000.001", "75s", TRUE),
        ],
        interval="15s",
    )
