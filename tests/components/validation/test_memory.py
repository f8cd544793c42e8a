"""What counting holds in memory: one batch in one form at a time, and little per category, with exact sums."""

from __future__ import annotations

import weakref

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.validation import rows, summarize
from components.validation.reference import ReferenceCounter
from components.validation.value_counts import ValueCounts

LARGE = 2**32


class Living:
    """Batches that something still refers to."""

    def __init__(self):
        self._known = []

    def __call__(self, batch):
        self._known.append(weakref.ref(batch))
        return batch

    def number(self):
        return sum(each() is not None for each in self._known)


@pytest.fixture
def file(tmp_path, raw_table):
    pq.write_table(raw_table(3000), tmp_path / "part-0.parquet", row_group_size=500)
    return tmp_path / "part-0.parquet"


def test_the_lists_for_tfdv_are_gone_before_the_counters_and_the_next_batch(file, monkeypatch):
    lists, held, made = Living(), [], summarize.as_lists

    def as_lists(batch):
        held.append(lists.number())
        return lists(made(batch))

    class Counter:
        def add(self, batch, first_row):
            held.append(lists.number())

        def merge(self, other):
            """Nothing: `held` is this test's."""

    monkeypatch.setattr(summarize, "as_lists", as_lists)
    summarize.summarize_files([file], rows.COLUMNS, [Counter()], processes=1)
    assert held == [0] * 12


class Sliced:
    """A batch that tells of its slices, which hold its memory as much as it does."""

    def __init__(self, batch, slices):
        self._batch, self._slices, self.num_rows = batch, slices, batch.num_rows

    def slice(self, *places):
        return self._slices(self._batch.slice(*places))


def test_a_batch_is_gone_before_the_next_one_is_read(file, monkeypatch):
    wholes, slices, held = Living(), Living(), []

    class Watched(pq.ParquetFile):
        def iter_batches(self, *arguments, **options):
            found = super().iter_batches(*arguments, **options)
            while True:
                held.append((wholes.number(), slices.number()))
                if (batch := next(found, None)) is None:
                    return
                yield wholes(Sliced(batch, slices))

    monkeypatch.setattr(pq, "ParquetFile", Watched)
    (parts,) = rows.divide([file], 1)
    for part in parts:
        for batch in rows.read_part(part, rows.COLUMNS, batch_rows=100):
            assert batch.num_rows == 100
            del batch
    assert held == [(0, 0)] * 30


def totals(parts):
    """The same sums by Python's integers."""
    found: dict[int, list[int]] = {}
    for values, sums in parts:
        for value, triple in zip(values.tolist(), sums.tolist()):
            found[value] = [a + b for a, b in zip(found.get(value, [0, 0, 0]), triple)]
    return found


def drawn(seed, largest_value, largest_sum):
    random = np.random.default_rng(seed)
    for _ in range(20):
        values = np.unique(random.integers(-1 if largest_value > LARGE else 0, largest_value, 40))
        yield values, random.integers(1, largest_sum, (len(values), 3))


@pytest.mark.parametrize("largest_value", [60, LARGE, 2**62])
@pytest.mark.parametrize("largest_sum", [5, LARGE // 4, 2**40])
def test_sums_are_exact_however_large_values_and_sums_are(largest_value, largest_sum):
    parts = list(drawn(1, largest_value, largest_sum))
    whole, halves = ValueCounts(), (ValueCounts(), ValueCounts())
    for number, part in enumerate(parts):
        whole.add_sums(*part)
        halves[number % 2].add_sums(*part)
    halves[0].merge(halves[1])
    expected = totals(parts)
    for counts in (whole, halves[0]):
        assert (counts.values.dtype, counts.sums.dtype) == (np.int64, np.int64)
        assert dict(zip(counts.values.tolist(), counts.sums.tolist())) == expected
        assert counts.of(np.array([7, *expected])).tolist()[1:] == [triple[0] for triple in expected.values()]
        values, sums = counts.listed(10)
        assert sums.dtype == values.dtype == np.int64
        most = sorted(expected, key=lambda value: (-expected[value][0], value))[:10]
        assert dict(zip(values.tolist(), sums.tolist())) == {value: expected[value] for value in most}


def test_narrow_and_wide_counts_merge_either_way_round():
    narrow, wide = ValueCounts(), ValueCounts()
    narrow.add_sums(np.array([3, 9]), np.array([[1, 2, 3], [4, 5, 6]]))
    wide.add_sums(np.array([-2, 9]), np.array([[1, 1, 1], [LARGE, LARGE, LARGE]]))
    expected = {-2: [1, 1, 1], 3: [1, 2, 3], 9: [LARGE + 4, LARGE + 5, LARGE + 6]}
    wide.merge(narrow)
    assert dict(zip(wide.values.tolist(), wide.sums.tolist())) == expected
    other = ValueCounts()
    other.add_sums(np.array([-2, 9]), np.array([[1, 1, 1], [LARGE, LARGE, LARGE]]))
    narrow.merge(other)
    assert dict(zip(narrow.values.tolist(), narrow.sums.tolist())) == expected


def test_a_category_takes_16_bytes_in_either_half_of_the_rows(raw_table):
    counter = ReferenceCounter()
    many = np.arange(40_000) * 101 % criteo.MAX_CATEGORY
    table = raw_table(40_000)
    table = table.set_column(table.schema.get_field_index("C7"), "C7", [many])
    for batch in table.to_batches():
        counter.add(batch)
    distinct = sum(min(len(table[name].unique().drop_null()), 40_000) for name in criteo.CATEGORICAL)
    assert 16 * 40_000 <= counter.held_bytes <= 2 * 16 * distinct


def test_what_is_held_stops_growing_at_the_capacity():
    counts = ValueCounts(100)
    held = []
    for begin in range(0, 5000, 50):
        counts.add(np.arange(begin, begin + 50))
        held.append(counts.held_bytes)
    assert max(held) == 100 * 16 == held[1]
    assert counts.lost <= 5000 / 101
