"""Conversions: joined in a window of their own, in the archive as known at maturity, later ones as late outcomes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.contracts.records import CONVERSION
from monitoring.memory.join import mature_request, settle_request
from monitoring.memory.store import Store
from tests.support.archives import outcomes
from tests.support.crashes import Killed, crash_at
from tests.support.monitors import START, WINDOW, clicks, prediction, publish

LONG = 3 * WINDOW


def conversions(name: str, events) -> object:
    return clicks(name, events, event=CONVERSION)


def converted(b) -> dict[tuple[str, int], int]:
    return {(row["request_id"], row["row"]): row["converted"] for row in b.archived}


def test_conversions_known_at_maturity_are_in_the_column_and_later_ones_are_late_outcomes(bench):
    b = bench(conversion_window_seconds=LONG)
    monitor = b.start()
    publish(b.log, prediction("a", 4), conversions("early", [("a", 0, START + 5)]))
    b.clock.now = START + WINDOW
    monitor.tick()
    publish(b.log, conversions("after the click window", [("a", 1, START + WINDOW + 5)]))
    monitor.tick()
    b.clock.now = START + LONG
    monitor.tick()
    assert [tuple(each) for each in b.store.newest_settled()] == [("a", START, 1, 4, 2)]
    assert monitor.windows.conversion_rate(1) == 0.5
    publish(b.log, conversions("after its own window", [("a", 2, START + 9)]))
    monitor.tick()
    monitor.stop()
    assert converted(b) == {("a", 0): 1, ("a", 1): 0, ("a", 2): 0, ("a", 3): 0}
    assert outcomes(b) == [("a", 1, CONVERSION), ("a", 2, CONVERSION)]
    assert b.store.counters["settled"] == 4
    assert b.store.counters["settled_conversion"] == 2
    assert b.store.counters["late_conversion"] == 2


def test_a_conversion_window_shorter_than_the_clicks_settles_at_maturity(bench):
    b = bench(conversion_window_seconds=10.0)
    monitor = b.start()
    publish(b.log, prediction("a", 2), conversions("o", [("a", 0, START + 9), ("a", 1, START + 11)]))
    b.clock.now = START + WINDOW
    monitor.tick()
    monitor.stop()
    assert converted(b) == {("a", 0): 1, ("a", 1): 0}
    assert monitor.windows.conversion_rate(1) == 0.5
    assert outcomes(b) == [("a", 1, CONVERSION)]
    assert b.store.counters["late_conversion"] == 1


def test_a_conversion_is_no_click_and_a_click_no_conversion(bench):
    b = bench(conversion_window_seconds=LONG)
    monitor = b.start()
    publish(b.log, prediction("a", 2), clicks("o", [("a", 0, START + 1)]), conversions("p", [("a", 1, START + 1)]))
    b.clock.now = START + WINDOW
    monitor.tick()
    monitor.stop()
    assert monitor.windows[1].labels.tolist() == [1, 0]
    assert converted(b) == {("a", 0): 0, ("a", 1): 1}


@pytest.mark.parametrize("point", ["join.matured", "join.settled"])
def test_a_crash_counts_no_conversion_twice_and_forgets_none(bench, point):
    b = bench(conversion_window_seconds=LONG)
    b.checkpoint = crash_at(point)
    monitor = b.start()
    publish(b.log, prediction("a", 4), conversions("o", [("a", 0, START + 5)]))

    def run() -> None:
        for b.clock.now in (START + WINDOW, START + LONG):
            monitor.tick()

    with pytest.raises(Killed):
        run()
    b.checkpoint = lambda name: None
    monitor = b.start()
    b.clock.now = START + LONG + 6
    monitor.tick()
    monitor.tick()
    monitor.stop()
    assert monitor.windows.conversion_rate(1) == 0.25
    assert b.store.counters["settled"] == 4
    assert converted(b)["a", 0] == 1
    assert b.start().windows.conversion_rate(1) == 0.25


def test_what_waits_for_conversions_is_settled_where_they_are_awaited_no_longer(bench):
    b = bench(conversion_window_seconds=LONG)
    monitor = b.start()
    publish(b.log, prediction("a", 2))
    b.clock.now = START + WINDOW
    monitor.tick()
    records = replace(b.settings.records, conversion_window_seconds=0.0)
    b.settings = replace(b.settings, records=records)
    b.start().tick()
    b.monitor.tick()
    assert [request.num_rows for request in b.store.newest_settled()] == [2]
    assert b.store.unsettled(1e12, 10) == []


EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 300)), max_size=10)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS, st.data())
def test_every_conversion_is_in_the_column_or_late_and_the_settled_number_is_the_oracles(
    tmp_path_factory, events, data
):
    """Predictions at 100, click window 60, conversion window 150; each event arrives before or after maturity."""
    store = Store(tmp_path_factory.mktemp("conversions") / "monitor.db")
    sizes = {name: data.draw(st.integers(1, 3)) for name in "ab"}  # c stays unknown
    store.add([(prediction(n, size, time=100.0), b"m") for n, size in sizes.items()], [], [], now=0.0, joined=())
    is_early = [data.draw(st.booleans()) for _ in events]
    joined = ("click", CONVERSION)

    def take_in(when: bool) -> None:
        for i, event in enumerate(events):
            if is_early[i] is when:
                store.add([], [conversions(f"o{i}", [event])], [], now=1.0, joined=joined)

    take_in(True)
    late: list = []
    waiting = store.waiting(200.0, 10)
    requests = [mature_request(each, {}, late, click_window=60.0, conversion_window=150.0) for each in waiting]
    store.mature(requests, {}, now=2.0, late=late, awaits_conversions=True)
    take_in(False)
    late = []
    settled = [settle_request(r, found, late, conversion_window=150.0) for r, found in store.unsettled(200.0, 10)]
    store.settle(settled, now=3.0, late=late)
    store.forget(before=10.0)
    in_time = {(n, row) for n, row, time in events if row < sizes.get(n, 0) and time <= 250.0}
    assert {r.request_id: r.num_converted for r in settled} == {n: sum(m == n for m, _ in in_time) for n in sizes}
    in_column = {(r.request_id, int(row)) for r in requests for row in np.flatnonzero(r.converted)}
    archived = {(each.outcome.request_id, each.outcome.row) for each in store.oldest_late(100)}
    assert in_column | archived == {(n, row) for n, row, _ in events}
    assert in_column == {
        (n, row) for (n, row, time), early in zip(events, is_early) if early and (n, row) in in_time and time <= 250.0
    }
    assert store._connection.execute("SELECT count(*) FROM conversions").fetchone() == (0,)
    store.close()
