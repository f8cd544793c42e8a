"""Tests of late outcomes and conversions: each is in exactly one outcome file."""

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergreen.contracts import raw_rows
from evergreen.contracts.records import CLICK, CONVERSION
from monitoring.monitor import FORGET_SECONDS, ORPHAN_SECONDS
from monitoring.state.archive import OUTCOME_SCHEMA as SCHEMA
from monitoring.state.archive import marker_path
from monitoring.state.store import StateStore
from tests.support.archives import archived_rows, expected_rows, outcome_files, outcomes
from tests.support.crashes import Kill
from tests.support.monitors import START, WINDOW, Bench, add_in_pulls, clicks, prediction, publish

MIDNIGHT = 1_763_078_400.0  # 2025-11-14


def test_clicks_after_their_window_are_archived_wherever_found_late(started, caplog):
    b = started()
    b.tick(
        prediction("a", 3),
        clicks("early in the log, late by its time", [("a", 0, START + WINDOW + 1)]),
        clicks("on no row", [("a", 7, START + 1)]),
        clicks("in time", [("a", 2, START + 1)]),
        at=START + WINDOW + 2,
    )
    b.tick(clicks("in time, late in the log", [("a", 1, START + 3)]))
    b.monitor.stop()
    assert outcomes(b) == [("a", 0, CLICK), ("a", 1, CLICK), ("a", 7, CLICK)]
    assert archived_rows(b.archived) == expected_rows([prediction("a", 3)], {("a", 2)})
    assert b.store.counters["late_outcome"] == 2
    assert b.store.counters["unmatched_outcome"] == 1
    assert "1 clicks refer to rows that do not exist, such as row 7" in caplog.text
    assert b.store.counters["archived_outcome"] == 3
    assert b.store.num_unarchived_rows == 0


def test_outcome_file_has_contracts_schema_and_values(started):
    b = started()
    b.tick(prediction("a", 2, time=START + 0.25), at=START + WINDOW + 2)
    publish(b.log, clicks("late", [("a", 1, START + 3.5)]))
    b.tick(at=b.clock.now + 1.125)
    b.monitor.stop()
    (path,) = b.settings.archive.glob("outcomes/day=2025-11-13/part-*.parquet")
    table = pq.ParquetFile(path).read()
    assert table.schema.equals(SCHEMA)
    types = [(field.name, str(field.type).replace("double", "float64")) for field in table.schema]
    assert types == list(raw_rows.OUTCOME_TYPES.items())
    (row,) = table.to_pylist()
    assert (row["request_id"], row["row"], row["event"]) == ("a", 1, CLICK)
    assert row["outcome_time"].timestamp() == START + 3.5
    assert row["stored_at"].timestamp() == START + WINDOW + 3.125
    assert row["window_seconds"] == WINDOW


def test_each_kind_of_outcome_names_its_own_window(started):
    b = started(conversion_window_seconds=500.0)
    b.tick(prediction("a", 2), at=START + WINDOW)
    b.tick(clicks("c", [("a", 1, START + 3)]), clicks("v", [("a", 0, START + 4)], event=CONVERSION))
    b.monitor.stop()
    (path,) = b.settings.archive.glob("outcomes/day=2025-11-13/part-*.parquet")
    windows = {
        row["event"]: row["window_seconds"] for row in pq.ParquetFile(path).read().to_pylist()
    }
    assert windows == {CLICK: WINDOW, CONVERSION: 500.0}


@pytest.mark.parametrize("archived_between", [False, True])
def test_click_in_time_counts_even_if_later_click_was_stored_before_it(started, archived_between):
    """The earliest late click of a row determines whether the row was clicked within the window."""
    b = started()
    b.tick(prediction("a", 2), at=START + 5 * WINDOW)
    for name, time in (("after", START + 4 * WINDOW), ("in time", START + 3), ("again", START + 9)):
        b.tick(clicks(name, [("a", 1, time)]))
        if archived_between:
            b.monitor.stop()
    b.monitor.stop()
    times = [
        row["outcome_time"].timestamp()
        for path in b.settings.archive.glob("outcomes/day=*/part-*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    assert min(times) == START + 3
    assert len(times) == (2 if archived_between else 1)
    assert b.store.counters["archived_outcome"] == len(times)


def test_late_outcome_is_in_day_of_prediction_or_in_own_day_if_prediction_is_unknown(started):
    b = started()
    b.tick(
        prediction("before", 1, time=MIDNIGHT - 1),
        clicks("orphan", [("unknown", 4, MIDNIGHT + 1)]),
        at=MIDNIGHT + WINDOW,
    )
    b.tick(clicks("late", [("before", 0, MIDNIGHT + 2)]))
    b.monitor.stop()
    assert outcome_files(b) == {"day=2025-11-13": [("before", 0, CLICK)]}
    b.tick(at=b.clock.now + WINDOW + ORPHAN_SECONDS + FORGET_SECONDS + 1)
    b.monitor.stop()
    assert outcome_files(b)["day=2025-11-14"] == [("unknown", 4, CLICK)]
    assert b.store.counters["unmatched_outcome"] == 1


def test_unexpected_conversions_are_all_archived_and_in_no_metric(started):
    b = started()
    b.tick(
        prediction("a", 2),
        clicks("o", [("a", 0, START + 1), ("x", 3, START + 1)], event=CONVERSION),
        at=START + WINDOW,
    )
    b.monitor.stop()
    assert outcomes(b) == [("a", 0, CONVERSION), ("x", 3, CONVERSION)]
    assert archived_rows(b.archived) == expected_rows([prediction("a", 2)])
    assert b.store.counters["conversion"] == 2
    assert b.store.counters.get("late_conversion", 0) == 0


def stream(b: Bench) -> set[tuple[str, int, str]]:
    """Publish predictions, then clicks (half of them late), a conversion and an unknown request.

    Returns:
        The outcomes that must be archived.
    """
    publish(b.log, *[prediction(f"r{i}", 3, time=START + i) for i in range(12)])
    b.tick(
        clicks("in time", [(f"r{i}", i % 3, START + i + 1) for i in range(0, 12, 2)]),
        at=START + 12 + WINDOW,
    )
    publish(b.log, clicks("late", [(f"r{i}", i % 3, START + i + 1) for i in range(1, 12, 2)]))
    b.tick(clicks("conversion", [("r5", 2, START + 9)], event=CONVERSION))
    b.monitor.stop()
    return {(f"r{i}", i % 3, CLICK) for i in range(1, 12, 2)} | {("r5", 2, CONVERSION)}


def test_outcomes_in_uploaded_files_are_not_rewritten_and_expire_in_time(started):
    b = started(keep_ids_seconds=0.0)
    with Kill("outcomes.renamed") as kill:
        b.checkpoint = kill.reach
        stream(b)
    assert kill.is_dead
    (path,) = b.settings.archive.glob("outcomes/day=*/part-*.parquet")
    # The uploader writes a marker for each moved file.
    marker = marker_path(b.settings.archive, path.name)
    marker.parent.mkdir()
    marker.write_text("{}")
    path.unlink()
    b.checkpoint = lambda name: None
    b.start()
    b.tick(at=b.clock.now + FORGET_SECONDS + 1)
    count = "SELECT count(*) FROM late_outcomes"
    assert b.store._connection.execute(count).fetchone() == (7,), (
        "the rows of these outcomes are still in the windows"
    )
    # Newer rows replace the rows in the window.
    b.store.seal_file(*b.store.files("sealed"), keep_rows=0)
    b.tick(at=b.clock.now + FORGET_SECONDS + 1)
    assert b.store._connection.execute(count).fetchone() == (0,)
    assert outcomes(b) == []
    assert b.store.files("uploaded") == [path.relative_to(b.settings.archive).as_posix()]


def test_conversion_rate_follows_its_window_and_survives_restart(started):
    b = started(conversion_window_seconds=3 * WINDOW, keep_ids_seconds=0.0)
    in_time = [("a", 0, START + 5), ("a", 0, START + 6), ("a", 1, START + 2 * WINDOW)]
    publish(b.log, prediction("a", 4), clicks("o", [("a", 2, START + 1)]))
    b.tick(
        clicks("p", [*in_time, ("a", 3, START + 4 * WINDOW), ("a", 9, START)], CONVERSION),
        at=START + WINDOW,
    )
    assert [kpis.conversion_rate for kpis in b.monitor._measurements.shown] == [None]
    b.start()
    b.tick(prediction("later", 1, time=START + 2 * WINDOW), at=START + 3 * WINDOW)
    b.monitor.stop()
    assert [kpis.conversion_rate for kpis in b.monitor._measurements.shown] == [2 / 4]
    assert outcomes(b) == [("a", row, CONVERSION) for row in (0, 1, 3, 9)]
    assert b.monitor.windows[1].labels.sum() == 1, "a conversion must not count as a click"


EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 300)), max_size=10
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(EVENTS, st.data())
def test_rate_is_that_of_records_in_any_order(tmp_path_factory, events, data):
    store = StateStore(tmp_path_factory.mktemp("conversions") / "monitor.db")
    sizes = {name: data.draw(st.integers(1, 3)) for name in "ab"}  # c is unknown
    made = [prediction(name, size, time=100.0, version=ord(name)) for name, size in sizes.items()]
    records = [*made, *(clicks(f"o{i}", [event], CONVERSION) for i, event in enumerate(events))]
    add_in_pulls(store, data.draw(st.permutations(records)), data.draw(st.integers(1, 5)))
    in_time = {
        (n, row)
        for n, row, time in events
        if 0 <= row < sizes.get(n, 0) and round(1e6 * time) <= 250_000_000
    }
    rates = {ord(name): sum(n == name for n, _ in in_time) / size for name, size in sizes.items()}
    assert store.conversion_rates(100.0, window_seconds=150.0) == pytest.approx(rates)
    assert store.conversion_rates(99.0, window_seconds=150.0) == {}
    store.close()
