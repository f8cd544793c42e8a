"""Rows scored by two models with a known AUC difference, as the reference for gate and canary.

The log-odds of a click are normal over rows. A model observes the log-odds with normal noise. Both
models share most of the noise, like successive models of one lineage. Half of each variance is
between requests, and half is within requests. A worse model is calibrated too: each of its scores
is the best probability that the model can give. Population AUCs are computed by integration, not
sampled.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

SPREAD = 1.3
"""Standard deviation of the log-odds. With `NOISE`, the AUC is about 0.78."""
NOISE = 0.5
"""Variance of the champion's noise."""
OWN_NOISE = 0.03
"""Variance of the noise that belongs to one model alone. The AUC difference of two equal models has
a standard error of 0.0017 over 20,000 rows with 3 % of clicks. Consecutive models of the simulated
lake have the same standard error."""

_PHI = np.vectorize(NormalDist().cdf, otypes=[float])


@dataclass(frozen=True)
class PlantedRows:
    """Rows ordered by request. Each field has the shape [n]."""

    labels: NDArray[np.uint8]
    candidate: NDArray[np.float64]
    champion: NDArray[np.float64]
    requests: NDArray[np.int64]


def draw(
    random: Generator, *, rows: int, rate: float, rows_per_request: int = 1, noise: float = NOISE
) -> PlantedRows:
    """Draw rows that a champion and a candidate have scored.

    Args:
        random: Source of randomness.
        rows: Minimum number of rows. The last request is completed, even if this adds more rows.
        rate: Share of clicks.
        rows_per_request: Number of rows per request. If requests have more than one row, half of
            every variance is between requests.
        noise: Variance of the noise in the candidate's scores, see `noise_that_loses` and
            `noise_that_costs`.
    """
    requests, mean = -(-rows // rows_per_request), mean_log_odds(rate)

    def normal() -> NDArray[np.float64]:
        own = random.standard_normal(requests * rows_per_request)
        if rows_per_request == 1:
            return own
        return np.sqrt(0.5) * (own + np.repeat(random.standard_normal(requests), rows_per_request))

    deviation = SPREAD * normal()
    labels = random.random(len(deviation)) < expit(mean + deviation)
    shared = deviation + np.sqrt(min(NOISE, noise) - OWN_NOISE) * normal()
    own = OWN_NOISE + max(noise - NOISE, 0.0)
    return PlantedRows(
        labels=labels.astype(np.uint8),
        candidate=_probability(mean, shared + np.sqrt(own) * normal(), noise),
        champion=_probability(
            mean, shared + np.sqrt(OWN_NOISE + max(NOISE - noise, 0.0)) * normal(), NOISE
        ),
        requests=np.repeat(np.arange(requests), rows_per_request),
    )


def expit(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities of log-odds."""
    return 1.0 / (1.0 + np.exp(-log_odds))


def _probability(mean: float, seen: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Return the mean probability given the log-odds that the model observes.

    The integral uses Gauss-Hermite quadrature on a grid of log-odds, and interpolation between the
    grid points.
    """
    weight = SPREAD**2 / (SPREAD**2 + noise)
    at, (nodes, weights) = np.linspace(-15.0, 15.0, 601), np.polynomial.hermite_e.hermegauss(15)
    means = expit(mean + weight * at[:, None] + SPREAD * np.sqrt(1 - weight) * nodes) @ (
        weights / weights.sum()
    )
    return expit(np.interp(seen, at, np.log(means / (1 - means))))


def _grid(rate: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return a grid of log-odds deviations, and their weights among clicks and among other rows."""
    at = np.linspace(-6.0, 6.0, 241)
    weights = np.exp(-(at**2) / 2)
    clicks = expit(mean_log_odds(rate) + SPREAD * at)
    of_clicks, of_others = weights * clicks, weights * (1 - clicks)
    return SPREAD * at, of_clicks / of_clicks.sum(), of_others / of_others.sum()


@lru_cache(maxsize=64)
def mean_log_odds(rate: float) -> float:
    """Return the mean log-odds for which the share of clicks is `rate`."""
    at = np.linspace(-6.0, 6.0, 241)
    weights = np.exp(-(at**2) / 2) / np.exp(-(at**2) / 2).sum()
    low, high = -20.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if (weights * expit(middle + SPREAD * at)).sum() < rate
            else (low, middle)
        )
    return low


@lru_cache(maxsize=64)
def population_auc(rate: float, noise: float) -> float:
    """Return the population AUC of a model with the noise variance `noise`.

    The AUC compares a click and a non-click of two different requests.
    """
    at, clicks, others = _grid(rate)
    return float(clicks @ _PHI((at[:, None] - at[None, :]) / np.sqrt(2 * noise)) @ others)


@lru_cache(maxsize=64)
def noise_that_loses(rate: float, auc_loss: float) -> float:
    """Return the noise variance for which a model's AUC is `auc_loss` below the champion's."""
    if auc_loss == 0.0:
        return NOISE
    wanted, low, high = population_auc(rate, NOISE) - auc_loss, OWN_NOISE, 8.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if population_auc(rate, middle) > wanted else (low, middle)
    return (low + high) / 2


def population_log_loss(rate: float, noise: float) -> float:
    """Return the mean log loss of a model with the noise variance `noise`.

    The mean log loss is the mean entropy of the model's probabilities.
    """
    at = np.linspace(-6.0, 6.0, 601)
    weights = np.exp(-(at**2) / 2) / np.exp(-(at**2) / 2).sum()
    share = _probability(mean_log_odds(rate), np.sqrt(SPREAD**2 + noise) * at, noise)
    return float(weights @ -(share * np.log(share) + (1 - share) * np.log1p(-share)))


@lru_cache(maxsize=64)
def noise_that_costs(rate: float, part: float) -> float:
    """Return the noise variance that raises the champion's log loss by the share `part`."""
    wanted, low, high = (1 + part) * population_log_loss(rate, NOISE), NOISE, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if population_log_loss(rate, middle) < wanted else (low, middle)
    return (low + high) / 2


def shifted(probabilities: NDArray[np.float64], part: float) -> NDArray[np.float64]:
    """Multiply the odds by a factor that raises the log loss by the share `part`.

    The probabilities must be calibrated.
    """
    entropy = -(
        probabilities * np.log(probabilities) + (1 - probabilities) * np.log1p(-probabilities)
    ).mean()
    odds, low, high = probabilities / (1 - probabilities), 0.0, 10.0

    def wrong(shift: float) -> NDArray[np.float64]:
        return odds * np.exp(shift) / (1 + odds * np.exp(shift))

    for _ in range(40):
        middle = (low + high) / 2
        found = wrong(middle)
        loss = -(probabilities * np.log(found) + (1 - probabilities) * np.log1p(-found)).mean()
        low, high = (middle, high) if loss < (1 + part) * entropy else (low, middle)
    return wrong(low)


def draw_slices(
    random: Generator, requests: NDArray[np.int64], *, columns: int = 26
) -> dict[str, NDArray[np.bool_]]:
    """Draw the rows that belong to each slice. Return the masks [n] by slice.

    Each of the five most frequent values of a column is a slice, and the other values are one
    slice. Each slice has between 1/20 and 1/4 of the rows. In every second column, all rows of a
    request have the same value. No column depends on clicks or scores.
    """
    frequencies = 1 / np.arange(1, 31)
    frequencies /= frequencies.sum()
    found = {"all rows": np.ones(len(requests), dtype=bool)}
    for column in range(columns):
        of_rows = random.choice(30, len(requests), p=frequencies)
        values = of_rows[requests] if column % 2 else of_rows
        found |= {f"column {column}: {value}": values == value for value in range(5)}
        found[f"column {column}: others"] = values >= 5
    return found
