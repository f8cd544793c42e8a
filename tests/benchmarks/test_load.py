"""Tests of the load generator's schedule, latencies and counts in virtual time."""

import asyncio

import numpy as np
import pytest

from benchmarks.load import closed_loop, open_loop
from evergreen.runtime.errors import PermanentError, TemporaryError
from tests.support.errors import raises
from tests.support.virtual_time import VirtualTime


def test_stall_is_charged_to_every_request_that_was_due_during_it():
    """Coordinated omission is avoided: waits of single requests follow Lindley's recursion."""
    service = np.full(1000, 0.01)
    service[50] = 0.8
    time = VirtualTime()

    async def go():
        line = asyncio.Lock()

        async def send(number):
            async with line:
                await time.sleep(service[number])

        return await open_loop(send, 50.0, 4.0, seed=3, timing=time.timing())

    responses = time.run(go())
    wait, expected = 0.0, []
    for each, gap in zip(service, np.diff(responses.due, append=np.inf)):
        expected.append(wait + each)
        wait = max(0.0, wait + each - gap)
    np.testing.assert_allclose(responses.latencies, expected, atol=1e-6)
    assert np.percentile(responses.latencies, 95) > 0.2


def test_arrivals_have_rate_and_spread_of_independent_users():
    time = VirtualTime()
    responses = time.run(
        open_loop(lambda number: time.sleep(0.001), 200.0, 20.0, timing=time.timing())
    )
    gaps = np.diff(responses.due)
    assert len(responses.due) == pytest.approx(4000, abs=4 * np.sqrt(4000))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert np.mean(gaps > gaps.mean()) == pytest.approx(np.exp(-1), abs=0.03)


def test_closed_loop_keeps_callers_busy_and_counts_errors_by_kind():
    time = VirtualTime()
    failing = {3: TemporaryError, 7: PermanentError}

    async def send(number):
        await time.sleep(0.02)
        if kind := failing.get(number % 10):
            raise kind(f"failed {number}")

    responses = time.run(closed_loop(send, 3, 4.0, timing=time.timing()))
    assert responses.failed == {"TemporaryError": 60, "PermanentError": 60}
    assert responses.first_errors == {"TemporaryError": "failed 3", "PermanentError": "failed 7"}
    assert len(responses.latencies) + 120 == pytest.approx(3 * 4.0 / 0.02, abs=3)
    assert responses.latencies == pytest.approx(0.02)


@pytest.mark.parametrize("loop", [open_loop, closed_loop])
def test_invalid_argument_is_raised_and_not_counted(loop):
    time = VirtualTime()

    async def send(number):
        await time.sleep(0.001)
        if number == 5:
            raise TypeError("defect")

    with raises(TypeError, "defect"):
        time.run(loop(send, 2, 10.0, timing=time.timing()))
