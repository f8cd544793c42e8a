"""One bad message stops nothing: it becomes a dead letter with a reason, and the monitor goes on with the others."""

import struct
from dataclasses import replace

import numpy as np
import pytest

import monitoring.monitor
from components.contracts.criteo import CRITEO_RECOMMENDER
from components.contracts.records import PredictionBatch, Record
from components.runtime.errors import TemporaryError
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish
from tests.support.record_messages import FORM, encode, fields_of

ROWS = 8
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Protobuf's types on the wire."""
SPOILT = {
    "0": (VARINT, b"\x00"),
    "7": (VARINT, b"\x07"),
    "2^32": (VARINT, b"\x80\x80\x80\x80\x10"),
    "-1": (VARINT, b"\xff" * 9 + b"\x01"),
    "0.5": (FIXED64, struct.pack("<d", 0.5)),
    "-0.5": (FIXED64, struct.pack("<d", -0.5)),
    "1e308": (FIXED64, struct.pack("<d", 1e308)),
    "NaN": (FIXED64, struct.pack("<d", float("nan"))),
    "infinity": (FIXED64, struct.pack("<d", float("inf"))),
    "32 bits": (FIXED32, b"\x00" * 4),
    "empty": (BYTES, b"\x00"),
    "text": (BYTES, b"\x04text"),
    "no UTF-8": (BYTES, b"\x02\xff\xfe"),
    "half a surrogate pair": (BYTES, b"\x03\xed\xa0\x80"),
    "bytes of 3 numbers": (BYTES, b"\x0c" + b"\x00" * 12),
}
TAKEN = {
    "request_id": ("text", "bytes of 3 numbers"),
    "batch_id": ("text", "bytes of 3 numbers"),
    "time": ("0.5",),
    "rows": ("text",),
    "model_version": ("0", "7", "2^32"),
    "shadow_version": ("0", "7", "2^32"),
    "canary": ("0", "7", "2^32", "-1"),
    "positions": ("empty",),
    "propensities": ("empty",),
    "recommender": ("empty",),
    "recommender_digest": ("empty", "text", "bytes of 3 numbers"),
    "features": ("empty",),
    "I1": ("empty",),
    "C26": ("empty",),
}
"""What of `SPOILT` is no error: the field's own type, with a value that the rest of the message agrees with."""


def full_prediction(name: str) -> PredictionBatch:
    """A prediction that makes use of every field."""
    return replace(
        prediction(name, ROWS),
        positions=np.arange(1, ROWS + 1, dtype=np.int32),
        propensities=np.full(ROWS, 0.5),
        shadow_version=3,
        shadow_scores=np.full(ROWS, 0.5, np.float32),
        canary=True,
        recommender=CRITEO_RECOMMENDER.name,
        recommender_digest="ab" * 32,
    )


def with_field(message: bytes, path: list[int], kind: int, value: bytes) -> bytes:
    """The message with one more field at the end, which takes the place of an earlier one of its number."""
    content = _varint(path[-1] << 3 | kind) + value
    for number in reversed(path[:-1]):
        content = _varint(number << 3 | BYTES) + _varint(len(content)) + content
    return message + content


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def run_to_the_end(b: Bench) -> None:
    """Everything that a monitor does with a message: stored, matured, archived, read again after a kill, forgotten."""
    monitor = b.start()
    monitor.tick()
    b.start().tick()
    b.tick(at=b.clock.now + 2 * WINDOW)
    b.tick(at=b.clock.now + 30 * 86_400.0)
    b.monitor.stop()


@pytest.mark.parametrize("kind", ["predictions", "outcomes"])
def test_every_field_with_every_type_of_the_wire_passes_the_running_monitor(bench, kind):
    def record(name: str) -> Record:
        return full_prediction(name) if kind == "predictions" else clicks(name, [("good", 1, START + 1)])

    described = fields_of(FORM.proto())
    numbers = {name: number for *_, name, number in described["LogRecord"]}
    paths = {name: [numbers[kind], number] for *_, name, number in described[kind.capitalize()]}
    paths["unknown"] = [numbers[kind], 99]
    if kind == "predictions":
        columns = {name: number for *_, name, number in described["Features"]}
        paths |= {name: [*paths["features"], columns[name]] for name in ("I1", "C26")}
    b = bench(pull_messages=7)
    cases, taken = [], []
    for field, path in paths.items():
        for name, (wire, value) in SPOILT.items():
            case = f"{field} {name}"
            b.log.publish([(case, with_field(encode(record(case)), path, wire, value))])
            cases.append(case)
            if name in TAKEN.get(field, ()):
                taken.append(case)
    publish(b.log, prediction("good", ROWS))
    run_to_the_end(b)
    dead = {letter.message_id: letter.reason for letter in b.log.list_dead_letters()}
    assert sorted(dead) == sorted({*cases} - {*taken})
    assert max(map(len, dead.values())) < 300
    requests = {row["request_id"] for row in b.archived}
    renamed = {"request_id text": "text", "request_id bytes of 3 numbers": "\0" * 12}
    assert requests == ({"good", *(renamed.get(c, c) for c in taken)} if kind == "predictions" else {"good"})
    assert b.log.backlog() == 0


def spoilt(record: Record, **values) -> Record:
    """The record past its own checks."""
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (spoilt(clicks("o", [("good", 1, START)]), rows=np.array([-1], np.int32)), "rows"),
        (spoilt(clicks("o", [("good", 0, START)]), times=np.array([np.nan])), "time"),
        (spoilt(clicks("o", [("good", 0, START)]), times=np.array([np.inf])), "time"),
        (spoilt(clicks("o", [("good", 0, START)]), times=np.array([-1.0])), "time"),
        (spoilt(clicks("o", [("good", 0, START)]), times=np.array([1e300])), "time"),
        (clicks("o", [("good", 0, START + 100_000)]), "a day from now"),
        (spoilt(clicks("o", [("good", 0, START)]), request_ids=("",)), "request_id"),
        (spoilt(prediction("places from 0", ROWS), positions=np.arange(ROWS, dtype=np.int32)), "position 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_no_row_can_carry_are_set_aside(bench, record, said):
    b = bench()
    publish(b.log, record, prediction("good", ROWS))
    run_to_the_end(b)
    (letter,) = b.log.list_dead_letters()
    assert said in letter.reason
    assert {row["request_id"] for row in b.archived} == {"good"}


def refuse_by_the_database(b: Bench, monkeypatch) -> None:
    b.store._connection.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON predictions WHEN NEW.request_id = 'r3'"
        " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
    )


def refuse_by_the_driver(b: Bench, monkeypatch) -> None:
    """A text that SQLite does not take, past every check."""
    read_records = monitoring.monitor.read_records

    def read(payloads, **known):
        records = read_records(payloads, **known)
        if records.predictions is not None:
            ids = records.predictions.ids
            ids[ids == "r3"] = "\ud800"
        return records

    monkeypatch.setattr(monitoring.monitor, "read_records", read)


@pytest.mark.parametrize("refuse", [refuse_by_the_database, refuse_by_the_driver])
def test_message_that_cannot_be_stored_is_set_aside_and_the_others_of_its_pull_are_kept(started, monkeypatch, refuse):
    b = started()
    refuse(b, monkeypatch)
    names = [f"r{number}" for number in range(7)]
    b.tick(*(prediction(name, ROWS) for name in names), clicks("o", [("r2", 1, START + 1)]))
    (letter,) = b.log.list_dead_letters()
    assert letter.message_id == "r3"
    assert "cannot be stored" in letter.reason
    assert b.log.backlog() == 0
    b.tick(at=b.clock.now + 2 * WINDOW)
    b.monitor.stop()
    assert {row["request_id"] for row in b.archived} == {*names} - {"r3"}
    assert sum(row["label"] for row in b.archived) == 1
    assert b.store.counters["predicted"] == 6 * ROWS
    assert b.store.counters["dead_letter"] == 1


def test_a_pull_is_taken_in_by_parts_of_so_many_bytes(started, monkeypatch):
    b, taken = started(), []
    take_in = b.monitor._take_in
    monkeypatch.setattr(b.monitor, "_take_in", lambda part, now: taken.append(len(part)) or take_in(part, now))
    monkeypatch.setattr(monitoring.monitor, "TAKEN_BYTES", 2000)
    b.tick(*(prediction(f"r{number}", rows) for number, rows in enumerate((1, 1, 1, 1, 30, 1))))
    assert taken == [4, 1, 1]
    assert b.store.counters["predicted"] == 35


def test_full_disk_sets_nothing_aside(started, monkeypatch):
    b = started()
    b.store._connection.execute("PRAGMA max_page_count = 1")
    publish(b.log, *(prediction(f"r{number}", 500) for number in range(5)))
    with pytest.raises(TemporaryError, match="state .*: database or disk is full"):
        b.monitor.tick()
    assert b.log.list_dead_letters() == []
    b.store._connection.execute("PRAGMA max_page_count = 1000000")
    b.tick(at=b.clock.now + 10.0)
    assert b.store.counters["predicted"] == 2500


@pytest.mark.parametrize("step", ["acknowledge", "dead_letter"])
def test_what_was_stored_is_known_although_the_log_failed_before_the_turn_was_over(bench, monkeypatch, step):
    b = bench()
    monitor, done = b.start(), getattr(b.log, step)

    def lose_the_answer(*arguments):
        monkeypatch.setattr(b.log, step, done)
        done(*arguments)
        raise TemporaryError("cut off")

    monkeypatch.setattr(b.log, step, lose_the_answer)
    publish(b.log, prediction("a", version=7))
    b.log.publish([("poison", b"no record")])
    with pytest.raises(TemporaryError, match="cut off"):
        monitor.tick()
    monitor.tick()
    assert b.store.counters["predicted"] == 8
    assert [event["version"] for event in b.events if event["kind"] == "version_seen"] == [7]
    assert monitor.serving_version == 7
