"""The order of a pass: every row once, decided by the seed, mixed with replayed rows."""

from __future__ import annotations

import numpy as np
import pytest

from components.training import row_order
from components.training.row_order import PassOrder, PassRows


def part(num_new, num_replayed=0, available=0, first=0):
    stop = first + num_new
    return PassRows(
        first=first, stop=stop, replay_first=stop + 7, replay_stop=stop + 7 + available, num_replayed=num_replayed
    )


@pytest.fixture
def small_windows(monkeypatch):
    """Passes of more than 64 rows are long ones."""
    monkeypatch.setattr(row_order, "_RUN_ROWS", 8)
    monkeypatch.setattr(row_order, "_MOST_RUNS", 8)


@pytest.mark.parametrize("num_rows", [1, 64, 65, 128, 129, 1000, 1003])
def test_every_row_comes_once_also_in_a_long_pass(small_windows, num_rows):
    rows = PassOrder(part(num_rows, first=3), 1).rows(0, num_rows)
    assert sorted(rows) == list(range(3, 3 + num_rows))


def test_pieces_make_the_same_order_wherever_a_reader_begins(small_windows):
    order = PassOrder(part(1003), 1).rows(0, 1003)
    assert (np.diff(order) != 1).mean() > 0.9
    for start in (0, 1, 63, 64, 500, 1002):
        other = PassOrder(part(1003), 1)
        np.testing.assert_array_equal(other.rows(start, start + 150), order[start : start + 150])


def test_a_batch_of_a_long_pass_holds_rows_of_all_of_it(small_windows):
    rows = PassOrder(part(64 * 64), 1).rows(0, 64)
    assert len(np.unique(rows // 8)) > 5  # of the 8 runs in its window
    assert rows.max() - rows.min() > 64 * 32


def test_the_last_window_of_a_long_pass_is_no_leftover(small_windows):
    rows = PassOrder(part(8 * 9), 1).rows(40, 72)
    assert len(np.unique(rows // 8)) == 4  # nine runs: five, then four


def test_replay_rows_are_spread_over_all_of_them_and_over_the_pass():
    order = PassOrder(part(900, num_replayed=100, available=1000), 1).rows(0, 1000)
    drawn = order[order >= 907] - 907
    assert sorted(drawn // 10) == list(range(100))
    positions = np.flatnonzero(order >= 907)
    assert 20 < (positions < 500).sum() < 80


def test_other_passes_draw_other_replay_rows():
    drawn = [
        {row for row in PassOrder(part(900, num_replayed=100, available=1000), seed).rows(0, 1000) if row >= 907}
        for seed in range(20)
    ]
    assert len(set.union(*drawn)) > 700
