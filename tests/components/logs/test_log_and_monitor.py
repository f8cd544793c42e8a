"""A whole small monitor on every log: each published row is archived once; unreadable messages become dead letters."""

import random
import time

from components.contracts import raw_rows
from components.contracts.criteo import CRITEO_RECOMMENDER
from components.contracts.records import record_id
from monitoring.memory.store import Store
from monitoring.monitor import Monitor
from tests.support.monitors import clicks, monitor_settings, prediction, read_rows
from tests.support.processes import wait_for
from tests.support.record_messages import encode

REQUESTS, ROWS = 40, 4


def of_the_future(message: bytes) -> bytes:
    """The same message with a field that nobody knows yet: number 107, a varint."""
    return message + b"\xd8\x06\x01"


def test_monitor_archives_every_published_row_once_and_dead_letters_the_unreadable(bench, tmp_path):
    began = time.time()
    batches = [prediction(f"r{i}", ROWS, time=began + 0.001 * i) for i in range(REQUESTS)]
    clicked = {(batch.request_id, i % ROWS) for i, batch in enumerate(batches)}
    outcomes = [clicks(f"o-{b.request_id}", [(b.request_id, i % ROWS, b.time + 0.05)]) for i, b in enumerate(batches)]
    messages = [(record_id(record), encode(record)) for record in (*batches, *outcomes)]
    unreadable = {"future": of_the_future(encode(prediction("future", ROWS))), "garbage": b"\x00 no record"}
    messages += [*messages[::7], *unreadable.items()]  # some twice
    random.Random(1).shuffle(messages)
    settings = monitor_settings(tmp_path, attribution_window_seconds=2.0, archive_roll_rows=50)
    subscriber, store, publisher = bench.subscriber(), Store(settings.state / "monitor.db"), bench.publisher()
    monitor = Monitor(settings, subscriber=subscriber, store=store, trigger=None, recommender=CRITEO_RECOMMENDER)
    for start in range(0, len(messages), 10):
        publisher.publish(messages[start : start + 10])
        monitor.tick()

    def counted(name: str, number: int) -> bool:
        monitor.tick()
        return store.counters.get(name, 0) >= number

    wait_for(lambda: counted("predicted", REQUESTS * ROWS), "all predictions")
    wait_for(lambda: counted("dead_letter", 2), "what is unreadable")
    bench.forget_predecessors()
    wait_for(lambda: counted("matured", REQUESTS * ROWS), "the end of the windows")
    monitor.stop()
    store.close()
    rows = read_rows(settings.archive)
    assert len(rows) == REQUESTS * ROWS
    assert sum(row[raw_rows.LABEL] for row in rows) == len(clicked)
    published = sorted(time for batch in batches for time in [round(batch.time * 1e6)] * ROWS)
    assert sorted(round(row[raw_rows.EVENT_TIME].timestamp() * 1e6) for row in rows) == published
    assert {kept.message_id: kept.payload for kept in subscriber.list_dead_letters()} == unreadable
    reasons = {kept.message_id: kept.reason for kept in subscriber.list_dead_letters()}
    assert "fields [107]" in reasons["future"]
