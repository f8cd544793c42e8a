"""How alike the rows of one request are, cell by cell, and what that costs a comparison of two samples.

In: rows per cell, with their sums of squares over requests. Out: the correlation of two rows of a request and the
design effect of the comparison (Kish, Survey Sampling, 1965: 1 + (rows of a request - 1) x correlation), which
`chance`'s tests take. A row of 64 that share their user says a 64th of an independent one about the user's columns, and
as much as one about the item's.

Each sample's correlation is measured around its own shares, so that a difference between the samples adds nothing.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Clustered:
    """Rows of one sample, counted in cells."""

    counts: NDArray[np.int64]
    """[k] rows of each cell."""
    squares: Floats
    """[k] sum over requests of the squared rows of the cell; NaN = not known."""
    products: Floats
    """[k] sum over requests of the cell's rows times the request's; NaN = not known."""
    rows: int
    """Rows of all cells."""
    sizes: int
    """Sum over requests of the squared rows of the request."""
    requests: int
    """0 = not known."""

    def mean_rows(self) -> float | None:
        """Rows of the request that a random row belongs to, at least 1; None where that is not known."""
        return max(self.sizes / self.rows, 1.0) if self.rows and self.requests else None


def correlations(samples: tuple[Clustered, ...]) -> tuple[Floats, float]:
    """Correlation of two rows of a request, in [0, 1]: of being in each cell, [k], and of all cells together.

    A cell's is at least that of all cells, which is known far better: of a rare cell a few requests may say anything.
    1, the worst, where nothing tells.
    """
    beyond, possible = np.zeros(len(samples[0].counts)), np.zeros(len(samples[0].counts))
    for sample in samples:
        if sample.requests < 2 or not sample.rows:
            continue
        share = sample.counts / sample.rows
        observed = sample.squares - 2 * share * sample.products + share**2 * sample.sizes
        observed = observed * (sample.requests / (sample.requests - 1))
        one = share * (1 - share)
        known = ~np.isnan(observed)
        beyond[known] += (observed - one * sample.rows)[known]
        possible[known] += (one * (sample.sizes - sample.rows))[known]
    overall = float(np.clip(beyond.sum() / possible.sum(), 0, 1)) if possible.sum() > 0 else 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(possible > 0, np.clip(beyond / possible, 0, 1), overall)
    return np.maximum(each, overall), overall


def own_designs(correlation: Floats, now: Clustered, before: Clustered) -> tuple[Floats, Floats]:
    """Design effect of each sample's own shares, [k] as `correlation`.

    A sample whose requests are not known is taken to have the other's; 1 where neither's are.
    """
    sizes = (now.mean_rows() or before.mean_rows() or 1.0, before.mean_rows() or now.mean_rows() or 1.0)
    return 1 + correlation * (sizes[0] - 1), 1 + correlation * (sizes[1] - 1)


def comparison_design(correlation: Floats, now: Clustered, before: Clustered) -> Floats:
    """Design effect of the difference of two samples' shares, [k] as `correlation`.

    The mean of the samples' own, each weighed by its variance; 1 where a sample has no rows.
    """
    if not now.rows or not before.rows:
        return np.ones(len(correlation))
    own = own_designs(correlation, now, before)
    return np.asarray((own[0] / now.rows + own[1] / before.rows) / (1 / now.rows + 1 / before.rows))


def with_few(p_value: float | None, freedom: float) -> float | None:
    """A p-value whose variance was known, where it was estimated from `freedom` + 1 independent rows or requests.

    The normal deviate of the p-value is taken for one of Student's t, whose p-value is by Wallace's approximation
    (Bounds on normal approximations to Student's distribution, 1959).
    """
    if p_value is None or p_value >= 1:
        return p_value
    freedom, t = max(freedom, 1.0), -NormalDist().inv_cdf(max(p_value, 1e-300) / 2)
    deviate = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.erfc(deviate / math.sqrt(2))
