"""Metric definitions: AUC and its uncertainty, log loss, calibration, rankings, score spread.

Evaluation's gate, the progressive validation of training, the simulator's Bayes-optimal AUC and the
monitor use these definitions, so that their numbers are comparable. An undefined number is `None`,
never 0.5 or 0.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evergreen.runtime.errors import ContractError

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
MIN_DEGREES = 3
"""Minimum degrees of freedom of an interval. With only 2 degrees of freedom, the standard error
itself may be wrong by a large factor."""
_ECE_BINS = 15
_NO_RATE = 1e-12
"""Tolerance for recognizing a click rate as 0 or 1. Weights are rounded, so the rate may not be
exact."""


class AucEstimate(NamedTuple):
    """An AUC, its standard error with degrees of freedom, and its 95 % interval within (0, 1)."""

    auc: float
    standard_error: float
    degrees: float
    low: float
    high: float


class AucDifference(NamedTuple):
    """Difference of two AUCs on the same rows, with a two-sided p-value.

    The other fields have the same meaning as in `AucEstimate`.
    """

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
            f"labels and scores have shapes {label_array.shape} and {score_array.shape}, expected "
            "one length"
        )
    if not ((label_array == 0) | (label_array == 1)).all():
        raise ContractError("labels hold values other than 0 and 1")
    if not np.isfinite(score_array).all():
        raise ContractError(
            f"{np.count_nonzero(~np.isfinite(score_array))} scores are NaN or infinite"
        )
    return label_array.astype(bool), score_array


def _count_smaller(
    values: NDArray[np.float64], against: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Count the numbers in `against` [m] that are smaller than each of `values` [n].

    A number that is equal adds one half to the count.
    """
    ordered = np.sort(against)
    wins: NDArray[np.float64] = (
        np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right")
    ) / 2.0
    return wins


def roc_auc(labels: ArrayLike, scores: ArrayLike) -> float | None:
    """Return the exact area under the ROC curve, or None if all rows have the same label.

    The AUC is the share of pairs of a click and a non-click in which the click has the higher score
    (Mann-Whitney form). Ties count half.

    Args:
        labels: 0 or 1, [n].
        scores: Finite numbers, [n]. Only the order of the scores matters.

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
    return float(_count_smaller(score[click], score[~click]).sum()) / (num_clicks * num_others)


def _placements(
    click: NDArray[np.bool_], score: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return the placement of each click and of each non-click.

    The placement of a click is the share of non-clicks with a lower score. The placement of a
    non-click is the share of clicks with a higher score.
    """
    num_clicks, num_others = int(click.sum()), int((~click).sum())
    # One sort is sufficient. Among rows with equal scores, each row of the other label counts as
    # half a row.
    order, firsts = _runs(score)
    sizes = np.diff(firsts, append=len(score))
    clicks_in = np.add.reduceat(click[order].astype(np.int64), firsts)
    clicks_to, others_to = np.cumsum(clicks_in), np.cumsum(sizes - clicks_in)
    below = np.empty((2, len(score)))
    below[:, order] = np.repeat(
        [others_to - (sizes - clicks_in) / 2.0, clicks_to - clicks_in / 2.0], sizes, axis=1
    )
    return below[0, click] / num_others, 1.0 - below[1, ~click] / num_clicks


def _runs(score: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sort order of the scores, and the start of each group of equal scores.

    There must be at least one score.
    """
    order = np.argsort(score)
    ordered = score[order]
    return order, np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


class Deviation(NamedTuple):
    """Uncertainty of an estimate: a standard error with the degrees of freedom of Student's t."""

    standard_error: float
    degrees: float

    @property
    def half_width(self) -> float:
        """Return half the width of the 95 % interval."""
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees, 0.975)) * self.standard_error


def grouped_deviation(*samples: tuple[NDArray[np.float64], NDArray[np.int64]]) -> Deviation | None:
    """Add the means of all samples, and return the standard error of this sum.

    Values of one group depend on each other, also across samples. Without a correction, the error
    would be too small if groups are few or uneven. Each group's contribution is therefore divided
    by the square root of 1 minus the group's share of the sample (the CR2 form of Bell and
    McCaffrey 2002). If every value is its own group, the result is the usual standard error of a
    mean. The degrees of freedom are computed from the squared contributions of the groups
    (Satterthwaite 1946). The degrees of freedom are limited to the number of groups in the smallest
    sample, minus one. docs/design/gate.md reports the measured coverage of the intervals.

    Returns None with fewer than `MIN_DEGREES` degrees of freedom.

    Args:
        samples: Pair of arrays for each sample. The first array contains the values, [n]. The
            second array contains the group number of each value, [n]. Group numbers start at 0.
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
    """Return the probability that Student's t is further from 0 than `t`, on both sides."""
    # SciPy is imported inside the function. The inference client uses `roc_auc` of this module and
    # does not install SciPy.
    from scipy.special import stdtr

    return float(2.0 * stdtr(degrees, -abs(t)))


def group_numbers(groups: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """Return the number of each row's group, from 0. `groups` are strings or integers, [num_rows].

    Raises:
        ContractError: the number of groups differs from the number of rows.
    """
    named = np.asarray(groups)
    if named.shape != (num_rows,):
        raise ContractError(
            f"groups have shape {named.shape}, expected one for each of {num_rows} rows"
        )
    numbers: NDArray[np.int64] = np.unique(named, return_inverse=True)[1].reshape(-1)
    return numbers


def auc_estimate(labels: ArrayLike, scores: ArrayLike, *, groups: ArrayLike) -> AucEstimate | None:
    """Return the AUC with DeLong's standard error for rows that come in groups.

    The method is that of DeLong et al. 1988 and, for groups, Obuchowski 1997. The interval is
    computed for the AUC's logit with Student's t, because an AUC near 1 has a skewed distribution
    and must stay below 1. If each group has one row, the standard error is DeLong's original one.

    Returns None if there is no interval (see `grouped_deviation`), or if the AUC is exactly 0 or 1.

    Args:
        labels: 0 or 1, [n].
        scores: Finite numbers, [n].
        groups: Request of each row, strings or integers, [n]. Rows of one user in two requests are
            in two groups.
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
    """Return the AUC of `scores` minus the AUC of `reference` on the same rows, by paired DeLong.

    Arguments are as in `auc_estimate`. If both scores order the rows equally, the difference is
    exactly 0 and the p-value is 1. Returns None if there is no interval (see `grouped_deviation`),
    or if the difference has no variance, as between a perfect and a constant model.
    """
    click, score = _checked(labels, scores)
    _, other = _checked(labels, reference)
    group = group_numbers(groups, len(click))
    if click.all() or not click.any():
        return None
    (won, lost), (won_reference, lost_reference) = (
        _placements(click, score),
        _placements(click, other),
    )
    won_more, lost_more = won - won_reference, lost - lost_reference
    difference = float(won_more.mean())
    deviation = grouped_deviation((won_more, group[click]), (lost_more, group[~click]))
    if deviation is None or (difference and not deviation.standard_error):
        return None
    error, half = deviation.standard_error, deviation.half_width
    p_value = student_p_value(difference / error, deviation.degrees) if error else 1.0
    return AucDifference(
        difference, *deviation, low=difference - half, high=difference + half, p_value=p_value
    )


def row_log_losses(labels: ArrayLike, scores: ArrayLike) -> NDArray[np.float64]:
    """Return the negative log likelihood of each row [n] in nats.

    Probabilities are clipped to [1e-7, 1 - 1e-7].
    """
    click, score = _checked(labels, scores)
    clipped = np.clip(score, 1e-7, 1 - 1e-7)
    losses: NDArray[np.float64] = -np.where(click, np.log(clipped), np.log1p(-clipped))
    return losses


def row_weighted(values: NDArray[np.float64], weights: ArrayLike | None) -> NDArray[np.float64]:
    """Return the values [n] rescaled so that their plain mean is the weighted mean.

    The difference between a value and the weighted mean is multiplied by the value's weight and
    divided by the mean weight. Pass the returned values to `grouped_deviation` to get the standard
    error of the weighted mean, which is a ratio of sums. If `weights` is None, the values are
    returned unchanged. If all weights are 0, the mean is undefined, and the result is empty.
    """
    if weights is None:
        return values
    weight = np.asarray(weights, np.float64)
    if not weight.any():
        return values[:0]
    mean = float(np.average(values, weights=weight))
    weighted: NDArray[np.float64] = mean + weight / weight.mean() * (values - mean)
    return weighted


def log_loss(
    labels: ArrayLike, scores: ArrayLike, *, weights: ArrayLike | None = None
) -> float | None:
    """Return the weighted mean of `row_log_losses`.

    Returns None if there is no row, or if every weight is 0.
    """
    losses = row_weighted(row_log_losses(labels, scores), weights)
    return float(losses.mean()) if len(losses) else None


def click_rate(labels: ArrayLike, *, weights: ArrayLike | None = None) -> float | None:
    """Return the weighted share of clicks.

    Returns None if there is no row, or if every weight is 0.
    """
    clicks = row_weighted(np.asarray(labels, np.float64), weights)
    return float(clicks.mean()) if len(clicks) else None


def normalized_entropy(
    labels: ArrayLike, scores: ArrayLike, *, weights: ArrayLike | None = None
) -> float | None:
    """Return the log loss divided by the entropy of the click rate (He et al. 2014).

    Returns None if all rows have the same label.
    """
    rate, loss = click_rate(labels, weights=weights), log_loss(labels, scores, weights=weights)
    if rate is None or loss is None or not _NO_RATE < rate < 1 - _NO_RATE:
        return None
    return loss / float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def calibration(
    labels: ArrayLike, scores: ArrayLike, *, weights: ArrayLike | None = None
) -> float | None:
    """Return the predicted clicks divided by the observed clicks, both weighted.

    The result is 1 for a calibrated model. Returns None if there is no click.
    """
    click, score = _checked(labels, scores)
    if weights is not None:
        click, score = (
            click * np.asarray(weights, np.float64),
            score * np.asarray(weights, np.float64),
        )
    return float(score.sum() / click.sum()) if click.any() else None


def expected_calibration_error(
    labels: ArrayLike, scores: ArrayLike, *, bins: int = _ECE_BINS
) -> float | None:
    """Return the mean absolute difference between the mean score and the click rate of a bin.

    The error is the sum over bins of (rows of the bin / rows) |mean score - click rate| (Naeini et
    al. 2015). The bins split the rows by rank (Nixon et al. 2019), because at click rates of a few
    percent all bins of equal width except one would be empty. Rows with equal scores share their
    click rate, so that their order does not matter at the edge of a bin. Even calibrated scores
    have an error above 0, because noise alone adds about sqrt(2 bins rate / (pi rows)).

    Returns None with fewer rows than bins.

    Args:
        labels: 0 or 1, [n].
        scores: Probabilities, [n].
        bins: Number of bins, at least 1.

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
    """Ranking quality within each user's rows.

    Values are None if no user has both a click and a row without a click.
    """

    gauc: float | None = None
    """Mean of the users' AUCs, weighted by their rows (Zhu et al. 2017, arXiv 1706.06978)."""
    ndcg: float | None = None
    """Mean of the users' NDCGs, with the same weight for each user. A user's NDCG covers all rows
    of the user, ordered by score."""


def user_quality(labels: ArrayLike, scores: ArrayLike, *, users: ArrayLike) -> UserQuality:
    """Return GAUC and NDCG over the users who have both a click and a row without a click.

    If several rows of a user have equal scores, each of these rows gets the mean discount of their
    positions.

    Args:
        labels: 0 or 1, [n].
        scores: Finite numbers, [n].
        users: Strings or integers, [n].

    Raises:
        ContractError: as in `roc_auc`, or the number of users differs from the number of rows.

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
    rank = np.arange(len(user)) - firsts[user]
    middle = np.repeat(rank[ties] + (tie_sizes - 1) / 2.0, tie_sizes)
    discount = 1.0 / np.log2(rank + 2.0)
    shared = np.repeat(np.add.reduceat(discount, ties) / tie_sizes, tie_sizes)
    # If u clicks are the first of n rows, the sum of their positions, counted from 0, is u (u - 1)
    # / 2.
    lost = np.bincount(user, middle * click) - clicks * (clicks - 1) / 2.0
    aucs = 1.0 - lost / (clicks * (sizes - clicks))
    ideal = np.cumsum(1.0 / np.log2(np.arange(clicks.max()) + 2.0))[clicks - 1]
    gains = np.bincount(user, shared * click) / ideal
    return UserQuality(float(np.average(aucs, weights=sizes)), float(gains.mean()))


def hit_at_k(positions_of_clicks: ArrayLike, *, k: int) -> bool:
    """Return whether at least one click of a list has a position up to `k`, counted from 1.

    The mean over all lists is the hit rate@k. A list without a click counts as a miss, because the
    metric measures how often users find nothing to click. If lists without a click were skipped,
    every list of at most k rows would be a hit.
    """
    return bool((_checked_positions(positions_of_clicks, k) <= k).any())


def ndcg_at_k(positions_of_clicks: ArrayLike, *, k: int) -> float | None:
    """Return the normalized discounted cumulative gain of one list, or None without a click.

    The gain of a click is 1. DCG@k is the sum of 1 / log2(1 + position) over clicks at positions up
    to k (Jarvelin and Kekalainen 2002). The DCG is divided by the DCG of the best order, in which
    all clicks are at the first positions. A list without clicks contains no information about its
    order. A mean over lists should omit lists for which the result is None.

    Args:
        positions_of_clicks: Positions of the clicked rows in the list, counted from 1. Each
            position occurs once. The order does not matter.
        k: Last position whose click is included, at least 1.

    >>> ndcg_at_k([1, 3], k=10)
    0.9197207891481876
    """
    positions = _checked_positions(positions_of_clicks, k)
    if not len(positions):
        return None
    ideal = (1.0 / np.log2(np.arange(2, min(k, len(positions)) + 2))).sum()
    return float((1.0 / np.log2(1.0 + positions[positions <= k])).sum() / ideal)


def _checked_positions(positions: ArrayLike, k: int) -> NDArray[np.float64]:
    checked = np.asarray(positions, np.float64)
    if k < 1:
        raise ContractError(f"k is {k}, expected at least 1")
    if (checked < 1).any():
        raise ContractError(f"a position in a list is {checked.min():g}, expected at least 1")
    return checked


def sequential_binomial(failures: int, requests: int, allowed: float) -> float:
    """Return the p-value of the hypothesis that the failure rate is at most `allowed`.

    The p-value remains valid if it is computed again and again while requests arrive. The mean of
    likelihood ratios for higher rates is a nonnegative martingale if the true rate is the allowed
    rate. By Ville's inequality (1939), this mean exceeds 1 / p at any time with a probability of at
    most p.

    Args:
        failures: Failed requests.
        requests: All requests.
        allowed: Allowed rate of failures, which is assumed to be known exactly.

    >>> sequential_binomial(0, 1000, 0.01), sequential_binomial(1000, 1000, 1.0)
    (1.0, 1.0)
    >>> sequential_binomial(50, 1000, 0.01) < 1e-6 < 0.05 < sequential_binomial(15, 1000, 0.01)
    True
    """
    if allowed >= 1:
        return 1.0
    logs = []
    for halvings in range(11):
        # The mixture contains 11 failure rates, from almost 1 down to slightly above the allowed
        # rate.
        rate = min(allowed + (1 - allowed) * 0.5**halvings, 0.999)
        logs.append(
            failures * math.log(rate / allowed)
            + (requests - failures) * math.log((1 - rate) / (1 - allowed))
        )
    largest = max(logs)
    log_mean = largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))
    return math.exp(min(-log_mean, 0.0))
