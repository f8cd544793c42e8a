"""Compare the cost of a rolling AUC per row with river's `RollingROCAUC`.

Run by `make benchmark-rolling`. Monitor and river use the newest 20,000 rows, and return their AUC
after every 1, 100, 1,000 and 10,000 rows. River takes one row per call, and keeps its rows sorted
in C++. The monitor's `RowWindow` takes the matured rows of a turn as arrays, and sorts all rows
when the AUC is read. The monitor reads the AUC once per turn, so a busy monitor reads it after
thousands of rows. The benchmark checks that the monitor and river end with the same AUC. The limit
is the duration of an empty Python call, because one row per call cannot cost less.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from river.metrics import RollingROCAUC

from benchmarks.command import benchmark_parser, documented
from benchmarks.spread import Figure, Spread, short, spread
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.records import NO_POSITION
from evergreen.runtime.errors import Refused
from evergreen.statistics.metrics import roc_auc
from monitoring.metrics.window import RowWindow
from monitoring.rows import MaturedRequests

T = TypeVar("T")
WINDOW = 20_000
NUM_ROWS = 100_000
CLICK_RATE = 0.1
EVERY = (1, 100, 1_000, 10_000)
"""Rows between two reads of the AUC."""
TARGET = 20.0
_MAX_READINGS, _ROUNDS, _QUICK_ROUNDS = 300, 9, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return 0."""
    flags = benchmark_parser("rolling", __doc__, quick="three rounds instead of nine").parse_args(
        argv
    )
    rounds = _QUICK_ROUNDS if flags.quick else _ROUNDS
    with documented(flags) as document:
        random = np.random.default_rng(0)
        labels = (random.random(NUM_ROWS) < CLICK_RATE).astype(np.uint8)
        scores = np.clip(random.beta(1, 9, NUM_ROWS) + 0.05 * labels, 0, 1).astype(np.float32)
        limit = f"an empty call: {short(1e6 * _seconds_of_an_empty_call())} us"
        figures = []
        for every in EVERY:
            readings = [
                (_ours(labels, scores, every), _river(labels, scores, every)) for _ in range(rounds)
            ]
            if any(abs(ours[1] - river[1]) > 1e-7 for ours, river in readings):
                raise Refused(
                    f"with a read every {every} rows, the monitor's last AUC is "
                    f"{readings[0][0][1]}, expected river's {readings[0][1][1]}"
                )
            ratio = spread([river[0] / ours[0] for ours, river in readings])
            target = TARGET if every == 1 else None
            name = f"AUC of {WINDOW:,} rows, read after every {every:,}"
            figures += [
                Figure(
                    name,
                    ratio,
                    peer="river",
                    target=target,
                    is_least=True,
                    limit=limit if every == 1 else None,
                ),
                Figure(f"{name}, ours", _micros(ours[0] for ours, _ in readings), "us a row"),
                Figure(f"{name}, river", _micros(river[0] for _, river in readings), "us a row"),
            ]
        document["figures"] = figures
    return 0


def _ours(
    labels: NDArray[np.uint8], scores: NDArray[np.float32], every: int
) -> tuple[float, float]:
    """Return our seconds per row, and the last AUC."""
    window = RowWindow(WINDOW)
    window.update(_matured(labels[:WINDOW], scores[:WINDOW]))
    turns = [_matured(labels[at : at + every], scores[at : at + every]) for at in _starts(every)]

    def turn(requests: MaturedRequests) -> float:
        window.update(requests)
        auc = roc_auc(window.labels, window.scores)
        assert auc is not None, "both classes are there"
        return auc

    return _timed(turn, turns, every)


def _river(
    labels: NDArray[np.uint8], scores: NDArray[np.float32], every: int
) -> tuple[float, float]:
    """Return river's seconds per row, and the last AUC."""
    metric = RollingROCAUC(window_size=WINDOW)
    rows = list(zip((labels == 1).tolist(), scores.tolist()))
    for label, score in rows[:WINDOW]:
        metric.update(label, score)

    def turn(part: Sequence[tuple[bool, float]]) -> float:
        for label, score in part:
            metric.update(label, score)
        return float(metric.get())

    return _timed(turn, [rows[at : at + every] for at in _starts(every)], every)


def _starts(every: int) -> range:
    """Return the index of the first row of each measured turn.

    The first measured turn starts with a full window.
    """
    return range(WINDOW, min(NUM_ROWS, WINDOW + _MAX_READINGS * every), every)


def _timed(turn: Callable[[T], float], turns: Sequence[T], every: int) -> tuple[float, float]:
    began = time.perf_counter()
    for each in turns:
        auc = turn(each)
    return (time.perf_counter() - began) / (len(turns) * every), auc


def _matured(labels: NDArray[np.uint8], scores: NDArray[np.float32]) -> MaturedRequests:
    """Return the rows as matured rows, with one row per request."""
    count = len(labels)
    return MaturedRequests(
        ids=np.full(count, "r", object),
        times=np.zeros(count),
        versions=np.ones(count, np.int32),
        sizes=np.ones(count, np.int64),
        scores=scores,
        positions=np.full(count, NO_POSITION, np.int32),
        numbers=np.arange(count),
        users=np.full(count, MISSING_CATEGORY, np.int64),
        labels=labels,
        click_delays=np.full(count, np.nan, np.float32),
    )


def _seconds_of_an_empty_call() -> float:
    def take(label: bool, score: float) -> None:
        """Ignore the row."""

    began = time.perf_counter()
    for _ in range(1_000_000):
        take(True, 0.5)
    return (time.perf_counter() - began) / 1_000_000


def _micros(seconds: Iterable[float]) -> Spread:
    return spread([1e6 * each for each in seconds])


if __name__ == "__main__":
    sys.exit(main())
