"""Conversions: each lies in an outcome file, and is in the rate where it came within its own window."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.contracts.records import CONVERSION
from monitoring.memory.store import Store
from tests.support.archives import outcomes
from tests.support.monitors import START, WINDOW, clicks, prediction, publish


def test_the_conversion_rate_follows_the_window_of_conversions_and_survives_a_restart(bench):
    b = bench(conversion_window_seconds=3 * WINDOW, keep_ids_seconds=0.0)
    b.start()
    in_time = [("a", 0, START + 5), ("a", 0, START + 6), ("a", 1, START + 2 * WINDOW)]
    publish(b.log, prediction("a", 4), clicks("o", [("a", 2, START + 1)]))
    publish(b.log, clicks("p", [*in_time, ("a", 3, START + 4 * WINDOW), ("a", 9, START)], CONVERSION))
    b.clock.now = START + WINDOW
    b.monitor.tick()
    assert [kpis.conversion_rate for kpis in b.monitor._measuring.shown] == [None]
    b.start()
    publish(b.log, prediction("later", 1, time=START + 2 * WINDOW))
    b.clock.now = START + 3 * WINDOW
    b.monitor.tick()
    b.monitor.stop()
    assert [kpis.conversion_rate for kpis in b.monitor._measuring.shown] == [2 / 4]
    assert outcomes(b) == [("a", row, CONVERSION) for row in (0, 1, 3, 9)]
    assert b.monitor.windows[1].labels.sum() == 1, "a conversion is no click"


EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 300)), max_size=10)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS, st.data())
def test_the_rate_is_that_of_the_records_in_any_order(tmp_path_factory, events, data):
    store = Store(tmp_path_factory.mktemp("conversions") / "monitor.db")
    sizes = {name: data.draw(st.integers(1, 3)) for name in "ab"}  # c stays unknown
    made = [prediction(name, size, time=100.0, version=ord(name)) for name, size in sizes.items()]
    records = [*made, *(clicks(f"o{i}", [event], CONVERSION) for i, event in enumerate(events))]
    for record in data.draw(st.permutations(records)):
        is_prediction = hasattr(record, "scores")
        store.add([(record, b"m")] if is_prediction else [], [] if is_prediction else [record], [], now=0.0)
    in_time = {(n, row) for n, row, time in events if 0 <= row < sizes.get(n, 0) and round(1e6 * time) <= 250_000_000}
    rates = {ord(name): sum(n == name for n, _ in in_time) / size for name, size in sizes.items()}
    assert store.conversion_rates(100.0, window_seconds=150.0) == pytest.approx(rates)
    assert store.conversion_rates(99.0, window_seconds=150.0) == {}
    store.close()
