"""Tests of batches: the rows, the table rows, and the end of the thread."""

import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from components.training import torch_parts
from components.training.rows import Rows
from components.training.torch_parts import TablePositions, assemble, lookups_of, made_ahead
from evergreen.config.features import FeaturePositions, PooledPositions
from evergreen.networks.files import one_id_per_slot
from tests.support.errors import raises

SIZES = np.array([4 + i % 7 for i in range(26)])
OFFSETS = np.cumsum([0, *SIZES[:-1]])


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    return Rows(
        labels=(random.random(50) < 0.4).astype(np.float32),
        dense=random.normal(size=(50, 13)).astype(np.float32),
        ids=(random.random((50, 26)) * SIZES).astype(np.int32),
    )


def test_keys_of_table_beyond_32_bits_do_not_collide(rows):
    offsets = OFFSETS + 2**40
    (found,) = assemble(
        rows, np.arange(50), [TablePositions(slice(None), offsets, one_id_per_slot(SIZES))]
    ).lookups
    np.testing.assert_array_equal(found.table_rows, np.unique((rows.ids + offsets).ravel()))


@pytest.fixture(params=["NumPy's sort", "torch's sort"])
def sort(request, monkeypatch):
    """Sorts keys with both implementations: NumPy's for a CPU, and torch's for a GPU."""
    if request.param == "torch's sort":
        monkeypatch.setattr(torch_parts, "_sorted", lambda keys: keys.sort(stable=True))


def test_lookups_name_each_distinct_row_and_its_positions_in_order(sort):
    keys = np.random.default_rng(1).integers(0, 40, 500)
    found = lookups_of(torch.from_numpy(keys))
    rows, inverse = np.unique(keys, return_inverse=True)
    np.testing.assert_array_equal(found.table_rows, rows)
    np.testing.assert_array_equal(found.inverse, inverse)
    bags = np.split(found.order.numpy(), found.starts.numpy()[1:])
    for row, bag in zip(rows, bags, strict=True):
        np.testing.assert_array_equal(bag, np.flatnonzero(keys == row))
    assert [each.dtype for each in found[:4]] == [torch.int64, *[torch.int32] * 3]


def test_no_keys_make_empty_lookups(sort):
    assert [len(each) for each in lookups_of(torch.empty(0, dtype=torch.int64))[:4]] == [0] * 4


def test_padding_is_not_looked_up_and_mean_divides_by_filled_positions(sort):
    lists = (PooledPositions(1, 4, "mean"), PooledPositions(4, 6, "sum"))
    positions = FeaturePositions((0, 1, 1, 1, 2, 2), lists)
    ids = np.array([[0, 3, 0, 3, 0, 0], [2, 0, 0, 0, 1, 4]], np.int32)
    table = TablePositions(slice(None), np.array([0, 10, 10, 10, 20, 20]), positions)
    found = table.lookups(torch.from_numpy(ids))
    looked_up = found.table_rows[found.inverse].tolist()
    assert looked_up == [0, 13, 13, 2, 21, 24]
    assert found.bags.tolist() == [0, 1, 3, 3, 4, 4]
    assert found.shares.flatten().tolist() == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert found.table_rows.tolist() == [0, 2, 13, 21, 24]
    assert found.order.tolist() == [0, 3, 1, 1, 5, 5]
    assert found.starts.tolist() == [0, 1, 2, 4, 5]


def test_batch_has_chosen_rows_and_shares_of_their_weights(rows):
    weights = np.arange(50, dtype=np.float32)
    numbers = np.array([7, 3, 7])
    batch = assemble(replace(rows, weights=weights), numbers, [])
    np.testing.assert_array_equal(batch.labels, rows.labels[numbers])
    np.testing.assert_array_equal(batch.dense, rows.dense[numbers])
    np.testing.assert_allclose(batch.weights, np.array([7, 3, 7]) / 17, rtol=1e-7)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_row_number_outside_rows_is_refused(rows, wrong):
    with raises(IndexError, str(wrong), "expected 0..49"):
        assemble(rows, np.array([0, wrong]), [])


@pytest.mark.parametrize("depth", [0, 2])
def test_error_of_source_comes_after_earlier_items(depth):
    def source():
        yield 1
        raise KeyError("lost")

    items = made_ahead(source(), depth)
    assert next(items) == 1
    with raises(KeyError, "lost"):
        next(items)


def test_depth_of_zero_prepares_each_item_when_due_without_thread():
    made, before = [], threading.active_count()

    def source():
        for number in range(3):
            made.append(number)
            yield number

    for item in made_ahead(source(), 0):
        assert (made, threading.active_count()) == ([*range(item + 1)], before)


def test_no_thread_is_left_when_items_are_no_longer_wanted():
    before = threading.active_count()
    made = []

    def endless():
        while True:
            made.append(len(made))
            yield made[-1]

    with closing(made_ahead(endless(), 3)) as items:
        assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert threading.active_count() == before
    assert len(made) <= 5 + 3 + 2  # 3 in the queue, 1 that waits, 1 in progress
