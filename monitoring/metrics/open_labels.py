"""AUC of rows whose attribution window is still open: estimate, bounds, and when it is final.

The input has two parts. For each open row, it has the score, the age, and whether a click has
arrived. For matured rows, it has the click delays. The output is the AUC that the open rows will
have when their labels are final. The module `window` computes the numbers of matured rows.

**Bounds.** A click that has arrived remains a click. Any other open row may or may not become a
click. The bounds are the minimum and maximum of the AUC over all possible labels of these rows, so
the matured value is always within the bounds. The ranks of all rows do not depend on labels, and U
= (sum of the clicks' midranks) - n1 (n1 + 1) / 2. Suppose that m of the undecided rows become
clicks. U is then largest if they are the m undecided rows with the highest ranks. U is smallest if
they are the m undecided rows with the lowest ranks. A cumulative sum over the sorted ranks gives
the largest and smallest U for every m.

**Estimate.** F(a) is the share of clicks that come within age a. F is estimated by the empirical
distribution of the click delays of matured rows. Delays of matured rows are not censored. If a row
of age a has no click yet, the probability that it will be clicked is p (1 - F(a)) / (1 - p F(a)).
The formula is from Chapelle (2014), with empirical delays instead of an exponential distribution.
In this formula, p is the row's score times a correction. The correction is the number of arrived
clicks divided by the number expected by now, among rows with similar scores. The expected number of
clicks is the sum of F(a) times the score. The correction makes the estimate follow a change in the
data as soon as clicks arrive. Once all windows have closed, F is 1, the probabilities are 0 or 1,
and the estimate is the matured value.

**Assumptions.** Delays depend neither on the score nor on the time. `ages` are measured up to the
log's watermark, because every click before the watermark was read. If they were measured up to the
clock's time, clicks in transit would look like missing clicks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError

MIN_DELAYS = 20
"""Minimum number of click delays for an estimate. With fewer delays, the AUC has bounds but no
estimate."""
_MAX_DELAYS = 10_000
"""Number of newest delays that are used. Older delays may be outdated."""
_CLICKS_PER_PART, _MAX_PARTS = 25, 20
"""The score range is divided into parts, and each part has a correction. `_CLICKS_PER_PART` is the
minimum number of arrived clicks per part. `_MAX_PARTS` is the maximum number of parts."""


class ClickDelays:
    """Click delays of the newest matured rows: the times from prediction to click.

    >>> delays = ClickDelays()
    >>> delays.update(np.array([1.0, np.nan, 2.0, 2.0], np.float32))
    >>> delays.share_within(np.array([0.0, 1.0, 60.0]))
    array([0.        , 0.33333333, 1.        ])
    """

    def __init__(self, capacity: int = _MAX_DELAYS) -> None:
        self._capacity, self._newest = capacity, np.zeros(0)

    def __len__(self) -> int:
        return len(self._newest)

    def update(self, delays: NDArray[np.floating]) -> None:
        """Add delays in seconds from prediction to click, shape [n]. NaN means no click."""
        self._newest = np.concatenate([self._newest, delays[~np.isnan(delays)]])[-self._capacity :]

    def share_within(self, ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return F, the share [n] of delays that are at most `ages` [n].

        NaN if there are no delays.
        """
        if not len(self._newest):
            return np.full(len(ages), np.nan)
        return np.searchsorted(np.sort(self._newest), ages, side="right") / len(self._newest)


@dataclass(frozen=True, kw_only=True)
class OpenEstimate:
    """AUC that the open rows of one version will have when their labels are final."""

    version: int
    open_rows: int
    open_clicks: int
    """Number of clicks that have arrived."""
    final_at: float | None
    """Time when the last label becomes final, in seconds since the epoch. None if there are no
    rows."""
    auc: float | None = None
    """Estimated AUC. None if fewer than `MIN_DELAYS` delays are known, or if the labels cannot
    contain both classes."""
    auc_low: float | None = None
    """Lowest AUC over all possible labels. None if the labels cannot contain both classes. The
    highest AUC is in `auc_high`."""
    auc_high: float | None = None


def estimate_open(
    scores: NDArray[np.floating],
    ages: NDArray[np.float64],
    clicked: NDArray[np.bool_],
    *,
    version: int,
    delays: ClickDelays,
    window_seconds: float,
    now: float,
) -> OpenEstimate:
    """Estimate the AUC that open rows will have when their windows have closed.

    100,000 rows take about 60 ms.

    Args:
        scores: Probabilities, shape [n].
        ages: Seconds since the prediction, shape [n]. A label is final at `window_seconds`.
        clicked: Whether a click within the window has arrived, shape [n].
        version: Model version of the rows.
        delays: Click delays of matured rows.
        window_seconds: Attribution window.
        now: Time until which every click was read, in seconds since the epoch.

    Raises:
        ContractError: Shapes differ, or a score is not a probability.
    """
    if not scores.shape == ages.shape == clicked.shape or scores.ndim != 1:
        raise ContractError(
            f"scores, ages and clicked have shapes {scores.shape}, {ages.shape}, {clicked.shape}"
        )
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ContractError("scores of open rows are outside [0, 1], expected probabilities")
    if not len(scores):
        return OpenEstimate(version=version, open_rows=0, open_clicks=0, final_at=None)
    may_click = ~clicked & (ages < window_seconds)
    low, high = _auc_bounds(scores, clicked, may_click)
    auc = None
    if len(delays) >= MIN_DELAYS and low is not None and high is not None:
        p = _click_probabilities(scores, ages, clicked, may_click=may_click, delays=delays)
        expected = expected_auc(p, scores)
        auc = None if expected is None else min(max(expected, low), high)
    return OpenEstimate(
        version=version,
        open_rows=len(scores),
        open_clicks=int(clicked.sum()),
        final_at=now + (float(window_seconds - ages[may_click].min()) if may_click.any() else 0.0),
        auc=auc,
        auc_low=low,
        auc_high=high,
    )


def _auc_bounds(
    scores: NDArray[np.floating], clicked: NDArray[np.bool_], may_click: NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    """Return the minimum and maximum AUC over all possible labels of the open rows.

    The mask `may_click` [n] selects the open rows. The module's docstring has the proof. An AUC
    needs both classes. The result is (None, None) if the labels cannot contain both classes.
    """
    _, inverse, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2.0)[inverse.reshape(-1)]
    of_open = np.sort(ranks[may_click])
    clicks = int(clicked.sum()) + np.arange(len(of_open) + 1)
    others = len(scores) - clicks
    exists = (clicks > 0) & (others > 0)
    if not exists.any():
        return None, None
    extremes = []
    for more in (of_open, of_open[::-1]):
        rank_sums = float(ranks[clicked].sum()) + np.concatenate([[0.0], np.cumsum(more)])
        wins = rank_sums - clicks * (clicks + 1) / 2.0
        extremes.append(wins[exists] / (clicks * others.astype(np.float64))[exists])
    return float(extremes[0].min()), float(extremes[1].max())


def expected_auc(probabilities: NDArray[np.float64], scores: NDArray[np.floating]) -> float | None:
    """Return the expected AUC if labels are independent with these click probabilities.

    A pair is a click and a non-click. The result is the expected number of pairs in which the click
    has the higher score, divided by the expected number of pairs. Row i is a click and row j a
    non-click with probability p_i (1 - p_j). If all probabilities are 0 or 1, the result is the
    ordinary AUC.

    Args:
        probabilities: Click probabilities in [0, 1], shape [n].
        scores: Finite scores, shape [n]. Only the order of the scores matters.

    Returns:
        None if no pair is possible: fewer than two rows, or all probabilities 0, or all 1.

    >>> expected_auc(np.array([0.0, 1.0, 0.0]), np.array([0.1, 0.2, 0.3]))
    0.5
    """
    order = np.argsort(scores)
    ordered, p = np.asarray(scores)[order], probabilities[order]
    firsts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(p)])
    if not len(firsts):
        return None
    sizes = np.diff(firsts, append=len(p))
    # `_below` includes half of the row's own weight, which is subtracted here.
    others_below = _below(1 - p, firsts, sizes) - (1 - p) / 2
    pairs = float(p.sum()) * float((1 - p).sum()) - float((p * (1 - p)).sum())
    if pairs <= 1e-12:
        return None
    return min(1.0, max(0.0, float((p * others_below).sum()) / pairs))


def _below(
    weights: NDArray[np.float64], firsts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return for each row the weight of all lower scores plus half the weight of equal scores.

    The rows are ordered by score. `firsts` and `sizes` describe the groups of equal scores.
    """
    in_run = np.add.reduceat(weights, firsts)
    below: NDArray[np.float64] = np.repeat(np.cumsum(in_run) - in_run / 2, sizes)
    return below


def _click_probabilities(
    scores: NDArray[np.floating],
    ages: NDArray[np.float64],
    clicked: NDArray[np.bool_],
    *,
    may_click: NDArray[np.bool_],
    delays: ClickDelays,
) -> NDArray[np.float64]:
    """Return the click probability of each row: 1 if clicked, 0 if too old, else the estimate."""
    arrived = np.where(may_click | clicked, delays.share_within(ages), 1.0)
    score = scores.astype(np.float64)
    p = np.minimum(score * _correction(score, arrived, clicked), 1.0)
    # If both the click probability p and F are 1, a click would have arrived by now. The row counts
    # as a non-click.
    still = np.divide(
        p * (1 - arrived), 1 - p * arrived, out=np.zeros(len(p)), where=p * arrived < 1
    )
    return np.where(clicked, 1.0, np.where(may_click, still, 0.0))


def _correction(
    score: NDArray[np.float64], arrived: NDArray[np.float64], clicked: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return for each row [n] the ratio of arrived to expected clicks, among similar scores.

    As a prior, 1 is added to the expected clicks, and the ratio over all rows is added to the
    arrived clicks. If there are few clicks, the correction is therefore close to the ratio over all
    rows.
    """
    expected = score * arrived
    overall = (clicked.sum() + 1) / (expected.sum() + 1)
    parts = int(np.clip(clicked.sum() // _CLICKS_PER_PART, 1, _MAX_PARTS))
    order = np.argsort(score)
    ordered = score[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    # Divide the rows into parts with equal numbers of expected clicks. Equal scores are in the same
    # part, for any order of rows.
    before = np.concatenate([[0.0], np.cumsum(expected[order])])
    of_run = np.minimum(
        (before[firsts] * parts / max(before[-1], 1e-12)).astype(np.int64), parts - 1
    )
    part = np.empty(len(score), np.int64)
    part[order] = np.repeat(of_run, np.diff(firsts, append=len(score)))
    clicks, expected_clicks = np.bincount(part, clicked, parts), np.bincount(part, expected, parts)
    return np.asarray(((clicks + overall) / (expected_clicks + 1))[part], np.float64)
