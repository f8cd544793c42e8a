"""Tests that compare the simulator's two metrics with the shipped queries on a real Prometheus."""

import random
import shutil
import subprocess

import pytest

from tests.support.prometheus import Prometheus
from tests.support.scaler_queries import KEDA, read_queries
from tools.autoscaling.hpa import PENDING_METRIC, QUEUE_METRIC
from tools.autoscaling.simulation import Sample, fleet_metrics

SEEDS = range(4)
START, DAY, SPAN = 1_700_000_000_000, 86_400_000, 900_000
PODS = [f"triton-{number}" for number in range(4)]
SERIES = {
    "nv_inference_queue_duration_us": "queue_microseconds",
    "nv_inference_request_success": "answered",
    "nv_inference_pending_request_count": "pending",
}


def random_samples(seed: int) -> dict[str, list[Sample]]:
    """Return the counters of four pods over time, with restarts, idle minutes and failed scrapes.

    Some of the pods start late or end early.
    """
    chance, samples = random.Random(seed), {}
    start = START + seed * DAY
    for pod in PODS:
        at = start + chance.choice([0, 0, 300_000]) + chance.randrange(15_000)
        end = start + SPAN - chance.choice([0, 0, 90_000, 420_000])
        queue = answered = 0.0
        samples[pod] = []
        while at < end:
            if chance.random() < 0.03:
                queue = answered = 0.0
            busy = chance.choice([0, 0, 1, 20])
            queue += float(round(5000 * busy * chance.random()))
            answered += float(chance.randrange(9) * busy)
            if chance.random() > 0.1:
                samples[pod].append(Sample(at, queue, answered, float(chance.randrange(9))))
            at += 15_000 + chance.randrange(-40, 41)
    return samples


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A real Prometheus with the samples of every seed."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed: there is no real Prometheus to compare with")
    folder = tmp_path_factory.mktemp("prometheus") / "it"
    server = Prometheus(folder, {}, flags=["--storage.tsdb.retention.time=100y"])
    lines = []
    for name, field in SERIES.items():
        lines.append(f"# TYPE {name} unknown")
        for pod in PODS:
            labels = f'namespace="evergreen",pod="{pod}",model="click_model",version="1"'
            for seed in SEEDS:
                samples = random_samples(seed)[pod]
                lines += [
                    f"{name}{{{labels}}} {getattr(s, field)!r} {s.milliseconds / 1000:.3f}"
                    for s in samples
                ]
    (folder / "series.txt").write_text("\n".join([*lines, "# EOF", ""]))
    command = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        folder / "series.txt",
        folder / "data",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with server:
        yield server


@pytest.mark.parametrize("metric", [QUEUE_METRIC, PENDING_METRIC])
def test_metrics_equal_answers_of_real_prometheus_to_shipped_queries(prometheus, metric):
    query = read_queries(KEDA)[metric]
    num_values = 0
    for seed in SEEDS:
        samples, chance = random_samples(seed), random.Random(seed)
        moments = [START + seed * DAY + chance.randrange(SPAN + 120_000) for _ in range(60)]
        # Include times at which a sample is exactly on the window's edge.
        moments += [samples[PODS[0]][9].milliseconds + offset for offset in (0, 60_000)]
        for at in moments:
            theirs = list(prometheus.query(query, time=f"{at / 1000:.3f}").values())
            ours = fleet_metrics(samples, at / 1000)[metric]
            assert ([] if ours is None else [ours]) == pytest.approx(theirs, rel=1e-9, abs=1e-12)
            num_values += len(theirs)
    assert num_values >= 200, "too few values to compare"


def test_too_few_samples_give_no_value_and_no_requests_give_zero():
    idle = [Sample(at * 15_000, 7.0, 3.0, 0.0) for at in range(4)]
    assert fleet_metrics({"idle": idle, "new": idle[-1:]}, 45.0) == {
        QUEUE_METRIC: 0.0,
        PENDING_METRIC: 0.0,
    }
    assert fleet_metrics({"new": idle[-1:]}, 45.0) == {QUEUE_METRIC: None, PENDING_METRIC: 0.0}
    assert fleet_metrics({"gone": idle}, 900.0) == {QUEUE_METRIC: None, PENDING_METRIC: None}
