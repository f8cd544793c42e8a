"""What the serving benchmark says of its latencies is what they are, and its targets are the issue's."""

import numpy as np
import pytest

from benchmarks import serving
from benchmarks import serving_runs as figures
from inference_client.load import Answers


def _answers(latencies, *, due=None, seconds=2.0):
    due = np.arange(len(latencies)) if due is None else due
    return Answers(np.array(due, float), np.array(latencies, float), seconds, {"Unanswered": 5}, {}, 0.0)


def test_a_run_without_answers_has_no_percentile_and_rows_per_second_count_answered_rows_only():
    empty = figures.summary(_answers([]), 64)
    assert (empty["p50_ms"], empty["mean_ms"], empty["rows_per_second"], empty["num_failed"]) == (None, None, 0, 5)
    assert figures.summary(_answers([0.1] * 10, seconds=2.0), 64)["rows_per_second"] == 10 * 64 / 2


def test_parts_of_a_request_add_up_to_its_mean():
    before = dict.fromkeys(("requests", "request", "queue", "compute_input", "compute_infer", "compute_output"), 7)
    grown = {"requests": 10, "request": 10_000_000, "queue": 2_000_000, "compute_input": 500_000}
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
    answers = _answers(np.where(slow, 0.03, 0.01), due=asked)
    found = figures.release_figures(answers, window=(19.05, 20.05), began=12.05, batch=64)
    assert found["window_seconds"] == pytest.approx(1.0)
    assert found["num_in_window"] == 10
    assert found["window_p99_ms"] == pytest.approx(30.0)
    assert found["before_p99_ms"] == pytest.approx(10.0)
    assert found["ratio"] == pytest.approx(3.0)


def _results(*, release_ratio=1.5, failed=0, ours_p99=3.0):
    def run(p50=1.0, p99=2.0, rows=100.0):
        return [{"p50_ms": p50, "p99_ms": p99, "rows_per_second": rows}]

    half = {"rounds": {"evergreen": run(p99=ours_p99), "onnxruntime": run(p99=1.0), "floor": run(p99=1.5)}}
    closed = {"1": {"evergreen": run(), "reference": run(p50=60.0), "onnxruntime": run(rows=110.0)}}
    closed["16"] = {"evergreen": run(rows=150.0), "reference": run(p50=600.0), "onnxruntime": run(rows=200.0)}
    return {
        "closed": {"64": closed, "1024": closed},
        "half_load": {"1": half, "64": half},
        "cold_starts": [0.3, 0.4, 0.5],
        "releases": [{"ratio": release_ratio, "num_failed": 0}, {"ratio": 1.0, "num_failed": failed}],
    }


def test_every_target_of_the_issue_is_judged():
    found = serving.judge(_results())
    assert [target.bound for target in found] == [50, 2, 2, 0.8, 0.8, 1, 0, 2]
    assert [target.is_met for target in found] == [True, True, True, True, False, True, True, True]
    assert found[0].value.median == 60
    assert found[4].value.median == 0.75
