"""What the candidate's order would gain in clicks, told by lists of which a client swapped two neighbours at random.

In: held-out rows that were shown by the rule of `contracts.exploration`, and the candidate's scores of them. Out: an
estimate with its interval, for people; the gate does not ask it.

Two neighbours of a list are disputed where the candidate scores the lower one higher. The gain is the mean, over all
disputed pairs, of the clicks on the two rows if they change places less the clicks if they stay, the rest of the list
as it was served: the smallest step from the live order towards the candidate's, and one that the log has seen at known
odds. What a list in the candidate's own order would bring is not estimated: of many places, hardly one such list was
ever shown. Nor is what the swap does to the clicks on other rows of the list.

A list of k rows, explored with probability s, adds X = (excess of the swapped pair, if that is disputed), or where none
was swapped X = -s / ((1 - s)(k - 1)) (sum of its disputed pairs' excess). A pair's excess is its clicks less those to
be expected of it: its two served scores, calibrated by the lists before. The expectation of X is s / (k - 1) times the
sum of the gains of its disputed pairs, whatever was to be expected, since both orders are centred by the same number;
so the sum of X over that of s (disputed pairs) / (k - 1), the swaps of disputed pairs to be expected, is unbiased. It
is inverse propensity weighting of both orders, each list weighed by its s. The centring takes away the variance that
the number of swaps brings, as self-normalized weights do (Swaminathan and Joachims 2015, NeurIPS), and adds no bias.

Interval: |X| <= 2, so for each lambda in (0, 1), exp((lambda / 2) sum(X - E X) - psi(lambda) sum (X / 2)^2) with
psi(lambda) = -log(1 - lambda) - lambda is a nonnegative supermartingale of mean at most 1 (Howard, Ramdas, McAuliffe
and Sekhon 2021, Annals of Statistics 49, on empirical-Bernstein bounds and average treatment effects). By Ville's
inequality, divided among the `_LAMBDAS` and both sides, the interval holds at all numbers of lists at once with 95 %.
Lists need not be alike; what each would have been clicked may change with time.
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
ALPHA = 0.05
MIN_SWAPS = 30
"""Swaps of disputed pairs below which there is too little overlap for an estimate."""
_LAMBDAS = 0.8 / 2.0 ** np.arange(7)
"""From bold, for few swaps, to careful, for a million."""
_LARGEST = 2.0
"""Of |X|: a pair has at most two clicks."""


class ShownRows(NamedTuple):
    """Rows of lists that were shown by the rule, list by list in the order shown, each [n]."""

    lists: NDArray[np.int64]
    """Their requests, as in `ScoredHoldout`; the rows of one follow each other."""
    positions: NDArray[np.float64]
    propensities: NDArray[np.float64]
    labels: NDArray[np.float64]
    served: NDArray[np.float64]
    """The scores by which the list was ordered; 0 where unknown."""
    candidate: NDArray[np.float32]


def read_shown(folder: Path, scored: ScoredHoldout) -> ShownRows:
    """Those of the held-out rows in `folder`, scored as `scored`, that have a propensity.

    Raises:
        ContractError: a file is unreadable or lacks a column.
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
    """The estimate and its interval; None where no list was explored.

    Lists that are not whole (places 1 to k, k at least 2) or whose propensities are not the rule's are left out.
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
    sums = np.asarray(np.bincount(of_pair, disputed * excess * np.where(is_swapped, 1.0, if_stayed)), np.float64)
    found = ReorderingGain(num_lists=num_lists, num_swaps=num_swaps, disputed_share=float(disputed.mean()))
    if num_swaps < MIN_SWAPS:
        return found
    expected_swaps = float((disputed * of_pair_odds).sum())
    gain, radius = float(sums.sum()) / expected_swaps, deviation_bound(sums) / expected_swaps
    return replace(found, gain=gain, low=max(gain - radius, -_LARGEST), high=min(gain + radius, _LARGEST))


def deviation_bound(sums: NDArray[np.float64]) -> float:
    """What the sum of these numbers [n] in [-2, 2] is off from that of their expectations, at most.

    At all n at once, with a probability of at least 1 - `ALPHA`.
    """
    variance = float(np.square(sums / _LARGEST).sum())
    price = math.log(2 * len(_LAMBDAS) / ALPHA)
    return _LARGEST * float(((price + (-np.log1p(-_LAMBDAS) - _LAMBDAS) * variance) / _LAMBDAS).min())


def _calibration_before(
    clicks: NDArray[np.float64], scores: NDArray[np.float64], of_pair: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Observed clicks per expected click in the lists before that of each pair, from 1 on; all [pairs]."""
    sums = [np.bincount(of_pair, each) for each in (clicks, scores)]
    seen, expected = (1.0 + np.cumsum(each) - each for each in sums)
    before: NDArray[np.float64] = (seen / expected)[of_pair]
    return before


class _ExploredPairs(NamedTuple):
    """The pairs of neighbours in the lists that are whole and follow the rule, each [pairs]."""

    upper: NDArray[np.int64]
    """The row at the upper of the two places, as shown."""
    lists: NDArray[np.int64]
    """The number of its list, from 0."""
    share: NDArray[np.float64]
    """With which probability a pair of the list was to be swapped."""
    is_swapped: NDArray[np.bool_]


def _explored_pairs(rows: ShownRows) -> _ExploredPairs:
    is_first = np.append(True, rows.lists[1:] != rows.lists[:-1])[: len(rows.lists)]
    of_row, starts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
    sizes = np.bincount(of_row)
    out_of_place = np.bincount(of_row, rows.positions != np.arange(len(of_row)) - starts[of_row] + 1)
    upper = np.flatnonzero(~is_first[1:])
    is_low = rows.propensities < MAX_SHARE
    is_swapped = is_low[upper] & is_low[upper + 1]
    num_low, num_swapped = np.bincount(of_row, is_low), np.bincount(of_row[upper], is_swapped, len(sizes))
    of_pair = np.where(num_low > 0, np.bincount(of_row, is_low * rows.propensities) / 2, 1 - rows.propensities[starts])
    share = of_pair * (sizes - 1)
    by_the_rule = (num_swapped <= 1) & (num_low == 2 * num_swapped) & (share > 0) & (share < MAX_SHARE)
    used = (by_the_rule & (out_of_place == 0))[of_row[upper]]
    upper, is_swapped = upper[used], is_swapped[used]
    return _ExploredPairs(upper, of_row[upper], share[of_row[upper]], is_swapped)
