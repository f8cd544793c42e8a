"""Tests that compare labels with a brute-force reference, for any order of arrival."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monitoring.monitor
from evergreen.contracts.records import Predictions
from monitoring.state.join import attribute
from monitoring.state.store import StateStore
from tests.support.monitors import START, WINDOW, add_in_pulls, clicks, matured, prediction, publish


def micros(time: float) -> int:
    """Return the time in microseconds, as in the archive and in extraction."""
    return round(time * 1e6)


def test_window_ends_in_one_microsecond_wherever_floats_round():
    """At 1.7e9 s, floats are 0.24 microseconds apart. Rounding can move a time across the limit."""
    for predicted_at in np.random.default_rng(0).uniform(1.7e9, 1.8e9, 200).tolist():
        last = (micros(predicted_at) + micros(1800.3)) / 1e6
        for time, label in ((last, 1), (last + 1e-6, 0)):
            waiting = matured("r", predicted_at, 1, [0], [0.5])
            found = attribute(waiting, [(waiting.numbers[0], 0, time)], window_seconds=1800.3)
            assert (found.requests.labels.tolist(), len(found.late)) == ([label], 1 - label)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_order_with_any_repetition_gives_labels_of_oracle(tmp_path_factory, data):
    names = [f"r{i}" for i in range(4)]
    sizes = {name: data.draw(st.integers(1, 4)) for name in names}
    events = data.draw(
        st.lists(
            st.tuples(st.sampled_from(names), st.integers(0, 3), st.floats(0, 120)),
            min_size=1,
            max_size=8,
        )
    )
    predictions = {
        name: prediction(name, size, time=100.0 + i) for i, (name, size) in enumerate(sizes.items())
    }
    outcomes = [clicks(f"o{i}", [(n, row, 100.0 + t)]) for i, (n, row, t) in enumerate(events)]
    records = data.draw(st.permutations([*predictions.values(), *outcomes]))
    repeated = records + data.draw(st.lists(st.sampled_from(records), max_size=4))
    store = StateStore(tmp_path_factory.mktemp("join") / "monitor.db")
    add_in_pulls(store, repeated, data.draw(st.integers(1, 8)))
    waiting = store.waiting(1e9, 100)
    found = attribute(waiting, store.clicks_on(waiting.numbers), window_seconds=WINDOW).requests
    assert sorted(waiting.ids) == names
    for name, start, size in zip(found.ids, found.starts, found.sizes):
        batch, rows = predictions[name], slice(start, start + size)
        last = micros(batch.time) + micros(WINDOW)
        first = [
            min(
                (
                    100.0 + t - batch.time
                    for n, r, t in events
                    if (n, r) == (name, i) and micros(100.0 + t) <= last
                ),
                default=None,
            )
            for i in range(len(batch))
        ]
        assert found.labels[rows].tolist() == [int(delay is not None) for delay in first]
        np.testing.assert_array_equal(found.click_delays[rows], np.array(first, np.float32))
    assert store.counters["predicted"] == sum(sizes.values())
    assert store.counters.get("duplicate", 0) == len(repeated) - len(records)
    store.close()


def test_windows_stay_open_while_their_clicks_wait_in_log(bench, monkeypatch):
    """The monitor starts after a long stop, when all attribution windows have ended.

    The monitor must still use the clicks that wait in the log.
    """
    monkeypatch.setattr(monitoring.monitor, "_MATURE_REQUESTS", 7)
    b = bench(pull_messages=2)
    publish(
        b.log, *[prediction(f"r{i}", 1) for i in range(50)], clicks("o", [("r0", 0, START + 1)])
    )
    b.clock.now = START + 10 * WINDOW
    monitor = b.start()
    monitor.tick()
    assert monitor.windows.versions == ()
    assert b.log.backlog() == 51 - 40
    monitor.tick()
    assert monitor.windows[1].labels.sum() == 1
    assert "passed_over" not in b.store.counters


def test_clock_set_back_lets_windows_opened_after_it_stay_open(started):
    b = started()
    b.clock.now = START + 86_400.0  # The clock is wrong by a day for one turn.
    b.monitor.tick()
    b.clock.now = START
    b.tick(prediction("a", 2))
    assert b.store.num_pending_rows == 2
    b.tick(clicks("o", [("a", 1, START + 5)]), at=START + WINDOW)
    assert b.monitor.windows[1].labels.tolist() == [0, 1]
    assert "passed_over" not in b.store.counters


@pytest.mark.parametrize("restart", [False, True], ids=["", "after a restart"])
def test_client_with_fast_clock_does_not_set_serving_version_for_hours(started, restart):
    b = started()
    b.tick(prediction("from tomorrow", 2, time=START + 80_000.0, version=1))
    if restart:
        b.start()
    b.clock.now = START + 1
    b.tick(prediction("now", 2, time=START + 1, version=2))
    assert b.monitor.serving_version == 2


def test_stop_under_flood_ends_and_leaves_rest_to_next_start(started):
    b = started(pull_messages=2)
    publish(b.log, *[prediction(f"r{i}", 1) for i in range(5)])
    coming = iter(range(1000))

    def flood(name: str) -> None:
        if name == "intake.pulled":
            publish(b.log, *[prediction(f"flood{next(coming)}", 1) for _ in range(2)])

    b.checkpoint = flood
    b.monitor.stop()
    assert b.kinds()[-1] == "stopped"
    assert b.store.counters["predicted"] == 6
    assert b.log.backlog() > 0


def test_ids_and_orphans_are_forgotten_only_when_old_and_archived(tmp_path):
    store = StateStore(tmp_path / "monitor.db")
    orphan = clicks("o", [("unknown", 0, 1.0)])
    store.add(
        Predictions.of([prediction("a", 1), prediction("b", 1, time=START + 1)]),
        [orphan],
        [],
        now=10.0,
    )
    waiting = store.waiting(START, 10)
    store.mature(attribute(waiting, [], window_seconds=0.0).requests, {}, now=11.0)
    store.intend_file("day=x/part-1.parquet", [1])
    store.seal_file("day=x/part-1.parquet", keep_rows=1)
    store.forget(before=10.0)
    store.add(Predictions.of([prediction("a", 1)]), [], [], now=12.0)
    assert store.counters["duplicate"] == 1
    store.forget(before=11.0)
    assert store.counters["unmatched_outcome"] == 1
    store.add(Predictions.of([prediction("b", 1, time=START + 1)]), [], [], now=12.0)
    assert store.counters["duplicate"] == 2  # request b is not archived, so its id is remembered
    store.close()
