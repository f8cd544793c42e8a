"""Tests of the path from a drift to the end of one run on Kubeflow, with faults.

Some tests run two monitors.
"""

import pytest

from monitoring.retraining.triggers import KubeflowTrigger
from tests.support.monitors import DRIFT, Bench, traffic

CYCLE = {"PENDING": "RUNNING", "RUNNING": "SUCCEEDED"}


@pytest.fixture
def start(kubeflow, tmp_path):
    """`start(name)` returns a bench whose monitor requests runs from Kubeflow."""
    options = {"trigger": "kubeflow", "kubeflow_host": kubeflow.url, "pipeline_name": "ours"}
    made = []

    def make(name="one") -> Bench:
        (tmp_path / name).mkdir()
        b = Bench(tmp_path / name, **DRIFT, **options, pipeline_arguments='{"recommender": "3"}')
        made.append(b)
        b.trigger = KubeflowTrigger(
            b.settings.actions.kubeflow, store=b.settings.store, timeout_seconds=(5.0, 5.0)
        )
        b.start()
        return b

    yield make
    for each in made:
        each.close()


def test_server_failure_for_half_hour_costs_no_run_and_no_second_one(kubeflow, start):
    b = start()
    traffic(b, "bad", auc="bad")
    kubeflow.failure = 503
    b.turn(100, 16.0)
    kubeflow.failure = None
    kubeflow.lost.append(("POST", "/runs"))
    b.turn(3, 16.0)
    kubeflow.advance = CYCLE
    b.turn(10, 16.0)
    assert [run["state"] for run in kubeflow.runs] == ["SUCCEEDED"]
    assert b.kinds().count("unreachable") == 1
    assert [event["outcome"] for event in b.events if event["kind"] == "run_ended"] == ["released"]


@pytest.mark.parametrize(
    "created_at",
    ["", "2025-12-31T23:59:59Z"],
    ids=["late run is newest", "late run is oldest"],
)
@pytest.mark.parametrize("is_before_retry", [True, False])
def test_run_created_after_request_timed_out_is_one_run_and_counts_once(
    kubeflow, start, is_before_retry, created_at
):
    b = start()
    kubeflow.num_late = 1
    traffic(b, "bad", auc="bad")
    b.turn(1, 1.0)
    assert (kubeflow.runs, len(kubeflow.late)) == ([], 1)
    if is_before_retry:
        kubeflow.commit_late(created_at)
    b.turn(2, 16.0)
    (first,) = kubeflow.runs
    if not is_before_retry:
        kubeflow.commit_late(created_at)
        first = min(kubeflow.runs, key=lambda run: run["created_at"])
        b.turn(1, 16.0)
        assert [run["state"] for run in kubeflow.runs if run is not first] == ["CANCELING"]
    b.turn(1, 16.0)
    for run in kubeflow.runs:
        run["state"] = "SUCCEEDED" if run is first else "CANCELED"
    b.turn(2, 16.0)
    assert [run["state"] for run in kubeflow.runs if run is not first] == ["CANCELED"] * (
        len(kubeflow.runs) - 1
    )
    kinds = b.kinds()
    assert [kinds.count(each) for each in ("decision", "run_started", "run_ended")] == [1, 1, 1]
    assert (b.store.counters["request_started"], b.store.counters["request_released"]) == (1, 1)
    assert len(b.monitor.actions.retraining.past_runs.requested_at) == 1


def test_two_monitors_with_same_rows_request_one_run_and_follow_it_to_end(kubeflow, start):
    """If an operator starts a second monitor before the first has ended, two monitors run."""
    benches = start("a"), start("b")
    for b, ahead in zip(benches, (0.25, 3.5)):  # the clocks of the two monitors differ
        traffic(b, "bad", auc="bad")
        b.tick(at=b.clock.now + ahead)
    assert [run["display_name"] for run in kubeflow.runs] == ["drift 2025-11-13 02:13:20 v1"]
    kubeflow.runs[0]["state"] = "SUCCEEDED"
    for b in benches:
        b.turn(2, 16.0)
        assert b.store.counters["request_released"] == 1
    assert len(kubeflow.runs) == 1
