"""Tests of a pass: every row comes once, in the seed's order, with the rehearsal rows."""

import numpy as np
import pytest

from components.training import row_order
from components.training.row_order import PassOrder, PassRows


def part(num_new, num_replayed=0, available=0):
    return PassRows(num_new=num_new, num_old=available, num_replayed=num_replayed)


@pytest.fixture
def small_windows(monkeypatch):
    """Defines that a pass of more than 64 rows is a long pass."""
    monkeypatch.setattr(row_order, "_BLOCK_ROWS", 8)
    monkeypatch.setattr(row_order, "_MAX_BLOCKS", 8)


@pytest.mark.parametrize("num_rows", [1, 64, 65, 128, 129, 1000, 1003])
@pytest.mark.parametrize("in_time_order", [False, True], ids=["shuffled", "in time order"])
def test_every_row_comes_once_also_in_long_pass(small_windows, num_rows, in_time_order):
    rows = PassOrder(part(num_rows), 1, in_time_order=in_time_order).rows(0, num_rows)
    assert sorted(rows) == list(range(num_rows))


def test_pieces_make_same_order_wherever_reader_begins(small_windows):
    order = PassOrder(part(1003), 1).rows(0, 1003)
    assert (np.diff(order) != 1).mean() > 0.9
    for start in (0, 1, 63, 64, 500, 1002):
        other = PassOrder(part(1003), 1)
        np.testing.assert_array_equal(other.rows(start, start + 150), order[start : start + 150])


def test_batch_of_long_pass_holds_rows_of_all_of_it(small_windows):
    rows = PassOrder(part(64 * 64), 1).rows(0, 64)
    assert len(np.unique(rows // 8)) > 5  # The window has 8 runs of rows.
    assert rows.max() - rows.min() > 64 * 32


def test_last_window_of_long_pass_is_no_leftover(small_windows):
    rows = PassOrder(part(8 * 9), 1).rows(40, 72)
    assert len(np.unique(rows // 8)) == 4  # the last four of nine runs


def test_in_time_order_each_row_is_within_tenth_of_pass_of_its_place():
    rows = PassOrder(part(2_005), 1, in_time_order=True).rows(0, 2_005)
    assert np.abs(rows - np.arange(2_005)).max() < 201
    assert (np.diff(rows) != 1).mean() > 0.9


def test_other_passes_draw_other_replay_rows():
    drawn = [
        {
            row
            for row in PassOrder(part(900, num_replayed=100, available=1000), seed).rows(0, 1000)
            if row >= 900
        }
        for seed in range(20)
    ]
    assert len(set.union(*drawn)) > 700
