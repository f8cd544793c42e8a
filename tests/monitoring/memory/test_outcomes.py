"""Late outcomes: none is only counted; each lies in one outcome file, whatever crashes."""

import pyarrow.parquet as pq
import pytest

from components.contracts import raw_rows
from components.contracts.records import CLICK, CONVERSION
from monitoring.memory.archive import OUTCOME_SCHEMA as SCHEMA
from monitoring.monitor import FORGET_SECONDS, ORPHAN_SECONDS
from tests.support.archives import archived_rows, expected_rows, outcome_files, outcomes
from tests.support.crashes import Killed, crash_at
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish

MIDNIGHT = 1_763_078_400.0  # 2025-11-14


def test_clicks_after_their_window_are_archived_wherever_they_are_found_late(bench):
    b = bench()
    monitor = b.start()
    publish(
        b.log,
        prediction("a", 3),
        clicks("early in the log, late by its time", [("a", 0, START + WINDOW + 1)]),
        clicks("on no row", [("a", 7, START + 1)]),
        clicks("in time", [("a", 2, START + 1)]),
    )
    b.clock.now = START + WINDOW + 2
    monitor.tick()
    publish(b.log, clicks("in time, late in the log", [("a", 1, START + 3)]))
    monitor.tick()
    monitor.stop()
    assert outcomes(b) == [("a", 0, CLICK), ("a", 1, CLICK), ("a", 7, CLICK)]
    assert archived_rows(b.archived) == expected_rows([prediction("a", 3)], {("a", 2)})
    assert b.store.counters["late_outcome"] == 2
    assert b.store.counters["unmatched_outcome"] == 1
    assert b.store.counters["archived_outcome"] == 3
    assert b.store.num_unarchived_rows == 0


def test_an_outcome_file_has_the_contracts_schema_and_values(bench):
    b = bench()
    monitor = b.start()
    publish(b.log, prediction("a", 2, time=START + 0.25))
    b.clock.now = START + WINDOW + 2
    monitor.tick()
    publish(b.log, clicks("late", [("a", 1, START + 3.5)]))
    b.clock.now += 1.125
    monitor.tick()
    monitor.stop()
    (path,) = b.settings.archive.glob("outcomes/day=2025-11-13/part-*.parquet")
    table = pq.ParquetFile(path).read()
    assert table.schema.equals(SCHEMA)
    told = [(field.name, str(field.type).replace("double", "float64")) for field in table.schema]
    assert told == list(raw_rows.OUTCOME_TYPES.items())
    (row,) = table.to_pylist()
    assert (row["request_id"], row["row"], row["event"]) == ("a", 1, CLICK)
    assert row["outcome_time"].timestamp() == START + 3.5
    assert row["stored_at"].timestamp() == START + WINDOW + 3.125
    assert row["window_seconds"] == WINDOW


def test_each_kind_of_outcome_names_its_own_window(bench):
    b = bench(conversion_window_seconds=500.0)
    monitor = b.start()
    publish(b.log, prediction("a", 2))
    b.clock.now = START + WINDOW
    monitor.tick()
    publish(b.log, clicks("c", [("a", 1, START + 3)]), clicks("v", [("a", 0, START + 4)], event=CONVERSION))
    monitor.tick()
    monitor.stop()
    (path,) = b.settings.archive.glob("outcomes/day=2025-11-13/part-*.parquet")
    windows = {row["event"]: row["window_seconds"] for row in pq.ParquetFile(path).read().to_pylist()}
    assert windows == {CLICK: WINDOW, CONVERSION: 500.0}


@pytest.mark.parametrize("archived_between", [False, True])
def test_a_click_in_time_is_kept_though_one_after_the_window_was_stored_before_it(bench, archived_between):
    """Of a row's late clicks the earliest is what says whether it was clicked within the window."""
    b = bench()
    monitor = b.start()
    publish(b.log, prediction("a", 2))
    b.clock.now = START + 5 * WINDOW
    monitor.tick()
    for name, time in (("after", START + 4 * WINDOW), ("in time", START + 3), ("again", START + 9)):
        publish(b.log, clicks(name, [("a", 1, time)]))
        monitor.tick()
        if archived_between:
            monitor.stop()
    monitor.stop()
    times = [
        row["outcome_time"].timestamp()
        for path in b.settings.archive.glob("outcomes/day=*/part-*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    assert min(times) == START + 3
    assert len(times) == (2 if archived_between else 1)
    assert b.store.counters["archived_outcome"] == len(times)


def test_the_day_is_the_predictions_and_where_it_is_unknown_the_outcomes(bench):
    b = bench()
    monitor = b.start()
    publish(b.log, prediction("before", 1, time=MIDNIGHT - 1), clicks("orphan", [("unknown", 4, MIDNIGHT + 1)]))
    b.clock.now = MIDNIGHT + WINDOW
    monitor.tick()
    publish(b.log, clicks("late", [("before", 0, MIDNIGHT + 2)]))
    monitor.tick()
    monitor.stop()
    assert outcome_files(b) == {"day=2025-11-13": [("before", 0, CLICK)]}
    b.clock.now += WINDOW + ORPHAN_SECONDS + FORGET_SECONDS + 1
    monitor.tick()
    monitor.stop()
    assert outcome_files(b)["day=2025-11-14"] == [("unknown", 4, CLICK)]
    assert b.store.counters["unmatched_outcome"] == 1


def test_conversions_that_nobody_awaits_are_all_archived_and_in_no_number(bench):
    b = bench()
    monitor = b.start()
    publish(b.log, prediction("a", 2), clicks("o", [("a", 0, START + 1), ("x", 3, START + 1)], event=CONVERSION))
    b.clock.now = START + WINDOW
    monitor.tick()
    monitor.stop()
    assert outcomes(b) == [("a", 0, CONVERSION), ("x", 3, CONVERSION)]
    assert archived_rows(b.archived) == expected_rows([prediction("a", 2)])
    assert b.store.counters["conversion"] == 2
    assert b.store.counters.get("late_conversion", 0) == 0


def stream(b: Bench) -> set[tuple[str, int, str]]:
    """Predictions, then their clicks, half of them late, a conversion and an unknown request; what must be archived."""
    publish(b.log, *[prediction(f"r{i}", 3, time=START + i) for i in range(12)])
    publish(b.log, clicks("in time", [(f"r{i}", i % 3, START + i + 1) for i in range(0, 12, 2)]))
    b.clock.now = START + 12 + WINDOW
    b.monitor.tick()
    publish(b.log, clicks("late", [(f"r{i}", i % 3, START + i + 1) for i in range(1, 12, 2)]))
    publish(b.log, clicks("conversion", [("r5", 2, START + 9)], event=CONVERSION))
    b.monitor.tick()
    b.monitor.stop()
    return {(f"r{i}", i % 3, CLICK) for i in range(1, 12, 2)} | {("r5", 2, CONVERSION)}


def test_outcomes_in_uploaded_files_are_not_written_again_and_are_forgotten_in_time(bench):
    from monitoring.memory.archive import marker_path

    b = bench(keep_ids_seconds=0.0)
    b.start()
    b.checkpoint = crash_at("outcomes.renamed")
    with pytest.raises(Killed):
        stream(b)
    (path,) = b.settings.archive.glob("outcomes/day=*/part-*.parquet")
    marker = marker_path(b.settings.archive, path.name)  # the uploader has it, and says so
    marker.parent.mkdir()
    marker.write_text("{}")
    path.unlink()
    b.checkpoint = lambda name: None
    b.start()
    b.clock.now += FORGET_SECONDS + 1
    b.monitor.tick()
    assert outcomes(b) == []
    assert b.store._connection.execute("SELECT count(*) FROM late_outcomes").fetchone() == (0,)
    assert b.store.files("uploaded") == [path.relative_to(b.settings.archive).as_posix()]
