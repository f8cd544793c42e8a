"""Which windows are shown to whom, and the asking of the contestants, each a process that lives as long as the study.

Pairs of a world that stands still, and the same pairs with a shifted second window. Pairs are drawn anew, each from its
own number; the shifts of one pair are planted into the same second window, so that the first one is read once. Peers
see the first pairs only, if they are slow. What a contestant is asked and answers is described in `answering`; counting
the answers is left to `benchmarks.validation`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

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
from inference_client.simulation.world import World
from pipelines.local.environments import REPOSITORY, VALIDATION_PEERS, python_of

OURS, TFDV, EVIDENTLY = "ours", "TFDV", "Evidently"
_ENVIRONMENTS = {OURS: "validation", TFDV: "validation", EVIDENTLY: VALIDATION_PEERS}
_ANSWERING = "benchmarks.validation_study.answering"


class ContestantAnswer(NamedTuple):
    """A contestant's alarms on one pair of windows."""

    alarms: dict[str, list[str]]
    """Features by the name of the setting; a contestant may have several settings."""
    seconds: float


class ContestantFailed(Exception):
    """A contestant ended instead of answering; the message names its log."""


class StudyContestant:
    """One contestant, started at the first question."""

    def __init__(self, name: str, log: Path) -> None:
        """Nothing is started yet; `log` takes what it prints beside its answers."""
        self.name, self._log = name, log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, before: Path, now: Path, columns: tuple[str, ...] = ()) -> ContestantAnswer:
        """Its alarms about the window `now`; `columns` are all that are asked about, empty = the 39 features.

        Raises:
            ContestantFailed: it ended.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        question = {"before": str(before), "now": str(now), "columns": list(columns)}
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # It ended; its missing answer is reported below.
        line = process.stdout.readline()
        if not line:
            raise ContestantFailed(
                f"{self.name} ended with code {process.wait()} instead of answering, see {self._log}"
            )
        return ContestantAnswer(**json.loads(line))

    def _start(self) -> subprocess.Popen[str]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [str(python_of(_ENVIRONMENTS[self.name])), "-m", _ANSWERING, self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
        return self._process

    def __enter__(self) -> StudyContestant:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.terminate()
            self._process.wait()


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
    still = {OURS: pairs, TFDV: min(pairs, 100), EVIDENTLY: few}
    items = {OURS: windows, TFDV: min(windows, 2 * few), EVIDENTLY: 1}
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
    series: PairSeries, number: int, world: World, *, contestants: Mapping[str, StudyContestant]
) -> Iterator[tuple[StudyCase, ContestantAnswer]]:
    """What each contestant says about each case of `series`, pair by pair.

    Args:
        series: The pairs.
        number: Sets series apart.
        world: Where the rows come from.
        contestants: Who is asked, by name.

    Raises:
        ContestantFailed: one ended.
    """
    for pair in range(max(max(case.pairs.get(name, 0) for name in contestants) for case in series.cases)):
        seed = (world.seed, number, pair)
        random = np.random.default_rng(seed)
        before, now = (draw_window(world, series.rows, random, requests=series.requests) for _ in range(2))
        with tempfile.TemporaryDirectory(prefix="evergreen-study-") as folder:
            scratch = Path(folder)
            write_window(before, scratch / "before", name="before")
            for place, case in enumerate(series.cases):
                asked = [name for name in contestants if pair < case.pairs.get(name, 0)]
                if not asked:
                    continue
                # Each place its own numbers: what strikes one column must not decide what strikes the next.
                struck = case.shift.plant(now, np.random.default_rng((*seed, place))) if case.shift else now
                write_window(struck, scratch / f"now-{place}", name="now")
                for name in asked:
                    columns = case.shift.columns if case.shift and name == EVIDENTLY else ()
                    yield case, contestants[name].ask(scratch / "before", scratch / f"now-{place}", columns)
                shutil.rmtree(scratch / f"now-{place}")
