"""Labels and scores with a planted AUC: independent rows, and requests whose rows share their user.

Binormal: scores of non-clicks are standard normal, those of clicks shifted, so that AUC = Phi(shift / sqrt 2). Scores
are left as they are, no probabilities: only their order counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from components.contracts.metrics import roc_auc
from monitoring.deciding.evidence import MaturedRows


@dataclass(frozen=True)
class Traffic:
    """Rows that come one after another."""

    rate: float
    """Share of clicks."""
    rows_per_decision: int
    rows_per_request: int = 1
    user_spread: float = 0.0
    """Standard deviation, over users, of what their rows share: in the score, and in the log-odds of a click."""


def draw(random: Generator, traffic: Traffic, rows: int, auc: float) -> MaturedRows:
    """`rows` rows; `auc` is that of rows of one user, which is the AUC of all where users do not differ."""
    requests = -(-rows // traffic.rows_per_request)
    groups = np.repeat(np.arange(requests), traffic.rows_per_request)[:rows]
    shift = np.float32(np.sqrt(2.0) * NormalDist().inv_cdf(auc))
    scores = random.standard_normal(rows, np.float32)
    if traffic.user_spread:
        user = random.standard_normal(requests, np.float32) * np.float32(traffic.user_spread)
        odds = traffic.rate / (1.0 - traffic.rate) * np.exp(user - traffic.user_spread**2 / 2)
        labels = random.random(rows, np.float32) < (odds / (1.0 + odds))[groups]
        scores += user[groups]
    else:
        labels = random.random(rows, np.float32) < np.float32(traffic.rate)
    scores += shift * labels
    return MaturedRows(labels=labels.astype(np.uint8), scores=scores, groups=groups)


def pooled_auc(traffic: Traffic, auc: float, *, rows: int = 4_000_000) -> float:
    """The AUC over all pairs of such traffic, as a gate would measure it; exact without users, else from a sample."""
    if not traffic.user_spread:
        return auc
    drawn = draw(np.random.default_rng(2**32), traffic, rows, auc)
    measured = roc_auc(drawn.labels, drawn.scores)
    assert measured is not None
    return measured


def joined(first: MaturedRows, second: MaturedRows) -> MaturedRows:
    """`second` after `first`."""
    return MaturedRows(
        labels=np.concatenate((first.labels, second.labels)),
        scores=np.concatenate((first.scores, second.scores)),
        groups=np.concatenate((first.groups, second.groups + first.groups[-1] + 1)),
    )


def part(rows: MaturedRows, begin: int, end: int) -> MaturedRows:
    """Rows `begin` to `end`, a multiple of the rows of a request each, as one decision point sees them."""
    groups: NDArray[np.int64] = rows.groups[begin:end]
    return MaturedRows(labels=rows.labels[begin:end], scores=rows.scores[begin:end], groups=groups - groups[0])
