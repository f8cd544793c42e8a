"""Tests of validation's reference for the monitor: it is exact, and is split into two halves."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pytest

from evergreen.config.features import MAX_CATEGORY, Features, ListOptions
from evergreen.contracts import criteo
from evergreen.statistics.column_profile import DENSE_EDGES, find_sums
from evergreen.statistics.profile_counter import BLOCK_ROWS, ProfileCounter, ValueCounts
from evergreen.statistics.reference import LISTED_VALUES, inner_buckets, read_reference
from evergreen.storage.uris import local_path
from tests.support.validation_statistics import by_feature, statistics_of, value_counts


def counted(*tables):
    counter = ProfileCounter(criteo.CRITEO)
    for table in tables:
        for batch in table.to_batches():
            counter.add(batch)
    return counter


def estimation_half(table):
    """Return the rows that were not used to select cells."""
    return table.filter(pa.array(np.arange(table.num_rows) // BLOCK_ROWS % 2 == 1))


def test_counts_are_tfdvs_where_tfdv_counts_exactly(checked):
    table = checked(5000)
    found, theirs = counted(table).reference(), statistics_of(estimation_half(table))
    assert (found.rows, found.profile.rows) == (5000, 2 * BLOCK_ROWS)
    for name in criteo.DENSE:
        column = found.profile.columns[name]
        expected = np.histogram(estimation_half(table)[name].drop_null().to_numpy(), DENSE_EDGES)[0]
        np.testing.assert_array_equal(column.counts, expected)
        assert column.missing.rows == theirs.columns[name].num_missing
    for name in criteo.CATEGORICAL:
        column = found.profile.columns[name]
        expected = {
            int(value): count for value, count in value_counts(by_feature(theirs)[name]).items()
        }
        assert dict(zip(column.values.tolist(), column.counts.tolist())) == {
            value: expected.get(value, 0) for value in column.values.tolist()
        }
        assert column.present == sum(expected.values())
        assert column.missing.rows == theirs.columns[name].num_missing


def test_values_and_bounds_are_chosen_by_every_other_block(checked):
    table = checked(6000)
    found, chosen = counted(table).reference(), np.arange(6000) // BLOCK_ROWS % 2 == 0
    for name in criteo.CATEGORICAL:
        counts = table[name].to_pandas()[chosen].value_counts()
        listed = found.profile.columns[name].values
        assert set(listed.tolist()) == set(counts.index.astype(int))
        assert [counts[value] for value in listed] == sorted(counts, reverse=True)
    for name in criteo.DENSE:
        values = table[name].to_pandas().to_numpy()[chosen]
        assert found.bounds[name] == inner_buckets(
            np.histogram(values[~np.isnan(values)], DENSE_EDGES)[0]
        )


def test_sums_over_requests_are_those_of_the_estimation_half(in_requests):
    """The reference has the same sums as a profile of only the rows of the estimation half."""
    table = in_requests(6000, size=48)
    found, alone = counted(table).reference().profile, counted(estimation_half(table)).profile()
    # In this order, neighbouring blocks are adjacent and share no request.
    assert (found.rows, found.sizes) == (alone.rows, alone.sizes)
    for name in criteo.FEATURES:
        column, other = found.columns[name], alone.columns[name]
        assert (column.present_sizes, column.missing) == (other.present_sizes, other.missing)
        expected = (
            other.sums
            if column.values is None
            else find_sums(column.values, other.values, other.sums)
        )
        np.testing.assert_array_equal(column.sums, expected)


def test_list_is_bounded(checked):
    random = np.random.default_rng(0)
    table = checked(20_000, C3=pa.array(random.integers(0, 5000, 20_000), pa.int64()))
    found = counted(table).reference().profile.columns["C3"]
    assert len(found.values) == LISTED_VALUES
    values, counts = np.unique(estimation_half(table)["C3"].to_numpy(), return_counts=True)
    expected = dict(zip(values.tolist(), counts.tolist()))
    assert [expected.get(value, 0) for value in found.values.tolist()] == found.counts.tolist()


@pytest.mark.parametrize("largest", [2**32, MAX_CATEGORY])
def test_hashes_of_words_are_counted_whatever_number_of_requests_in_batch(checked, largest):
    random = np.random.default_rng(2)
    known = random.integers(largest // 2, largest, 300)
    column = pa.array([largest, *known[random.zipf(1.3, 19_999) % 300]], pa.int64())
    requests = pa.array([f"request {i // 2}" for i in range(20_000)])
    found = counted(checked(20_000, C3=column, request_id=requests)).profile().columns["C3"]
    values, counts = np.unique(column.to_numpy(), return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist())) == dict(
        zip(found.values.tolist(), found.counts.tolist())
    )


def test_beyond_its_capacity_count_is_too_low_by_bounded_part_of_rows_only():
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


def test_step_writes_statistics_of_its_window(step, write_rows, raw_table, release_model):
    release_model(step(write_rows(raw_table(3000)))[1])
    rows = raw_table(2000, seed=1)
    _, report = step(write_rows(rows, name="raw2"), run="r2")
    found = read_reference(local_path(report.reference_uri))
    assert found.rows == 2000
    assert found.scores is None
    expected = np.histogram(estimation_half(rows)["I5"].drop_null().to_numpy(), DENSE_EDGES)[0]
    np.testing.assert_array_equal(found.profile.columns["I5"].counts, expected)


def test_list_is_counted_by_its_elements_that_count_and_by_their_number():
    random, rows = np.random.default_rng(3), 5000
    lists = [random.integers(0, 9, size).tolist() or None for size in random.integers(0, 5, rows)]
    features = Features(
        numeric=(), categorical=(), lists=("tags",), list_options={"tags": ListOptions(max=2)}
    )
    columns = {
        "label": [0] * rows,
        "tags": lists,
        "request_id": [f"q{i // 8}" for i in range(rows)],
    }
    counter = ProfileCounter(features)
    counter.add(pa.RecordBatch.from_pydict(columns))
    kept = [(each or [])[-2:] for each in lists]
    window, in_estimation = counter.profile(), counter.reference().profile
    in_window = window.columns["tags"]
    assert dict(zip(in_window.values.tolist(), in_window.counts.tolist())) == Counter(chain(*kept))
    assert (in_window.present, in_window.missing.rows) == (sum(map(len, kept)), 0)
    lengths = list(map(len, kept))
    np.testing.assert_array_equal(
        window.columns["tags/length"].counts, np.histogram(lengths, DENSE_EDGES)[0]
    )
    in_estimation_half = np.arange(rows) // BLOCK_ROWS % 2 == 1
    expected = np.histogram(np.array(lengths)[in_estimation_half], DENSE_EDGES)[0]
    np.testing.assert_array_equal(in_estimation.columns["tags/length"].counts, expected)
    elements = Counter(chain(*(each for each, is_used in zip(kept, in_estimation_half) if is_used)))
    assert (
        dict(
            zip(
                in_estimation.columns["tags"].values.tolist(),
                in_estimation.columns["tags"].counts.tolist(),
            )
        )
        == elements
    )
    # A request that is divided between two blocks of rows counts as two requests.
    bounds = sorted({*range(0, rows, 8), *range(0, rows, BLOCK_ROWS), rows})
    requests = [Counter(chain(*kept[start:stop])) for start, stop in pairwise(bounds)]
    assert in_window.present_sizes == sum(each.total() ** 2 for each in requests)
    for value, sums in zip(in_window.values.tolist(), in_window.sums.tolist()):
        products = [(each[value] ** 2, each[value] * each.total()) for each in requests]
        assert sums[1:] == [sum(each) for each in zip(*products)]
