"""The demo's traffic as a trace: as many requests as were sent, at the rates at which they were, and readable again."""

from __future__ import annotations

import numpy as np
import pytest

from components.runtime.errors import ContractError
from k8s.scaling.traces import read_trace
from pipelines.local.request_trace import recorded_trace

LINES = [
    {"time": 1000.5, "requests_sent": 30, "rows": 1920},
    {"time": 1001.5, "requests_sent": 0, "rows": 0},
    {"time": 1003.5, "requests_sent": 70, "rows": 4480},
]


def test_every_request_is_in_the_second_in_which_it_was_sent(tmp_path):
    trace = recorded_trace(LINES)
    assert list(trace.rates) == [30.0, 0.0, 35.0]
    assert list(trace.rows) == [64, 64, 64]
    assert trace.num_expected == pytest.approx(100)
    (tmp_path / "requests.csv").write_text(trace.as_csv())
    again = read_trace(tmp_path / "requests.csv")
    np.testing.assert_allclose(again.starts, [0, 1, 2, 4])
    np.testing.assert_allclose(again.rates, trace.rates)


@pytest.mark.parametrize("lines", [[], [{"time": 1.0, "requests_sent": 0, "rows": 0}]])
def test_traffic_without_a_request_is_no_trace(lines):
    with pytest.raises(ContractError, match="expected at least one"):
        recorded_trace(lines)
