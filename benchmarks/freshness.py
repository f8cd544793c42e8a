"""What fresh models gain in a drifting world: `make benchmark-freshness`.

Simulated traffic over two days after a first model; policies differ in when they retrain and in nothing else. Prints
the mean AUC gain over the model that stays as it was, beside the gains that Monolith's authors published; `--docs`
writes figures and chart into docs/. The world is `inference_client.simulation.slow_drift`'s, rounds are
`benchmarks.freshness_study`'s, and what was chosen, and when, is told in docs/freshness.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.models import share_cores

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
FIGURES, CHART = "freshness.json", "freshness.svg"


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
    share_cores()
    # Torch is imported from here on.
    from benchmarks.freshness_study.chart import chart
    from benchmarks.freshness_study.days import FROZEN, drifting_world, run_days
    from benchmarks.freshness_study.figures import figures
    from benchmarks.freshness_study.plan import CONTROL, LEARNING, days_of, described

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
    from benchmarks.freshness_study.days import EXACT, FROZEN
    from benchmarks.freshness_study.figures import PUBLISHED
    from benchmarks.freshness_study.plan import CONTROL

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
    from benchmarks.freshness_study.days import BEST, EXACT

    entropy = study["normalized_entropy"]
    return float(entropy[EXACT] / entropy[BEST] - 1.0)


if __name__ == "__main__":
    sys.exit(main())
