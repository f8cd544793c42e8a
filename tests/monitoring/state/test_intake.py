"""Tests of bad messages: each becomes a dead letter with a reason, and the monitor continues."""

import struct
from dataclasses import replace

import numpy as np
import pytest

import monitoring.monitor
import monitoring.state.store as store_module
from evergreen.config.features import Features
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import MAX_ROWS_PER_RECORD, PredictionBatch, Record
from evergreen.runtime.errors import TemporaryError
from monitoring.state import join
from monitoring.state.admission import MAX_OTHERS
from monitoring.state.store import StateStore
from testing.recommenders import SHOP
from testing.releases import make_live, release
from tests.support.errors import raises
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish
from tests.support.record_messages import FORM, encode, fields_of

ROWS = 8
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Protobuf's wire types."""
FIELD_VALUES = {
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
VALID_CASES = {
    "request_id": ("text", "bytes of 3 numbers"),
    "batch_id": ("text", "bytes of 3 numbers"),
    "rows": ("text",),
    "model_version": ("0", "7", "2^32"),
    "shadow_version": ("0", "7", "2^32"),
    "canary": ("0", "7", "2^32", "-1"),
    "positions": ("empty",),
    "propensities": ("empty",),
    "recommender": ("empty",),
    "recommender_digest": ("empty", "text", "bytes of 3 numbers"),
    "features": ("empty",),
    "price": ("empty",),
    "user": ("empty",),
    "genres": ("empty",),
}
"""Valid values by field. A valid value has the type of its field, and agrees with the rest of the
message."""


def full_prediction(name: str) -> PredictionBatch:
    """Return a prediction that uses every field."""
    return replace(
        prediction(name, ROWS),
        positions=np.arange(1, ROWS + 1, dtype=np.int32),
        propensities=np.full(ROWS, 0.5),
        shadow_version=3,
        shadow_scores=np.full(ROWS, 0.5, np.float32),
        canary=True,
        recommender=SHOP.name,
        recommender_digest="ab" * 32,
    )


def with_field(message: bytes, path: list[int], kind: int, value: bytes) -> bytes:
    """Append a field to the message. For a repeated field number, readers use the last value."""
    content = _varint(path[-1] << 3 | kind) + value
    for number in reversed(path[:-1]):
        content = _varint(number << 3 | BYTES) + _varint(len(content)) + content
    return message + content


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def run_to_the_end(b: Bench) -> None:
    """Run a monitor from storing a message to deleting it, with a kill in between."""
    monitor = b.start()
    monitor.tick()
    b.start().tick()
    b.tick(at=b.clock.now + 2 * WINDOW)
    b.tick(at=b.clock.now + 30 * 86_400.0)
    b.monitor.stop()


@pytest.mark.parametrize("kind", ["predictions", "outcomes"])
def test_every_field_with_every_type_of_wire_passes_running_monitor(bench, kind):
    def record(name: str) -> Record:
        return (
            full_prediction(name)
            if kind == "predictions"
            else clicks(name, [("good", 1, START + 1)])
        )

    described = fields_of(FORM.proto())
    numbers = {name: number for *_, name, number in described["LogRecord"]}
    paths = {name: [numbers[kind], number] for *_, name, number in described[kind.capitalize()]}
    paths["unknown"] = [numbers[kind], 99]
    if kind == "predictions":
        columns = {name: number for *_, name, number in described["Features"]}
        paths |= {name: [*paths["features"], columns[name]] for name in ("price", "user", "genres")}
    b = bench(pull_messages=7)
    cases, accepted = [], []
    for field, path in paths.items():
        for name, (wire, value) in FIELD_VALUES.items():
            case = f"{field} {name}"
            b.log.publish([(case, with_field(encode(record(case)), path, wire, value))])
            cases.append(case)
            if name in VALID_CASES.get(field, ()):
                accepted.append(case)
    publish(b.log, prediction("good", ROWS))
    run_to_the_end(b)
    dead = {letter.message_id: letter.reason for letter in b.log.list_dead_letters()}
    assert sorted(dead) == sorted({*cases} - {*accepted})
    assert max(map(len, dead.values())) < 300
    requests = {row["request_id"] for row in b.archived}
    renamed = {"request_id text": "text", "request_id bytes of 3 numbers": "\0" * 12}
    assert requests == (
        {"good", *(renamed.get(c, c) for c in accepted)} if kind == "predictions" else {"good"}
    )
    assert b.log.backlog() == 0


def with_values(record: Record, **values) -> Record:
    """Set values without the record's own checks, and return the record."""
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (with_values(clicks("o", [("good", 1, START)]), rows=np.array([-1], np.int32)), "rows"),
        (with_values(clicks("o", [("good", 0, START)]), times=np.array([np.nan])), "time"),
        (with_values(clicks("o", [("good", 0, START)]), times=np.array([np.inf])), "time"),
        (with_values(clicks("o", [("good", 0, START)]), times=np.array([-1.0])), "time"),
        (with_values(clicks("o", [("good", 0, START)]), times=np.array([1e300])), "time"),
        (clicks("o", [("good", 0, START + 100_000)]), "a day from now"),
        (with_values(clicks("o", [("good", 0, START)]), request_ids=("",)), "request_id"),
        (
            with_values(
                prediction("places from 0", ROWS), positions=np.arange(ROWS, dtype=np.int32)
            ),
            "position 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_record_with_impossible_arrays_becomes_dead_letter(bench, record, message):
    b = bench()
    publish(b.log, record, prediction("good", ROWS))
    run_to_the_end(b)
    (letter,) = b.log.list_dead_letters()
    assert message in letter.reason
    assert {row["request_id"] for row in b.archived} == {"good"}


def refuse_by_the_database(b: Bench, monkeypatch) -> None:
    b.store._connection.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON predictions WHEN NEW.request_id = 'r3'"
        " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
    )


def refuse_by_the_driver(b: Bench, monkeypatch) -> None:
    """Store a text that passes all checks of the monitor, but that SQLite rejects."""
    read_records = monitoring.monitor.read_records

    def read(payloads, rules, **known):
        records = read_records(payloads, rules, **known)
        if records.predictions is not None:
            ids = records.predictions.ids
            ids[ids == "r3"] = "\ud800"
        return records

    monkeypatch.setattr(monitoring.monitor, "read_records", read)


@pytest.mark.parametrize("refuse", [refuse_by_the_database, refuse_by_the_driver])
def test_message_that_cannot_be_stored_is_dead_lettered_and_others_stay(
    started, monkeypatch, refuse
):
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


def test_rows_that_lack_columns_are_decoded_by_parts_of_so_many_bytes(started, monkeypatch):
    b, added, add = started(), [], StateStore.add

    def count(store, predictions, *arguments, **known):
        added.append(predictions.num_rows)
        return add(store, predictions, *arguments, **known)

    monkeypatch.setattr(StateStore, "add", count)
    monkeypatch.setattr(join, "_DECODED_BYTES", 10 * FORM.row_bytes)
    b.tick(prediction("first", 1))
    narrow = RecordFormat(Features(numeric=("price",), categorical=()))
    for number, rows in enumerate((4, 4, 4, 30, 1)):
        whole = prediction(f"r{number}", rows)
        publish(
            b.log,
            replace(whole, dense=whole.dense[:, :1], categorical=whole.categorical[:, :0]),
            form=narrow,
        )
    b.tick(prediction("whole", 50))  # the record lacks a column that the monitor would fill in
    assert added == [1, 50 + 12, 30, 1]
    assert b.log.backlog() == 0
    assert b.store.counters["predicted"] == 94


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (with_values(prediction("long", 400), request_id="a" * 850_000), "850000 characters"),
        (with_values(prediction("long", ROWS), request_id="é" * 129), "129 characters"),
        (prediction("many", MAX_ROWS_PER_RECORD + 1), "2049 rows, expected at most 2048"),
        (
            with_values(prediction("named", ROWS), recommender_digest="d" * 500_000),
            "recommender_digest",
        ),
        (with_values(clicks("o", [("good", 1, START)]), batch_id="b" * 400_000), "batch_id"),
        (
            with_values(clicks("o", [("good", 1, START)] * 2), request_ids=("good", "r" * 900_000)),
            "request_id",
        ),
        (
            with_values(prediction("hot", ROWS), dense=np.full((ROWS, 2), np.inf, np.float32)),
            "a finite number",
        ),
        (
            prediction("of 41 days ago", time=START - 41 * 86_400.0),
            "41.0 days ago, expected at most 40 days",
        ),
        (clicks("o", [("good", 1, START - 41 * 86_400.0), ("good", 2, START)]), "41.0 days ago"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_record_beyond_bound_becomes_dead_letter_and_others_are_counted(bench, record, message):
    b = bench()
    publish(b.log, record, prediction("good", ROWS))
    run_to_the_end(b)
    (letter,) = b.log.list_dead_letters()
    assert message in letter.reason
    assert letter.payload == encode(record)
    assert len(letter.reason) <= 400
    assert {row["request_id"] for row in b.archived} == {"good"}
    assert b.store.counters["dead_letter"] == 1


def test_longest_id_and_maximum_number_of_rows_are_accepted(bench):
    b = bench()
    longest = "é" * 128
    publish(b.log, prediction(longest, MAX_ROWS_PER_RECORD))
    run_to_the_end(b)
    assert b.log.list_dead_letters() == []
    assert [row["request_id"] for row in b.archived] == [longest] * MAX_ROWS_PER_RECORD


def test_unknown_versions_are_bounded_and_released_one_is_always_accepted(bench):
    b = bench()
    b.start()
    forged = [
        prediction(f"forged {number}", 1, version=1000 + number) for number in range(3 * MAX_OTHERS)
    ]
    b.tick(*forged)
    dead = {letter.message_id for letter in b.log.list_dead_letters()}
    assert dead == {f"forged {number}" for number in range(MAX_OTHERS, 3 * MAX_OTHERS)}
    assert "unknown to the model registry" in b.log.list_dead_letters()[0].reason
    make_live(b.settings.store, release(b.settings.store, 7))
    b.tick(prediction("released", 1, version=7, time=START + 1), at=START + 1)
    assert b.monitor.serving_version == 7
    # The limit on unknown versions also applies after a restart. A version without predictions for
    # a day is not included in the limit.
    b.start().tick()
    b.tick(prediction("one more", 1, version=5), at=START + 2)
    assert len(b.log.list_dead_letters()) == 2 * MAX_OTHERS + 1
    b.tick(prediction("kept", 1, version=1000, time=START + 86_000.0), at=START + 86_000.0)
    b.tick(prediction("another", 1, version=5, time=START + 87_000.0), at=START + 87_000.0)
    b.tick(prediction("the first again", 1, version=1000, time=START + 87_000.0))
    assert len(b.log.list_dead_letters()) == 2 * MAX_OTHERS + 1


def test_ids_of_dead_letters_are_few_short_and_forgotten_in_time(started, monkeypatch):
    monkeypatch.setattr(store_module, "_MAX_DEAD_LETTERS", 20)
    b = started(keep_ids_seconds=1000.0)

    def stored_ids() -> list[str]:
        return [
            name for (name,) in b.store._connection.execute("SELECT message_id FROM dead_letters")
        ]

    b.log.publish([(f"{number} " + "x" * 5000, b"poison") for number in range(50)])
    b.tick()
    assert b.store.counters["dead_letter"] == 50
    assert max(map(len, stored_ids())) <= 128
    b.tick(at=START + 700.0)
    assert len(stored_ids()) == 20
    b.tick(at=START + 2000.0)
    assert stored_ids() == []


def test_full_disk_makes_no_dead_letters(started, monkeypatch):
    b = started()
    b.store._connection.execute("PRAGMA max_page_count = 1")
    publish(b.log, *(prediction(f"r{number}", 500) for number in range(5)))
    with raises(TemporaryError, "state", "full"):
        b.monitor.tick()
    assert b.log.list_dead_letters() == []
    b.store._connection.execute("PRAGMA max_page_count = 1000000")
    b.tick(at=b.clock.now + 10.0)
    assert b.store.counters["predicted"] == 2500


@pytest.mark.parametrize("step", ["acknowledge", "dead_letter"])
def test_stored_messages_are_known_although_log_failed_during_turn(bench, monkeypatch, step):
    b = bench()
    monitor, done = b.start(), getattr(b.log, step)

    def lose_response(*arguments):
        monkeypatch.setattr(b.log, step, done)
        done(*arguments)
        raise TemporaryError("cut off")

    monkeypatch.setattr(b.log, step, lose_response)
    publish(b.log, prediction("a", version=7))
    b.log.publish([("poison", b"no record")])
    with raises(TemporaryError, "cut off"):
        monitor.tick()
    monitor.tick()
    assert b.store.counters["predicted"] == 8
    assert [event["version"] for event in b.events if event["kind"] == "version_seen"] == [7]
    assert monitor.serving_version == 7
