from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from components.preprocessing.vocabularies import extend_vocabulary

NOTHING = np.array([], dtype=np.int64)


def counted(rows):
    counts = Counter(rows.tolist())
    return np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_ids_never_move_over_rounds_of_growth(seed):
    random = np.random.default_rng(seed)
    vocabulary = NOTHING
    first_positions = {}
    for round_ in range(8):
        threshold = int(random.integers(1, 5))
        low = int(random.integers(0, 40 * (round_ + 1)))
        rows = random.integers(low, low + 60, 300) * 71_582_788  # up to 2^32; categories vanish and come back
        vocabulary = extend_vocabulary(vocabulary, *counted(rows), frequency_threshold=threshold)
        for value, position in first_positions.items():
            assert vocabulary[position] == value
        frequent = {value for value, count in Counter(rows.tolist()).items() if count >= threshold}
        assert frequent <= set(vocabulary.tolist())
        assert set(vocabulary.tolist()) == frequent | set(first_positions)
        first_positions |= {int(v): p for p, v in enumerate(vocabulary) if int(v) not in first_positions}
        assert len(vocabulary) == len(first_positions)


def test_new_categories_are_ordered_by_count_then_value():
    seen, counts = np.array([5, 1, 9, 3, 8]), np.array([2, 2, 7, 1, 2])
    assert extend_vocabulary(np.array([8]), seen, counts, frequency_threshold=2).tolist() == [8, 9, 1, 5]


def test_order_of_rows_does_not_matter():
    seen, counts = np.arange(100), np.arange(100) % 7
    mixed = np.random.default_rng(0).permutation(100)
    one = extend_vocabulary(NOTHING, seen, counts, frequency_threshold=3)
    other = extend_vocabulary(NOTHING, seen[mixed], counts[mixed], frequency_threshold=3)
    assert one.tolist() == other.tolist()


def test_nothing_seen_leaves_the_vocabulary():
    assert extend_vocabulary(np.array([4, 2]), NOTHING, NOTHING, frequency_threshold=1).tolist() == [4, 2]
