"""Tests of one feature of two windows: its values, its mean, its missing share; each with its effect and what it sees.

In: two `windows.ColumnSummary`s of a column. Out: p-values of 'nothing changed', corrected for rows of a request that
are alike (`drift_statistics.clustered`), and effects with 95 % intervals. Whether an effect matters is decided with all
features' tests together, in `drift`.

The cells that are compared are chosen by both windows' rows together: chosen by one alone, its luck would be taken for
a change of the other (`contracts.reference_statistics` has the measurement). Means are of bucket numbers: as the value
up to 10, as its logarithm beyond, so that no tail outweighs the rest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.drift_statistics.chance import MIN_EXPECTED, chi_square_tail, homogeneity, mean_design, proportion
from components.drift_statistics.clustered import Clustered, comparison_design, correlations, own_designs, with_few
from components.drift_statistics.effects import (
    Effect,
    detectable_mean,
    detectable_share,
    divergence,
    divergence_of_shift,
    share_change,
)
from components.validation.settings import ValidationSettings
from components.validation.windows import NUM_BUCKETS, ColumnSummary, Total, WindowSummary

LEAST_SHARE_CHANGE = 0.002
"""Least change of one category's share that counts, however rare the category was."""
KNOWN_FACTOR = 4
"""A value is a cell of its own if its rows are this many times what the summaries may lack of it."""
CERTAIN_ROWS = 10
"""Expected rows, each as good as an independent one, from which on absence is no accident (e^-10)."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Tested(NamedTuple):
    """One test of one feature."""

    name: str
    """`values`, `mean` or `missing`."""
    p_value: float | None
    """None where a side has no rows that it could be made of."""
    effect: Effect
    """Of `values` of a category: the change, without sign, of the share that changed most for its floor; of `values`
    of a dense column: Jensen-Shannon divergence in bits; of `mean`: its shift, in standard deviations; of `missing`:
    the change of the share."""
    floor: float
    """Least size of the effect that matters."""
    matters: bool
    """Whether the effect has that size."""
    detectable: float
    """Smallest effect that would probably have been found (`effects.POWER`)."""
    design: float
    """Design effect of the comparison: rows that say as much as one independent row."""


class Moved(NamedTuple):
    """The category whose share changed most, for its floor."""

    value: int
    rows_before: int
    rows_now: int


class ColumnTests(NamedTuple):
    """All tests of one feature."""

    tests: tuple[Tested, ...]
    divergence: float | None
    """Jensen-Shannon divergence in bits less what chance adds; None where a side has no values."""
    moved: Moved | None
    new_share: float | None
    """Share of the rows with a value whose category is new with certainty; None for a dense column."""


_NOTHING = Effect(0.0, 0.0, 0.0)


def compare_columns(
    now: ColumnSummary,
    before: ColumnSummary,
    windows: tuple[WindowSummary, WindowSummary],
    settings: ValidationSettings,
    level: float,
) -> ColumnTests:
    """The tests of a column.

    Args:
        now: The column in the window.
        before: The column in the window that it is compared with.
        windows: Both windows, in that order.
        settings: What an effect must be to matter.
        level: p-value that a change must have to be called one, for what is detectable.
    """
    of_column = _with_rows_of(now, windows[0]), _with_rows_of(before, windows[1])
    missing = _missing(now.missing, before.missing, of_column, settings, level)
    if not now.present or not before.present:
        return ColumnTests((missing,), None, None, None)
    if now.values is None or before.values is None:
        values, difference = _buckets(now, before, settings, level)
        return ColumnTests((values, _mean(now, before, settings, level), missing), difference, None, None)
    values, difference, moved, new = _categories(now, before, settings, level)
    return ColumnTests((values, missing), difference, moved, new)


# -- missing values


def _missing(
    now: Total, before: Total, windows: tuple[WindowSummary, WindowSummary], settings: ValidationSettings, level: float
) -> Tested:
    n, m = windows[0].rows, windows[1].rows
    design = design_of_totals(now, before, windows)
    effect = share_change(now.rows, n, before.rows, m, design) or _NOTHING
    share = (now.rows + before.rows) / max(n + m, 1)
    return Tested(
        "missing",
        with_few(proportion(now.rows, n, before.rows, m, design), _freedom(n, m, design)),
        effect,
        settings.missing_drift,
        abs(effect.value) >= settings.missing_drift,
        detectable_share(share, max(n, 1), max(m, 1), design, level),
        design,
    )


def _with_rows_of(column: ColumnSummary, window: WindowSummary) -> WindowSummary:
    """The window as large as the part of it that has the column, supposing that all its parts' requests are alike."""
    if column.rows == window.rows:
        return window
    share = column.rows / window.rows
    requests, sizes = math.ceil(window.requests * share), math.ceil(window.sizes * share)
    return replace(window, rows=column.rows, requests=requests, sizes=sizes)


def design_of_totals(now: Total, before: Total, windows: tuple[WindowSummary, WindowSummary]) -> float:
    """Design effect of the difference of two shares of all rows."""
    samples = [
        Clustered(
            counts=np.array([total.rows]),
            squares=np.array([float(total.squares)]),
            products=np.array([float(total.products)]),
            rows=window.rows,
            sizes=window.sizes,
            requests=window.requests,
        )
        for total, window in zip((now, before), windows)
    ]
    correlation, _ = correlations((samples[0], samples[1]))
    # Shares of 0 and 1 tell nothing of their correlation: the worst is supposed, whole requests.
    return float(comparison_design(correlation, samples[0], samples[1])[0])


# -- dense columns


def _buckets(
    now: ColumnSummary, before: ColumnSummary, settings: ValidationSettings, level: float
) -> tuple[Tested, float]:
    design, mean = _cell_designs(*(_sample(column, column.sums, 0) for column in (now, before)))
    effect = divergence(now.counts, before.counts, design) or _NOTHING
    reach = divergence_of_shift(detectable_mean(now.present, before.present, mean, level))
    floor = settings.numeric_drift
    p_value = with_few(homogeneity(now.counts, before.counts, design), _freedom(now.present, before.present, mean))
    return Tested("values", p_value, effect, floor, effect.value >= floor, reach, mean), effect.value


def _mean(now: ColumnSummary, before: ColumnSummary, settings: ValidationSettings, level: float) -> Tested:
    places = np.arange(NUM_BUCKETS)
    beyond = possible = weighed = 0.0
    means = []
    for column in (now, before):
        mean = float(column.counts @ places) / column.present
        variance = max(float(column.counts @ places**2) / column.present - mean**2, 0.0)
        means.append(mean)
        weighed += variance * column.present
        if column.present_requests >= 2:
            squares = column.place_squares - 2 * mean * column.place_products + mean**2 * column.present_sizes
            squares *= column.present_requests / (column.present_requests - 1)
            beyond += squares - variance * column.present
            possible += variance * (column.present_sizes - column.present)
    n, m = now.present, before.present
    deviation = math.sqrt(weighed / (n + m))
    correlation = np.array([min(max(beyond / possible, 0.0), 1.0) if possible > 0 else 1.0])
    samples = [_sample(column, column.sums, 0) for column in (now, before)]
    design = float(comparison_design(correlation, samples[0], samples[1])[0])
    error = math.sqrt(design * (1 / n + 1 / m))
    shift = (means[0] - means[1]) / deviation if deviation else (0.0 if means[0] == means[1] else math.inf)
    p_value = with_few(chi_square_tail(min((shift / error) ** 2, 1e6), 1), _freedom(n, m, design))
    effect = Effect(shift, shift - 1.96 * error, shift + 1.96 * error)
    reach = detectable_mean(n, m, design, level)
    return Tested("mean", p_value, effect, settings.mean_drift, abs(shift) >= settings.mean_drift, reach, design)


# -- categorical columns


def _categories(
    now: ColumnSummary, before: ColumnSummary, settings: ValidationSettings, level: float
) -> tuple[Tested, float, Moved | None, float]:
    values, samples, own = _cells(now, before)
    designs, mean = _cell_designs(*samples)
    a, b = samples[0].counts, samples[1].counts
    n, m = now.present, before.present
    effect = divergence(a, b, designs) or _NOTHING
    # The last cell are the others.
    share_now, share_before = a[:-1] / n, b[:-1] / m
    floors = np.minimum(
        settings.categorical_drift,
        np.maximum(settings.categorical_drift_relative * share_before, LEAST_SHARE_CHANGE),
    )
    worst = _worst(np.where(own, np.abs(share_now - share_before) / floors, -1.0))
    change, floor, moved, reach = _NOTHING, settings.categorical_drift, None, 1.0
    if worst is not None:
        signed = share_change(int(a[worst]), n, int(b[worst]), m, float(designs[worst])) or _NOTHING
        change, floor = _unsigned(signed), float(floors[worst])
        moved = Moved(int(values[worst]), int(b[worst]), int(a[worst]))
        reach = detectable_share(float((a + b)[worst] / (n + m)), n, m, float(designs[worst]), level)
    tested = Tested(
        "values",
        with_few(homogeneity(a, b, designs), _freedom(n, m, mean)),
        change,
        floor,
        change.value >= floor or effect.value >= settings.numeric_drift,
        reach,
        mean,
    )
    return tested, effect.value, moved, _new_share(a[:-1], b[:-1], designs[:-1], n / m, before.floor) / n


def _cells(now: ColumnSummary, before: ColumnSummary) -> tuple[Ints, tuple[Clustered, Clustered], NDArray[np.bool_]]:
    """The values that are known well enough, both samples with a last cell for the others, and which are frequent.

    Frequent ones come first, most frequent first; the rare ones, which the tests take together, in the order of their
    values. In the order of their rows they would come sample by sample: where a value was in one request alone, its
    rows are that request's, and requests of the two samples may differ in size (measured: requests of 64 rows beside
    such of 40 to 64 were called drift in six columns of a world that stood still).
    """
    assert now.values is not None
    assert before.values is not None
    values = np.union1d(now.values, before.values)
    sums = [column.of(values) for column in (now, before)]
    known = sums[0][:, 0] + sums[1][:, 0] >= KNOWN_FACTOR * (now.floor + before.floor)
    values, sums = values[known], [each[known] for each in sums]
    frequent, expected = _frequent(*(_sample(column, each, 0) for column, each in zip((now, before), sums)))
    order = np.lexsort((values, np.where(frequent, -expected, 0.0)))
    samples = [_sample(column, each[order], 1) for column, each in zip((now, before), sums)]
    return values[order], (samples[0], samples[1]), frequent[order]


def _frequent(now: Clustered, before: Clustered) -> tuple[NDArray[np.bool_], Floats]:
    """Which cells expect `MIN_EXPECTED` rows, as good as independent ones, in the smaller sample; and how many each."""
    correlation, _ = correlations((now, before))
    own = own_designs(correlation, now, before)
    sizes = (now.rows / own[0], before.rows / own[1])
    rows = now.counts / own[0] + before.counts / own[1]
    expected = rows * np.minimum(*sizes) / (sizes[0] + sizes[1])
    return expected >= MIN_EXPECTED, expected


def _worst(ratios: Floats) -> int | None:
    return int(ratios.argmax()) if len(ratios) and ratios.max() >= 0 else None


def _unsigned(effect: Effect) -> Effect:
    if effect.value < 0:
        effect = Effect(-effect.value, -effect.high, -effect.low)
    return Effect(effect.value, max(effect.low, 0.0), effect.high)


def _new_share(now: Ints, before: Ints, designs: Floats, ratio: float, floor: int) -> float:
    """Rows of categories that were absent though their rows now, less 4 standard errors, promised 10 rows there."""
    needed = (CERTAIN_ROWS * designs + 2 * floor) * ratio
    certain = (before == 0) & (now - 4 * np.sqrt(now * designs) >= needed)
    return float(now[certain].sum())


# -- both


def _freedom(n: int, m: int, design: float) -> float:
    """Rows of the smaller sample, as good as independent ones, less one: what its variance was estimated from."""
    return min(n, m) / design - 1


def _sample(column: ColumnSummary, sums: Ints, others: int) -> Clustered:
    """The column's rows in cells of `sums` [k, 3], with as many more cells for the rest (0 or 1)."""
    rest = np.full(others, column.present - int(sums[:, 0].sum()))
    unknown = np.full(others, np.nan)
    return Clustered(
        counts=np.concatenate([sums[:, 0], rest]),
        squares=np.concatenate([sums[:, 1].astype(np.float64), unknown]),
        products=np.concatenate([sums[:, 2].astype(np.float64), unknown]),
        rows=column.present,
        sizes=column.present_sizes,
        requests=column.present_requests,
    )


def _cell_designs(now: Clustered, before: Clustered) -> tuple[Floats, float]:
    """Design effect of each cell, and their mean."""
    correlation, _ = correlations((now, before))
    designs = comparison_design(correlation, now, before)
    both = now.counts + before.counts
    return designs, mean_design(both, designs)[0] if len(designs) > 1 and both.max() < both.sum() else float(designs[0])
