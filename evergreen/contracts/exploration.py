"""The rule by which a client explores: two neighbours of a ranked list change places now and then, at known odds.

Joins the client, which draws by the rule and logs each row's propensity, to evaluation, which weighs clicks by it.

With probability `share` a list of k >= 2 rows is shown with one of its k - 1 pairs of neighbours swapped, each pair as
likely as the others; otherwise it is shown in the order of its scores. A row's propensity is the probability with which
it stood at the place where it was shown: share / (k - 1) for the two rows of a swapped pair, 1 - share / (k - 1) for
any other row at an end of the list, and 1 - 2 share / (k - 1) between. A share below 1/2 keeps swapped rows below 1/2
and all others above, so that the propensities alone tell which pair was swapped, and the share. Swaps of
neighbours are the least visible exploration that tells what an order is worth (FairPairs: Radlinski and Joachims 2006,
AAAI; swap interventions: Joachims, Swaminathan and Schnabel 2017, WSDM).
"""

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError

MAX_SHARE = 0.5
"""Shares lie below it."""


def check_share(share: float) -> None:
    """Returns if `share` is one that the rule knows.

    Raises:
        ContractError: it is not in [0, 0.5).
    """
    if not 0.0 <= share < MAX_SHARE:
        raise ContractError(f"explore is {share}, expected a share of the lists in [0, {MAX_SHARE:g})")


def explored(order: NDArray[np.int64], share: float, chance: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The order that is shown, and the propensity of each of its rows; both [k].

    Args:
        order: The rows of the list, best first, [k], k >= 1.
        share: See `check_share`; 0 changes nothing, and all propensities are 1.
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
