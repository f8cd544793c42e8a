"""Tests of stored requests: they mature in time order, and are deleted once they are archived."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import monitoring.state.store
from monitoring.state.join import attribute
from monitoring.state.store import StateStore
from tests.support.monitors import START, WINDOW, add_in_pulls, prediction


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    times=st.lists(st.integers(0, 9), min_size=5, max_size=12),
    pull=st.integers(1, 6),
    block_bytes=st.integers(1, 2000),
    limit=st.integers(1, 5),
    max_rows=st.integers(1, 8),
    part_rows=st.integers(1, 8),
    bounds=st.lists(st.integers(0, 9), max_size=3),
)
@example(times=[0] * 7, pull=1, block_bytes=1, limit=2, max_rows=2, part_rows=1, bounds=[])
def test_requests_mature_by_time_and_id_and_are_in_this_order_in_their_file(
    tmp_path_factory, times, pull, block_bytes, limit, max_rows, part_rows, bounds
):
    store = StateStore(tmp_path_factory.mktemp("blocks") / "monitor.db")
    numbers = [7 * i % 12 for i in range(len(times))]
    made = {
        f"r{n:02}": prediction(f"r{n:02}", 1 + n % 3, time=START + 20 * t)
        for n, t in zip(numbers, times)
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(monitoring.state.store, "_BLOCK_BYTES", block_bytes)
        add_in_pulls(store, list(made.values()), pull)
    expected: list[str] = []
    for bound in [*sorted(bounds), 9]:
        until = START + 20 * bound
        due = [
            batch
            for batch in made.values()
            if batch.time <= until and batch.request_id not in expected
        ]
        expected += [
            batch.request_id
            for batch in sorted(due, key=lambda batch: (batch.time, batch.request_id))
        ]
        while (waiting := store.waiting(until, limit, max_rows)) is not None:
            assert len(waiting) <= limit
            assert waiting.num_rows <= max_rows or len(waiting) == 1
            store.mature(
                attribute(waiting, [], window_seconds=0.0).requests,
                {},
                now=START,
                part_rows=part_rows,
            )
        held = store.newest_rows()
        assert ([] if held is None else held.ids.tolist()) == expected
    parts = store.oldest_unarchived(1000)
    assert all(part.num_rows <= max(part_rows, 3) for part in parts)
    store.intend_file("part", [part.number for part in parts])
    rows, labels = store.rows_of_file("part")
    assert rows.ids.tolist() == expected
    np.testing.assert_array_equal(
        rows.dense, np.concatenate([made[name].dense for name in expected])
    )
    assert len(labels) == rows.num_rows
    store.close()


def test_rows_of_pull_are_freed_once_all_of_them_are_archived(started):
    b = started(archive_roll_rows=2, window_rows=2, min_clicks=1)

    def left() -> tuple[set[str], int, int]:
        counted = [
            b.store._connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in TABLES
        ]
        return {row["request_id"] for row in b.archived}, *counted

    b.tick(*[prediction(f"r{i}", 2, time=FIRST + 15.0 * i) for i in range(3)], at=FIRST + WINDOW)
    assert left() == ({"r0"}, 1, 1)
    b.tick(at=FIRST + 15.0 + WINDOW)
    assert left() == ({"r0", "r1"}, 1, 1)
    b.start()
    b.tick(at=FIRST + 30.0 + WINDOW)
    assert left() == ({"r0", "r1", "r2"}, 0, 1), "the window must contain the newest rows"
    both = [
        prediction(name, 2, time=b.clock.now + ahead)
        for name, ahead in (("later", 0.0), ("ahead", 50_000.0))
    ]
    b.tick(*both, at=b.clock.now + 1000.0)
    assert left() == ({"r0", "r1", "r2", "later"}, 1, 2), (
        "rows with a future time must not keep other rows"
    )


FIRST = START - START % 60
TABLES = ("block_rows", "blocks")
