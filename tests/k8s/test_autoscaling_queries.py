"""The shipped queries tell the truth of recorded servers, by Prometheus' own engine; the reference's query does not.

The series are what real Tritons counted (`queue_series.json`). The truth is arithmetic on the same counters, and the
clients' own count of answers says that the counters can be trusted.
"""

from __future__ import annotations

import pytest

from k8s.scaling.manifests import PENDING_METRIC, QUEUE_METRIC
from tests.k8s.promql_units import Question, ask, close_to
from tests.support.adapter_queries import ADAPTER, read_queries, substitute
from tests.support.recorded_queues import PENDING, PODS, QUEUE, RECORD, SUCCESS, counted, recorded_series, truth

REFERENCE = (
    f"1000 * avg(delta({QUEUE}{{<<.LabelMatchers>>}}[30s])/(1+delta({SUCCESS}{{<<.LabelMatchers>>}}[30s]))/1000)"
    " by (<<.GroupBy>>)"
)
"""NVIDIA-Merlin/gcp-ml-ops, yamls/Autoscaling_custom_metrics/1_custom-metric-server-config.yaml; 1000 makes its
milliseconds ours."""


def shipped(*pods):
    """The queries as the HPA has them asked for these pods."""
    return read_queries(ADAPTER, pods=pods)


def reference(*pods):
    return substitute(REFERENCE, namespace="evergreen", pods=pods)


def of_pod(pod):
    return f'{{pod="{pod}"}}'


def test_the_recorded_servers_counted_what_their_clients_got_answered():
    for pod in PODS:
        lost = counted(pod, SUCCESS, 0, 150)
        after_the_last_reading = sum(RECORD["last"][pod][SUCCESS].values()) - sum(
            RECORD["readings"][pod][-1][SUCCESS].values()
        )
        assert lost + after_the_last_reading == RECORD["answered"][pod]


# 75: one of three models has traffic. 90: a second wakes, slow and seldom. 120: a server killed in the window.
@pytest.mark.parametrize(
    ("pod", "moment"), [("busy", 75), ("busy", 90), ("busy", 150), ("restarted", 75), ("restarted", 120), ("quiet", 90)]
)
def test_queue_time_per_request_is_the_truth(pod, moment):
    query, it = shipped(pod)[QUEUE_METRIC], of_pod(pod)
    between = truth(moment, [pod], window=55)
    ask(
        f"queue_{pod}_{moment}",
        recorded_series(),
        [
            Question(close_to(query, truth(moment, [pod])), f"{moment}s", {it: 1}),
            # Between two readings the window holds 55 s of them. Prometheus extrapolates both counters of a model
            # alike; of a model whose first requests fall into the window, by up to a reading less than of others.
            Question(close_to(query, between, share=0.01), f"{moment + 2}s", {it: 1}),
            Question(close_to(query, 1.02 * truth(moment, [pod]), share=0.01), f"{moment}s", {it: 0}),
        ],
    )


def test_the_reference_query_misses_the_truth_of_the_same_series():
    def off_by(pod, moment, low, high):
        ratio = f"{reference(pod)} / {truth(moment, [pod], window=30)!r}"
        return Question(f"({ratio} > bool {low}) * ({ratio} < bool {high})", f"{moment}s", {of_pod(pod): 1})

    # As it is deployed there: one value for the namespace.
    whole = REFERENCE.replace("<<.LabelMatchers>>", 'namespace="evergreen"').replace("<<.GroupBy>>", "namespace")

    def whole_off_by(moment, low, high):
        ratio = f"{whole} / {truth(moment, window=30)!r}"
        it = '{namespace="evergreen"}'
        return Question(f"({ratio} > bool {low}) * ({ratio} < bool {high})", f"{moment}s", {it: 1})

    ask(
        "reference",
        recorded_series(),
        [
            # Two models without traffic: a third of the truth.
            off_by("busy", 75, 0.32, 0.35),
            # One more model, few requests and slow: nearly six times the truth.
            off_by("busy", 150, 5.5, 5.7),
            # Three requests, and one added to them: a quarter is lost.
            off_by("quiet", 85, 0.74, 0.76),
            whole_off_by(60, 0.33, 0.35),
            whole_off_by(150, 2.9, 3.1),
        ],
    )


def test_a_pod_that_completes_nothing_says_zero_queue_time_and_how_many_wait():
    waiting = RECORD["readings"]["stuck"][-1][PENDING]["click_model"]
    assert waiting >= 10
    queries, it = shipped("stuck"), of_pod("stuck")
    ask(
        "stuck",
        recorded_series(["stuck"]),
        [
            Question(queries[QUEUE_METRIC], "120s", {it: 0}),
            Question(queries[PENDING_METRIC], "120s", {it: waiting}),
            Question(queries[PENDING_METRIC], "15s", {it: 0}),
        ],
    )


def test_no_traffic_is_zero_and_a_pod_is_known_after_two_readings():
    labels = 'namespace="evergreen",model="click_model",version="1"'
    series = {f'{metric}{{{labels},pod="idle"}}': "0x20" for metric in (QUEUE, SUCCESS)}
    # Its server answers from the eighth minute-quarter on; a pod whose server has no model yet has no series at all.
    series |= {f'{metric}{{{labels},pod="new"}}': "_x7 0 0 0 0 0" for metric in (QUEUE, SUCCESS, PENDING)}
    query = shipped("idle", "new", "without-a-model")[QUEUE_METRIC]
    ask(
        "idle_and_new",
        series,
        [
            Question(query, "105s", {of_pod("idle"): 0}),
            Question(query, "120s", {of_pod("idle"): 0, of_pod("new"): 0}),
            Question(shipped("idle", "new")[PENDING_METRIC], "105s", {of_pod("new"): 0}),
        ],
        interval="15s",
    )


def test_a_lone_request_keeps_its_queue_time_and_a_late_count_is_no_spike():
    labels = 'namespace="evergreen",model="click_model",version="1"'
    ask(
        "floor",
        {
            f'{QUEUE}{{{labels},pod="lone"}}': "0 0 0 0 9000 9000 9000 9000",
            f'{SUCCESS}{{{labels},pod="lone"}}': "0 0 0 0 1 1 1 1",
            # Read between the server's two additions: the time is there, the request not yet.
            f'{QUEUE}{{{labels},pod="late"}}': "0 0 0 0 9000 9000 9000 9000",
            f'{SUCCESS}{{{labels},pod="late"}}': "0x7",
        },
        [
            Question(close_to(shipped("lone")[QUEUE_METRIC], 9000.0), "75s", {of_pod("lone"): 1}),
            Question(close_to(shipped("lone")[QUEUE_METRIC], 9000.0), "80s", {of_pod("lone"): 1}),
            Question(f"({shipped('late')[QUEUE_METRIC]}) <= bool 9000.001", "75s", {of_pod("late"): 1}),
        ],
        interval="15s",
    )
