"""Which windows are shown to whom: pairs of a world that stands still, and the same pairs with a shifted second window.

Pairs are drawn anew, each from its own number; the shifts of one pair are planted into the same second window, so that
the first one is read once. TFDV sees the first pairs only. Who judges, and by what, is described in
`contestants`; counting the alarms is left to `benchmarks.validation`.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.validation_study.contestants import OURS, TFDV, Judge
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
from demo.simulation.world import World


@dataclass(frozen=True, kw_only=True)
class StudyCase:
    """One kind of pairs."""

    name: str
    pairs: Mapping[str, int]
    """How many pairs each contestant is shown, by its name; the first ones of the series."""
    shift: Shift | None = None
    """None = the world stands still."""


@dataclass(frozen=True, kw_only=True)
class PairSeries:
    """Pairs of windows of one size, and the cases that are made of them."""

    rows: int
    """Of each window."""
    cases: Sequence[StudyCase]
    requests: str = EQUAL
    """See `shifts.draw_window`."""


def make_plan(*, pairs: int, windows: int, quick: bool) -> list[PairSeries]:
    """The study's series.

    Args:
        pairs: Stationary pairs of windows of 20,000 rows.
        windows: Windows per shift and place.
        quick: Few windows of each kind, for whether it runs and not for what it says.
    """
    few, some = (1, 2) if quick else (2, 20)
    still = {OURS: pairs, TFDV: min(pairs, 100)}
    items = {OURS: windows, TFDV: min(windows, 2 * few)}
    half = {OURS: pairs // 2, TFDV: some}
    shifts = _shifted("item", items, _chosen(ITEM_SHIFTS, quick), rows=20_000)
    plan = [
        PairSeries(rows=20_000, cases=[_still(half, 20_000, ", unequal requests")], requests=UNEQUAL),
        PairSeries(rows=20_000, cases=[_still(half, 20_000, ", independent rows")], requests=INDEPENDENT),
        PairSeries(rows=2_000, cases=[_still(half, 2_000)]),
        PairSeries(rows=20_000, cases=[_still(still, 20_000), *shifts]),
    ]
    if quick:
        return plan
    users, large = {OURS: windows // 2, TFDV: few}, {OURS: some, TFDV: few}
    return [
        *plan,
        PairSeries(rows=100_000, cases=[_still(large, 100_000), *_shifted("user", users, USER_SHIFTS, rows=100_000)]),
        PairSeries(rows=400_000, cases=[_still({OURS: some // 4, TFDV: few}, 400_000)]),
    ]


def _still(pairs: Mapping[str, int], rows: int, more: str = "") -> StudyCase:
    return StudyCase(name=f"stationary, {rows:,} rows{more}", pairs=pairs)


def _shifted(place: str, pairs: Mapping[str, int], shifts: Sequence[Shift], *, rows: int) -> list[StudyCase]:
    return [StudyCase(name=f"{place}, {rows:,} rows, {shift.kind}", pairs=pairs, shift=shift) for shift in shifts]


def _chosen(shifts: Sequence[Shift], quick: bool) -> Sequence[Shift]:
    """All of them, or the first place of each kind."""
    return [s for i, s in enumerate(shifts) if not quick or s.kind not in {other.kind for other in shifts[:i]}]


def show(
    series: PairSeries, number: int, world: World, *, judges: Mapping[str, Judge]
) -> Iterator[tuple[StudyCase, dict[str, list[str]]]]:
    """What each contestant says about each case of `series`, pair by pair: alarmed features, by its settings' names.

    Args:
        series: The pairs.
        number: Sets series apart.
        world: Where the rows come from.
        judges: The contestants, by name.
    """
    for pair in range(max(max(case.pairs.get(name, 0) for name in judges) for case in series.cases)):
        seed = (world.seed, number, pair)
        random = np.random.default_rng(seed)
        before, now = (draw_window(world, series.rows, random, requests=series.requests) for _ in range(2))
        with tempfile.TemporaryDirectory(prefix="evergreen-study-") as folder:
            scratch = Path(folder)
            write_window(before, scratch / "before", name="before")
            for place, case in enumerate(series.cases):
                asked = [name for name in judges if pair < case.pairs.get(name, 0)]
                if not asked:
                    continue
                # Each place its own numbers: what strikes one column must not decide what strikes the next.
                struck = case.shift.plant(now, np.random.default_rng((*seed, place))) if case.shift else now
                write_window(struck, scratch / f"now-{place}", name="now")
                for name in asked:
                    yield case, judges[name](scratch / "before", scratch / f"now-{place}")
                shutil.rmtree(scratch / f"now-{place}")
