"""Tests of the whole simulation: shipped manifests and queries over small traces."""

import math
from pathlib import Path

import numpy as np
import pytest

from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tools.autoscaling.cluster import Cluster, StartTimes
from tools.autoscaling.hpa import SHIPPED_AUTOSCALER, PodCounts, read_autoscaler, with_queue_target
from tools.autoscaling.queueing import (
    SHIPPED,
    PodQueue,
    PodSettings,
    ServiceTimes,
    read_service_times,
)
from tools.autoscaling.simulation import Settings, Simulation
from tools.autoscaling.traces import Trace

TIMES = ServiceTimes((1, 64), (0.05, 3.2))
QUICK = StartTimes(node=90, pod=10)
QUEUE = "triton_queue_microseconds_per_request"


def steps(*rates: float, seconds: float = 300) -> Trace:
    starts = np.arange(len(rates) + 1) * seconds
    return Trace(starts, np.array(rates, float), np.full(len(rates), 1), "steps")


def simulated(trace: Trace, *, target: float = 20_000, **of_settings):
    spec = with_queue_target(read_autoscaler(SHIPPED_AUTOSCALER), target)
    settings = Settings(**{"service_times": TIMES, "starts": QUICK, **of_settings})
    return Simulation(trace, spec, settings).run()


def test_overload_adds_replicas_and_quiet_removes_them_within_bounds():
    spec = read_autoscaler(SHIPPED_AUTOSCALER)
    outcome = simulated(steps(5, 150, 150, 5, 5, 5, 5, 5))
    wanted = [moment.wanted for moment in outcome.moments]
    assert all(spec.min_replicas <= each <= spec.max_replicas for each in wanted)
    assert wanted[18] == spec.min_replicas
    assert max(wanted) > 3
    assert wanted[-1] < max(wanted)


def test_requests_are_all_accounted_for_and_same_seed_gives_same_run():
    trace = steps(30, 200, 10)
    first, second, other = (simulated(trace, seed=seed) for seed in (1, 1, 2))
    for outcome in (first, other):
        counters = outcome.counters
        lost = outcome.num_arrived - counters.answered - counters.refused - counters.timed_out
        assert lost == outcome.num_inside + outcome.num_without_pod
        assert sum(map(len, outcome.waits)) >= counters.answered
    assert first.counters == second.counters
    assert first.moments == second.moments
    assert first.counters != other.counters


def test_metrics_of_hpa_equal_those_of_simulated_pods():
    outcome = simulated(steps(60, seconds=900), target=10_000_000, initial_replicas=2)
    means = [moment.metrics[QUEUE] for moment in outcome.moments[10:]]
    truth = np.concatenate(outcome.waits[10:]).mean() * 1e6
    assert all(each is not None for each in means)
    assert np.mean(means) == pytest.approx(truth, rel=0.1)


def test_pod_on_new_node_answers_after_complete_startup():
    cluster = Cluster(
        QUICK, lambda now: PodQueue(PodSettings(), TIMES.of_rows, now), lambda number: 0.0
    )
    cluster.start_at_once(1)
    cluster.scale(100.0, 2)
    assert [len(cluster.ready(at)) for at in (204.0, 205.0)] == [1, 2]
    assert cluster.counted(204.0) == PodCounts(existing=2, ready=1)
    # The newest pod is removed first, and stops after its preStop pause. The next pod finds a
    # running node that has the image.
    cluster.scale(300.0, 1)
    assert [pod.name for pod in cluster.ready(300.0)] == ["triton-0"]
    assert cluster.counted(300.0) == PodCounts(existing=1, ready=2)
    assert cluster.settle(339.0) == []
    assert [pod.name for pod in cluster.settle(340.0)] == ["triton-1"]
    cluster.settle(939.0)
    cluster.scale(939.0, 2)
    assert [len(cluster.ready(at)) for at in (953.0, 954.0)] == [1, 2]
    # An idle node is removed after ten minutes, and the next pod waits for a new one.
    cluster.scale(1000.0, 1)
    cluster.settle(1040.0)
    cluster.settle(1640.0)
    cluster.scale(1640.0, 2)
    assert [len(cluster.ready(at)) for at in (1744.0, 1745.0)] == [1, 2]
    assert cluster.pod_hours(1700.0) * 3600 == pytest.approx(1700 + 240 + 101 + 60)


@pytest.mark.parametrize("name", ["sample-cpu.json", "demo-cpu.json"])
def test_shipped_service_times_name_measurement_and_grow_with_rows(name):
    times = read_service_times(SHIPPED / name)
    assert "tritonserver" in times.what
    assert times.medians == tuple(sorted(times.medians))
    assert times.of_rows(640) == pytest.approx(
        math.fsum([times.of_rows(256), times.of_rows(1024)]) / 2
    )
    assert times.of_rows(8192) > times.of_rows(4096)


def test_service_times_of_another_form_are_refused(tmp_path: Path):
    (tmp_path / "times.json").write_text('{"service_times": []}')
    with raises(ContractError, "service times"):
        read_service_times(tmp_path / "times.json")
