"""The monitor's speed: the AUC after every record beside named peers, then the whole process: `make benchmark-monitor`.

1. The AUC of the last 10,000 records after each record of one stream, asked of: scikit-learn's roc_auc_score, which the
   reference calls at every record (beside it over its own window of 200); river's RollingROCAUC; and the monitor's
   RollingAuc, given blocks, requests of 64 rows and single rows. Everyone continues the same stream, in turns, every
   round in another order; a ratio is of one round's two rates. Their answers are compared in the run: equal to 1e-12,
   or the figures would be of something else. Scores are all different there; what ties do is asked apart.
2. `benchmarks.monitor_throughput`: rows per second of the whole process on one core, and its memory.

Prints tables, and writes all of it as JSON. All runs on one core; how figures are made is said in `monitor_figures`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine, monitor_figures
from benchmarks.monitor_figures import Answers
from benchmarks.spread import named
from components.runtime.durable import write_whole
from monitoring.measures.rolling_auc import RollingAuc

WINDOW, REFERENCE_WINDOW = 10_000, 200
CLICK_RATES = (0.032, 0.25)
"""The demo's traffic and the Criteo sample's."""
_ROUNDS, _QUICK_ROUNDS = 9, 3
_TIED_RECORDS, _CALL_ROWS = 400, 2048


class Stream(NamedTuple):
    """Labels and scores: a full window, then the records to be answered."""

    labels: NDArray[np.uint8]
    scores: NDArray[np.float32]

    @classmethod
    def draw(cls, rate: float, records: int, seed: int, *, levels: int | None = None) -> Stream:
        """Clicks at `rate` that score higher than the others; all scores different, or rounded to `levels`."""
        random = np.random.default_rng(seed)
        labels = (random.random(WINDOW + records) < rate).astype(np.uint8)
        values = random.normal(size=len(labels)) + 1.2 * labels
        places = np.argsort(np.argsort(values)) / len(values)
        scores = places if levels is None else np.floor(places * levels) / levels
        return cls(labels, scores.astype(np.float32))


Contestant = Callable[[Stream, int], tuple[NDArray[np.float64], float]]
"""Answers so many records of a stream after its first window: the AUC after each, and the seconds it took."""


def scikit_learn(window: int) -> Contestant:
    """The reference's method over its last `window` records; slices of arrays, which spares it the lists it keeps."""
    from sklearn.metrics import roc_auc_score

    def answer(stream: Stream, records: int) -> tuple[NDArray[np.float64], float]:
        aucs = np.full(records, np.nan)
        began = time.perf_counter()
        for i in range(records):
            last = slice(WINDOW + i + 1 - window, WINDOW + i + 1)
            labels = stream.labels[last]
            if 0 < labels.sum() < window:
                aucs[i] = roc_auc_score(labels, stream.scores[last])
        return aucs, time.perf_counter() - began

    return answer


def river() -> Contestant:
    """The windowed AUC of river, updated and asked at every record."""
    from river.metrics import RollingROCAUC

    def answer(stream: Stream, records: int) -> tuple[NDArray[np.float64], float]:
        metric, rows = (
            RollingROCAUC(window_size=WINDOW),
            list(zip((stream.labels == 1).tolist(), stream.scores.tolist())),
        )
        for label, score in rows[:WINDOW]:
            metric.update(label, score)
        aucs = np.empty(records)
        began = time.perf_counter()
        for i, (label, score) in enumerate(rows[WINDOW : WINDOW + records]):
            metric.update(label, score)
            aucs[i] = metric.get()
        return aucs, time.perf_counter() - began

    return answer


def ours(rows_per_call: int, window: int = WINDOW) -> Contestant:
    """The monitor's, so many records at a call."""

    def answer(stream: Stream, records: int) -> tuple[NDArray[np.float64], float]:
        rolling = RollingAuc(max_rows=window)
        rolling.update(stream.labels[:WINDOW], stream.scores[:WINDOW])
        calls = []
        began = time.perf_counter()
        for at in range(WINDOW, WINDOW + records, rows_per_call):
            call = slice(at, min(at + rows_per_call, WINDOW + records))
            calls.append(rolling.update(stream.labels[call], stream.scores[call]))
        return np.concatenate(calls), time.perf_counter() - began

    return answer


def contestants() -> dict[str, tuple[Contestant, int, int]]:
    """Name to contestant, the records it answers in a round, and its window."""
    return {
        monitor_figures.OURS: (ours(_CALL_ROWS), 100_000, WINDOW),
        "ours, 64 rows a call": (ours(64), 20_000, WINDOW),
        "ours, 1 row a call": (ours(1), 4_000, WINDOW),
        monitor_figures.RIVER: (river(), 4_000, WINDOW),
        monitor_figures.SCIKIT_LEARN: (scikit_learn(WINDOW), 100, WINDOW),
        "scikit-learn, window 200": (scikit_learn(REFERENCE_WINDOW), 400, REFERENCE_WINDOW),
    }


def measure(rate: float, rounds: int, *, share: float = 1.0) -> dict[str, Any]:
    """The figures of one click rate; `share` of the usual records.

    Raises:
        monitor_figures.Unequal: two contestants answered differently.
    """
    chosen, taken = contestants(), []
    for number in range(rounds):
        stream = Stream.draw(rate, max(records for _, records, _ in chosen.values()), seed=number)
        answers: dict[str, Answers] = {}
        names = list(chosen)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestant, records, window = chosen[name]
            aucs, seconds = contestant(stream, max(20, round(records * share)))
            answers[name] = Answers(aucs, seconds, window)
        own, _ = ours(_CALL_ROWS, REFERENCE_WINDOW)(stream, 400)
        monitor_figures.expect_equal({**answers, "ours over 200": Answers(own, 1.0, REFERENCE_WINDOW)})
        taken.append(answers)
    return monitor_figures.of_rate(rate, taken)


def ties(rate: float) -> dict[str, float]:
    """Furthest from scikit-learn, per contestant, over records whose scores are rounded to 1,000 values."""
    stream = Stream.draw(rate, _TIED_RECORDS, seed=99, levels=1000)
    truth, _ = scikit_learn(WINDOW)(stream, _TIED_RECORDS)
    asked = {monitor_figures.OURS: ours(_CALL_ROWS), monitor_figures.RIVER: river()}
    return {name: float(np.abs(each(stream, _TIED_RECORDS)[0] - truth).max()) for name, each in asked.items()}


def whole_process(quick: bool) -> dict[str, Any]:
    """The figures of `monitor_throughput`, in a process of its own: its memory is what is measured."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.monitor_throughput", "--json", str(figures)]
        subprocess.run(command + ["--quick"] * quick, check=True, cwd=Path(__file__).resolve().parents[1])
        found: dict[str, Any] = json.loads(figures.read_text())
        return found


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.monitor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two minutes: fewer rounds and records, wider spreads")
    parser.add_argument("--only", choices=("auc", "process"), help="one section instead of both")
    parser.add_argument(
        "--output", type=Path, default=Path("build/benchmarks/monitor.json"), help="JSON file with all figures"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both sections; 0 = all figures are there, whatever they say."""
    flags = build_parser().parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    facts, other_work = machine.facts(), machine.OtherWork()
    facts |= {name: machine.version_of(name) for name in ("scikit-learn", "river")}
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    document: dict[str, Any] = {"machine": facts, "flags": {"quick": flags.quick}}
    if flags.only != "process":
        print(f"AUC of the last {WINDOW:,} records after every record; median (least to most) over rounds", flush=True)
        document["rates"] = []
        for rate in CLICK_RATES:
            result = measure(rate, _QUICK_ROUNDS if flags.quick else _ROUNDS, share=0.5 if flags.quick else 1.0)
            result["off_with_ties"] = ties(rate)
            document["rates"].append(result)
            monitor_figures.print_rate(result)
    if flags.only != "auc":
        print("\nwhole process: decode, join, KPIs, judgement, archive with fsync", flush=True)
        document["process"] = whole_process(flags.quick)
    if warning := other_work.warning():
        print(warning)
    document["other_work_share"] = other_work.share()
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(flags.output, json.dumps(named(document), indent=2) + "\n")
    print(f"written: {flags.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
