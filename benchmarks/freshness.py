"""What fresh models gain in a drifting world: `make benchmark-freshness`.

Simulated traffic over two days after a first model; policies differ in when they retrain and in nothing else. Prints
the mean AUC gain over the frozen model, beside the gains that Monolith's authors published; `--docs` writes figures and
chart into docs/. The world is `inference_client.simulation.slow_drift`'s, scoring and learning are
`benchmarks.freshness_days`', and docs/freshness.md says what was chosen, and when.

Gains are in AUC points: 1 point = 0.01 of AUC. Each is the mean over hours of the difference within an hour, since
rows of different hours were scored by different models. Its interval is DeLong's: hours hold different rows, so the
variances of the hours' paired differences add up. It says how sure these rows make us of these models' difference in
this world; another seed is another world.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.freshness_days import BEST, EXACT, FROZEN, Days, Learning, Scores, drifting_world, run_days
from components.charts.line_chart import ticks
from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.metrics import Z_95, auc_difference, normalized_entropy, roc_auc
from components.models import share_cores
from components.models.configs import DcnConfig
from components.preprocessing.vocabularies import AdmissionRules
from components.training.config import TrainingSettings
from inference_client.simulation.slow_drift import DriftingWorld

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
FIGURES, CHART = "freshness.json", "freshness.svg"
WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 40, 44
COLORS = ("#dc2626", "#d97706", "#2563eb", "#059669")
SMOOTHED_HOURS = 3
"""Hours whose mean is drawn: a single hour's clicks make a policy's AUC uncertain by a tenth of a point."""
CONTROL = "every 5 h"
"""The policy that also runs in a world where nothing moves: what it gains there comes from more rows."""

LEARNING = Learning(
    config=DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL),
    first=TrainingSettings(max_epochs=3),
    # One pass: each row is learnt once, as online training does. No halvings: within hours there is no jump to find.
    # Rate and batch were chosen among eight pairs by hourly and half-hourly rounds, in the world of another seed.
    round=TrainingSettings(max_epochs=1, num_halvings=0, learning_rate=0.0003, batch_size=1024, min_batch_size=1024),
    rules=AdmissionRules(frequency_threshold=5),
)
POINTS = 100.0
PUBLISHED = {"every 5 h": 0.24, "every 1 h": 0.34, "every 30 min": 0.37}
"""Monolith (Liu et al. 2022, arXiv 2209.07663), table 2: mean AUC of DeepFM on Criteo's rows, trained on from batch
training with parameters synchronised at this interval, minus that of batch training alone; in AUC points."""


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.freshness",
        description="AUC gained by retraining every 5 h, 1 h and 30 min of simulated traffic, over a frozen model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a fifth of the time on fewer rows: whether it runs, not what it says")
    add("--seed", type=int, default=1, help="of the world, its drift and its traffic")
    add("--docs", action="store_true", help=f"write {FIGURES} and {CHART} into docs/")
    add("--output", type=Path, help=f"folder for {FIGURES} and {CHART} (docs/ with --docs)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; 0 = done, whatever the figures."""
    flags = build_parser().parse_args(argv)
    share_cores()  # torch is imported when the first engine is made
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    days = days_of(flags.seed, is_quick=flags.quick)
    world = drifting_world(flags.seed)
    result: dict[str, Any] = {**described(world, days), "study": figures(run_days(world, days, LEARNING, say=say))}
    say("control: the same days in a world where nothing moves")
    still = replace(days, intervals={name: days.intervals[name] for name in (FROZEN, CONTROL)})
    control = run_days(drifting_world(flags.seed, is_still=True), still, LEARNING, say=say)
    result |= {"control": figures(control), "seconds": round(time.monotonic() - began)}
    print(table(result))
    folder = DOCS if flags.docs else flags.output
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FIGURES).write_text(json.dumps(result, indent=1) + "\n")
        (folder / CHART).write_text(chart(result))
        say(f"written: {folder / FIGURES}, {folder / CHART}")
    return 0


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    study, control = result["study"], result["control"]
    lines = [
        "",
        f"{study['rows']:,} rows scored, {study['clicks']:,} clicks; gains in AUC points (0.01), mean over "
        f"{len(study['hourly_auc'][FROZEN])} hours [95 %]",
        f"{'retrained':<14}{'mean AUC':>9}{'gain over frozen':>28}{'Monolith':>10}{'below best':>12}{'models':>8}",
    ]
    for name in study["rounds"]:
        gained = _interval(study["gain_over_frozen"][name]) if name != FROZEN else ""
        published = f"{PUBLISHED[name]:+.2f}" if name in PUBLISHED else ""
        below = study["below_best"][name]["points"]
        lines.append(
            f"{name:<14}{study['mean_auc'][name]:>9.4f}{gained:>28}{published:>10}{below:>12.2f}"
            f"{study['models'][name]:>8}"
        )
    for name, found in study["gain_over_slower"].items():
        lines.append(f"{name} over the next slower: {_interval(found)}")
    lines += [
        f"exact truth, as old as the frozen model: {study['below_best'][EXACT]['points']:.2f} below best; "
        f"normalized entropy {100 * _entropy_lost(study):+.2f} %",
        f"nothing moves, {CONTROL}: {_interval(control['gain_over_frozen'][CONTROL])} over frozen",
        f"{result['seconds']} s",
    ]
    return "\n".join(lines)


def _interval(found: dict[str, float]) -> str:
    return f"{found['points']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _entropy_lost(study: dict[str, Any]) -> float:

    entropy = study["normalized_entropy"]
    return float(entropy[EXACT] / entropy[BEST] - 1.0)


def days_of(seed: int, *, is_quick: bool) -> Days:
    """Two days after two days; quick: eight hours after eight, of half as many rows."""
    policies = {FROZEN: math.inf, "every 5 h": 5.0, "every 1 h": 1.0, "every 30 min": 0.5}
    hours, rows = (8, 20_000) if is_quick else (48, 40_000)
    return Days(earlier_hours=hours, hours=hours, rows_per_hour=rows, intervals=policies, seed=seed)


def described(world: DriftingWorld, days: Days) -> dict[str, Any]:
    """The plan as JSON-ready values."""
    return {
        "drift": asdict(world.drift),
        "bayes_auc": world.at(days.earlier_hours).bayes_auc,
        "days": {
            "earlier_hours": days.earlier_hours,
            "hours": days.hours,
            "rows_per_hour": days.rows_per_hour,
            "seed": days.seed,
        },
        "learning": {
            "config": LEARNING.config.as_document(),
            "first": LEARNING.first.deciding(),
            "round": LEARNING.round.deciding(),
            "frequency_threshold": LEARNING.rules.frequency_threshold,
        },
    }


def figures(scores: Scores) -> dict[str, Any]:
    """All figures of one run as JSON-ready values."""
    names = [*scores.num_rounds]
    return {
        "rows": len(scores.label),
        "clicks": int(scores.label.sum()),
        "hourly_auc": {name: _hourly(scores, name) for name in scores.by},
        "mean_auc": {name: float(np.mean(_hourly(scores, name))) for name in scores.by},
        "gain_over_frozen": {name: gain(scores, name, FROZEN) for name in names if name != FROZEN},
        "gain_over_slower": {
            name: gain(scores, name, slower) for slower, name in zip(names, names[1:]) if slower != FROZEN
        },
        "below_best": {name: gain(scores, BEST, name) for name in scores.by if name != BEST},
        "normalized_entropy": {name: normalized_entropy(scores.label, by) for name, by in scores.by.items()},
        "rounds": scores.num_rounds,
        "models": scores.num_models,
        "round_seconds": {name: round(seconds, 1) for name, seconds in scores.seconds.items()},
    }


def gain(scores: Scores, name: str, reference: str) -> dict[str, float]:
    """Mean over hours of AUC(name) - AUC(reference) in points, with its 95 % interval."""
    differences, variances = [], []
    for part in _hours(scores):
        found = auc_difference(scores.label[part], scores.by[name][part], scores.by[reference][part])
        assert found is not None, "an hour has clicks and other rows"
        differences.append(found.auc)
        variances.append(found.standard_error**2)
    mean, error = float(np.mean(differences)), float(np.sqrt(np.sum(variances)) / len(variances))
    return {
        "points": POINTS * mean,
        "low": POINTS * (mean - Z_95 * error),
        "high": POINTS * (mean + Z_95 * error),
    }


def _hourly(scores: Scores, name: str) -> list[float]:
    aucs = [roc_auc(scores.label[part], scores.by[name][part]) for part in _hours(scores)]
    return [auc for auc in aucs if auc is not None]


def _hours(scores: Scores) -> list[slice]:
    """The rows of each hour; they lie in time order."""
    edges: NDArray[np.int64] = np.searchsorted(scores.hour, np.arange(scores.hour[-1] + 2))
    return [slice(int(a), int(b)) for a, b in zip(edges, edges[1:])]


def chart(result: dict[str, Any]) -> str:
    """The chart of `result`, the study's JSON document."""
    hourly = result["study"]["hourly_auc"]
    names = [*result["study"]["rounds"], EXACT]
    lines = {name: _smoothed([100.0 * (best - own) for best, own in zip(hourly[BEST], hourly[name])]) for name in names}
    num_hours, top = len(hourly[BEST]), max(max(line) for line in lines.values()) * 1.06

    def at(hour: float, points: float) -> tuple[float, float]:
        x = LEFT + hour / num_hours * (WIDTH - LEFT - RIGHT)
        return x, TOP + points / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">AUC points below the best possible, mean of {SMOOTHED_HOURS} hours'
        "</text>",
    ]
    for value in ticks(0.0, top, 6):
        x, y = at(0, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{0.0 - value:.4g}</text>')
    for hour in range(0, num_hours + 1, 6 if num_hours > 12 else 2):
        x, _ = at(hour, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{hour}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">hours since the first model</text>')
    for number, (name, line) in enumerate(lines.items()):
        color, dashes = (COLORS[number], "") if name != EXACT else ("#777", ' stroke-dasharray="5 4"')
        points = " ".join("{:.1f},{:.1f}".format(*at(hour + 0.5, value)) for hour, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        y = TOP + 14 + 18 * number
        label = name if name in (FROZEN, EXACT) else f"retrained {name}"
        parts.append(
            f'<line x1="{WIDTH - 142}" x2="{WIDTH - 122}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"{dashes}/>'
        )
        parts.append(f'<text x="{WIDTH - 116}" y="{y + 4}" font-size="11">{html.escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _smoothed(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours; fewer at the ends."""
    half = SMOOTHED_HOURS // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    sys.exit(main())
