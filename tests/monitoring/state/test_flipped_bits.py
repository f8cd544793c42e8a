"""Tests of a flipped bit in a stored block: it is reported, counted, and never read as another row.

Rows outside of the block are not affected.
"""

import random
import sqlite3

import pytest

from evergreen.runtime.errors import ContractError
from monitoring.rows import MaturedRequests
from monitoring.state.database import CorruptBlock, pack, unpack
from monitoring.state.store import STORE_FILE
from tests.support.errors import raises
from tests.support.monitors import START, WINDOW, clicks, matured, prediction

COLUMNS = {
    "blocks": ("requests", "last"),
    "block_rows": ("content", "last"),
    "matured": ("requests", "last"),
}


def flip(b, table: str, *, seed: int) -> None:
    """Flip one bit in the block of one row, as a disk error would while the monitor is down."""
    b.kill()
    column, key = COLUMNS[table]
    chance = random.Random(seed)
    with sqlite3.connect(b.settings.state / STORE_FILE) as connection:
        rows = connection.execute(
            f"SELECT {key}, {column} FROM {table} WHERE length({column}) > 0 ORDER BY {key}"
        ).fetchall()
        number, content = chance.choice(rows)
        flipped = bytearray(content)
        at = chance.randrange(8 * len(flipped))
        flipped[at // 8] ^= 1 << at % 8
        connection.execute(
            f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (bytes(flipped), number)
        )
    connection.close()


def test_every_flipped_bit_of_block_is_found():
    requests = matured("a request", START, 3, [0, 1], [0.25, 0.5])
    packed = pack(requests)
    assert unpack(MaturedRequests, packed).ids.tolist() == ["a request"]
    for at in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[at // 8] ^= 1 << at % 8
        with raises(CorruptBlock, "block 7", f"{len(packed)} bytes", "does not match"):
            unpack(MaturedRequests, bytes(flipped), 7)
    assert issubclass(CorruptBlock, ContractError)


@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_archived_unchanged_or_are_named(bench, table, seed):
    """Flip one bit while four requests wait for labels and two requests wait for the archive."""
    b = bench(archive_roll_rows=10_000, archive_roll_seconds=1e6)
    b.start()
    sent = {}
    for number in range(6):
        name = f"r{number}"
        sent[name] = prediction(name, 5, time=b.clock.now)
        b.tick(sent[name], clicks(f"o{number}", [(name, 1, b.clock.now + 1)]))
        b.clock.advance(25.0)
    flip(b, table, seed=seed)
    b.start()
    b.tick(sent_late := prediction("late", 5, time=b.clock.now))
    sent["late"] = sent_late
    b.tick(at=b.clock.now + WINDOW)
    b.tick(at=b.clock.now + WINDOW)
    b.monitor.stop()
    found = {name: [row for row in b.archived if row["request_id"] == name] for name in sent}
    for name, rows in found.items():
        if rows:
            assert [row["score"] for row in rows] == sent[name].scores.tolist()
            assert [row["price"] is None for row in rows] == [
                value != value for value in sent[name].dense[:, 0]
            ]
            assert [row["label"] for row in rows] == (
                [0, 1, 0, 0, 0] if name != "late" else [0] * 5
            )
    lost = 5 * sum(not rows for rows in found.values())
    counters = b.store.counters
    assert lost == counters.get("set_apart", 0) + counters.get("given_up", 0)
    assert lost <= 5, "only the rows of one block may be lost"
    assert counters["predicted"] == sum(map(len, found.values())) + lost
    assert b.store.num_pending_rows == 0
    named = [event["text"] for event in b.events if event["kind"] == "set_apart"]
    assert bool(named) == bool(lost)
    assert all("does not match its checksum" in text for text in named)


def test_statistics_of_maturing_block_are_recomputed_from_its_rows(bench):
    b = bench()
    b.start()
    b.tick(prediction("r", 5), clicks("o", [("r", 2, START + 1)]))
    flip(b, "blocks", seed=1)
    b.start()
    b.tick(at=START + 2 * WINDOW)
    b.monitor.stop()
    assert [row["label"] for row in b.archived] == [0, 0, 1, 0, 0]


def test_unreadable_block_is_abandoned_and_others_mature(bench):
    b = bench()
    b.start()
    b.tick(prediction("lost", 5))
    flip(b, "blocks", seed=1)
    flip(b, "block_rows", seed=1)
    b.start()
    b.tick(prediction("kept", 3, time=START + 1), at=START + 1)
    b.tick(at=START + 2 * WINDOW)
    b.monitor.stop()
    assert {row["request_id"] for row in b.archived} == {"kept"}
    assert (b.store.counters["given_up"], b.store.num_pending_rows) == (5, 0)
    (event,) = [each for each in b.events if each["kind"] == "set_apart"]
    assert event["text"].startswith(
        "5 rows lose their labels and cannot be archived: block 1 of the state"
    )
    assert b.monitor._exposition.snapshot.set_apart_rows == 5
