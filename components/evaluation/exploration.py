"""Estimate the clicks that the candidate's order would gain, from randomized rankings.

The estimate uses held-out rows of lists in which the client swapped two neighbours at random by the
rule of `contracts.exploration`. The estimate also uses the candidate's scores of these rows. The
estimate is information for people, and no check of the gate uses it.

A pair of neighbours in a list is disputed if the candidate gives the second row a higher score than
the first row. The gain of a disputed pair is the number of clicks on its two rows in the swapped
order, minus the number in the served order. The rest of the list stays in the served order. The
estimate is the mean gain over all disputed pairs. A swap is the smallest step from the live order
towards the candidate's order, and the log contains swaps with known probabilities. The clicks on a
list in the candidate's own order are not estimated, because the log hardly ever contains this list.
The estimate also ignores the effect of a swap on other rows of the list.

The estimate uses these quantities of a list:

- k: number of rows of the list;
- s: probability with which one pair of the list was swapped;
- d: number of disputed pairs of the list;
- excess of a pair: the clicks on its two rows, minus its expected clicks;
- X: the term that the list adds to the estimate.

The term X depends on which pair was swapped:

- If a disputed pair was swapped, X is the excess of this pair.
- If any other pair was swapped, X is 0.
- If no pair was swapped, X is the total excess of all disputed pairs, times -s / ((1 - s)(k - 1)).

The expected clicks of a pair are the sum of its two served scores, times a ratio. The ratio divides
the clicks on all earlier lists by their expected clicks. The expected clicks of a pair do not
depend on the order of its rows. Therefore the mean of X is the total gain of the list's disputed
pairs, times s / (k - 1).

The estimate is the sum of X over all lists, divided by the expected number of swapped disputed
pairs. This expected number is the sum of s d / (k - 1) over all lists. The estimate is unbiased,
and a list counts in proportion to its probability s. The method is inverse propensity weighting.
The number of swaps is random. Subtracting the expected clicks removes the variance that this number
adds to the estimate. The subtraction adds no bias. Self-normalized weights remove the same variance
(Swaminathan and Joachims 2015, NeurIPS).

The interval is an empirical-Bernstein bound (Howard, Ramdas, McAuliffe and Sekhon 2021, Annals of
Statistics 49). The bound holds because |X| <= 2. For each lambda in (0, 1), the following process
is a nonnegative supermartingale with a mean of at most 1:

    exp((lambda / 2) sum(X - E X) - psi(lambda) sum (X / 2)^2)
    psi(lambda) = -log(1 - lambda) - lambda

Ville's inequality is applied to each of the `_LAMBDAS` and to both ends of the interval. The result
is a 95 % interval that holds for all numbers of lists simultaneously. Lists may differ, and the
click rate may change with time.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.evaluation.scoring import ScoredHoldout, column_batches
from evergreen.contracts.exploration import MAX_SHARE
from evergreen.contracts.manifests import ReorderingGain
from evergreen.contracts.raw_rows import POSITION, PROPENSITY, SCORE, feature_matrix

_COLUMNS = [POSITION, PROPENSITY, SCORE]
_ALPHA = 0.05
MIN_SWAPS = 30
"""Minimum number of swapped disputed pairs for an estimate."""
_LAMBDAS = 0.8 / 2.0 ** np.arange(7)
"""Values of lambda. The large values of lambda give narrow intervals for few swaps. The small
values of lambda give narrow intervals for a million swaps."""
_LARGEST = 2.0
"""Upper bound of |X|, because a pair has at most two clicks."""


class ShownRows(NamedTuple):
    """Rows of randomized rankings.

    Every array has the shape [n]. One list follows the other, and the rows of a list are in the
    order in which they were shown.
    """

    lists: NDArray[np.int64]
    """Request of each row, as in `ScoredHoldout`. Rows of one request are adjacent."""
    positions: NDArray[np.float64]
    propensities: NDArray[np.float64]
    labels: NDArray[np.float64]
    served: NDArray[np.float64]
    """Scores by which the list was ordered. 0 if unknown."""
    candidate: NDArray[np.float32]


def read_shown(folder: Path, scored: ScoredHoldout) -> ShownRows:
    """Return the held-out rows in `folder` that have a propensity.

    Args:
        folder: The raw held-out rows.
        scored: The same rows with scores, in the same order.

    Raises:
        ContractError: A file is unreadable or lacks a column.
    """
    batches = column_batches(folder, _COLUMNS)
    parts = [feature_matrix(batch, _COLUMNS, "float64", missing=np.nan) for batch in batches]
    numbers = np.concatenate([np.zeros((0, len(_COLUMNS))), *parts])
    shown = np.flatnonzero(~np.isnan(numbers[:, :2]).any(axis=1))
    positions, propensities, served = numbers[shown].T
    return ShownRows(
        lists=scored.requests[shown],
        positions=positions,
        propensities=propensities,
        labels=scored.labels[shown].astype(np.float64),
        served=np.nan_to_num(served),
        candidate=scored.candidate[shown],
    )


def reordering_gain(rows: ShownRows) -> ReorderingGain | None:
    """Return the estimate and its interval, or None if no list was explored.

    Lists are ignored if k is 1, if positions 1 to k are incomplete, or if their propensities do not
    follow the rule.
    """
    explored = _explored_pairs(rows)
    upper, of_pair, is_swapped = explored.upper, explored.lists, explored.is_swapped
    live = np.arange(len(rows.labels))
    live[upper[is_swapped]] += 1
    live[upper[is_swapped] + 1] -= 1
    first, second = live[upper], live[upper + 1]
    disputed = rows.candidate[second] > rows.candidate[first]
    clicks, scores = (each[first] + each[second] for each in (rows.labels, rows.served))
    excess = clicks - np.minimum(scores * _calibration_before(clicks, scores, of_pair), _LARGEST)
    num_pairs, num_swapped = np.bincount(of_pair), np.bincount(of_pair, is_swapped)
    num_lists, num_swaps = int(np.count_nonzero(num_pairs)), int((disputed & is_swapped).sum())
    if not num_lists:
        return None
    of_pair_odds = explored.share / num_pairs[of_pair]
    if_stayed = np.where(num_swapped[of_pair] == 0, -of_pair_odds / (1.0 - explored.share), 0.0)
    sums = np.asarray(
        np.bincount(of_pair, disputed * excess * np.where(is_swapped, 1.0, if_stayed)), np.float64
    )
    found = ReorderingGain(
        num_lists=num_lists, num_swaps=num_swaps, disputed_share=float(disputed.mean())
    )
    if num_swaps < MIN_SWAPS:
        return found
    expected_swaps = float((disputed * of_pair_odds).sum())
    gain, radius = float(sums.sum()) / expected_swaps, deviation_bound(sums) / expected_swaps
    return replace(
        found, gain=gain, low=max(gain - radius, -_LARGEST), high=min(gain + radius, _LARGEST)
    )


def deviation_bound(sums: NDArray[np.float64]) -> float:
    """Return a bound on the distance between the sum of the terms and its expectation.

    The bound holds for all n simultaneously, with a probability of at least 1 - `_ALPHA`. Each of
    the n terms is in [-2, 2].
    """
    variance = float(np.square(sums / _LARGEST).sum())
    price = math.log(2 * len(_LAMBDAS) / _ALPHA)
    return _LARGEST * float(
        ((price + (-np.log1p(-_LAMBDAS) - _LAMBDAS) * variance) / _LAMBDAS).min()
    )


def _calibration_before(
    clicks: NDArray[np.float64], scores: NDArray[np.float64], of_pair: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return each pair's ratio of clicks to expected clicks.

    The ratio uses the clicks and expected clicks of all earlier lists. For the first list, the
    ratio is 1.
    """
    sums = [np.bincount(of_pair, each) for each in (clicks, scores)]
    seen, expected = (1.0 + np.cumsum(each) - each for each in sums)
    before: NDArray[np.float64] = (seen / expected)[of_pair]
    return before


class _ExploredPairs(NamedTuple):
    """Pairs of neighbours.

    Every array has the shape [pairs]. The lists of the pairs are complete and follow the rule of
    `contracts.exploration`.
    """

    upper: NDArray[np.int64]
    """Row in the upper position of the pair, as shown."""
    lists: NDArray[np.int64]
    """Index of the list that contains the pair."""
    share: NDArray[np.float64]
    """Probability with which one pair of the list was swapped."""
    is_swapped: NDArray[np.bool_]


def _explored_pairs(rows: ShownRows) -> _ExploredPairs:
    is_first = np.append(True, rows.lists[1:] != rows.lists[:-1])[: len(rows.lists)]
    of_row, starts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
    sizes = np.bincount(of_row)
    out_of_order = np.bincount(
        of_row, rows.positions != np.arange(len(of_row)) - starts[of_row] + 1
    )
    upper = np.flatnonzero(~is_first[1:])
    is_low = rows.propensities < MAX_SHARE
    is_swapped = is_low[upper] & is_low[upper + 1]
    num_low, num_swapped = (
        np.bincount(of_row, is_low),
        np.bincount(of_row[upper], is_swapped, len(sizes)),
    )
    of_pair = np.where(
        num_low > 0,
        np.bincount(of_row, is_low * rows.propensities) / 2,
        1 - rows.propensities[starts],
    )
    share = of_pair * (sizes - 1)
    by_the_rule = (
        (num_swapped <= 1) & (num_low == 2 * num_swapped) & (share > 0) & (share < MAX_SHARE)
    )
    used = (by_the_rule & (out_of_order == 0))[of_row[upper]]
    upper, is_swapped = upper[used], is_swapped[used]
    return _ExploredPairs(upper, of_row[upper], share[of_row[upper]], is_swapped)
