"""Tests of requests that the log delivers again: the monitor ignores them.

A new request with the id of an earlier request becomes a dead letter. No click on a redelivered
request is lost.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.monitors import START, WINDOW, clicks, prediction, publish

ROWS = 4
FIRST = replace(
    prediction("r", ROWS),
    positions=np.arange(1, ROWS + 1, dtype=np.int32),
    propensities=np.full(ROWS, 0.5),
    shadow_version=3,
    shadow_scores=np.full(ROWS, 0.25, np.float32),
)


def changed(array, value):
    copy = array.copy()
    copy.flat[-1] = value
    return copy


OTHERS = {
    "time": {"time": FIRST.time + 1e-6},
    "version": {"model_version": 2},
    "canary": {"canary": True},
    "rows": vars(prediction("r", ROWS + 1)),
    "dense": {"dense": changed(FIRST.dense, 1e6)},
    "categorical": {"categorical": changed(FIRST.categorical, 7)},
    "scores": {"scores": changed(FIRST.scores, 0.125)},
    "positions": {"positions": changed(FIRST.positions, 9)},
    "no positions": {"positions": None},
    "propensities": {"propensities": changed(FIRST.propensities, 0.75)},
    "shadow version": {"shadow_version": 4},
    "shadow scores": {"shadow_scores": changed(FIRST.shadow_scores, 0.75)},
}


def counts(b):
    return tuple(
        int(b.store.counters.get(name, 0))
        for name in ("predicted", "duplicate", "reused_id", "dead_letter")
    )


def other_of(name):
    change = OTHERS[name]
    return prediction("r", ROWS + 1) if name == "rows" else replace(FIRST, **change)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("when", ["in one pull", "in the next pull", "after a restart"])
def test_request_that_differs_in_one_value_is_another_one(started, name, when):
    b = started()
    if when == "in one pull":
        b.tick(FIRST, other_of(name))
    else:
        b.tick(FIRST)
        if when == "after a restart":
            b.start()
        b.tick(other_of(name))
    assert counts(b)[1:] == (0, 1, 1)
    (letter,) = b.log.list_dead_letters()
    assert letter.reason.startswith("request id 'r' names another request with other content")
    assert b.log.backlog() == 0
    b.tick(at=START + 2 * WINDOW)
    b.monitor.stop()
    assert len({row["row"] for row in b.archived}) == len(b.archived) > 0


@pytest.mark.parametrize("restart", [False, True])
def test_equal_request_is_duplicate_before_and_after_it_is_archived(started, restart):
    b = started(archive_roll_rows=1)
    b.tick(FIRST, prediction("s", 2), prediction("t", 3, version=2))
    for _ in range(2):
        redeliver(b, FIRST, prediction("t", 3, version=2))
    assert counts(b) == (9, 4, 0, 0)
    b.tick(at=START + 2 * WINDOW)
    if restart:
        b.start()
    redeliver(b, FIRST)
    assert counts(b) == (9, 5, 0, 0)
    # A new request has the id of the archived request.
    redeliver(b, replace(FIRST, time=START + 1))
    assert counts(b) == (9, 5, 1, 1)


def redeliver(b, *records):
    """Deliver the records to the monitor again, as an at-least-once log may."""
    b.log._connection.execute("DELETE FROM messages WHERE state = 'acknowledged'")
    b.tick(*records)


def test_changed_requests_in_many_blocks_are_distinguished(started):
    b = started(pull_messages=3)
    made = [prediction(f"r{i}", 1 + i % 3, time=START - i) for i in range(20)]
    b.tick(*made)
    others = [replace(each, scores=changed(each.scores, 0.5)) for each in made[::4]]
    redeliver(b, *reversed(made), *others)
    assert counts(b) == (sum(map(len, made)), 20, 5, 5)


def test_outcomes_of_publisher_that_reuses_message_ids_all_count(started):
    b = started()
    b.tick(prediction("r", ROWS), clicks("batch 1", [("r", 0, START + 1)]))
    b.tick(
        clicks("batch 1", [("r", 2, START + 1)]),
        clicks("batch 1", [("r", 3, START + 1)], event="conversion"),
    )
    redeliver(b, clicks("batch 1", [("r", 0, START + 1)]), clicks("batch 1", [("r", 2, START + 1)]))
    assert counts(b) == (ROWS, 2, 0, 0)
    assert [b.store.counters[name] for name in ("outcome", "conversion")] == [2, 1]
    b.tick(at=START + 2 * WINDOW)
    b.monitor.stop()
    assert [row["label"] for row in b.archived] == [1, 0, 1, 0]


def test_crash_before_reused_id_is_counted_loses_and_doubles_nothing(started):
    b = started()
    b.tick(FIRST)
    for number, at in enumerate(
        ("intake.stored", "intake.acknowledged", "intake.dead_letter"), start=1
    ):

        def crash(name, at=at):
            if name == at:
                raise KeyboardInterrupt

        b.checkpoint = crash
        publish(b.log, replace(FIRST, scores=changed(FIRST.scores, number / 8)))
        with pytest.raises(KeyboardInterrupt):
            b.monitor.tick()
        b.checkpoint = lambda name: None
        b.start()
        b.clock.advance(6)  # the lease of the pulled message must end
        b.monitor.tick()
        assert counts(b) == (ROWS, 0, number, number)
        assert len(b.log.list_dead_letters()) == number
