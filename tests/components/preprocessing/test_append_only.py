"""Ids over 30 rounds of growth, deletion and return, against a ledger of plain dicts that knows nothing of arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from components.contracts.vocabulary_changes import vocabulary_changes
from components.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from components.preprocessing.vocabularies import AdmissionRules, next_column, unseen_column
from components.storage.uris import local_path

ROUNDS = 30
DAY = 86_400_000_000
EMPTY = np.zeros(0, np.int64)


class Ledger:
    """Who has which id: category to id, ids that are free, and what is counted of the others."""

    def __init__(self, threshold, ttl_days):
        self.threshold, self.ttl = threshold, ttl_days
        self.id_of, self.last_day, self.tally, self.tally_day = {}, {}, Counter(), {}
        self.free, self.next_id = set(), FIRST_ID

    def round(self, rows, day):
        """Counts a window and gives and takes ids; returns what was freed and what was given out in it."""
        may_be_used = sorted(self.free)
        known, counts = set(self.id_of), Counter(v for v in rows if v is not None)
        for value in counts:
            if value in known:
                self.last_day[value] = day
            else:
                self.tally[value] += counts[value]
                self.tally_day[value] = day
        leaving = {v for v in known if day - self.last_day[v] > self.ttl}
        freed = {self.id_of.pop(v) for v in leaving}
        self.free |= freed
        due = [v for v in counts if v not in known and self.tally[v] >= self.threshold]
        given = {}
        for value in sorted(due, key=lambda v: (-self.tally[v], v)):
            if may_be_used:
                given[value] = may_be_used.pop(0)
                self.free.discard(given[value])
            else:
                given[value], self.next_id = self.next_id, self.next_id + 1
            del self.tally[value]
            self.last_day[value] = day
        self.id_of |= given
        for value in [v for v in self.tally if day - self.tally_day[v] > self.ttl]:
            del self.tally[value]
        return freed, given

    def encode(self, rows):
        return [MISSING_ID if v is None else self.id_of.get(v, OOV_ID) for v in rows]


def windows(random, rounds):
    """Rows of each round: categories come, are common or rare for a while, pause for some rounds, and return."""
    universe = random.choice(2**32, 400, replace=False).tolist()
    for number in range(rounds):
        awake = [
            v for k, v in enumerate(universe) if k < 40 + 12 * number and (number // (1 + k % 5)) % (2 + k % 3) == 0
        ]
        weights = 1 / (1 + random.permutation(len(awake)))
        rows = random.choice(awake, 150, p=weights / weights.sum()).tolist()
        yield [None if random.random() < 0.05 else v for v in rows]


def workflow_with(vocabulary):
    return FeatureWorkflow(
        vocabularies=(vocabulary, *[EMPTY] * 25),
        fill=0.0,
        clip_min=0.0,
        means=np.zeros(13, np.float32),
        stds=np.ones(13, np.float32),
        frequency_threshold=1,
    )


def encoded(workflow, rows):
    raw = np.full((len(rows), 26), -1)
    raw[:, 0] = [-1 if v is None else v for v in rows]
    return workflow.encode_categorical(raw)[:, 0].tolist()


@pytest.mark.parametrize("seed", range(25))
def test_thirty_rounds_never_move_an_id_and_every_row_gets_the_one_that_the_ledger_says(seed):
    random = np.random.default_rng(seed)
    threshold, ttl = int(random.integers(1, 5)), int(random.integers(1, 5))
    rules = AdmissionRules(frequency_threshold=threshold, ttl=ttl * DAY, max_candidates=10_000)
    ledger, column = Ledger(threshold, ttl), unseen_column(EMPTY)
    before, reused, returned, gone = workflow_with(EMPTY), 0, 0, set()
    for day, rows in enumerate(windows(random, ROUNDS), start=1):
        was = dict(ledger.id_of)
        freed, given = ledger.round(rows, day)
        counts = Counter(v for v in rows if v is not None)
        mixed = random.permutation(len(counts))
        seen, sightings = (np.array(list(a), np.int64)[mixed] for a in (counts.keys(), counts.values()))
        column = next_column(column, seen, sightings, now=day * DAY, rules=rules)
        now = workflow_with(column.vocabulary)
        assert encoded(now, rows) == ledger.encode(rows)
        alive = {v: FIRST_ID + k for k, v in enumerate(column.vocabulary.tolist()) if v != TOMBSTONE}
        assert alive == ledger.id_of
        assert all(was[v] == alive[v] for v in was.keys() & alive.keys())
        (change, *_) = vocabulary_changes(before, now)
        assert set(change.entered.tolist()) == set(given.values())
        assert set(change.evicted.tolist()) == freed
        assert not freed & set(given.values())
        reused, returned = reused + len(change.reused), returned + len(given.keys() & gone)
        gone |= was.keys() - alive.keys()
        before = now
    assert reused > 0
    assert returned > 0, "no category came back: the rounds prove less than they should"


@pytest.fixture
def play(write_raw, run_step, keep_as_model, raw_table, reading):
    """Runs a round of the real step on a window of column C2 from a parent, and keeps its workflow as a model."""

    def play(name, rows, parent, day, seed=0):
        mask = np.array([v is None for v in rows])
        table = reading.replace(raw_table(len(rows), seed=seed), "C2", np.array([v or 0 for v in rows]), mask=mask)
        raw = write_raw(table, name=f"raw of {name}", last_event_time=f"2025-10-{day:02d}T00:00:00+00:00")
        encoded_set = run_step(raw, run=name, parent=parent, frequency_threshold=2, extra=("--category-ttl-days", "1"))
        keep_as_model(local_path(encoded_set.workflow_uri), encoded_set.slot_sizes, name)
        return encoded_set

    return play


def test_the_real_step_with_nvtabular_encodes_every_row_of_a_chain_as_the_ledger_says(play, reading):
    ledger, parent, reused = Ledger(2, 1), "none", 0
    for day, rows in enumerate(windows(np.random.default_rng(7), 6), start=1):
        free = set(ledger.free)
        _, given = ledger.round(rows, day)
        reused += len(free & set(given.values()))
        encoded_set = play(f"m{day}", rows, parent, day)
        assert reading.encoded(encoded_set.train_uri).ids[:, 1].tolist() == ledger.encode(rows)
        parent = f"m{day}"
    assert reused > 0


@pytest.mark.parametrize("reference", ["m1,m2", "m1 m2", "m1+m2", "current, m2", "m1;m1"])
def test_two_parents_are_refused_as_such(write_raw, run_step, raw_table, capsys, reference):
    run_step(write_raw(raw_table(50)), parent=reference, expect=2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"parent is {reference!r}, which names 2 models, expected one: models cannot be merged" in error
