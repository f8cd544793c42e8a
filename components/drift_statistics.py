"""Whether two counted samples differ, and by how much: tests, what alike rows of one request do to them, effects.

Joins validation and the monitor, which test alike. NumPy and the standard library only, for neither image holds SciPy;
the tests compare with SciPy's. How large a difference must be to matter is the callers'.

Rows of one request are alike, cell by cell. From rows per cell, with their sums of squares over requests, come the
correlation of two rows of a request and the design effect of the comparison (Kish, Survey Sampling, 1965: 1 + (rows of
a request - 1) x correlation), which the tests take. A row of 64 that share their user says a 64th of an independent one
about the user's columns, and as much as one about the item's. Each sample's correlation is measured around its own
shares, so that a difference between the samples adds nothing.

The distances are those of TFDV's comparators (`tensorflow_data_validation/anomalies/metrics.cc`): both take the counts
that are listed as the whole, missing values are in neither, and the divergence's logarithm has base 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]

MIN_EXPECTED = 5.0
"""Fewest expected rows of a cell (Cochran's rule); rarer neighbours are taken together."""


def homogeneity(now: Counts, before: Counts, design: float | Floats) -> float | None:
    """p-value of the test that two samples, counted in the same cells [k], have one distribution.

    Twice the smaller of two: Pearson's chi-square over all cells, which sees many small changes; and `proportion` of
    the cell that changed most, times the number of cells, which sees one change among many cells. Cells are taken
    together beforehand, in their order (`taken_together`).

    Where the design effects of the cells differ, the chi-square is divided by their mean, and its degrees of freedom
    are reduced by how much they differ (Rao and Scott's second-order correction, by the cells' own variances alone).

    `now` and `before` are rows per cell; `design` is the design effect (Rao and Scott, 1981), rows of clustered data
    that say as much as one independent row, of all cells or of each. None where a sample is empty; 1 where one cell
    holds all.
    """
    n, m = int(now.sum()), int(before.sum())
    if not n or not m:
        return None
    a, b, designs = taken_together(now, before, design)
    if len(a) < 2:
        return 1.0
    mean, spread = mean_design(a + b, designs)
    differences = a * math.sqrt(m / n) - b * math.sqrt(n / m)
    statistic = float((differences**2 / (a + b)).sum())
    overall = chi_square_tail(statistic / (mean * (1 + spread)), (len(a) - 1) / (1 + spread))
    one = chi_square_tail(float((_deviances(a, n, b=b, m=m, design=designs) / designs).max()), 1)
    return min(1.0, 2 * min(overall, one * len(a)))


def taken_together(now: Counts, before: Counts, design: float | Floats) -> tuple[Counts, Counts, Floats]:
    """Both samples' rows and the design effect of groups of neighbouring cells, each [g].

    A group expects `MIN_EXPECTED` rows in the smaller sample; neither sample may be empty.
    """
    n, m = int(now.sum()), int(before.sum())
    designs = np.broadcast_to(np.asarray(design, np.float64), now.shape)
    both = now + before
    starts = _grouped(both * (min(n, m) / designs / (n + m)))
    rows = np.add.reduceat(both, starts)
    weighed = np.add.reduceat(both * designs, starts) / np.maximum(rows, 1)
    return np.add.reduceat(now, starts), np.add.reduceat(before, starts), np.maximum(weighed, 1e-12)


def mean_design(rows: Counts, designs: Floats) -> tuple[float, float]:
    """Mean design effect of at least two cells [k], each weighed by its part in a chi-square's expectation.

    And the squared coefficient of their variation.
    """
    weights = 1 - rows / rows.sum()
    weights = weights / weights.sum()
    mean = float((weights * designs).sum())
    return mean, max(0.0, float((weights * designs**2).sum()) / mean**2 - 1)


def proportion(a: int, n: int, *, b: int, m: int, design: float) -> float | None:
    """p-value of the test that `a` of `n` rows and `b` of `m` are samples of one share; None where a sample is empty.

    The likelihood ratio test, corrected for continuity as Yates does (Contingency tables involving small numbers,
    1934), by half a row as good as an independent one: so its tail holds for a few of them too. Of 10 such rows that
    all lie in one of two equal samples the exact test says 0.0020, this one 0.0017, and 0.0002 without the correction
    (measured without: of windows of 20,000 rows that stood still, 7 times as many p-values below 0.0005 as there should
    be, in columns of many rare categories).
    """
    if not n or not m:
        return None
    return chi_square_tail(float(_deviances(np.array([a]), n, b=np.array([b]), m=m, design=design)[0]) / design, 1)


def _deviances(a: Counts, n: int, *, b: Counts, m: int, design: float | Floats) -> Floats:
    """Per cell, twice the log of the likelihood ratio of two shares against one, half of `design` rows nearer to it."""
    share = (a + b) / (n + m)
    beyond = a - n * share
    moved = np.sign(beyond) * np.minimum(np.asarray(design) / 2, np.abs(beyond))
    now, before = a - moved, b + moved
    parts = [(now, n * share), (n - now, n * (1 - share)), (before, m * share), (m - before, m * (1 - share))]
    total = np.zeros(len(a))
    for observed, expected in parts:
        held = observed > 0
        total[held] += 2 * observed[held] * np.log(observed[held] / expected[held])
    return np.maximum(total, 0.0)


def _grouped(expected: NDArray[np.floating[Any]]) -> Counts:
    """First cell of each group."""
    starts, held = [0], 0.0
    for cell, rows in enumerate(expected.tolist()):
        if held >= MIN_EXPECTED:
            starts.append(cell)
            held = 0.0
        held += rows
    # What is left at the end joins the group before it.
    return np.array(starts[:-1] if held < MIN_EXPECTED and len(starts) > 1 else starts)


def chi_square_tail(statistic: float, freedom: float) -> float:
    """Probability that a chi-square variable of `freedom` degrees exceeds `statistic`.

    The regularised incomplete gamma function, by its series below the mean and its continued fraction above (Press et
    al., Numerical Recipes, 6.2).

    >>> round(chi_square_tail(3.841458820694124, 1), 12)
    0.05
    """
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        step = a
        while term > total * 1e-17:
            step += 1
            term *= x / step
            total += term
        return max(0.0, 1 - scale * total)
    b = x + 1 - a
    c, d = 1e300, 1 / b
    fraction = d
    for i in range(1, 100_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        fraction *= d * c
        if abs(d * c - 1) < 1e-16:
            break
    return scale * fraction


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's adjusted p-values: rejecting those up to a rate keeps false discoveries at that rate.

    The share of false discoveries among all, on average; where nothing drifted, that is the probability of any. It
    holds for independent tests and for positively dependent ones, such as columns that lack values in the same rows.

    >>> adjusted([0.01, 0.04, 0.03])
    [0.03, 0.04, 0.04]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    result, lowest = [1.0] * len(p_values), 1.0
    for rank in range(len(order), 0, -1):
        lowest = min(lowest, p_values[order[rank - 1]] * len(order) / rank)
        result[order[rank - 1]] = lowest
    return result


def design_effect(same: int, pairs: int, *, shares: Floats, mean_rows: float) -> float:
    """Rows of requests that say as much as one independent row: 1 + (mean rows of a request - 1) x correlation.

    The correlation of two rows of a request is by how much more often than by chance they agree: 0 where they are
    independent, 1 where a request's rows are all alike. Never below 0; 1, the worst, where nothing tells: no pair was
    seen, or all rows are in one cell (a bucket of few requests may lack a value by chance alone). Of `pairs` of rows
    `same` agree; `shares` are those of each cell, [k], sum 1; `mean_rows` are those of a random row's request.
    """
    if mean_rows <= 1:
        return 1.0
    by_chance = float((shares**2).sum())
    if not pairs or by_chance >= 1:
        return mean_rows
    correlation = (same / pairs - by_chance) / (1 - by_chance)
    return 1 + min(max(correlation, 0.0), 1.0) * (mean_rows - 1)


# -- rows of one request


@dataclass(frozen=True, kw_only=True, eq=False)
class Clustered:
    """Rows of one sample, counted in cells."""

    counts: Counts
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


# -- effects

POWER = 0.8
"""Probability with which a detectable effect is found."""
_BITS = 8 * math.log(2)
"""Jensen-Shannon divergence in bits of a small difference: chi-square x (1/n + 1/m) / this."""
_Z = NormalDist().inv_cdf(0.975)


class Effect(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def jensen_shannon(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """Jensen-Shannon divergence in bits (0 to 1) of counts [k] over the same buckets; None where a side is empty.

    >>> jensen_shannon(np.array([1, 0]), np.array([0, 3]))
    1.0
    """
    if not a.sum() or not b.sum():
        return None
    p, q = a / a.sum(), b / b.sum()
    middle = (p + q) / 2
    return float((_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2)


def l_infinity(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """Largest change of a value's share (0 to 1), of counts [k] of the same values; None where a side is empty.

    >>> l_infinity(np.array([1, 1]), np.array([3, 1]))
    0.25
    """
    if not a.sum() or not b.sum():
        return None
    return float(np.abs(a / a.sum() - b / b.sum()).max())


def _relative_entropy(p: Floats, q: Floats) -> float:
    held = p > 0
    return float((p[held] * np.log2(p[held] / q[held])).sum())


def divergence(now: Counts, before: Counts, design: float | Floats) -> Effect | None:
    """Jensen-Shannon divergence in bits of two samples [k], less what chance alone adds; None where a side is empty.

    Two samples of one distribution have a divergence too: by its chi-square asymptotics (K - 1) s with
    s = design (1/n + 1/m) / (8 ln 2), K the cells taken together as the test takes them. Beyond it, the divergence over
    s is a noncentral chi-square, whose variance gives the interval.
    """
    n, m = int(now.sum()), int(before.sum())
    if not n or not m:
        return None
    a, b, designs = taken_together(now, before, design)
    if len(a) < 2:
        return Effect(0.0, 0.0, 0.0)
    one = mean_design(a + b, designs)[0] * (1 / n + 1 / m) / _BITS
    measured = jensen_shannon(a, b) or 0.0
    value = max(0.0, measured - (len(a) - 1) * one)
    error = one * math.sqrt(2 * (len(a) - 1) + 4 * value / one)
    return Effect(min(value, 1.0), max(0.0, value - _Z * error), min(1.0, value + _Z * error))


def share_change(a: int, n: int, *, b: int, m: int, design: float) -> Effect | None:
    """Change of a share from `b` of `m` rows to `a` of `n`; None where a sample is empty.

    The interval is Agresti and Caffo's (2000): of one more row of either kind to each sample, in independent rows.
    """
    if not n or not m:
        return None
    size_now, size_before = max(n / design, 1.0), max(m / design, 1.0)
    now = (a / n * size_now + 1) / (size_now + 2)
    before = (b / m * size_before + 1) / (size_before + 2)
    error = math.sqrt(now * (1 - now) / (size_now + 2) + before * (1 - before) / (size_before + 2))
    value, middle = a / n - b / m, now - before
    return Effect(value, max(-1.0, min(value, middle - _Z * error)), min(1.0, max(value, middle + _Z * error)))


def wilson_interval(share: float, rows: float, *, z: float = _Z) -> tuple[float, float]:
    """The lowest and the highest true share that `share` of `rows` independent rows agrees with (Wilson, 1927).

    >>> low, high = wilson_interval(0.5, 1000)
    >>> round(low, 3), round(high, 3)
    (0.469, 0.531)
    """
    scale = 1 + z**2 / rows
    middle = (share + z**2 / (2 * rows)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
    return max(0.0, middle - half) if share else 0.0, min(1.0, middle + half)


def detectable_share(share: float, *, n: int, m: int, design: float, level: float) -> float:
    """Smallest change of a share of about `share` that a test at `level` finds with probability `POWER`; at most 1."""
    error = math.sqrt(max(share * (1 - share), 1 / (n + m)) * design * (1 / n + 1 / m))
    return min(1.0, _reach(level) * error)


def detectable_mean(n: int, m: int, *, design: float, level: float) -> float:
    """The same for the shift of a mean, in standard deviations."""
    return _reach(level) * math.sqrt(design * (1 / n + 1 / m))


def divergence_of_shift(shift: float) -> float:
    """Jensen-Shannon divergence in bits of two normal distributions `shift` (small) standard deviations apart.

    >>> round(divergence_of_shift(0.2), 4)
    0.0072
    """
    return min(1.0, shift**2 / _BITS)


def _reach(level: float) -> float:
    return NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(POWER)
