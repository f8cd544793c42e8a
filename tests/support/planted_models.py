"""Rows scored by two models whose AUCs differ by a planted amount, as the oracle of the gate and the canary.

The log-odds of a click are normal over rows; a model sees them through normal noise, most of which both models share,
as two models of one line do. Half of each variance lies between requests. Scores are the best probabilities that such
a model can give, so worse ones rank worse and are calibrated nevertheless. Population AUCs are integrals, no samples.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

SPREAD = 1.3
"""Standard deviation of the log-odds; with `NOISE`, AUCs of about 0.78."""
NOISE = 0.5
"""Variance of the champion's noise."""
OWN_NOISE = 0.03
"""Part of it that the candidate does not share: by it the AUC difference of two equal models has a standard error of
0.0017 over 20,000 rows with 3 % of clicks, as consecutive models of the simulated lake had."""

_PHI = np.vectorize(NormalDist().cdf, otypes=[float])


@dataclass(frozen=True)
class PlantedRows:
    """Rows in the order of their requests, each [n]."""

    labels: NDArray[np.uint8]
    candidate: NDArray[np.float64]
    champion: NDArray[np.float64]
    requests: NDArray[np.int64]


def draw(random: Generator, *, rows: int, rate: float, rows_per_request: int = 1, noise: float = NOISE) -> PlantedRows:
    """Rows with the scores of a champion and of a candidate.

    Args:
        random: Where they come from.
        rows: At least so many; the last request is whole.
        rate: Share of clicks.
        rows_per_request: Rows that share half of every variance.
        noise: Variance of the candidate's noise; see `noise_that_loses`, `noise_that_costs`.
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
        champion=_probability(mean, shared + np.sqrt(OWN_NOISE + max(NOISE - noise, 0.0)) * normal(), NOISE),
        requests=np.repeat(np.arange(requests), rows_per_request),
    )


def expit(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of log-odds."""
    return 1.0 / (1.0 + np.exp(-log_odds))


def _probability(mean: float, seen: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """The mean of the probability given what the model sees, by Gauss and Hermite's rule on a grid between which
    log-odds are interpolated."""
    weight = SPREAD**2 / (SPREAD**2 + noise)
    at, (nodes, weights) = np.linspace(-15.0, 15.0, 601), np.polynomial.hermite_e.hermegauss(15)
    means = expit(mean + weight * at[:, None] + SPREAD * np.sqrt(1 - weight) * nodes) @ (weights / weights.sum())
    return expit(np.interp(seen, at, np.log(means / (1 - means))))


def _grid(rate: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Deviations of the log-odds on a grid, and their weights among clicks and among other rows."""
    at = np.linspace(-6.0, 6.0, 241)
    weights = np.exp(-(at**2) / 2)
    clicks = expit(mean_log_odds(rate) + SPREAD * at)
    of_clicks, of_others = weights * clicks, weights * (1 - clicks)
    return SPREAD * at, of_clicks / of_clicks.sum(), of_others / of_others.sum()


@lru_cache(maxsize=64)
def mean_log_odds(rate: float) -> float:
    """The mean of log-odds by which `rate` of the rows are clicked."""
    at = np.linspace(-6.0, 6.0, 241)
    weights = np.exp(-(at**2) / 2) / np.exp(-(at**2) / 2).sum()
    low, high = -20.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (weights * expit(middle + SPREAD * at)).sum() < rate else (low, middle)
    return low


@lru_cache(maxsize=64)
def population_auc(rate: float, noise: float) -> float:
    """The AUC of a model with noise of this variance, over rows of different requests."""
    at, clicks, others = _grid(rate)
    return float(clicks @ _PHI((at[:, None] - at[None, :]) / np.sqrt(2 * noise)) @ others)


@lru_cache(maxsize=64)
def noise_that_loses(rate: float, auc_loss: float) -> float:
    """The variance of noise by which a model's AUC lies `auc_loss` below the champion's."""
    if auc_loss == 0.0:
        return NOISE
    wanted, low, high = population_auc(rate, NOISE) - auc_loss, OWN_NOISE, 8.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if population_auc(rate, middle) > wanted else (low, middle)
    return (low + high) / 2


def population_log_loss(rate: float, noise: float) -> float:
    """The mean log loss of a model with noise of this variance: the mean entropy of its probabilities."""
    at = np.linspace(-6.0, 6.0, 601)
    weights = np.exp(-(at**2) / 2) / np.exp(-(at**2) / 2).sum()
    share = _probability(mean_log_odds(rate), np.sqrt(SPREAD**2 + noise) * at, noise)
    return float(weights @ -(share * np.log(share) + (1 - share) * np.log1p(-share)))


@lru_cache(maxsize=64)
def noise_that_costs(rate: float, part: float) -> float:
    """The variance of noise by which a model's log loss exceeds the champion's by `part` of it."""
    wanted, low, high = (1 + part) * population_log_loss(rate, NOISE), NOISE, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if population_log_loss(rate, middle) < wanted else (low, middle)
    return (low + high) / 2


def shifted(probabilities: NDArray[np.float64], part: float) -> NDArray[np.float64]:
    """The probabilities with odds multiplied alike, by which the log loss of calibrated ones grows by `part` of it."""
    entropy = -(probabilities * np.log(probabilities) + (1 - probabilities) * np.log1p(-probabilities)).mean()
    odds, low, high = probabilities / (1 - probabilities), 0.0, 10.0

    def wrong(shift: float) -> NDArray[np.float64]:
        return odds * np.exp(shift) / (1 + odds * np.exp(shift))

    for _ in range(40):
        middle = (low + high) / 2
        found = wrong(middle)
        loss = -(probabilities * np.log(found) + (1 - probabilities) * np.log1p(-found)).mean()
        low, high = (middle, high) if loss < (1 + part) * entropy else (low, middle)
    return wrong(low)


def draw_slices(random: Generator, requests: NDArray[np.int64], *, columns: int = 26) -> dict[str, NDArray[np.bool_]]:
    """The five most frequent values of each column, and the others of each; by name, a quarter to a twentieth of the
    rows [n]. Every second column is of the request, and none has to do with clicks or scores."""
    frequencies = 1 / np.arange(1, 31)
    frequencies /= frequencies.sum()
    found = {"all rows": np.ones(len(requests), dtype=bool)}
    for column in range(columns):
        of_rows = random.choice(30, len(requests), p=frequencies)
        values = of_rows[requests] if column % 2 else of_rows
        found |= {f"column {column}: {value}": values == value for value in range(5)}
        found[f"column {column}: others"] = values >= 5
    return found
