"""The AUC of rows whose attribution window is still open: estimate, hard bounds, when it is final.

In: scores and ages of the open rows, which of them are clicked already, and the delays of clicks on matured rows. Out:
what their matured AUC will be. The numbers of matured rows are left to `window`.

**Bounds.** A click that has arrived stays; any other open row may still become a click or not. The bounds are the least
and the greatest value over all these labelings, so the matured value always lies between them. The ranks of all rows do
not depend on labels, and U = (sum of the clicks' midranks) - n1 (n1 + 1) / 2. Of all labelings with m more
clicks the greatest U therefore has the m highest ranks, the least U the m lowest; one cumulative sum gives both for
every m, and with them the extremes.

**Estimate.** F(a), the share of clicks that come within age a, is the distribution of the delays of matured rows'
clicks: none of them is censored, so the Kaplan-Meier estimate is their empirical distribution. A row of age a without
a click becomes one with probability p (1 - F(a)) / (1 - p F(a)) (Chapelle 2014, with the delays as they are in place of
his exponential). p is the score times clicks arrived over clicks expected by now, sum of F(a) score, of its part of the
score range: the arrived clicks themselves correct the model, so that a changed world shows as soon as clicks arrive. At
the end F is 1, the probabilities are 0 or 1, and the estimate is the matured value.

It assumes that delays depend neither on the score nor on the time, and that `ages` count up to a time until which every
click is in (the log's watermark, not the clock): clicks on their way would look like clicks that did not happen.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError

MIN_DELAYS = 20
"""With fewer clicks on matured rows the delays are too uncertain for an estimate; there are only bounds."""
KEPT_DELAYS = 10_000
"""Newest delays that are kept: older ones may describe a world that has changed."""
_CLICKS_PER_PART, _MAX_PARTS = 25, 20
"""Arrived clicks that a part of the score range needs to be corrected by itself, and most parts."""


class ClickDelays:
    """The newest delays from prediction to click of matured rows.

    >>> delays = ClickDelays()
    >>> delays.update(np.array([1.0, np.nan, 2.0, 2.0], np.float32))
    >>> delays.share_within(np.array([0.0, 1.0, 60.0]))
    array([0.        , 0.33333333, 1.        ])
    """

    def __init__(self, kept: int = KEPT_DELAYS) -> None:
        self._kept, self._newest = kept, np.zeros(0)

    def __len__(self) -> int:
        return len(self._newest)

    def update(self, delays: NDArray[np.floating]) -> None:
        """Takes in seconds from prediction to click, any shape [n]; NaN = no click."""
        self._newest = np.concatenate([self._newest, delays[~np.isnan(delays)]])[-self._kept :]

    def share_within(self, ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """F: the share [n] of delays that are at most `ages` [n]; NaN without a delay."""
        if not len(self._newest):
            return np.full(len(ages), np.nan)
        return np.searchsorted(np.sort(self._newest), ages, side="right") / len(self._newest)


@dataclass(frozen=True, kw_only=True)
class OpenEstimate:
    """The AUC of the open rows of one version once their labels are final; a number that does not exist is None."""

    version: int
    open_rows: int
    open_clicks: int
    """Clicks that have arrived already."""
    final_at: float | None
    """When the last label becomes certain, in the time that ages count in; None without rows."""
    auc: float | None = None
    """The estimate: None with fewer than `MIN_DELAYS` delays known, or where no two rows can differ in label."""
    auc_low: float | None = None
    """Bounds over the labelings that have an AUC: None where none has."""
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
    """Estimates the rows' AUC once their windows have closed; 100,000 rows take some 60 ms.

    Arrays are [n]. At an age of `window_seconds` or more the label is final; `clicked`: a click within the window has
    arrived; `delays` are those of clicks on matured rows; every click until `now` is in.

    Raises:
        ContractError: shapes differ, or a score is no probability.
    """
    if not scores.shape == ages.shape == clicked.shape or scores.ndim != 1:
        raise ContractError(f"scores, ages and clicked have shapes {scores.shape}, {ages.shape}, {clicked.shape}")
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ContractError("open rows hold a score outside [0, 1]")
    if not len(scores):
        return OpenEstimate(version=version, open_rows=0, open_clicks=0, final_at=None)
    may_click = ~clicked & (ages < window_seconds)
    low, high = auc_bounds(scores, clicked, may_click)
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


def auc_bounds(
    scores: NDArray[np.floating], clicked: NDArray[np.bool_], may_click: NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    """Least and greatest AUC over all labelings of the rows `may_click` [n]; proof in the module's text.

    Labelings of one class have no AUC and are left out; (None, None) where all are such.
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
    """Expected number of (click, other) pairs that the click wins, over the expected number of pairs.

    Labels are taken as independent: the pair of i and j is (click, other) with probability p_i (1 - p_j). Probabilities
    of 0 and 1 give the AUC of these labels. Probabilities are in [0, 1], scores finite, of which only the order counts;
    both are [n]. None where no pair is possible: fewer than two rows, or all probabilities 0, or all 1.

    >>> expected_auc(np.array([0.0, 1.0, 0.0]), np.array([0.1, 0.2, 0.3]))
    0.5
    """
    order = np.argsort(scores)
    ordered, p = np.asarray(scores)[order], probabilities[order]
    firsts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(p)])
    if not len(firsts):
        return None
    sizes = np.diff(firsts, append=len(p))
    # A row is no pair with itself; with its own score it would be one, counted half.
    others_below = _below(1 - p, firsts, sizes) - (1 - p) / 2
    pairs = float(p.sum()) * float((1 - p).sum()) - float((p * (1 - p)).sum())
    if pairs <= 1e-12:
        return None
    return min(1.0, max(0.0, float((p * others_below).sum()) / pairs))


def _below(weights: NDArray[np.float64], firsts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each row of an order in runs of equal scores: the weight of the runs below and half that of its own."""
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
    """Of each row: 1 where clicked, 0 where it cannot click any more, else the probability that it still does."""
    arrived = np.where(may_click | clicked, delays.share_within(ages), 1.0)
    score = scores.astype(np.float64)
    p = np.minimum(score * _correction(score, arrived, clicked), 1.0)
    # Where p and F are both 1 a click would have come: the row is none after all.
    still = np.divide(p * (1 - arrived), 1 - p * arrived, out=np.zeros(len(p)), where=p * arrived < 1)
    return np.where(clicked, 1.0, np.where(may_click, still, 0.0))


def _correction(
    score: NDArray[np.float64], arrived: NDArray[np.float64], clicked: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Of each row [n]: clicks arrived over clicks expected by now among rows that score like it.

    Both are taken one click larger than they are, towards the ratio of all rows: without clicks nothing is corrected.
    """
    expected = score * arrived
    overall = (clicked.sum() + 1) / (expected.sum() + 1)
    parts = int(np.clip(clicked.sum() // _CLICKS_PER_PART, 1, _MAX_PARTS))
    order = np.argsort(score)
    ordered = score[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    # Parts of equally many expected clicks; rows of one score in one part, whatever their order.
    before = np.concatenate([[0.0], np.cumsum(expected[order])])
    of_run = np.minimum((before[firsts] * parts / max(before[-1], 1e-12)).astype(np.int64), parts - 1)
    part = np.empty(len(score), np.int64)
    part[order] = np.repeat(of_run, np.diff(firsts, append=len(score)))
    clicks, expected_clicks = np.bincount(part, clicked, parts), np.bincount(part, expected, parts)
    return np.asarray(((clicks + overall) / (expected_clicks + 1))[part], np.float64)
