"""Measure the gain and the cost of fresh models under drift, for `make benchmark-freshness`.

Simulated traffic continues for a day after a first model. The retraining policies differ only in
their cadence and parent. Every run executes the real steps with their defaults. The steps are
extraction, preprocessing, training, the gate, and a release or a canary
(`benchmarks.simulated_lineage`). The output has the AUC of the served scores, the outcomes of the
runs and their cost, next to published gains and savings. docs/design/freshness.md explains the
choices, and `benchmarks.slow_drift` is the simulator.

Events have the same order as in production. Every quarter of an hour, the live model scores new
rows, which then enter the lake. If a canary is active, it is evaluated next. After each interval of
a policy, a run trains on the current lake. The run's release scores the rows that follow.

Gains are in AUC points, where 1 point is 0.01 of AUC. A gain is the mean of hourly differences. The
difference is computed for each hour separately, because different models scored different hours.
The interval of a gain is computed by DeLong's method. The hours have no common rows, so the
variances of the hourly differences add up. The interval covers only the uncertainty from the rows.
It does not cover the choice of the simulator's seed.
"""

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.chart import chart_file
from benchmarks.command import benchmark_parser, documented
from benchmarks.simulated_lineage import (
    CANARY,
    GAVE_WAY,
    REFUSED,
    RELEASED,
    LineageRun,
    SimulatedLineage,
    TimedRows,
)
from benchmarks.slow_drift import DriftingSimulator, SlowDrift
from benchmarks.spread import Figure, Spread, spread
from demo.simulation.simulator import Simulator
from evergreen.contracts.manifests import CURRENT, NONE
from evergreen.reports.svg import Line
from evergreen.statistics.metrics import Z_95, auc_difference, log_loss, normalized_entropy, roc_auc
from testing.warm_steps import WarmSteps

FROZEN = "never"
FULL = "every 12 h, from scratch"
CONTROL = "every 5 h"
"""Name of the policy that is also measured without drift. Without drift, the gain of this policy
comes only from more rows."""
BEST = "best possible"
EXACT = "true probabilities of hour 0"
"""Name of a policy that scores with the true probabilities of hour 0. The AUC of this policy falls
with time only because of drift."""


@dataclass(frozen=True)
class Cadence:
    """Interval and parent of retraining."""

    hours: float
    """Hours between two runs, a multiple of the simulator's steps. An infinite value means that no
    run follows."""
    parent: str = CURRENT
    """The run's parameter `parent`: the live model, or none."""


POLICIES = {
    FROZEN: Cadence(math.inf),
    FULL: Cadence(12.0, parent=NONE),
    "every 12 h": Cadence(12.0),
    CONTROL: Cadence(5.0),
    "every 1 h": Cadence(1.0),
    "every 30 min": Cadence(0.5),
}
PUBLISHED = {"every 5 h": 0.24, "every 1 h": 0.34, "every 30 min": 0.37}
"""Published gains in AUC points by interval, from table 2 of Monolith (Liu et al. 2022, arXiv
2209.07663). Each gain is a difference of mean AUC between two DeepFM models on Criteo's rows. One
of the two models synchronises its parameters at the given interval. The other model is trained only
in batches."""
PUBLISHED_SAVING = 45
"""Cost of stateless batch training divided by the cost of incremental training, as published by
Grubhub (Egg 2021, arXiv 2107.07106)."""
OUTCOMES = (RELEASED, CANARY, GAVE_WAY, REFUSED)
COLORS = {
    FROZEN: "#dc2626",
    FULL: "#7c3aed",
    CONTROL: "#d97706",
    "every 1 h": "#2563eb",
    "every 30 min": "#059669",
    EXACT: "#777",
}
SMOOTHED_HOURS = 3
"""Number of hours that the chart averages. With the clicks of a single hour, a policy's AUC is
uncertain by a tenth of a point."""


@dataclass(frozen=True, kw_only=True)
class Days:
    """Length, size and policies of the study."""

    hours: int
    """Hours of traffic before and after hour 0. The hours before hour 0 train the first model, and
    the hours after hour 0 are scored."""
    rows_per_hour: int
    policies: dict[str, Cadence]
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """All n scored rows in time order."""

    hour: NDArray[np.int64]
    """Hour of each row, counted from 0, shape [n]."""
    label: NDArray[np.int32]
    by: dict[str, NDArray[np.float64]]
    """Scores [n] by policy. The names `BEST` and `EXACT` count as policies."""
    first: LineageRun
    """The run of the first model."""
    lines: dict[str, SimulatedLineage]
    """Lineage of models by policy."""


def drifting_simulator(seed: int, *, is_still: bool = False) -> DriftingSimulator:
    """Return the simulator of the study. If `is_still` is True, the simulator has no drift."""
    drift = SlowDrift(seed=seed)
    if is_still:
        drift = replace(drift, columns=(), new_category_columns=())
    return DriftingSimulator(simulator=Simulator.create(seed), drift=drift)


def _traffic(
    simulator: DriftingSimulator, days: Days, hours: range
) -> Iterator[tuple[float, TimedRows]]:
    """Yield the rows of each step within `hours`, with the end of the step in hours.

    Equal seeds give equal rows.
    """
    step = simulator.drift.step_minutes / 60.0
    count = round(days.rows_per_hour * step)
    for number in range(round(hours.start / step), round(hours.stop / step)):
        random = np.random.default_rng([days.seed, 21, number])
        rows = simulator.at(number * step).draw(count, random)
        yield (number + 1) * step, TimedRows.of(rows, start=number * step, end=(number + 1) * step)


def run_days(simulator: DriftingSimulator, days: Days, folder: Path) -> Scores:
    """Return the scores of every policy over the same rows.

    The lake and the lineages are written to `folder`.
    """
    exact, lake = simulator.at(days.hours), folder / "lake"
    hours: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int32]] = []
    scores: dict[str, list[NDArray[np.float64]]] = {
        name: [] for name in (*days.policies, BEST, EXACT)
    }
    for _, traffic in _traffic(simulator, days, range(days.hours)):
        traffic.write(lake)
    with WarmSteps() as warm:
        first = SimulatedLineage(folder / "first", lake=lake, warm=warm)
        of_first = first.run_pipeline()
        print(f"the first model is trained: {of_first}", flush=True)
        lines = {name: first.branched(folder / f"line-{i}") for i, name in enumerate(days.policies)}
        for end, traffic in _traffic(simulator, days, range(days.hours, 2 * days.hours)):
            hour, rows = end - days.hours, traffic.rows
            hours.append(np.full(len(rows.label), math.ceil(hour) - 1))
            labels.append(rows.label)
            scores[BEST].append(rows.probability)
            scores[EXACT].append(exact.probability_of(rows.dense, rows.categorical))
            for name, line in lines.items():
                scores[name].append(line.serve(traffic))
            traffic.write(lake)
            for name, line in lines.items():
                line.step_canary()
                # A run in the last hour would release a model that scores no rows.
                if hour % days.policies[name].hours == 0 and hour < days.hours:
                    line.run_pipeline(parent=days.policies[name].parent)
            if hour % 6 == 0:
                made = [f"{name} {len(each.runs)}" for name, each in lines.items()]
                print(f"hour {hour:.0f}; runs: {', '.join(made)}", flush=True)
    return Scores(
        hour=np.concatenate(hours),
        label=np.concatenate(labels),
        by={name: np.concatenate(parts) for name, parts in scores.items()},
        first=of_first,
        lines=lines,
    )


def figures(scores: Scores) -> dict[str, Any]:
    """Return all figures of one study as JSON-ready values."""
    names = [*scores.lines]
    hourly = {
        name: [roc_auc(scores.label[rows], by[rows]) for rows in _rows_by_hour(scores)]
        for name, by in scores.by.items()
    }
    gains = {name: gain(scores, name, FROZEN) for name in names if name != FROZEN}
    return {
        "rows": len(scores.label),
        "clicks": int(scores.label.sum()),
        "hourly_auc": hourly,
        "mean_auc": {name: float(np.mean(np.array(aucs, float))) for name, aucs in hourly.items()},
        "log_loss": {name: log_loss(scores.label, by) for name, by in scores.by.items()},
        "gain_over_frozen": gains,
        "gain_over_slower": {
            name: gain(scores, name, slower)
            for slower, name in zip(names, names[1:])
            if slower != FROZEN
        },
        "below_best": {name: gain(scores, BEST, name) for name in scores.by if name != BEST},
        "normalized_entropy": {
            name: normalized_entropy(scores.label, by) for name, by in scores.by.items()
        },
        "first": _cost([scores.first]),
        "rounds": {
            name: {
                "outcomes": Counter(each.outcome for each in line.runs),
                "canaries": [each._asdict() for each in line.canary_ends],
                **_cost(line.runs),
            }
            for name, line in scores.lines.items()
        },
    }


def _cost(runs: Sequence[LineageRun]) -> dict[str, Any]:
    """Return the training rows of all runs, and the CPU seconds of training and of all steps."""
    return {
        "rows": sum(each.rows for each in runs),
        "training_seconds": sum(each.seconds["training"] for each in runs),
        "seconds": sum(sum(each.seconds.values()) for each in runs),
    }


def gain(scores: Scores, name: str, reference: str) -> dict[str, float]:
    """Return the mean over hours of AUC(name) - AUC(reference), with its 95 % interval.

    Mean and interval are in AUC points.
    """
    differences, variances = [], []
    for rows in _rows_by_hour(scores):
        # The simulator draws rows independently.
        groups = range(rows.start, rows.stop)
        found = auc_difference(
            scores.label[rows], scores.by[name][rows], scores.by[reference][rows], groups=groups
        )
        assert found is not None, "each hour has rows with and without a click"
        differences.append(found.auc)
        variances.append(found.standard_error**2)
    mean, error = 100.0 * np.mean(differences), 100.0 * np.sqrt(np.sum(variances)) / len(variances)
    return {
        "points": float(mean),
        "low": float(mean - Z_95 * error),
        "high": float(mean + Z_95 * error),
    }


def _rows_by_hour(scores: Scores) -> list[slice]:
    """Return the slice of rows of each hour. Rows are in time order."""
    edges = np.searchsorted(scores.hour, np.arange(scores.hour[-1] + 2)).tolist()
    return [slice(start, end) for start, end in zip(edges, edges[1:])]


def table(result: dict[str, Any]) -> str:
    """Return the figures as text."""
    study, control = result["study"], result["control"]
    lines = [
        f"{study['rows']:,} rows scored, {study['clicks']:,} clicks; gains in AUC points (0.01), "
        "mean over "
        f"{len(study['hourly_auc'][FROZEN])} hours [95 %]",
        f"{'retrained':<26}{'mean AUC':>9}{'log loss':>9}"
        + f"{'gain over never':>28}{'Monolith':>10}{'below best':>12}",
    ]
    for name in study["rounds"]:
        gained = _interval(study["gain_over_frozen"][name]) if name != FROZEN else ""
        published = f"{PUBLISHED[name]:+.2f}" if name in PUBLISHED else ""
        below = study["below_best"][name]["points"]
        lines.append(
            f"{name:<26}{study['mean_auc'][name]:>9.4f}{study['log_loss'][name]:>9.4f}{gained:>28}{published:>10}"
            f"{below:>12.2f}"
        )
    for name, found in study["gain_over_slower"].items():
        lines.append(f"{name} over the one above: {_interval(found)}")
    entropy = study["normalized_entropy"]
    return "\n".join(
        [
            *lines,
            "true probabilities at the time of the first model: "
            f"{study['below_best'][EXACT]['points']:.2f} below best; "
            f"normalized entropy {100 * (entropy[EXACT] / entropy[BEST] - 1):+.2f} %",
            f"nothing moves, {CONTROL}: {_interval(control['gain_over_frozen'][CONTROL])} over "
            "never",
            *_runs_table(study),
        ]
    )


def _runs_table(study: dict[str, Any]) -> list[str]:
    """Return outcomes and cost of the runs as text.

    Each gain per cost is also shown as a multiple of the gain per cost of `FULL`.
    """
    lines = [
        f"{'retrained':<26}"
        + "".join(f"{each:>10}" for each in OUTCOMES)
        + f"{'grown':>7}{'aborted':>8}{'rows':>12}"
        f"{'training s':>11}{'all s':>8}{'points per M rows':>18}"
        + f"{'per minute':>11}{'x scratch':>10}"
    ]
    per_second = {
        name: study["gain_over_frozen"][name]["points"] / each["seconds"]
        for name, each in study["rounds"].items()
        if each["seconds"]
    }
    for name, each in study["rounds"].items():
        if name not in per_second:
            continue
        ends = Counter(end["is_released"] for end in each["canaries"])
        lines.append(
            f"{name:<26}"
            + "".join(f"{each['outcomes'].get(outcome, 0):>10}" for outcome in OUTCOMES)
            + f"{ends[True]:>7}{ends[False]:>8}{each['rows']:>12,}{each['training_seconds']:>11.0f}"
            f"{each['seconds']:>8.0f}"
            + f"{study['gain_over_frozen'][name]['points'] / each['rows'] * 1e6:>18.2f}"
            f"{60 * per_second[name]:>11.3f}"
            + (f"{per_second[name] / per_second[FULL]:>10.1f}" if FULL in per_second else "")
        )
    first = study["first"]
    lines.append(
        f"the first model: {first['rows']:,} rows, {first['training_seconds']:.0f} s of training, "
        f"{first['seconds']:.0f} s in all; Grubhub published up to {PUBLISHED_SAVING} times "
        "cheaper than batch training"
    )
    return lines


def _interval(found: dict[str, float]) -> str:
    return f"{found['points']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def chart(result: dict[str, Any]) -> str:
    """Return an SVG chart of each hour's AUC, in points below the best possible AUC."""
    hourly = result["study"]["hourly_auc"]
    lines = []
    for name, color in COLORS.items():
        if name not in hourly:
            continue
        points = 100.0 * (np.array(hourly[name]) - np.array(hourly[BEST]))
        # At the edges, the average covers fewer hours.
        sums, counts = (
            np.convolve(each, np.ones(SMOOTHED_HOURS), "same")
            for each in (points, np.ones(len(points)))
        )
        lines.append(
            Line(
                label=name,
                color=color,
                x=[*np.arange(0.5, len(points))],
                y=(sums / counts).tolist(),
            )
        )
    title = f"AUC points to the best possible, mean of {SMOOTHED_HOURS} hours"
    return chart_file(lines, y_label=title, x_unit="h")


def charts(document: dict[str, Any]) -> dict[str, str]:
    """Return the study's chart, by file name."""
    return {"freshness.svg": chart(document)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, and return 0."""
    parser = benchmark_parser(
        "freshness", __doc__, quick="two policies, six hours of few rows, to test that it runs"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of the simulator, its drift and its traffic (default: 1)",
    )
    flags = parser.parse_args(argv)
    hours, rows = (6, 20_000) if flags.quick else (24, 40_000)
    chosen = [FROZEN, CONTROL, "every 1 h"] if flags.quick else POLICIES
    days = Days(
        hours=hours,
        rows_per_hour=rows,
        policies={name: POLICIES[name] for name in chosen},
        seed=flags.seed,
    )
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="freshness-") as folder:
        study = figures(run_days(drifting_simulator(flags.seed), days, Path(folder) / "study"))
        print("control: the same days in a simulator without drift", flush=True)
        still = replace(days, policies={name: POLICIES[name] for name in (FROZEN, CONTROL)})
        control = figures(
            run_days(drifting_simulator(flags.seed, is_still=True), still, Path(folder) / "control")
        )
        document |= {
            "seed": days.seed,
            "rows_per_hour": days.rows_per_hour,
            "study": study,
            "control": control,
        }
        print(table(document))
        for name, each in study["rounds"].items():
            if name != FROZEN:
                gained = Spread(
                    *(study["gain_over_frozen"][name][key] for key in ("points", "low", "high"))
                )
                seconds = spread([each["seconds"] / sum(each["outcomes"].values())])
                document["figures"] += [
                    Figure(
                        f"retrained {name}, AUC points gained [95 %]",
                        gained,
                        "points",
                        peer="never retrained",
                    ),
                    Figure(f"retrained {name}, processor time of a round", seconds, "s"),
                ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
