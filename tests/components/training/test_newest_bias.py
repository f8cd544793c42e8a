"""The bias of a fit follows a click rate that changed within the window, and takes all rows where none did."""

from __future__ import annotations

import numpy as np
import pytest

from components.training.calibration import bias_shift, newest_bias_shift

NUM_ROWS = 20_000


def window(seed, *, change, share, learned):
    """Labels whose logit changed by `change` in the newest `share`, and the predictions of a model that learned it."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1.5, 1.0, NUM_ROWS)
    moved = np.where(np.arange(NUM_ROWS) < (1 - share) * NUM_ROWS, 0.0, change)
    labels = (random.random(NUM_ROWS) < 1 / (1 + np.exp(-logits - moved))).astype(np.float32)
    return labels, (1 / (1 + np.exp(-logits - learned))).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_all_rows_set_the_bias_where_the_click_rate_did_not_change(seed):
    labels, predicted = window(seed, change=0.0, share=0.0, learned=0.1)
    assert newest_bias_shift(labels, predicted) == bias_shift(labels, predicted) == pytest.approx(-0.1, abs=0.05)


@pytest.mark.parametrize("change", [-0.8, 0.8])
@pytest.mark.parametrize("share", [1 / 3, 0.1])
def test_a_model_that_learned_the_new_click_rate_keeps_it(change, share):
    labels, predicted = window(3, change=change, share=share, learned=change)
    assert abs(bias_shift(labels, predicted)) > 0.3, "the rate of the whole window would take it back"
    assert newest_bias_shift(labels, predicted) == pytest.approx(0.0, abs=0.1)


def test_a_change_of_a_third_of_the_window_is_told_by_that_third():
    labels, predicted = window(4, change=0.5, share=1 / 3, learned=0.4)
    newest = slice(NUM_ROWS - NUM_ROWS // 3, None)
    assert newest_bias_shift(labels, predicted) == bias_shift(labels[newest], predicted[newest])


def test_a_few_rows_hardly_move_the_bias():
    assert abs(newest_bias_shift(np.ones(5, np.float32), np.full(5, 0.2, np.float32))) < 0.05
