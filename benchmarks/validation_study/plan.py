"""Define the pairs of windows of the study, with and without a shift.

Each pair has its own random numbers. For each shift, only the second window of a pair is changed,
so the first window is read once. TFDV gets only the first pairs. `methods` describes the methods,
and `benchmarks.validation` counts the alarms.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.validation_study.methods import OURS, TFDV, Method
from benchmarks.validation_study.shifts import (
    EQUAL,
    INDEPENDENT,
    ITEM_SHIFTS,
    UNEQUAL,
    USER_SHIFTS,
    Shift,
    draw_window,
    write_window,
)
from demo.simulation.simulator import Simulator


@dataclass(frozen=True, kw_only=True)
class StudyCase:
    """Pairs of windows with the same shift, or without a shift."""

    name: str
    pairs: Mapping[str, int]
    """Number of pairs for each method by name. A method with fewer pairs gets the first pairs of
    the series."""
    shift: Shift | None = None
    """The planted shift, or None for stationary pairs."""


@dataclass(frozen=True, kw_only=True)
class PairSeries:
    """Pairs of windows with the same number of rows, and the cases tested on these pairs."""

    rows: int
    """Rows of each window."""
    cases: Sequence[StudyCase]
    requests: str = EQUAL
    """Sizes of the requests, as in `shifts.draw_window`."""


def make_plan(*, pairs: int, windows: int, quick: bool) -> list[PairSeries]:
    """Return the specifications of the study's series.

    Args:
        pairs: Number of stationary pairs of windows with 20,000 rows.
        windows: Number of windows per shift and column.
        quick: Whether to use only a few windows of each kind, to test that the study runs.
    """
    few, some = (1, 2) if quick else (2, 20)
    still = {OURS: pairs, TFDV: min(pairs, 100)}
    items = {OURS: windows, TFDV: min(windows, 2 * few)}
    half = {OURS: pairs // 2, TFDV: some}
    shifts = _shifted("item", items, _chosen(ITEM_SHIFTS, quick), rows=20_000)
    plan = [
        PairSeries(
            rows=20_000, cases=[_still(half, 20_000, ", unequal requests")], requests=UNEQUAL
        ),
        PairSeries(
            rows=20_000, cases=[_still(half, 20_000, ", independent rows")], requests=INDEPENDENT
        ),
        PairSeries(rows=2_000, cases=[_still(half, 2_000)]),
        PairSeries(rows=20_000, cases=[_still(still, 20_000), *shifts]),
    ]
    if quick:
        return plan
    users, large = {OURS: windows // 2, TFDV: few}, {OURS: some, TFDV: few}
    return [
        *plan,
        PairSeries(
            rows=100_000,
            cases=[_still(large, 100_000), *_shifted("user", users, USER_SHIFTS, rows=100_000)],
        ),
        PairSeries(rows=400_000, cases=[_still({OURS: some // 4, TFDV: few}, 400_000)]),
    ]


def _still(pairs: Mapping[str, int], rows: int, more: str = "") -> StudyCase:
    return StudyCase(name=f"stationary, {rows:,} rows{more}", pairs=pairs)


def _shifted(
    columns: str, pairs: Mapping[str, int], shifts: Sequence[Shift], *, rows: int
) -> list[StudyCase]:
    return [
        StudyCase(name=f"{columns}, {rows:,} rows, {shift.kind}", pairs=pairs, shift=shift)
        for shift in shifts
    ]


def _chosen(shifts: Sequence[Shift], quick: bool) -> Sequence[Shift]:
    """Return all shifts. If `quick` is set, return only the first shift of each kind."""
    return [
        s
        for i, s in enumerate(shifts)
        if not quick or s.kind not in {other.kind for other in shifts[:i]}
    ]


def show(
    series: PairSeries, number: int, simulator: Simulator, *, methods: Mapping[str, Method]
) -> Iterator[tuple[StudyCase, dict[str, list[str]]]]:
    """Yield the cases of every pair, each with the features that have an alarm.

    The features are listed by method and setting.

    Args:
        series: Pairs of windows of one kind.
        number: Number that is part of the random seed. Each series needs a different number.
        simulator: Simulator of the rows.
        methods: Methods by name.
    """
    for pair in range(
        max(max(case.pairs.get(name, 0) for name in methods) for case in series.cases)
    ):
        seed = (simulator.seed, number, pair)
        random = np.random.default_rng(seed)
        before, now = (
            draw_window(simulator, series.rows, random, requests=series.requests) for _ in range(2)
        )
        with tempfile.TemporaryDirectory(prefix="evergreen-study-") as folder:
            scratch = Path(folder)
            write_window(before, scratch / "before", name="before")
            for index, case in enumerate(series.cases):
                chosen = [name for name in methods if pair < case.pairs.get(name, 0)]
                if not chosen:
                    continue
                # Each shift has its own random numbers, so that the choice of rows in one column
                # does not determine the choice in the next column.
                shifted = (
                    case.shift.plant(now, np.random.default_rng((*seed, index)))
                    if case.shift
                    else now
                )
                write_window(shifted, scratch / f"now-{index}", name="now")
                for name in chosen:
                    yield case, methods[name](scratch / "before", scratch / f"now-{index}")
                shutil.rmtree(scratch / f"now-{index}")
