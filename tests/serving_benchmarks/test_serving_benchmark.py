"""What the serving benchmark says of its latencies is what they are, and its targets are the issue's."""

import asyncio

import numpy as np
import pytest

from benchmarks import serving
from benchmarks import serving_runs as figures
from benchmarks.serving_asking import Answers, Failed, closed_loop, open_loop


def _answers(latencies, *, asked=None, seconds=2.0, failed=0):
    asked = np.arange(len(latencies)) if asked is None else asked
    return Answers(np.array(asked, float), np.array(latencies, float), seconds, failed)


def test_percentile_is_a_latency_that_occurred():
    latencies = np.arange(1, 101) / 1000
    assert figures.percentile_ms(latencies, 50) == pytest.approx(50.0)
    assert figures.percentile_ms(latencies, 99) == pytest.approx(99.0)
    assert figures.percentile_ms(latencies, 100) == pytest.approx(100.0)
    assert figures.percentile_ms(latencies[:1], 99) == pytest.approx(1.0)


def test_no_answers_have_no_percentile():
    summary = figures.summary(_answers([], failed=3), 64)
    assert (summary["p50_ms"], summary["p99_ms"], summary["mean_ms"]) == (None, None, None)
    assert summary["rows_per_second"] == 0
    assert summary["num_failed"] == 3


def test_rows_per_second_count_answered_rows_only():
    assert figures.summary(_answers([0.1] * 10, seconds=2.0, failed=5), 64)["rows_per_second"] == 10 * 64 / 2


def test_parts_of_a_request_add_up_to_its_mean():
    before = dict.fromkeys(("count", "request", "queue", "compute_input", "compute_infer", "compute_output"), 7)
    grown = {"count": 10, "request": 10_000_000, "queue": 2_000_000, "compute_input": 500_000}
    grown |= {"compute_infer": 6_000_000, "compute_output": 1_000_000}
    split = figures.server_split(before, {name: before[name] + grown[name] for name in before}, mean_ms=1.4)
    assert split["compute_infer"] == pytest.approx(0.6)
    assert split["front end"] == pytest.approx(0.05)
    assert split["client and network"] == pytest.approx(0.4)
    assert sum(split.values()) == pytest.approx(1.4)
    assert figures.server_split(before, before, mean_ms=1.0) is None


def test_release_is_judged_by_the_requests_that_were_due_in_its_window():
    asked = np.arange(0, 30, 0.1)
    slow = (asked >= 19.05) & (asked < 20.05)
    answers = _answers(np.where(slow, 0.03, 0.01), asked=asked)
    found = figures.release_figures(answers, window=(19.05, 20.05), run=(12.05, 21.0), batch=64)
    assert found["window_seconds"] == pytest.approx(1.0)
    assert found["num_in_window"] == 10
    assert found["window_p99_ms"] == pytest.approx(30.0)
    assert found["before_p99_ms"] == pytest.approx(10.0)
    assert found["ratio"] == pytest.approx(3.0)


class _Clock:
    """Time that passes only when somebody waits or works."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        end = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, end)


def test_requests_in_a_stall_of_an_open_loop_count_from_when_they_were_due():
    clock = _Clock()

    async def stalls_once(i):
        clock.now += 0.05 if i == 5 else 0.0
        return np.zeros(1, np.float32)

    answers = asyncio.run(open_loop(stalls_once, 1000.0, 0.5, seed=1, clock=clock, sleep=clock.sleep))
    stall_began = answers.asked[5]
    late = answers.latencies > 1e-6
    due_meanwhile = (answers.asked >= stall_began) & (answers.asked < stall_began + 0.05)
    assert due_meanwhile.sum() > 25
    # Nobody asked before the stall waited, everybody due in it did, until it was over.
    assert not late[answers.asked < stall_began - 0.005].any()
    assert late[due_meanwhile].all()
    over = answers.asked + answers.latencies
    assert over[due_meanwhile] == pytest.approx(stall_began + 0.05, abs=0.01)


def test_open_loop_asks_at_the_rate():
    clock = _Clock()

    async def answers_at_once(i):
        return np.zeros(1, np.float32)

    answers = asyncio.run(open_loop(answers_at_once, 500.0, 10.0, seed=3, clock=clock, sleep=clock.sleep))
    gaps = np.diff(answers.asked)
    assert len(answers.latencies) == pytest.approx(5000, abs=4 * np.sqrt(5000))
    # Gaps of a Poisson process are as spread as they are long.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_failures_are_counted_and_are_no_latencies():
    clock = _Clock()

    async def fails_every_third(i):
        clock.now += 0.001
        if i % 3 == 0:
            raise Failed("refused")
        return np.zeros(1, np.float32)

    answers = asyncio.run(closed_loop(fails_every_third, 1, 0.2995, clock=clock))
    assert answers.errors == ("refused",)
    assert (answers.num_failed, len(answers.latencies)) == (100, 200)


def _results(*, release_ratio=1.5, failed=0, ours_p99=3.0):
    def run(p50=1.0, p99=2.0, rows=100.0):
        return [{"p50_ms": p50, "p99_ms": p99, "rows_per_second": rows}]

    half = {"rounds": {"evergreen": run(p99=ours_p99), "onnxruntime": run(p99=1.0), "floor": run(p99=1.5)}}
    closed = {"1": {"evergreen": run(), "reference": run(p50=60.0), "onnxruntime": run(rows=110.0)}}
    closed["16"] = {"evergreen": run(rows=150.0), "reference": run(p50=600.0), "onnxruntime": run(rows=200.0)}
    return {
        "closed": {"64": closed, "1024": closed},
        "half_load": {"1": half, "64": half},
        "cold_starts": {"ready": [0.3, 0.4, 0.5]},
        "releases": {"releases": [{"ratio": release_ratio, "num_failed": 0}, {"ratio": 1.0, "num_failed": failed}]},
    }


def test_every_target_of_the_issue_is_judged():
    found = serving.judge(_results())
    assert [target.bound for target in found] == [50, 2, 2, 0.8, 0.8, 1, 0, 2]
    assert [target.is_met for target in found] == [True, True, True, True, False, True, True, True]
    assert found[0].value.median == 60
    assert found[4].value.median == 0.75


def test_one_failed_request_of_one_release_misses_the_target():
    met = {target.name: target.is_met for target in serving.judge(_results(failed=1))}
    assert not met["failed requests of a release"]


def test_capacity_is_that_of_the_best_concurrency():
    found = serving.capacities(_results()["closed"], 64)
    assert found == {"evergreen": 150 / 64, "reference": 100 / 64, "onnxruntime": 200 / 64}
