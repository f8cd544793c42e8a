"""Test the claim "the AUC is at least theta" by an e-process, for the policy `sequential`.

The input is matured rows in order. The output is the e-value and the time at which it began to
grow. `monitoring.policies.policies` bases its decisions on the e-value and on the start of its
growth. The literature describes an e-value as the capital of a gambler who bets against the claim.
Choosing lambda is then choosing the size of a bet.

**Payoff.** A round is a fixed number of successive requests. Each round compares every click with
every non-click of *different* requests in the round. The result of a pair is 1 if the click has the
higher score, 1/2 for a tie, and 0 otherwise. The payoff X is the sum of (result - theta) over the
pairs, divided by the planned number of pairs. The planned number is fixed before the round, so X is
in [-theta, 1 - theta]. No two rounds share a row. Rows of one request, which share their user, are
in one round and never form a pair. If the AUC over the pairs of different requests is at least
theta, then E[X | earlier rounds] >= 0. If lambda in [0, 1 / (1 - theta)) is chosen before the
round, the factor 1 - lambda X has a mean of at most 1. The product of the factors is a nonnegative
supermartingale (betting on a bounded mean: Waudby-Smith and Ramdas 2024, JRSS-B 86).

**Mixture.** The e-value is a weighted sum of products of these factors. Each product multiplies the
factors of all rounds from its start onwards. Before its start, the product is 1. Products start at
every round s. All products that start at round s have the total weight w_s, where w_1 + w_2 + ... =
1. The weight w_s is split equally over one product for each of `FRACTIONS`. The lambda of a product
is the largest lambda times the fraction. A weighted mean of supermartingales is a supermartingale,
so the e-value is that of an e-process (Ramdas et al. 2023, Statistical Science 38). By Ville's
inequality (1939), P(the e-value ever reaches 1 / alpha) <= alpha, over all time and at every look.
If a drift begins after long service, the products that start late detect it. By the time of such a
drift, the products that started early are close to 0. A product that starts at round t costs only a
factor of 1 / w_t, whose logarithm is about log t. The restarted e-detectors of Shin, Ramdas and
Rinaldo (2024) detect a drift sooner. However, restarted e-detectors bound the mean time between
false alarms, not the probability of any false alarm.

**Several versions.** Each version has its own rounds and its own theta. The rounds of all versions
multiply the same e-value, one after the other. The lambda of a round follows from theta, and is
chosen before the rows of the round are known. Assume that the AUC of each version is at least the
version's theta. Then the product of the factors of all versions' rounds is a supermartingale. A
single application of Ville's inequality covers all versions together.

**Start of the change.** The start is estimated as in Page's CUSUM test (1954). A `Trail` per
fraction multiplies the same factors and restarts at 1 when the product falls below 1. The estimate
does not affect whether there is an alarm.

**Assumptions.** The bound is exact if rows are independent given their labels, or if requests are
independent and no round has more pairs than planned. If a round has more pairs than planned, its
payoff is scaled down. For dependent rows, the scaling moves the null hypothesis slightly. The bound
is not proven for users who return in other requests. If users return, the claim is about the
observed users only. The gate's interval, which is computed by user, allows for the difference.
docs/design/sequential-tests.md has simulated rates.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monitoring.policies.policy import NO_ROWS, MaturedRows

FRACTIONS = tuple(0.9 / 2**k for k in range(6))
"""Values of lambda as fractions of the largest lambda. Large values suit a steep drop, and small
values suit an AUC just below theta."""
_ROUND_CLICKS, _ROUND_OTHERS = 1.0, 6.0
"""Minimum expected clicks and non-clicks of a round. With more non-clicks than clicks, each click
is compared with several non-clicks, and a single round cannot reduce the e-value much. The largest
payoff of a round limits lambda."""
_FIRST_CLICKS = 10
"""Number of clicks that are counted before the first round. The counted rows determine the size of
the first round."""
_REMEMBERED_CLICKS = 1000.0
"""Approximate number of newest clicks that determine the size of the next rounds."""
_MAX_REQUESTS = 20_000
"""Maximum number of requests of a round. The rows of a round are stored until the round is
complete. If clicks are rarer than one per `_MAX_REQUESTS` requests, some rounds have no pair."""
_SPREADS = 2.0
"""Safety margin of the planned numbers of clicks and non-clicks, in standard deviations above the
mean."""


class Rounds:
    """Divides one version's rows into rounds, and computes the payoff of each round."""

    def __init__(self, theta: float, state: Mapping[str, Any]) -> None:
        """Continue from the saved state that `state_dict()` returned.

        The first round starts anew if the state is empty or belongs to another `theta`. `theta`
        must be in (0, 1).
        """
        if state.get("theta") != theta:
            state = {}  # The saved state belongs to another theta.
        self.theta = theta
        # Sums over requests: requests, clicks, squared clicks, non-clicks, squared non-clicks.
        self._sums = np.asarray(state.get("sums", np.zeros(5)))
        self._rows = _unpack_rows(state["rows"]) if "rows" in state else NO_ROWS

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a successor process as a JSON object."""
        return {"theta": self.theta, "sums": self._sums.tolist(), "rows": _pack_rows(self._rows)}

    @property
    def lambdas(self) -> list[float]:
        """Values of lambda for a round, one for each of `FRACTIONS`."""
        return [fraction / (1.0 - self.theta) for fraction in FRACTIONS]

    def add(self, rows: MaturedRows) -> tuple[list[float], list[float]]:
        """Add `rows`, and return the payoff and the number of clicks of each newly completed round.

        Rounds without any pair are skipped.
        """
        plan = self._plan_round()
        self._count_rows(rows)
        if plan is None:
            return [], []
        self._rows = _concatenate(self._rows, rows)
        per_round, planned_pairs = plan
        num_rounds = (int(self._rows.groups[-1]) + 1) // per_round
        if not num_rounds:
            return [], []
        used = int(np.searchsorted(self._rows.groups, num_rounds * per_round))
        labels = self._rows.labels[:used]
        scores = self._rows.scores[:used]
        groups = self._rows.groups[:used]
        self._rows = MaturedRows(
            labels=self._rows.labels[used:],
            scores=self._rows.scores[used:],
            groups=self._rows.groups[used:] - num_rounds * per_round,
        )
        rounds = groups // per_round
        wins, pairs = cross_wins(labels, scores, groups, rounds=rounds, num_rounds=num_rounds)
        payoffs = (wins - self.theta * pairs) / np.maximum(pairs, planned_pairs)
        clicks = np.bincount(rounds, labels, num_rounds)
        has_pairs = pairs > 0
        return payoffs[has_pairs].tolist(), clicks[has_pairs].tolist()

    def _plan_round(self) -> tuple[int, float] | None:
        """Return the next round's number of requests and planned pairs, or None.

        The size is computed from the rows counted so far. The result is None before `_FIRST_CLICKS`
        clicks. A payoff is divided by the planned pairs, or by the actual pairs if there are more.
        """
        requests, clicks, clicks_squared, others, others_squared = self._sums.tolist()
        if clicks < _FIRST_CLICKS or not others:
            return None
        needed = max(_ROUND_CLICKS * requests / clicks, _ROUND_OTHERS * requests / others, 2.0)
        size = min(math.ceil(needed), _MAX_REQUESTS)
        most = [
            size * total / requests
            + _SPREADS * math.sqrt(size * max(squared / requests - (total / requests) ** 2, 0.0))
            for total, squared in ((clicks, clicks_squared), (others, others_squared))
        ]
        return size, max(most[0], 1.0) * max(most[1], 1.0)

    def _count_rows(self, rows: MaturedRows) -> None:
        clicks = np.bincount(rows.groups, rows.labels)
        others = np.bincount(rows.groups) - clicks
        new = [len(clicks), clicks.sum(), (clicks**2).sum(), others.sum(), (others**2).sum()]
        self._sums = self._sums + np.array(new, np.float64)
        if self._sums[1] > 2 * _REMEMBERED_CLICKS:
            self._sums = self._sums / 2.0


class EValue:
    """E-value of successive rounds."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict()` returned.

        The e-value starts anew if the state is empty.
        """
        self._products: list[float] = list(state.get("products", (0.0,) * len(FRACTIONS)))
        self.rounds = int(state.get("rounds", 0))
        """Number of rounds with at least one pair."""
        self.clicks = int(state.get("clicks", 0))
        """Number of clicks in the rounds with at least one pair."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a successor process as a JSON object."""
        return {"products": list(self._products), "rounds": self.rounds, "clicks": self.clicks}

    @property
    def value(self) -> float:
        """The e-value, 1 before the first round."""
        return sum(self._products) / len(self._products) + 1.0 / math.log2(self.rounds + 2)

    def update(
        self, payoffs: list[float], clicks: list[float], lambdas: list[float], *, enough: float
    ) -> bool:
        """Update the e-value round by round until it reaches `enough`.

        Args:
            payoffs: Payoff of each round.
            clicks: Number of clicks of each round.
            lambdas: Values of lambda, one for each of `FRACTIONS`, chosen before the rounds.
            enough: E-value after which the remaining rounds are skipped.

        Returns:
            Whether the e-value reached `enough`.
        """
        # Python floats are faster here than an array of six elements.
        for payoff, of_round in zip(payoffs, clicks):
            self.rounds += 1
            self.clicks += int(of_round)
            start = 1.0 / math.log2(self.rounds + 1) - 1.0 / math.log2(self.rounds + 2)
            self._products = [
                (s + start) * (1.0 - each * payoff) for s, each in zip(self._products, lambdas)
            ]
            if self.value >= enough:
                return True
        return False


class EProcess:
    """E-process over the rows of one version, against one null hypothesis."""

    def __init__(self, theta: float, state: Mapping[str, Any]) -> None:
        """Continue from the saved state that `state_dict()` returned.

        The e-process starts anew if the state is empty or has another `theta`. `theta` must be in
        (0, 1).
        """
        self._rounds = Rounds(theta, state)
        self._e_value = EValue(state if state.get("theta") == theta else {})
        self.theta = theta

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a successor process as a JSON object."""
        return {**self._rounds.state_dict(), **self._e_value.state_dict()}

    @property
    def rounds(self) -> int:
        """Number of rounds with at least one pair."""
        return self._e_value.rounds

    @property
    def clicks(self) -> int:
        """Number of clicks in the rounds with at least one pair."""
        return self._e_value.clicks

    @property
    def value(self) -> float:
        """The e-value, 1 before the first round."""
        return self._e_value.value

    def update(self, rows: MaturedRows, enough: float) -> bool:
        """Add `rows`, update the e-value by all rounds that are now complete, and report success.

        Returns:
            Whether the e-value reached `enough`. Rounds that follow this round are skipped.
        """
        payoffs, clicks = self._rounds.add(rows)
        return self._e_value.update(payoffs, clicks, self._rounds.lambdas, enough=enough)


_LARGEST = 1e300
"""Upper limit of `Trail.value`, because JSON has no infinity."""


@dataclass(frozen=True)
class Trail:
    """Running product of the factors for one value of lambda.

    If the product falls to 1 or below, it restarts at 1.
    """

    value: float = 1.0
    since: float | None = None
    """Event time in seconds after which the rows of the product begin. None if the product is 1."""
    shown_at: float | None = None
    """Event time of the newest row when the product first reached the threshold of an alarm, or
    None."""

    def after(self, factor: float, *, since: float, until: float, enough: float) -> "Trail":
        """Return the trail multiplied by the factor of one decision point.

        `factor` is computed from the rows between `since` and `until`.
        """
        began = since if self.since is None else self.since
        value = min(self.value * factor, _LARGEST)
        if value <= 1.0:
            return Trail()
        is_new = self.shown_at is None and value >= enough
        return Trail(value, began, until if is_new else self.shown_at)


def factors(payoffs: list[float], lambdas: list[float]) -> list[float]:
    """Return for each lambda the product of the factors of all rounds.

    The factors are multiplied in the order of the rounds, so that every machine gets the same bits.
    """
    rounds = 1.0 - np.outer(np.asarray(payoffs, np.float64), lambdas)
    with np.errstate(over="ignore", under="ignore"):
        product: list[float] = np.cumprod(rounds, axis=0)[-1].tolist()
    return product


def cross_wins(
    labels: NDArray[np.uint8],
    scores: NDArray[np.float32],
    groups: NDArray[np.int64],
    *,
    rounds: NDArray[np.int64],
    num_rounds: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compare every click with every non-click of a different group, separately for each round.

    A click with the higher score wins, and a tie is half a win. Groups and rounds are numbered from
    0, and their numbers ascend. All rows of a group are in one round, and a round may have no row.

    Args:
        labels: Label of each row, 0 or 1, shape [n].
        scores: Score of each row, shape [n].
        groups: Group of each row, for example its user or its request, shape [n].
        rounds: Round of each row, shape [n].
        num_rounds: Number of rounds.

    Returns:
        Wins and pairs of each round, each of shape [num_rounds].

    >>> wins, pairs = cross_wins(
    ...     np.array([1, 0, 0, 1], np.uint8),
    ...     np.array([0.5, 0.5, 0.4, 0.3], np.float32),
    ...     np.array([0, 1, 1, 2]),
    ...     rounds=np.array([0, 0, 0, 0]),
    ...     num_rounds=1,
    ... )
    >>> wins.tolist(), pairs.tolist()
    ([1.5], [4.0])
    """
    wins, pairs = _count_wins(labels, scores, rounds, num_keys=num_rounds)
    num_groups = int(groups[-1]) + 1
    if num_groups < len(groups):
        round_of_group = np.zeros(num_groups, np.int64)
        round_of_group[groups] = rounds
        within = (
            np.bincount(round_of_group, each, num_rounds)
            for each in _count_wins(labels, scores, groups, num_keys=num_groups)
        )
        wins, pairs = wins - next(within), pairs - next(within)
    return wins, pairs


def _count_wins(
    labels: NDArray[np.uint8],
    scores: NDArray[np.float32],
    keys: NDArray[np.int64],
    *,
    num_keys: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count for each key the pairs of a click and a non-click, and the pairs that the click wins.

    A tie is half a win. Wins are therefore multiples of 1/2 without a rounding error.
    """
    order = np.lexsort((scores, keys))
    label = labels[order]
    score = scores[order]
    key = keys[order]
    others = np.concatenate(([0], np.cumsum(label == 0)))
    is_first = np.concatenate(([True], (score[1:] != score[:-1]) | (key[1:] != key[:-1])))
    run = np.cumsum(is_first) - 1
    starts = np.flatnonzero(is_first)
    ends = np.append(starts[1:], len(order))
    key_starts = np.searchsorted(key, np.arange(num_keys))
    clicks = np.flatnonzero(label)
    below = others[starts[run[clicks]]] - others[key_starts[key[clicks]]]
    ties = others[ends[run[clicks]]] - others[starts[run[clicks]]]
    wins = np.bincount(key[clicks], below + 0.5 * ties, num_keys).astype(np.float64)
    num_clicks = np.bincount(keys, labels, num_keys).astype(np.float64)
    return wins, num_clicks * (np.bincount(keys, minlength=num_keys) - num_clicks)


def _concatenate(first: MaturedRows, second: MaturedRows) -> MaturedRows:
    if not len(first.labels):
        return second
    return MaturedRows(
        labels=np.concatenate((first.labels, second.labels)),
        scores=np.concatenate((first.scores, second.scores)),
        groups=np.concatenate((first.groups, second.groups + first.groups[-1] + 1)),
    )


def _pack_rows(rows: MaturedRows) -> dict[str, Any]:
    """Return the rows as JSON.

    The JSON is short, because few rows are clicks and most requests have one row.
    """
    sizes = np.bincount(rows.groups)
    return {
        "clicks": np.flatnonzero(rows.labels).tolist(),
        "scores": base64.b64encode(rows.scores.astype("<f4").tobytes()).decode(),
        "sizes": None if (sizes == 1).all() else sizes.tolist(),
    }


def _unpack_rows(packed: Mapping[str, Any]) -> MaturedRows:
    scores = np.frombuffer(base64.b64decode(packed["scores"]), "<f4").astype(np.float32)
    labels = np.zeros(len(scores), np.uint8)
    labels[packed["clicks"]] = 1
    sizes = (
        np.ones(len(scores), np.int64) if packed["sizes"] is None else np.asarray(packed["sizes"])
    )
    return MaturedRows(labels=labels, scores=scores, groups=np.repeat(np.arange(len(sizes)), sizes))
