"""What validation counts for the monitor: exact, in two fair halves, and where the monitor looks for it."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pytest

from components.config.features import MAX_CATEGORY, Features, ListOptions
from components.contracts import criteo
from components.contracts.reference_statistics import DENSE_EDGES, LISTED_VALUES, read_reference
from components.storage.uris import local_path
from components.validation.tfdv_statistics import by_feature, num_missing
from components.validation.windows import BLOCK_ROWS, ReferenceCounter, ValueCounts
from tests.support.validation_statistics import statistics_of, value_counts


def counted(*tables):
    counter = ReferenceCounter(criteo.CRITEO)
    for table in tables:
        for batch in table.to_batches():
            counter.add(batch)
    return counter.statistics()


def test_counts_are_tfdvs_where_tfdv_counts_exactly(judged):
    table = judged(5000)
    statistics, theirs = counted(table), by_feature(statistics_of(table))
    assert statistics.rows == 5000
    for name in criteo.DENSE:
        expected = np.histogram(table[name].drop_null().to_numpy(), DENSE_EDGES)[0]
        np.testing.assert_array_equal(statistics.dense[name].counts, expected)
        assert statistics.dense[name].missing == num_missing(theirs[name])
    for name in criteo.CATEGORICAL:
        column = statistics.categorical[name]
        expected = {int(value): count for value, count in value_counts(theirs[name]).items()}
        ours = dict(zip(column.values.tolist(), column.counts.tolist()))
        assert {value: expected[value] for value in ours} == ours
        assert column.others == sum(count for value, count in expected.items() if value not in ours)
        assert column.missing == num_missing(theirs[name])


def test_the_values_are_chosen_by_every_other_block_and_counted_fairly_in_the_rest(judged):
    table = judged(6000)
    statistics = counted(table)
    fair = (np.arange(6000) // BLOCK_ROWS) % 2 == 1
    for name in criteo.CATEGORICAL:
        column = table[name].to_pandas()
        chosen, listed = column[~fair].value_counts(), statistics.categorical[name]
        assert set(listed.values.tolist()) == set(chosen.index.astype(int))
        assert [chosen[value] for value in listed.values] == sorted(chosen, reverse=True)
        expected = column[fair].value_counts()
        assert listed.fair_counts.tolist() == [expected.get(value, 0) for value in listed.values]
        assert listed.fair_others == expected.sum() - listed.fair_counts.sum()
    for name in criteo.DENSE:
        values = table[name].to_pandas().to_numpy()[fair]
        expected = np.histogram(values[~np.isnan(values)], DENSE_EDGES)[0]
        np.testing.assert_array_equal(statistics.dense[name].fair_counts, expected)


def test_the_list_is_bounded_and_the_rest_is_counted_as_one(judged):
    random = np.random.default_rng(0)
    column = pa.array(random.integers(0, 5000, 20_000), pa.int64())
    found = counted(judged(20_000, C3=column)).categorical["C3"]
    assert len(found.values) == LISTED_VALUES
    assert found.counts.sum() + found.others == 20_000
    values, counts = np.unique(column.to_numpy(), return_counts=True)
    expected = dict(zip(values.tolist(), counts.tolist()))
    assert [expected[value] for value in found.values.tolist()] == found.counts.tolist()


@pytest.mark.parametrize("largest", [2**32, MAX_CATEGORY])
def test_hashes_of_words_are_counted_whatever_the_number_of_requests_in_a_batch(judged, largest):
    random = np.random.default_rng(2)
    known = random.integers(largest // 2, largest, 300)
    column = pa.array([largest, *known[random.zipf(1.3, 19_999) % 300]], pa.int64())
    requests = pa.array([f"request {i // 2}" for i in range(20_000)])
    found = counted(judged(20_000, C3=column, request_id=requests)).categorical["C3"]
    values, counts = np.unique(column.to_numpy(), return_counts=True)
    expected = dict(zip(values.tolist(), counts.tolist()))
    assert {*found.values.tolist()} <= {*expected}
    assert [expected[value] for value in found.values.tolist()] == found.counts.tolist()
    assert found.counts.sum() + found.others == 20_000
    assert found.counts.sum() > 19_900


def test_beyond_its_capacity_a_count_is_too_low_by_a_bounded_part_of_the_rows_only():
    random = np.random.default_rng(1)
    counts, values = ValueCounts(50), random.zipf(1.2, 30_000) % 10_000
    for part in np.array_split(values, 30):
        found, rows = np.unique(part, return_counts=True)
        counts.add_sums(found, np.stack([rows] * 3, axis=1))
    assert len(counts.values) <= 50
    for value, count in zip(counts.values.tolist(), counts.counts.tolist()):
        true = int((values == value).sum())
        assert true - 30_000 / 51 <= count <= true
    assert set(np.unique(values, return_counts=True)[0][:1]) <= set(counts.values.tolist())


def test_the_step_writes_the_statistics_of_its_window(step, write_rows, raw_table, release_model):
    release_model(step(write_rows(raw_table(3000)))[1])
    rows = raw_table(2000, seed=1)
    _, report = step(write_rows(rows, name="raw2"), run="r2")
    found = read_reference(local_path(report.reference_uri))
    assert found.rows == 2000
    assert found.scores is None
    expected = np.histogram(rows["I5"].drop_null().to_numpy(), DENSE_EDGES)[0]
    np.testing.assert_array_equal(found.dense["I5"].counts, expected)


def test_a_list_is_counted_by_its_elements_that_count_and_by_their_number():
    random, rows = np.random.default_rng(3), 5000
    lists = [random.integers(0, 9, size).tolist() or None for size in random.integers(0, 5, rows)]
    features = Features(numeric=(), categorical=(), lists=("tags",), list_options={"tags": ListOptions(max=2)})
    columns = {"label": [0] * rows, "tags": lists, "request_id": [f"q{i // 8}" for i in range(rows)]}
    counter = ReferenceCounter(features)
    counter.add(pa.RecordBatch.from_pydict(columns))
    kept = [(each or [])[-2:] for each in lists]
    found, window = counter.statistics(), counter.window()
    elements, in_window = found.categorical["tags"], window.columns["tags"]
    assert dict(zip(elements.values.tolist(), elements.counts.tolist())) == Counter(chain(*kept))
    assert (elements.others, elements.missing, in_window.missing.rows) == (0, 0, 0)
    lengths = np.histogram(list(map(len, kept)), DENSE_EDGES)[0]
    np.testing.assert_array_equal(found.dense["tags/length"].counts, lengths)
    np.testing.assert_array_equal(window.columns["tags/length"].counts, lengths)
    # A request that a block of rows cuts counts as two.
    bounds = sorted({*range(0, rows, 8), *range(0, rows, BLOCK_ROWS), rows})
    requests = [Counter(chain(*kept[start:stop])) for start, stop in pairwise(bounds)]
    assert in_window.present_sizes == sum(each.total() ** 2 for each in requests)
    for value, sums in zip(in_window.values.tolist(), in_window.sums.tolist()):
        products = [(each[value] ** 2, each[value] * each.total()) for each in requests]
        assert sums[1:] == [sum(each) for each in zip(*products)]
