"""Tests that the monitor and a replay make the same decisions at any rate of requests.

The rates are between one request a day and thousands a second, with gaps of hours. The monitor runs
a turn after each request, after several requests, or once at the end, as after a long stop. The
number of messages in a pull is random. Some turns begin with a restart of the monitor.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.simulation.simulator import Simulator
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from tests.monitoring.backtest.conftest import backtested, write_references
from tests.monitoring.drift.conftest import reference_of, requests_of
from tests.support.monitors import START, WINDOW, Bench, clicks, publish

REQUESTS, ROWS, DELAY = 150, 5, 2.0
SETTINGS = {
    "policies": "sequential,data_drift",
    "min_clicks": 5,
    "window_rows": 200,
    "decide_seconds": 600.0,
    "drift_bucket_seconds": 3600.0,
    "drift_grace_seconds": 60.0,
    "drift_min_rows": 10,
    "drift_buckets": 1,
    "cooldown_seconds": 1e6,
}


@pytest.fixture(scope="module")
def reference():
    return reference_of(Simulator.create(11).draw(20_000, np.random.default_rng(1)))


@pytest.fixture(scope="module")
def requests():
    drawn = Simulator.create(11).draw(REQUESTS * ROWS, np.random.default_rng(2))
    return list(zip(requests_of(drawn, size=ROWS), drawn.label.reshape(REQUESTS, ROWS)))


def play(folder, requests, reference, *, times, looks, pull_messages, kills):
    """Publish each request `DELAY` after its time, together with its clicks.

    Returns:
        The decision lines of the monitor and of the replay.
    """
    bench = Bench(folder, recommender=CRITEO_RECOMMENDER, **SETTINGS, pull_messages=pull_messages)
    write_references(bench.settings.store, reference)
    bench.start().tick()
    for number, (time, (request, labels)) in enumerate(zip(times, requests)):
        batch = replace(request, time=time, model_version=1 + 2 * number // len(times))
        events = [(batch.request_id, int(row), time + 1.0) for row in np.flatnonzero(labels)]
        bench.clock.now = max(bench.clock.now, time + DELAY)
        publish(
            bench.log, batch, *([clicks(f"c-{number}", events)] if events else []), form=bench.form
        )
        if number in kills:
            bench.start()
        if number in looks:
            bench.monitor.tick()
    bench.clock.now += WINDOW + 2 * 3600.0
    while bench.log.backlog() or bench.store.num_pending_rows:
        bench.monitor.tick()
        bench.clock.now += 1.0
    bench.monitor.stop()
    evaluated = backtested(bench.settings, CRITEO)
    lines = (bench.settings.state / "decisions.jsonl").read_text().splitlines()
    counters = dict(bench.store.counters)
    bench.close()
    assert not counters.get("passed_over")
    assert not [
        name
        for name, rows in counters.items()
        if name.startswith("drift_") and name.endswith("_row") and rows
    ]
    return lines, evaluated


GAPS = st.one_of(
    st.just(0.0),
    st.floats(1e-4, 1e-2),
    st.floats(0.5, 60.0),
    st.floats(600.0, 7200.0),
    st.just(86_400.0),
)


@st.composite
def arrivals(draw):
    """Draw the times of requests.

    Within an interval, the rate is constant. Intervals are separated by gaps.
    """
    gaps = []
    for rate, num, gap in draw(
        st.lists(st.tuples(GAPS, st.integers(1, 60), GAPS), min_size=2, max_size=8)
    ):
        gaps += [gap, *[rate] * num]
    return (START + 1.0 + np.cumsum(gaps[:REQUESTS])).tolist()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), times=arrivals(), pull_messages=st.sampled_from([1, 7, 500]))
def test_replay_equals_recorded_decisions_at_any_rate_and_with_gaps_and_kills(
    requests, reference, data, times, pull_messages
):
    numbers = st.sets(st.integers(0, len(times) - 1), max_size=len(times))
    looks, kills = (
        data.draw(numbers, label="looks"),
        data.draw(st.sets(st.integers(0, len(times) - 1), max_size=3)),
    )
    with tempfile.TemporaryDirectory() as folder:
        lines, replayed = play(
            Path(folder),
            requests,
            reference,
            times=times,
            looks=looks,
            pull_messages=pull_messages,
            kills=kills,
        )
    assert replayed == lines


@pytest.mark.parametrize("pull_messages", [500, 10])
def test_catching_up_over_hundred_buckets_equals_replay(
    tmp_path, requests, reference, pull_messages
):
    """A monitor is stopped for four days, during which at least one request an hour arrives."""
    times = (START + 1.0 + 2500.0 * np.arange(REQUESTS)).tolist()
    lines, replayed = play(
        tmp_path,
        requests,
        reference,
        times=times,
        looks={3},
        pull_messages=pull_messages,
        kills={80},
    )
    assert len(lines) > 50
    assert replayed == lines
