"""Tests that rows with open labels equal those of a brute-force reference, in bounded memory."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergreen.contracts.records import Predictions
from monitoring.state.join import attribute
from monitoring.state.store import StateStore
from tests.support.monitors import START, WINDOW, add_in_pulls, clicks, prediction


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_open_rows_are_those_of_records_whose_window_is_open(tmp_path_factory, data):
    store = StateStore(tmp_path_factory.mktemp("open") / "monitor.db")
    requests = [
        prediction(
            f"r{i}",
            data.draw(st.integers(1, 3)),
            time=100.0 + i,
            version=data.draw(st.integers(1, 2)),
        )
        for i in range(5)
    ]
    events = data.draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(100, 200)).map(
                lambda e: (f"r{e[0]}", *e[1:])
            )
        )
    )
    records = [*requests, *[clicks(f"o{i}", [e]) for i, e in enumerate(events)]]
    add_in_pulls(store, data.draw(st.permutations(records)), data.draw(st.integers(1, 10)))
    matured_until = data.draw(st.integers(99, 104))
    waiting = store.waiting(matured_until, 10)
    if waiting is not None:
        store.mature(attribute(waiting, [], window_seconds=50.0).requests, {}, now=1.0)
    found, expected = set(), set()
    if (waiting := store.newest_waiting()) is not None:
        rows = attribute(waiting, store.clicks_on(waiting.numbers), window_seconds=50.0).requests
        versions, times = np.repeat(rows.versions, rows.sizes), np.repeat(rows.times, rows.sizes)
        found = set(
            zip(versions.tolist(), rows.scores.tolist(), times.tolist(), rows.labels.tolist())
        )
    for batch in requests:
        for row in range(len(batch)) if batch.time > matured_until else ():
            clicked = any(
                (n, r) == (batch.request_id, row) and t <= batch.time + 50 for n, r, t in events
            )
            expected.add((batch.model_version, float(batch.scores[row]), batch.time, int(clicked)))
    assert found == expected
    store.close()


def test_newest_requests_up_to_limit_are_returned_complete(tmp_path):
    store = StateStore(tmp_path / "monitor.db")
    store.add(
        Predictions.of([prediction(f"r{i}", 4, time=100.0 + i) for i in range(10)]), [], [], now=0.0
    )
    found = store.newest_waiting(11)
    assert (found.times.tolist(), found.num_rows) == ([108.0, 109.0], 8)
    assert store.newest_waiting(3) is None
    store.close()


def test_estimates_of_open_labels_are_shown_and_follow_records(started):
    b = started(decide_seconds=1.0)
    b.tick(
        prediction("a", 8),
        prediction("b", 4, time=START + 1, version=2),
        clicks("o", [("a", 1, START + 1)]),
        at=START + 2,
    )
    first, second = b.monitor._measurements.open_labels
    assert (first.version, first.open_rows, first.open_clicks) == (1, 8, 1)
    assert (second.version, second.open_rows, second.final_at) == (2, 4, START + 1 + WINDOW)
    assert first.auc is None  # no click delay has been measured yet
    b.tick(at=START + 1 + WINDOW)
    assert b.monitor._measurements.open_labels == ()
    assert len(b.monitor._measurements._delays) == 1


@pytest.mark.slow
def test_memory_does_not_grow_with_open_requests(started):
    """Python uses no more memory for 100,000 open requests than for a tenth of them."""
    b = started(archive_roll_rows=5000, window_rows=5000)
    held, template = {}, prediction("x", 1)
    tracemalloc.start()
    for i in range(100):
        names = [f"r{i}-{k}" for k in range(1000)]
        batches = [dataclasses.replace(template, request_id=name, time=START + i) for name in names]
        outcome = clicks(f"o{i}", [(name, 0, START + i) for name in names[:32]])
        b.store.add(Predictions.of(batches), [outcome], [], now=START)
        b.clock.now = START + 1
        if i in (9, 99):
            b.monitor.tick()
            held[i] = tracemalloc.get_traced_memory()[0]
    assert b.store.num_pending_rows == 100_000
    assert held[99] < held[9] + 1_000_000
    tracemalloc.reset_peak()
    b.clock.now = START + 100 + WINDOW
    b.monitor.tick()  # The tick matures all requests, 10,000 at a time.
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert b.store.num_pending_rows == 0
    assert b.store.counters["matured_click"] == 3200
    assert peak < held[99] + 40_000_000
