"""Tests of batches: their rows, their table rows, and how their thread ends."""

import threading
from contextlib import closing

import numpy as np
import pytest

from components.training.rows import Rows
from components.training.torch_parts import TablePlaces, assemble, made_ahead
from evergreen.networks.files import one_each
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
        rows, np.arange(50), [TablePlaces(slice(None), offsets, one_each(SIZES))]
    ).lookups
    np.testing.assert_array_equal(found.table_rows, np.unique((rows.ids + offsets).ravel()))


def test_what_source_raises_comes_after_items_before_it():
    def source():
        yield 1
        raise KeyError("lost")

    items = made_ahead(source(), 2)
    assert next(items) == 1
    with raises(KeyError, "lost"):
        next(items)


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
    assert len(made) <= 5 + 3 + 2  # queue, one waiting, one in progress
