"""Tests of the figures that the serving benchmark computes from latencies."""

import numpy as np
import pytest

from benchmarks.load import Responses, window_figures


def _responses(due: list[float], latencies: list[float]) -> Responses:
    return Responses(
        latencies=np.array(latencies), due=np.array(due), seconds=1.0, failed={}, first_errors={}
    )


def test_the_ratio_compares_the_window_with_the_quiet_time_alone() -> None:
    responses = _responses([0.5, 1.0, 1.5, 2.0, 2.5], [9.0, 0.004, 0.004, 0.012, 9.0])
    figures = window_figures(responses, window=(2.0, 2.5), quiet=(1.0, 2.0))
    assert figures["num_in_window"] == 1
    assert figures["window_p99_ms"] == pytest.approx(12.0)
    assert figures["before_p99_ms"] == pytest.approx(4.0)
    assert figures["ratio"] == pytest.approx(3.0)


def test_a_ratio_without_requests_in_the_quiet_time_is_none() -> None:
    figures = window_figures(_responses([2.0], [0.012]), window=(2.0, 2.5), quiet=(1.0, 2.0))
    assert figures["before_p99_ms"] is None
    assert figures["ratio"] is None
