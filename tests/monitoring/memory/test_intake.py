"""One bad message stops nothing: it becomes a dead letter with a reason, and the monitor goes on with the others."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

import monitoring.monitor
from components.contracts.criteo import CRITEO_RECOMMENDER
from components.contracts.records import PredictionBatch, Record, encode
from components.runtime.errors import TemporaryError
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish

ROWS = 8
SPOILT = {
    "null": None,
    "true": True,
    "false": False,
    "-1": -1,
    "2^31": 2**31,
    "2^64": 2**64,
    "2^70": 1180591620717411303424,
    "10^400": 10**400,
    "1e308": 1e308,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    "0.5": 0.5,
    "empty": "",
    "half a surrogate pair": "\ud800",
    "list": [],
    "list of numbers": [7],
    "list of lists": [["a"]],
    "object": {"a": 1},
}
TAKEN = {
    "time": ("0.5",),
    "canary": ("true", "false"),
    "has_positions": ("true",),
    "has_propensities": ("true",),
    "recommender": ("null",),
    "recommender_digest": ("null",),
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


def header_of(message: bytes) -> tuple[dict, int]:
    """The header, and where the arrays begin."""
    *_, length = struct.unpack_from("<4sBBI", message)
    return json.loads(message[10 : 10 + length]), 10 + length


def forged(record: Record, **changes) -> bytes:
    """The message of `record` with another header and a checksum that fits."""
    message = encode(record)
    header, start = header_of(message)
    text = json.dumps({**header, **changes}).encode()
    whole = message[:6] + struct.pack("<I", len(text)) + text + message[start:-4]
    return whole + struct.pack("<I", zlib.crc32(whole))


def run_to_the_end(b: Bench) -> None:
    """Everything that a monitor does with a message: stored, matured, archived, read again after a kill, forgotten."""
    monitor = b.start()
    monitor.tick()
    b.start().tick()
    b.clock.now += 2 * WINDOW
    b.monitor.tick()
    b.clock.now += 30 * 86_400.0
    b.monitor.tick()
    b.monitor.stop()


@pytest.mark.parametrize("kind", ["prediction", "outcome"])
def test_every_field_of_every_json_type_and_size_passes_the_running_monitor(bench, kind):
    def record(name: str) -> Record:
        return full_prediction(name) if kind == "prediction" else clicks(name, [("good", 1, START + 1)])

    b = bench(pull_messages=7)
    header, _ = header_of(encode(record("any")))
    taken = []
    for field in (*header, "unknown"):
        for name, value in SPOILT.items():
            case = f"{field} {name}"
            b.log.publish([(case, forged(record(case), **{field: value}))])
            if field == "unknown" or name in TAKEN.get(field, ()):
                taken.append(case)
    publish(b.log, prediction("good", ROWS))
    run_to_the_end(b)
    dead = {letter.message_id: letter.reason for letter in b.log.list_dead_letters()}
    assert sorted(dead) == sorted({f"{f} {n}" for f in (*header, "unknown") for n in SPOILT} - {*taken})
    assert max(map(len, dead.values())) < 300
    requests = {row["request_id"] for row in b.archived}
    assert requests == ({"good", *taken} if kind == "prediction" else {"good"})
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
        (replace(prediction("wide"), dense=np.zeros((8, 14), np.float32)), "14 numeric"),
        (replace(prediction("narrow"), categorical=np.zeros((8, 25), np.int64)), "25 categorical"),
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
    """A number that SQLite does not take, past every check."""
    read_record = monitoring.monitor.read_record

    def read(payload, **known):
        record = read_record(payload, **known)
        if getattr(record, "request_id", "") == "r3":
            object.__setattr__(record, "model_version", 2**70)
        return record

    monkeypatch.setattr(monitoring.monitor, "read_record", read)


@pytest.mark.parametrize("refuse", [refuse_by_the_database, refuse_by_the_driver])
def test_message_that_cannot_be_stored_is_set_aside_and_the_others_of_its_pull_are_kept(bench, monkeypatch, refuse):
    b = bench()
    b.start()
    refuse(b, monkeypatch)
    names = [f"r{number}" for number in range(7)]
    publish(b.log, *(prediction(name, ROWS) for name in names), clicks("o", [("r2", 1, START + 1)]))
    b.monitor.tick()
    (letter,) = b.log.list_dead_letters()
    assert letter.message_id == "r3"
    assert "cannot be stored" in letter.reason
    assert b.log.backlog() == 0
    b.clock.now += 2 * WINDOW
    b.monitor.tick()
    b.monitor.stop()
    assert {row["request_id"] for row in b.archived} == {*names} - {"r3"}
    assert sum(row["label"] for row in b.archived) == 1
    assert b.store.counters["predicted"] == 6 * ROWS
    assert b.store.counters["dead_letter"] == 1


def test_full_disk_sets_nothing_aside(bench, monkeypatch):
    b = bench()
    monitor = b.start()
    b.store._connection.execute("PRAGMA max_page_count = 1")
    publish(b.log, *(prediction(f"r{number}", 500) for number in range(5)))
    with pytest.raises(TemporaryError, match="state .*: database or disk is full"):
        monitor.tick()
    assert b.log.list_dead_letters() == []
    b.store._connection.execute("PRAGMA max_page_count = 1000000")
    b.clock.now += 10.0
    monitor.tick()
    assert b.store.counters["predicted"] == 2500
