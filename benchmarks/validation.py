"""Power and false alarms of validation beside named peers: `make benchmark-validation`.

Pairs of windows of a synthetic world that stands still: in how many pairs is anything alarmed? Target: at most the
stated `false_alarm_rate`. Then windows with a planted shift: in how many is the shifted feature named? Target: 95 %.
The validation step as a run calls it, TFDV's drift comparator with the thresholds of its guide, and Evidently's default
preset are shown the same files. What the windows and shifts are is `benchmarks.validation_study`'s.

Prints tables, and writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.validation_study.plan import EVIDENTLY, OURS, TFDV, StudyCase, StudyContestant, make_plan, show
from components.drift_statistics.effects import wilson_interval
from components.runtime.durable import write_whole
from components.validation.rules import ValidationSettings
from inference_client.simulation.world import World

WORLD_SEED = 7
FOUND_TARGET = 0.95
"""Least share of the windows with a shift whose shifted features are named."""
FALSE_ALARM_RATE = ValidationSettings.false_alarm_rate


@dataclass
class SettingCount:
    """What one contestant's setting said about the windows of one case."""

    is_stationary: bool
    hits: int = 0
    """Stationary pairs with any alarm, or windows with every shifted feature named."""
    windows: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, case: StudyCase, alarms: Sequence[str], seconds: float) -> None:
        """Counts one window."""
        self.hits += set(case.shift.columns) <= set(alarms) if case.shift else bool(alarms)
        self.windows += 1
        self.seconds.append(seconds)

    def figures(self) -> dict[str, Any]:
        """Share, its 95 % interval, whether the target is met, and seconds a window."""
        share = self.hits / self.windows
        low, high = wilson_interval(share, self.windows)
        met = share <= FALSE_ALARM_RATE if self.is_stationary else share >= FOUND_TARGET
        counts = {"hits": self.hits, "windows": self.windows, "share": share, "low": low, "high": high}
        return {**counts, "met": met, "seconds": median(self.seconds)}


Counts = dict[str, dict[str, SettingCount]]
"""By case, then setting."""


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="few windows of each kind and no Evidently: whether it runs")
    add("--pairs", type=int, default=200, help="stationary pairs of windows")
    add("--windows", type=int, default=16, help="windows per shift and place")
    add("--contestants", nargs="+", choices=(OURS, TFDV, EVIDENTLY), default=[OURS, TFDV, EVIDENTLY])
    add("--output", type=Path, default=Path("build/benchmarks/validation.json"), help="JSON file with all figures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; 0 = all figures are there, whatever they say."""
    flags = build_parser().parse_args(argv)
    facts, other_work = machine.facts(), machine.OtherWork()
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    counts = run_study(flags)
    if warning := other_work.warning():
        print(warning)
    document = {
        "machine": facts,
        "flags": {"quick": flags.quick, "world_seed": WORLD_SEED, "false_alarm_rate": FALSE_ALARM_RATE},
        "shares": {case: {name: each.figures() for name, each in of.items()} for case, of in counts.items()},
        "other_work_share": other_work.share(),
    }
    write_whole(flags.output, json.dumps(document, indent=1) + "\n")
    print(f"written: {flags.output}")
    return 0


def run_study(flags: argparse.Namespace) -> Counts:
    """Shows every case to every contestant, and prints and returns the counts."""
    began = time.monotonic()
    pairs, windows = (6, 2) if flags.quick else (flags.pairs, flags.windows)
    world, counts = World.create(WORLD_SEED), Counts()
    with ExitStack() as stack:
        logs = flags.output.parent / "validation_logs"
        # Evidently takes a minute to a pair.
        names = [name for name in flags.contestants if not (flags.quick and name == EVIDENTLY)]
        contestants = {name: stack.enter_context(StudyContestant(name, logs / f"{name}.log")) for name in names}
        for number, series in enumerate(make_plan(pairs=pairs, windows=windows, quick=flags.quick)):
            of_series = Counts()
            for case, answer in show(series, number, world, contestants=contestants):
                for setting, alarms in answer.alarms.items():
                    of_case = of_series.setdefault(case.name, {})
                    count = of_case.setdefault(setting, SettingCount(is_stationary=case.shift is None))
                    count.add(case, alarms, answer.seconds)
            print(f"{time.monotonic() - began:.0f} s\n{format_table(of_series, ours=OURS)}", flush=True)
            counts |= of_series
    return counts


def format_table(counts: Mapping[str, Mapping[str, SettingCount]], *, ours: str) -> str:
    """The shares for people; `ours` is the setting that the targets are for."""
    lines = []
    for case, settings in counts.items():
        is_stationary = next(iter(settings.values())).is_stationary
        what = "pairs with any alarm" if is_stationary else "windows whose shift was named"
        target = f"at most {FALSE_ALARM_RATE:g}" if is_stationary else f"at least {FOUND_TARGET:g}"
        lines += ["", f"{case} ({what}; target {target})"]
        for setting, count in settings.items():
            found = count.figures()
            share = f"{count.hits}/{count.windows} = {found['share']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
            outcome = ("  met" if found["met"] else "  MISSED") if setting == ours else ""
            lines.append(f"  {setting:<28}{share:<36}{found['seconds']:>8.2f} s a window{outcome}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
