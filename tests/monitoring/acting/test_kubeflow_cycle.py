"""From drift to the end of the one run on Kubeflow: the real monitor and kfp client, faults, two monitors."""

import pytest

from monitoring.acting.triggers import KubeflowTrigger
from monitoring.monitor import Monitor
from tests.support.monitors import DRIFT, Bench, traffic

CYCLE = {"PENDING": "RUNNING", "RUNNING": "SUCCEEDED"}


@pytest.fixture
def changes(kubeflow):
    asked = {"trigger": "kubeflow", "kubeflow_host": kubeflow.url, "pipeline_name": "ours"}
    return {**DRIFT, **asked, "pipeline_arguments": '{"store": "/mnt/store"}'}


@pytest.fixture
def bench_of(tmp_path, changes):
    made = []

    def make(name=".") -> Bench:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(Bench(tmp_path / name, **changes))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        each.log.close()


def start_on_kubeflow(b: Bench) -> Monitor:
    b.trigger = KubeflowTrigger(b.settings.acting.kubeflow, store=b.settings.store, timeout_seconds=(5.0, 5.0))
    return b.start()


def turns(b, monitor, number=10):
    for _ in range(number):
        monitor.tick()
        b.clock.now += 16.0


def test_a_server_in_trouble_for_half_an_hour_costs_no_run_and_no_second_one(kubeflow, bench_of):
    b = bench_of()
    monitor = start_on_kubeflow(b)
    traffic(b, "bad", auc="bad")
    kubeflow.failure = 503
    turns(b, monitor, 100)
    kubeflow.failure = None
    kubeflow.lost.append(("POST", "/runs"))
    turns(b, monitor, 3)
    kubeflow.advance = CYCLE
    turns(b, monitor, 10)
    assert [run["state"] for run in kubeflow.runs] == ["SUCCEEDED"]
    assert b.kinds().count("unreachable") == 1
    assert [event["outcome"] for event in b.events if event["kind"] == "run_ended"] == ["released"]


# -- two monitors, where one is shipped


def test_two_monitors_that_saw_the_same_rows_ask_for_one_run_and_both_follow_it_to_its_end(kubeflow, bench_of):
    first, second = bench_of("a"), bench_of("b")
    for b in (first, second):
        monitor = start_on_kubeflow(b)
        traffic(b, "bad", auc="bad")
        b.clock.now += {first: 0.25, second: 3.5}[b]  # their clocks differ
        monitor.tick()
    assert [run["display_name"] for run in kubeflow.runs] == ["drift-20251113T021320Z-v1"]
    kubeflow.runs[0]["state"] = "SUCCEEDED"
    for b in (first, second):
        turns(b, b.monitor, 2)
        assert b.store.counters["request_released"] == 1
    assert len(kubeflow.runs) == 1
