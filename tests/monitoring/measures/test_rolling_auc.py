"""The AUC after every record against scikit-learn on the window that ends with it, and against a few plain lines."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from components.runtime.errors import ContractError
from monitoring.measures import rolling_auc
from monitoring.measures.rolling_auc import RollingAuc


def plain_rolling_auc(labels, scores, max_rows):
    """The same in plain Python over two sorted lists: the oracle where scikit-learn would take too long."""
    window, ordered, twice_u, aucs = deque(), ([], []), 0, []

    def change(label, score, sign):
        nonlocal twice_u
        other = ordered[1 - label]
        below = bisect_left(other, score) + bisect_right(other, score)
        twice_u += sign * (below if label else 2 * len(other) - below)
        if sign > 0:
            insort(ordered[label], score)
        else:
            ordered[label].pop(bisect_left(ordered[label], score))

    for row in zip(labels, scores):
        window.append(row)
        change(*row, 1)
        if len(window) > max_rows:
            change(*window.popleft(), -1)
        pairs = len(ordered[0]) * len(ordered[1])
        aucs.append(twice_u / (2 * pairs) if pairs else math.nan)
    return aucs


def scikit_learn(labels, scores):
    return roc_auc_score(labels, scores) if 0 < sum(labels) < len(labels) else math.nan


@st.composite
def streams(draw):
    """Labels of any click rate, scores with few, many or only ties, times that rest, step and jump; cut into calls."""
    n = draw(st.integers(0, 80))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = (random.random(n) < draw(st.sampled_from([0.0, 0.03, 0.5, 1.0]))).astype(np.uint8)
    levels = draw(st.sampled_from([1, 3, 20, 10**6]))
    scores = (random.integers(0, levels, n) / levels).astype(np.float32)
    times = np.cumsum(random.choice([0.0, 0.5, 1.0, 30.0], n, p=[0.4, 0.3, 0.28, 0.02]))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    return labels, scores, times, cuts


def in_calls(rolling, labels, scores, times, cuts):
    parts = [np.split(each, cuts) for each in (labels, scores, times)]
    return np.concatenate([rolling.update(*call) for call in zip(*parts)])


@given(
    streams(),
    st.none() | st.integers(1, 40),
    st.none() | st.sampled_from([0.25, 1.0, 7.0]),
    st.sampled_from([1, 3, 16, 512]),
    st.sampled_from([0, 5, 100]),
)
@settings(max_examples=60, deadline=None)
def test_every_window_of_records_and_of_time_equals_scikit_learn(stream, max_rows, seconds, block_rows, few_rows):
    labels, scores, times, cuts = stream
    if max_rows is None and seconds is None:
        max_rows = 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rolling_auc, "BLOCK_ROWS", block_rows)
        patch.setattr(rolling_auc, "_MAX_LEAVING", 2 * block_rows)
        patch.setattr(rolling_auc, "FEW_ROWS", few_rows)
        rolling = RollingAuc(max_rows=max_rows, seconds=seconds)
        found = in_calls(rolling, labels, scores, times, cuts)
    for i, auc in enumerate(found):
        kept = [k for k in range(i + 1) if max_rows is None or k > i - max_rows]
        kept = [k for k in kept if seconds is None or times[k] > times[i] - seconds]
        expected = scikit_learn(labels[kept], scores[kept])
        assert auc == pytest.approx(expected, abs=1e-12, nan_ok=True)
    if len(found):
        assert len(rolling) == len(kept)
        assert (rolling.auc is None) == math.isnan(found[-1])
        assert rolling.auc is None or rolling.auc == found[-1]


@pytest.mark.parametrize("rate", [0.03, 0.4])
@pytest.mark.parametrize("rows_a_call", [1, 64, 3000, None])
def test_long_stream_equals_the_plain_one_to_the_last_bit(rate, rows_a_call):
    random, n = np.random.default_rng(0), 6000
    labels = (random.random(n) < rate).astype(np.uint8)
    scores = np.round(random.beta(1, 20, n), 3).astype(np.float32)
    rolling = RollingAuc(max_rows=1000)
    # None: of every size, so that the two ways of counting take turns.
    calls = range(rows_a_call, n, rows_a_call) if rows_a_call else np.cumsum(random.choice([1, 5, 100, 700], 40))
    found = np.concatenate([rolling.update(*call) for call in zip(np.split(labels, calls), np.split(scores, calls))])
    np.testing.assert_array_equal(found, plain_rolling_auc(labels.tolist(), scores.tolist(), 1000))


def test_window_that_leaves_whole_after_a_silence_is_counted_anew():
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 5000), random.random(5000)
    times = np.r_[np.linspace(0, 1, 4900), np.linspace(1000, 1001, 100)]
    found = RollingAuc(seconds=60).update(labels, scores, times)
    assert math.isnan(found[4900])
    for i in (4899, 4950, 4999):
        first = 0 if i < 4900 else 4900
        assert found[i] == pytest.approx(roc_auc_score(labels[first : i + 1], scores[first : i + 1]), abs=1e-12)


def test_times_so_large_that_a_short_window_rounds_away_still_hold_their_row():
    rolling = RollingAuc(seconds=1e-9)
    rolling.update(np.array([1, 0]), np.array([0.5, 0.1]), np.array([1.7e9, 1.7e9]))
    assert len(rolling) == 1


@pytest.mark.parametrize(
    ("labels", "scores", "times", "said"),
    [
        ([0, 1], [0.1], [1, 1], "shapes"),
        ([0, 2], [0.1, 0.2], [1, 1], "other than 0 and 1"),
        ([0, 1], [0.1, math.nan], [1, 1], "1 scores are NaN"),
        ([0, 1], [0.1, 0.2], [2, 1], "times fall"),
        ([0, 1], [0.1, 0.2], [0, 1], "times fall"),
        ([0, 1], [0.1, 0.2], [1, math.nan], "times fall or are not finite"),
        ([0, 1], [0.1, 0.2], None, "times are missing"),
    ],
)
def test_rows_that_cannot_be_taken_in_leave_the_window_as_it_was(labels, scores, times, said):
    rolling = RollingAuc(seconds=5)
    rolling.update(np.array([0, 1]), np.array([0.1, 0.9]), np.array([0.0, 0.5]))
    with pytest.raises(ContractError, match=said):
        rolling.update(np.array(labels), np.array(scores), None if times is None else np.array(times, float))
    assert (len(rolling), rolling.auc) == (2, 1.0)


@pytest.mark.parametrize("limits", [{}, {"max_rows": 0}, {"seconds": 0.0}, {"seconds": math.nan}])
def test_window_that_would_hold_nothing_or_all_is_refused(limits):
    with pytest.raises(ContractError):
        RollingAuc(**limits)
