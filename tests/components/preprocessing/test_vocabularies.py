"""Tests that compare admission, eviction and reuse of ids with plain dicts."""

from collections import Counter

import numpy as np
import pytest

from components.preprocessing.vocabularies import next_column, unseen_column
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.workflow import TOMBSTONE

NEW = unseen_column(np.zeros(0, np.int64))
DAY = 86_400_000_000


def rules(threshold=2, ttl=0, max_candidates=1000):
    return PreprocessingSettings(
        frequency_threshold=threshold, category_ttl_days=ttl / DAY, max_candidates=max_candidates
    )


def counted(rows):
    counts = Counter(rows)
    return np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.int64)


def candidates(column):
    return dict(zip(column.candidates.categories.tolist(), column.candidates.frequencies.tolist()))


class ByHand:
    """Reference with the same rules on dicts: id -> category, category -> (count, last seen)."""

    def __init__(self):
        self.ids, self.seen, self.waiting = [], {}, {}

    def round(self, rows, now, threshold, ttl, max_candidates):
        counts = Counter(rows)
        free = [i for i, value in enumerate(self.ids) if value == TOMBSTONE]
        for value in counts:
            if value in self.seen:
                self.seen[value] = max(self.seen[value], now)
            else:
                total, last = self.waiting.get(value, (0, now))
                self.waiting[value] = (total + counts[value], max(last, now))
        for value in [v for v, last in self.seen.items() if ttl and now - last > ttl]:
            del self.seen[value]
            self.ids[self.ids.index(value)] = TOMBSTONE
        ready = [v for v, (total, _) in self.waiting.items() if v in counts and total >= threshold]
        for value in sorted(ready, key=lambda v: (-self.waiting[v][0], v)):
            del self.waiting[value]
            self.seen[value] = now
            if free:
                self.ids[free.pop(0)] = value
            else:
                self.ids.append(value)
        kept = [(v, t) for v, t in self.waiting.items() if not (ttl and now - t[1] > ttl)]
        kept.sort(key=lambda item: (-item[1][0], -item[1][1], item[0]))
        self.waiting = dict(kept[:max_candidates])


@pytest.mark.parametrize("seed", range(10))
def test_any_rounds_end_as_by_hand(seed):
    random = np.random.default_rng(seed)
    ttl = int(random.integers(0, 4)) * DAY
    column, by_hand = NEW, ByHand()
    for round_ in range(12):
        threshold, most = int(random.integers(1, 5)), int(random.integers(0, 25))
        low = int(random.integers(0, 15 * (round_ + 1)))
        rows = (random.integers(low, low + 40, int(random.integers(0, 120))) * 71_582_788).tolist()
        now = (
            20_000 + round_ + int(random.integers(-1, 2))
        ) * DAY  # windows may overlap, or be processed again
        column = next_column(column, *counted(rows), now=now, rules=rules(threshold, ttl, most))
        by_hand.round(rows, now, threshold, ttl, most)
        assert column.vocabulary.tolist() == by_hand.ids
        assert column.last_seen.tolist() == [
            0 if v == TOMBSTONE else by_hand.seen[v] for v in by_hand.ids
        ]
        assert candidates(column) == {v: total for v, (total, _) in by_hand.waiting.items()}
        assert column.candidates.last_seen.tolist() == [
            by_hand.waiting[v][1] for v in sorted(by_hand.waiting)
        ]


def test_round_leaves_parents_column_as_it_was():
    parent = next_column(NEW, *counted([1, 1, 2, 2, 5]), now=DAY, rules=rules())
    copies = [
        a.copy() for a in (parent.vocabulary, parent.last_seen, parent.candidates.frequencies)
    ]
    next_column(parent, *counted([5, 9, 9]), now=50 * DAY, rules=rules(ttl=DAY))
    for copy, array in zip(
        copies, (parent.vocabulary, parent.last_seen, parent.candidates.frequencies)
    ):
        np.testing.assert_array_equal(copy, array)
