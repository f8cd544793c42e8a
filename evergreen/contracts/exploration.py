"""Rule of exploration: two neighbours in a list are sometimes swapped, with known probability.

The inference client applies the rule, and logs the propensity of each row. Evaluation weights each
click by its propensity.

A list of k >= 2 rows has k - 1 pairs of neighbours. With probability `share`, one of these pairs is
chosen at random, and its rows are swapped. If no pair is swapped, the list is shown in the order of
its scores.

The propensity of a row is the probability of the position where it was shown. Three cases are
possible:
- If the row belongs to the swapped pair, the propensity is share / (k - 1).
- If the row is at an end of the list and not swapped, the propensity is 1 - share / (k - 1).
- If the row is inside the list and not swapped, the propensity is 1 - 2 * share / (k - 1).

If `share` is below 1/2, each swapped row has a propensity below 1/2, and each other row has a
propensity above 1/2. The propensities alone therefore identify the swapped pair and the value of
`share`.

Swaps of neighbours are the least visible exploration that can measure the value of a ranking. See
FairPairs (Radlinski and Joachims 2006, AAAI) and swap interventions (Joachims, Swaminathan and
Schnabel 2017, WSDM).
"""

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError

MAX_SHARE = 0.5
"""Upper bound of the share of lists to explore. The share must be smaller than this bound."""


def check_share(share: float) -> None:
    """Check the share of lists to explore.

    Raises:
        ContractError: the share is not in [0, 0.5).
    """
    if not 0.0 <= share < MAX_SHARE:
        raise ContractError(
            f"explore is {share}, expected a share of the lists in [0, {MAX_SHARE:g})"
        )


def explored(
    order: NDArray[np.int64], share: float, chance: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the order in which a list is shown, and the propensity of each of its rows, both [k].

    Args:
        order: The rows of the list, best first, [k], k >= 1.
        share: See `check_share`. If the share is 0, the order does not change, and all propensities
            are 1.
        chance: A uniform random number in [0, 1).

    >>> order, propensities = explored(np.array([7, 8, 9]), 0.25, 0.2)
    >>> order.tolist(), propensities.tolist()
    ([7, 9, 8], [0.875, 0.125, 0.125])
    """
    check_share(share)
    pairs = len(order) - 1
    of_pair = share / max(pairs, 1)
    propensities = np.full(len(order), 1.0 - 2.0 * of_pair)
    propensities[[0, -1]] = 1.0 - of_pair if pairs else 1.0
    if not pairs or chance >= share:
        return order, propensities
    first = min(int(chance / of_pair), pairs - 1)
    swapped, shown = [first, first + 1], order.copy()
    shown[swapped], propensities[swapped] = order[swapped[::-1]], of_pair
    return shown, propensities
