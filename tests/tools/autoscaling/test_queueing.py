"""Tests of a pod's queue: queueing theory, the server's rules, and lost requests."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergreen.contracts.criteo import CRITEO
from evergreen.serving.repository.triton_config import ServingOptions, read_options, triton_config
from tools.autoscaling.queueing import PodQueue, PodSettings

ENDLESS = {"max_queued": 10**9, "timeout_seconds": 1e9, "max_batch_rows": 1}


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request of M/M/c waits.

    `load` is the arrival rate times the mean service time.
    """
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


def mean_wait(instances: int, utilisation: float, seed: int) -> float:
    """Return the mean of the simulated waits, as a multiple of the mean service time."""
    random = np.random.default_rng(seed)
    count = 80_000
    arrivals = np.cumsum(random.exponential(1 / (utilisation * instances), count))
    multiples = random.exponential(1, count)
    pod = PodQueue(PodSettings(instances=instances, **ENDLESS), lambda rows: 1.0)
    for at in range(0, count, 997):
        part = slice(at, at + 997)
        pod.offer(arrivals[part].tolist(), 1, multiples[part].tolist())
        pod.advance(float(arrivals[part][-1]))
    pod.advance(math.inf)
    assert pod.counters.answered == count
    return float(np.mean(pod.waits))


@pytest.mark.parametrize(("instances", "utilisation"), [(1, 0.5), (2, 0.7), (4, 0.8)])
def test_mean_wait_of_random_service_equals_erlang(instances, utilisation):
    load = instances * utilisation
    expected = erlang_c(instances, load) / (instances - load)
    found = [mean_wait(instances, utilisation, seed) for seed in range(5)]
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 4 * error
    assert error < 0.1 * expected


def queue(**settings) -> PodQueue:
    return PodQueue(PodSettings(**settings), lambda rows: 1.0 + rows)


def test_free_instance_batches_waiting_requests_up_to_maximum_size():
    pod = queue(instances=1, max_batch_rows=4, timeout_seconds=60.0)
    pod.offer([0.0, 0.1, 0.2, 0.3], 2, [1.0] * 4)
    pod.advance(100.0)
    # The first request is computed alone, in 3 s. The next batch of 4 rows contains two of the
    # three waiting requests and takes 5 s.
    assert pod.waits == pytest.approx([0.0, 2.9, 2.8, 7.7])
    assert pod.counters.answered == 4
    assert pod.counters.queue_seconds == pytest.approx(13.4)


def test_request_at_full_queue_is_refused_and_later_ones_are_accepted():
    pod = queue(instances=1, max_queued=2, max_batch_rows=1)
    pod.offer([0.0, 0.1, 0.2, 0.3, 2.5], 1, [1.0] * 5)
    pod.advance(100.0)
    assert pod.counters.refused == 1
    assert pod.waits == pytest.approx([0.0, 1.9, 3.8, 3.5])


def test_request_that_waited_too_long_is_refused_when_its_turn_comes():
    pod = queue(instances=1, timeout_seconds=1.5, max_batch_rows=1)
    pod.offer([0.0, 0.1, 1.0], 1, [1.0] * 3)
    pod.advance(100.0)
    assert (pod.counters.timed_out, pod.counters.answered) == (1, 2)
    assert pod.waits == pytest.approx([0.0, 1.0])


@settings(deadline=None)
@given(
    gaps=st.lists(st.floats(0, 3), max_size=60),
    steps=st.lists(st.floats(0.01, 20), min_size=1, max_size=12),
    instances=st.integers(1, 3),
    most=st.integers(1, 6),
    timeout=st.floats(0.1, 10),
    most_rows=st.sampled_from([1, 5]),
)
def test_every_request_is_answered_refused_timed_out_or_inside_at_any_cut(
    gaps, steps, instances, most, timeout, most_rows
):
    arrivals = np.cumsum(gaps).tolist()
    settings = PodSettings(
        instances=instances, max_queued=most, timeout_seconds=timeout, max_batch_rows=most_rows
    )
    outcomes = []
    for cuts in (np.cumsum(steps).tolist(), [float(sum(steps))]):
        pod = PodQueue(settings, lambda rows: 0.5 + 0.1 * rows)
        pod.offer(arrivals, 2, [1.0] * len(arrivals))
        for cut in cuts:
            pod.advance(cut)
            done = pod.counters.answered + pod.counters.refused + pod.counters.timed_out
            assert done + pod.num_inside == len(arrivals)
            assert pod.num_queued <= most
        outcomes.append([*astuple(pod.counters), pod.num_queued, *pod.waits])
    # More frequent checks of the queue give the same result.
    assert outcomes[0] == pytest.approx(outcomes[1])


def test_defaults_equal_generated_configuration():
    options_of_server = ServingOptions(server="onnxruntime")
    options = read_options(triton_config("m", options_of_server, [1], features=CRITEO))
    settings = PodSettings()
    assert settings.instances == options.instances
    assert (settings.max_queued, settings.timeout_seconds * 1e6) == options.queue_limits
    assert options.max_queue_delay_microseconds == 0, "the simulator does not delay batches"
