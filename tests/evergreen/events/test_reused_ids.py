"""Tests of five requests with one id: the first is accepted, and the others are dead-lettered."""

from monitoring.monitor import Monitor
from monitoring.state.store import StateStore
from testing.processes import wait_for
from testing.recommenders import SHOP
from tests.support.clocks import Clock
from tests.support.monitors import (
    START,
    clicks,
    monitor_settings,
    prediction,
    publish,
    read_events,
    read_rows,
)

PAGES = [prediction("session 7", 10, time=START + page, seed=page) for page in range(5)]


def test_monitor_counts_and_keeps_requests_that_it_cannot_join(
    tmp_path, bench, publisher, subscriber
):
    settings, clock = monitor_settings(tmp_path), Clock(START + 10)
    store = StateStore(settings.state / "monitor.db")
    monitor = Monitor(
        settings,
        subscriber=subscriber,
        store=store,
        trigger=None,
        recommender=SHOP,
        clock=clock,
    )

    def tick_until(counter: str, number: float) -> None:
        def arrived() -> bool:
            monitor.tick()
            return store.counters.get(counter, 0) >= number

        wait_for(arrived, f"{number} of {counter}")

    publish(publisher, clicks("o", [("session 7", 2, START + 5)]))
    tick_until("outcome", 1)  # The click arrives before its prediction.
    publish(publisher, *PAGES[:3])
    tick_until("predicted", 10)
    publish(publisher, *PAGES[3:], PAGES[0], prediction("other", 1))
    tick_until("predicted", 11)
    tick_until("reused_id", 4)
    assert [store.counters[name] for name in ("predicted", "reused_id", "dead_letter")] == [
        11,
        4,
        4,
    ]
    letters = subscriber.list_dead_letters()
    assert len({letter.payload for letter in letters}) == len(letters) == 4
    for letter in letters:
        assert (
            "request id 'session 7' names another request with other content, expected a new id "
            "for each" in letter.reason
        )
    texts = [
        event["text"] for event in read_events(settings.state) if event["kind"] == "dead_letter"
    ]
    assert "clicks under it count for the first" in texts[0]
    subscriber.replay_dead_letters()  # replayed messages with a reused id become dead letters again
    wait_for(
        lambda: monitor.tick() or len(subscriber.list_dead_letters()) == 4, "the dead letters again"
    )
    assert [store.counters[name] for name in ("predicted", "reused_id", "dead_letter")] == [
        11,
        4,
        4,
    ]
    clock.advance(1000)
    tick_until("matured", 11)
    monitor.stop()
    store.close()
    rows = [row for row in read_rows(settings.archive) if row["request_id"] == "session 7"]
    assert [(row["row"], row["label"]) for row in rows] == [
        (row, int(row == 2)) for row in range(10)
    ]
    scores = PAGES[0].scores.tolist() if bench.deduplicates else None
    assert scores in (None, [row["score"] for row in rows])
