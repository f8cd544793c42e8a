"""Measure how cost grows with the work, as slopes on logarithmic axes.

Run by `make benchmark-growth`. `benchmarks.scale` measures the cost of each step by number of rows.
`benchmarks.year` measures the cost of reading a registry by number of runs. `benchmarks.growth`
reads the documents of both benchmarks, and measures the monitor's processor time for several rates
of requests. A turn of the monitor covers at most a second of traffic. The processor time per second
of traffic determines the number of replicas for a rate. Each replica has its own partitions. At a
slope of 1, twice the work costs twice as much. If the last slope of a curve is above `STEEP`, the
target is missed.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chart import COLORS, chart_file
from benchmarks.command import MEASURED, benchmark_parser, documented
from benchmarks.monitor import measure
from benchmarks.spread import Figure, short, spread
from evergreen.reports.svg import Line
from monitoring.monitor import TICK_PULLS
from monitoring.settings import RecordSettings

RATES, QUICK_RATES = (1, 10, 100, 1_000, 10_000), (10, 100, 1_000)
"""Rates of traffic in requests per second. Each request has `ROWS_PER_REQUEST` rows."""
ROWS_PER_REQUEST, LEAST_ROWS = 10, 100_000
MOST_A_TURN = TICK_PULLS * RecordSettings.pull_messages // 2
"""Maximum requests of a turn: half of the messages that a turn pulls, to leave room for the
clicks."""
BUSY = 0.7
"""Maximum share of a core that a replica uses. With the spare share, the replica catches up after a
pause."""
STEEP = 1.05
"""Slope above which a cost grows faster than the work. A smaller excess over 1 is noise."""
Curve = Sequence[tuple[float, float]]
"""Pairs of work and cost, ascending."""


def last_slope(curve: Curve) -> float:
    """Return the slope of the last part of a curve, on logarithmic axes.

    A slope of 1 means proportional cost, and a slope of 2 means quadratic cost. The slope is
    computed between the last point and the largest point with at most a third of its work. Between
    closer points, noise would dominate the slope.

    >>> last_slope([(10, 1), (100, 2), (900, 170), (1_000, 200)])
    2.0
    """
    larger, cost = curve[-1]
    x, y = max(each for each in curve if 3 * each[0] <= larger)
    return math.log(cost / y) / math.log(larger / x)


def monitor_curve(rates: Sequence[int], least_rows: int) -> Curve:
    """Measure one monitor at each rate, and return its share of a core by requests per second."""
    curve = []
    for rate in rates:
        rows = (
            max(least_rows, 5 * rate * ROWS_PER_REQUEST)
            if rate >= 100
            else rate * ROWS_PER_REQUEST * 100
        )
        turns = -(-rate // MOST_A_TURN)  # number of turns per second of traffic
        run = measure(
            rows,
            rows_per_message=ROWS_PER_REQUEST,
            log="memory",
            load=(rate // turns, 1 / turns),
        )
        curve.append((float(rate), run["cpu_seconds"] / run["turns"] * turns))
        print(f"{rate:,} requests/s: {curve[-1][1]:.4f} of a core", flush=True)
    return curve


def scale_curves(document: Mapping[str, Any]) -> dict[str, dict[str, Curve]]:
    """Return the cost of each step by number of rows, as one curve per resource and step.

    The resources are processor seconds, bytes of memory and bytes on disk.
    """
    kinds = {"seconds": "processor_seconds", "memory": "peak", "disk": "disk"}
    return {
        kind: {
            step: [(each["rows"], each[key]) for each in of if each[key]]
            for step, of in document["steps"].items()
        }
        for kind, key in kinds.items()
    }


def store_curves(document: Mapping[str, Any]) -> dict[str, Curve]:
    """Return a curve for each reader of the registry: CPU seconds by number of runs."""
    num_runs = {"a day": 24, "30 days": 720, "a year": 8_760, "10,000 rounds": 10_000}
    store = document["store"]
    names = [name for name in next(iter(store.values())) if name.startswith("s, ")]
    return {
        name.removeprefix("s, "): [(num_runs[at], max(of[name], 1e-4)) for at, of in store.items()]
        for name in names
    }


def slopes(what: str, curves: Mapping[str, Curve]) -> list[Figure]:
    """Return a figure with the last slope of each curve."""
    found = []
    for name, curve in curves.items():
        if len(curve) < 2:
            continue
        work, cost = curve[-1]
        limit_text = f"{short(cost)} at {short(work)}"
        found.append(
            Figure(
                f"{what}: {name}, slope",
                spread([last_slope(curve)]),
                "",
                target=STEEP,
                limit=limit_text,
            )
        )
    return found


def charts(document: Mapping[str, Any]) -> dict[str, str]:
    """Return one chart for each kind of work, by file name. Both axes are logarithmic."""
    drawn = {}
    for name, of in document["curves"].items():
        lines = [
            Line(
                label=label,
                color=COLORS[number % len(COLORS)],
                x=[math.log10(x) for x, _ in curve],
                y=[math.log10(y) for _, y in curve],
            )
            for number, (label, curve) in enumerate(of.items())
        ]
        if lines:
            drawn[f"growth-{name.replace(' ', '-')}.svg"] = chart_file(
                lines, y_label=_AXES[name], x_unit=""
            )
    return drawn


_AXES = {
    "monitor": "log10 of cores by log10 of requests/s",
    "store": "log10 of CPU seconds by log10 of rounds",
    "steps seconds": "log10 of processor seconds by log10 of rows",
    "steps memory": "log10 of bytes of anonymous memory by log10 of rows",
    "steps disk": "log10 of bytes on disk by log10 of rows",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the monitor, and report how cost grows with rows, requests and runs.

    The costs of steps and of the registry are read from the documents of other benchmarks.
    """
    flags = benchmark_parser("growth", __doc__, quick="three rates and few rows").parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with documented(flags) as document:
        curve = monitor_curve(*((QUICK_RATES, 20_000) if flags.quick else (RATES, LEAST_ROWS)))
        curves: dict[str, Mapping[str, Curve]] = {"monitor": {"monitor": curve}}
        if (path := MEASURED / "year.json").exists():
            curves["store"] = store_curves(json.loads(path.read_text()))
        if (path := MEASURED / "scale.json").exists():
            curves |= {
                f"steps {kind}": of
                for kind, of in scale_curves(json.loads(path.read_text())).items()
            }
        document["curves"] = curves
        for what, of in curves.items():
            document["figures"] += slopes(what, of)
        for rate, share in curve:
            name = f"monitor at {rate:,.0f} requests/s of {ROWS_PER_REQUEST} rows"
            replicas = f"replicas at {BUSY:.0%} of a core each: {math.ceil(share / BUSY)}"
            document["figures"].append(Figure(name, spread([share]), "cores", limit=replicas))
    return 0


if __name__ == "__main__":
    sys.exit(main())
