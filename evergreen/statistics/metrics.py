"""Metric definitions: AUC and how uncertain it is, log loss, normalized entropy, calibration, ranked lists, scores.

Joins evaluation's gate, training's progressive validation, the simulated world's best-possible AUC and the monitor: one
definition, so their numbers can be compared. A number that does not exist is `None`, never 0.5 or 0.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evergreen.runtime.errors import ContractError

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
MIN_DEGREES = 3
"""Degrees of freedom below which no interval is given: with 2 the standard error itself may be wrong several times."""
ECE_BINS = 15
_NO_RATE = 1e-12
"""Click rates that are 0 or 1 but for the rounding of weights lie within it of them."""


class AucEstimate(NamedTuple):
    """An AUC, its standard error with its degrees of freedom, and its 95 % interval within (0, 1)."""

    auc: float
    standard_error: float
    degrees: float
    low: float
    high: float


class AucDifference(NamedTuple):
    """Difference of two AUCs on the same rows, with a two-sided p-value; else as `AucEstimate`."""

    auc: float
    standard_error: float
    degrees: float
    low: float
    high: float
    p_value: float


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    label_array, score_array = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if label_array.shape != score_array.shape or label_array.ndim != 1:
        raise ContractError(
            f"labels and scores have shapes {label_array.shape} and {score_array.shape}, expected one same length"
        )
    if not ((label_array == 0) | (label_array == 1)).all():
        raise ContractError("labels hold values other than 0 and 1")
    if not np.isfinite(score_array).all():
        raise ContractError(f"{np.count_nonzero(~np.isfinite(score_array))} scores are NaN or infinite")
    return label_array.astype(bool), score_array


def _wins(values: NDArray[np.float64], against: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each of `values` [n]: how many of `against` [m] lie below it, those equal to it counted half."""
    ordered = np.sort(against)
    wins: NDArray[np.float64] = (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right")) / 2.0
    return wins


def roc_auc(labels: ArrayLike, scores: ArrayLike) -> float | None:
    """Exact area under the ROC curve, ties counted half; `None` unless both classes are present.

    Mann-Whitney form: the share of (click, other) pairs in which the click scores higher. Labels are 0 or 1, scores
    finite numbers of which only the order counts; both are [n].

    Raises:
        ContractError: shapes differ, a label is neither 0 nor 1, or a score is not finite.

    >>> roc_auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
    0.75
    >>> roc_auc([1, 1], [0.2, 0.3]) is None
    True
    """
    click, score = _checked(labels, scores)
    num_clicks = int(np.count_nonzero(click))
    num_others = len(click) - num_clicks
    if not num_clicks or not num_others:
        return None
    return float(_wins(score[click], score[~click]).sum()) / (num_clicks * num_others)


def _placements(click: NDArray[np.bool_], score: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Each click's share of non-clicks below it, and each non-click's share of clicks above it."""
    num_clicks, num_others = int(click.sum()), int((~click).sum())
    # One sort; what ties has equal numbers, of which the own half counts.
    order, firsts = _runs(score)
    sizes = np.diff(firsts, append=len(score))
    clicks_in = np.add.reduceat(click[order].astype(np.int64), firsts)
    clicks_to, others_to = np.cumsum(clicks_in), np.cumsum(sizes - clicks_in)
    below = np.empty((2, len(score)))
    below[:, order] = np.repeat([others_to - (sizes - clicks_in) / 2.0, clicks_to - clicks_in / 2.0], sizes, axis=1)
    return below[0, click] / num_others, 1.0 - below[1, ~click] / num_clicks


def _runs(score: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order of at least one score, and where in it each run of equal scores begins."""
    order = np.argsort(score)
    ordered = score[order]
    return order, np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


class Deviation(NamedTuple):
    """How far an estimate may lie from the truth: a standard error, and the degrees of freedom of its Student's t."""

    standard_error: float
    degrees: float

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees, 0.975)) * self.standard_error


def grouped_deviation(*samples: tuple[NDArray[np.float64], NDArray[np.int64]]) -> Deviation | None:
    """Deviation of the sum of the samples' means, where values of one group depend on each other, across samples too.

    What a group adds to each mean is divided by the root of the share of the sample that is not its own, else few or
    uneven groups would make the error too small (the CR2 form of Bell and McCaffrey 2002). With every value its own
    group this is the usual standard error of a mean. The degrees of freedom are Satterthwaite's (1946) for the squares
    of the groups' parts, and at most one less than the groups of any sample. docs/evaluation.md has the coverage.

    A sample is values [n], and the group of each, an integer from 0, [n]. None with fewer than `MIN_DEGREES` degrees.
    """
    parts = np.zeros(max((int(group.max()) + 1 for _, group in samples if len(group)), default=0))
    fewest = len(parts)
    for values, group in samples:
        if not len(values):
            return None
        shares = np.bincount(group, minlength=len(parts)) / len(values)
        fewest = min(fewest, int(np.count_nonzero(shares)))
        if fewest <= MIN_DEGREES:
            return None
        sums = np.bincount(group, values - values.mean(), minlength=len(parts)) / len(values)
        parts += sums / np.sqrt(1.0 - shares)
    squares = np.square(parts)
    variance, spread = float(squares.sum()), float(squares.var()) * len(parts)
    degrees = min(2.0 * variance**2 / spread if spread else math.inf, fewest - 1.0)
    return Deviation(math.sqrt(variance), degrees) if degrees >= MIN_DEGREES else None


def student_p_value(t: float, degrees: float) -> float:
    """Return the probability that Student's t with so many degrees of freedom lies further from 0 than `t`."""
    # SciPy is imported where it is used: the inference client takes its AUC from this module and has no SciPy.
    from scipy.special import stdtr

    return float(2.0 * stdtr(degrees, -abs(t)))


def group_numbers(groups: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """The `groups` (strings or integers, [num_rows]) numbered from 0.

    Raises:
        ContractError: there are more or fewer of them than rows.
    """
    named = np.asarray(groups)
    if named.shape != (num_rows,):
        raise ContractError(f"groups have shape {named.shape}, expected one for each of {num_rows} rows")
    numbers: NDArray[np.int64] = np.unique(named, return_inverse=True)[1].reshape(-1)
    return numbers


def auc_estimate(labels: ArrayLike, scores: ArrayLike, *, groups: ArrayLike) -> AucEstimate | None:
    """AUC with DeLong's standard error (DeLong et al. 1988) for rows that come in groups (Obuchowski 1997).

    The interval is one of the AUC's logit by Student's t: an AUC near 1 is skewed, and never lies above 1. Where every
    row is its own group the standard error is DeLong's. Labels are 0 or 1, scores finite; `groups` is the request of
    each row, strings or integers: rows of one request share their user. All are [n].
    None where there is no interval: see `grouped_deviation`; an AUC of exactly 0 or 1 has none either.
    """
    click, score = _checked(labels, scores)
    group = group_numbers(groups, len(click))
    if click.all() or not click.any():
        return None
    won, lost = _placements(click, score)
    auc = float(won.mean())
    deviation = grouped_deviation((won, group[click]), (lost, group[~click]))
    if deviation is None or not 0.0 < auc < 1.0:
        return None
    logit, half = math.log(auc / (1.0 - auc)), deviation.half_width / (auc * (1.0 - auc))
    low, high = ((1.0 + math.tanh(end / 2.0)) / 2.0 for end in (logit - half, logit + half))
    return AucEstimate(auc, *deviation, low=low, high=high)


def auc_difference(
    labels: ArrayLike, scores: ArrayLike, reference: ArrayLike, *, groups: ArrayLike
) -> AucDifference | None:
    """AUC of `scores` minus AUC of `reference` on the same rows, by paired DeLong; groups as in `auc_estimate`.

    None where there is no interval: see `grouped_deviation`; a difference without any spread, of a perfect and a
    constant model, has none either. Scores that order the rows alike differ by exactly 0 with a p-value of 1.
    """
    click, score = _checked(labels, scores)
    _, other = _checked(labels, reference)
    group = group_numbers(groups, len(click))
    if click.all() or not click.any():
        return None
    (won, lost), (won_reference, lost_reference) = _placements(click, score), _placements(click, other)
    won_more, lost_more = won - won_reference, lost - lost_reference
    difference = float(won_more.mean())
    deviation = grouped_deviation((won_more, group[click]), (lost_more, group[~click]))
    if deviation is None or (difference and not deviation.standard_error):
        return None
    error, half = deviation.standard_error, deviation.half_width
    p_value = student_p_value(difference / error, deviation.degrees) if error else 1.0
    return AucDifference(difference, *deviation, low=difference - half, high=difference + half, p_value=p_value)


def row_log_losses(labels: ArrayLike, scores: ArrayLike) -> NDArray[np.float64]:
    """Negative log likelihood of each row [n] in nats, probabilities clipped to [1e-7, 1 - 1e-7]."""
    click, score = _checked(labels, scores)
    clipped = np.clip(score, 1e-7, 1 - 1e-7)
    losses: NDArray[np.float64] = -np.where(click, np.log(clipped), np.log1p(-clipped))
    return losses


def row_weighted(values: NDArray[np.float64], weights: ArrayLike | None) -> NDArray[np.float64]:
    """The values [n] with the weighted mean as their mean, and each as far from it as its weight over the mean weight.

    So `grouped_deviation` of them is that of the weighted mean, a ratio of sums. Without weights they stay as they are;
    where all weights are 0 there is no mean, and no value.
    """
    if weights is None:
        return values
    weight = np.asarray(weights, np.float64)
    if not weight.any():
        return values[:0]
    mean = float(np.average(values, weights=weight))
    weighted: NDArray[np.float64] = mean + weight / weight.mean() * (values - mean)
    return weighted


def log_loss(labels: ArrayLike, scores: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """Mean of `row_log_losses`, each row counted by its weight where some are given; `None` without any."""
    losses = row_weighted(row_log_losses(labels, scores), weights)
    return float(losses.mean()) if len(losses) else None


def click_rate(labels: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """Share of clicks, each row counted by its weight where some are given; `None` without any."""
    clicks = row_weighted(np.asarray(labels, np.float64), weights)
    return float(clicks.mean()) if len(clicks) else None


def normalized_entropy(labels: ArrayLike, scores: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """Log loss divided by the entropy of the base rate (He et al. 2014); `None` unless both classes are present."""
    rate, loss = click_rate(labels, weights=weights), log_loss(labels, scores, weights=weights)
    if rate is None or loss is None or not _NO_RATE < rate < 1 - _NO_RATE:
        return None
    return loss / float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def calibration(labels: ArrayLike, scores: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """Expected clicks per observed click (1 = calibrated), both counted by weight; `None` without a click."""
    click, score = _checked(labels, scores)
    if weights is not None:
        click, score = click * np.asarray(weights, np.float64), score * np.asarray(weights, np.float64)
    return float(score.sum() / click.sum()) if click.any() else None


def expected_calibration_error(labels: ArrayLike, scores: ArrayLike, *, bins: int = ECE_BINS) -> float | None:
    """Mean distance of expected and observed click rate over bins of equal mass; `None` with fewer rows than bins.

    Sum over bins of (rows of the bin / rows) |mean score - click rate| (Naeini et al. 2015), the bins cut the rows by
    rank (Nixon et al. 2019): bins of equal width would leave all but one empty at click rates of some percent. Rows of
    one score share their click rate, so that the order of rows does not matter where a bin's edge falls among them. It
    is not 0 for calibrated scores: noise alone adds about sqrt(2 bins rate / (pi rows)). Labels are 0 or 1, scores
    probabilities, both [n]; `bins` is at least 1.

    >>> expected_calibration_error([0, 1, 1, 1], [0.25, 0.25, 0.75, 0.75], bins=2)
    0.25
    """
    click, score = _checked(labels, scores)
    if bins < 1:
        raise ContractError(f"bins is {bins}, expected at least 1")
    if len(score) < bins:
        return None
    order, firsts = _runs(score)
    sizes = np.diff(firsts, append=len(score))
    rates = np.repeat(np.add.reduceat(click[order].astype(np.float64), firsts) / sizes, sizes)
    edges = np.arange(bins) * len(score) // bins
    return float(np.abs(np.add.reduceat(score[order] - rates, edges)).sum() / len(score))


class UserQuality(NamedTuple):
    """How well scores order the rows of each user; None where no user has both a click and a row without one."""

    gauc: float | None = None
    """Mean of the users' AUCs, weighted by their rows (Zhu et al. 2017, arXiv 1706.06978)."""
    ndcg: float | None = None
    """Mean of the NDCGs of all rows of a user, ordered by score; each user counts once."""


def user_quality(labels: ArrayLike, scores: ArrayLike, *, users: ArrayLike) -> UserQuality:
    """GAUC and NDCG over users who have both a click and a row without one.

    Rows of one user with equal scores share the discounts of the places that they take together. Labels are 0 or 1,
    scores finite, users strings or integers; all are [n].

    Raises:
        ContractError: as `roc_auc`, or there is not one user for each row.

    >>> user_quality([1, 0, 0, 1], [0.9, 0.1, 0.8, 0.7], users=["a", "a", "b", "b"]).gauc
    0.5
    """
    click, score = _checked(labels, scores)
    user = group_numbers(users, len(click))
    clicks, sizes = np.bincount(user, click), np.bincount(user)
    is_ordered = (clicks > 0) & (clicks < sizes)
    order = np.lexsort((-score, user))
    order = order[is_ordered[user[order]]]
    if not len(order):
        return UserQuality()
    click, score, user = click[order], score[order], group_numbers(user[order], len(order))
    clicks, sizes = np.bincount(user, click).astype(np.int64), np.bincount(user)
    firsts = np.cumsum(sizes) - sizes
    ties = np.flatnonzero(np.concatenate([[True], (np.diff(user) != 0) | (np.diff(score) != 0)]))
    tie_sizes = np.diff(ties, append=len(user))
    place = np.arange(len(user)) - firsts[user]
    middle = np.repeat(place[ties] + (tie_sizes - 1) / 2.0, tie_sizes)
    discount = 1.0 / np.log2(place + 2.0)
    shared = np.repeat(np.add.reduceat(discount, ties) / tie_sizes, tie_sizes)
    # Of u clicks among n rows: places from 0 sum to u (u - 1) / 2 where all clicks come first.
    lost = np.bincount(user, middle * click) - clicks * (clicks - 1) / 2.0
    aucs = 1.0 - lost / (clicks * (sizes - clicks))
    ideal = np.cumsum(1.0 / np.log2(np.arange(clicks.max()) + 2.0))[clicks - 1]
    gains = np.bincount(user, shared * click) / ideal
    return UserQuality(float(np.average(aucs, weights=sizes)), float(gains.mean()))


def hit_at_k(positions_of_clicks: ArrayLike, *, k: int) -> bool:
    """Whether one of a list's clicks lies at a place up to `k`, places counted from 1.

    The hit rate@k is its mean over all lists. Lists without a click count as misses: what was shown and not clicked is
    the failure that it measures, and where lists are no longer than k all others would be hits by definition.
    """
    return bool((_places(positions_of_clicks, k) <= k).any())


def ndcg_at_k(positions_of_clicks: ArrayLike, *, k: int) -> float | None:
    """Normalized discounted cumulative gain of one list, a click's gain being 1; `None` without a click.

    DCG@k is the sum of 1 / log2(1 + place) over clicks at places up to k (Jarvelin and Kekalainen 2002); it is divided
    by that of the same number of clicks at the first places. Without a click both are 0 and the list says nothing of
    the order: a mean over lists leaves it out.

    Args:
        positions_of_clicks: Places of the clicked rows in their list, from 1, each once, in any order.
        k: Last place that counts, at least 1.

    >>> ndcg_at_k([1, 3], k=10)
    0.9197207891481876
    """
    places = _places(positions_of_clicks, k)
    if not len(places):
        return None
    ideal = (1.0 / np.log2(np.arange(2, min(k, len(places)) + 2))).sum()
    return float((1.0 / np.log2(1.0 + places[places <= k])).sum() / ideal)


def _places(positions: ArrayLike, k: int) -> NDArray[np.float64]:
    places = np.asarray(positions, np.float64)
    if k < 1:
        raise ContractError(f"k is {k}, expected at least 1")
    if (places < 1).any():
        raise ContractError(f"a place in a list is {places.min():g}, expected at least 1")
    return places


def sequential_binomial(failures: int, requests: int, allowed: float) -> float:
    """A p-value of `failures` among `requests` against a rate of at most `allowed`, valid at every look.

    The mean of likelihood ratios of higher rates is, under the rate allowed, a nonnegative martingale, so it ever
    exceeds 1 / p with probability p at most (Ville 1939). The rate allowed is taken as known.

    >>> sequential_binomial(0, 1000, 0.01), sequential_binomial(1000, 1000, 1.0)
    (1.0, 1.0)
    >>> sequential_binomial(50, 1000, 0.01) < 1e-6 < 0.05 < sequential_binomial(15, 1000, 0.01)
    True
    """
    if allowed >= 1:
        return 1.0
    logs = []
    for halvings in range(11):
        # From just above the rate allowed to nearly all.
        rate = min(allowed + (1 - allowed) * 0.5**halvings, 0.999)
        logs.append(failures * math.log(rate / allowed) + (requests - failures) * math.log((1 - rate) / (1 - allowed)))
    largest = max(logs)
    log_mean = largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))
    return math.exp(min(-log_mean, 0.0))
