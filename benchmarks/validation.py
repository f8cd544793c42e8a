"""Compare the power and false alarms of validation and TFDV, for `make benchmark-validation`.

One part draws pairs of windows from a stationary simulator, and counts the pairs with an alarm. The
target is that at most the share `false_discovery_rate` of these pairs has an alarm. The other part
plants a shift in the second window of each pair, and counts how often a method names the shifted
features. The target is 95 %. Both methods read the same files. The methods are the validation step
as in a run, and TFDV's drift comparator with the thresholds of its guide and of BigQuery.
`benchmarks.validation_study` defines windows and shifts.

Prints tables, and writes all figures as JSON.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command import benchmark_parser, documented
from benchmarks.spread import INTERVAL, Figure, Spread, share_interval
from benchmarks.validation_study.methods import METHODS, OURS
from benchmarks.validation_study.plan import StudyCase, make_plan, show
from demo.simulation.simulator import Simulator
from evergreen.config.validation import ValidationSettings

SIMULATOR_SEED = 7
FOUND_TARGET = 0.95
"""Target for the share of shifted windows in which a method names every shifted feature."""
FALSE_ALARM_RATE = ValidationSettings.false_discovery_rate


@dataclass
class SettingCount:
    """Alarm count of one method setting over the windows of one study case."""

    is_stationary: bool
    hits: int = 0
    """Number of hits. In a stationary case, a hit is a window with an alarm. In a case with a
    shift, a hit is a window in which the method names every shifted feature."""
    windows: int = 0

    def add(self, case: StudyCase, alarms: Sequence[str]) -> None:
        """Count one window."""
        self.hits += set(case.shift.columns) <= set(alarms) if case.shift else bool(alarms)
        self.windows += 1

    def figures(self) -> dict[str, Any]:
        """Return the share, its 95 % interval, and whether the target is met."""
        share = self.hits / self.windows
        low, high = share_interval(self.hits, self.windows)
        met = share <= FALSE_ALARM_RATE if self.is_stationary else share >= FOUND_TARGET
        return {
            "hits": self.hits,
            "windows": self.windows,
            "share": share,
            "low": low,
            "high": high,
            "met": met,
        }


Counts = dict[str, dict[str, SettingCount]]
"""Counts by case and setting."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, and return 0."""
    parser = benchmark_parser(
        "validation", __doc__, quick="few windows of each kind, to test that it runs"
    )
    flags = parser.parse_args(argv)
    with documented(flags) as document:
        document |= {"world_seed": SIMULATOR_SEED, "false_alarm_rate": FALSE_ALARM_RATE}
        counts = run_study(is_quick=flags.quick)
        document["figures"] = [
            Figure(
                f"{case}, {'false alarms' if count.is_stationary else 'named'}",
                Spread(*(count.figures()[key] for key in ("share", "low", "high"))),
                f"of {count.windows} windows {INTERVAL}",
                target=FALSE_ALARM_RATE if count.is_stationary else FOUND_TARGET,
                is_least=not count.is_stationary,
            )
            for case, of in counts.items()
            for count in [of[OURS]]
        ]
        document["shares"] = {
            case: {name: each.figures() for name, each in of.items()} for case, of in counts.items()
        }
    return 0


def run_study(*, is_quick: bool) -> Counts:
    """Run every method on every case, print the counts, and return them."""
    began = time.monotonic()
    pairs, windows = (6, 2) if is_quick else (200, 16)
    simulator, counts = Simulator.create(SIMULATOR_SEED), Counts()
    for number, series in enumerate(make_plan(pairs=pairs, windows=windows, quick=is_quick)):
        of_series = Counts()
        for case, alarms_of in show(series, number, simulator, methods=METHODS):
            for setting, alarms in alarms_of.items():
                of_case = of_series.setdefault(case.name, {})
                count = of_case.setdefault(setting, SettingCount(is_stationary=case.shift is None))
                count.add(case, alarms)
        print(f"{time.monotonic() - began:.0f} s\n{format_table(of_series, ours=OURS)}", flush=True)
        counts |= of_series
    return counts


def format_table(counts: Mapping[str, Mapping[str, SettingCount]], *, ours: str) -> str:
    """Return the shares as text. Only the figures of the setting `ours` have targets."""
    lines = []
    for case, settings in counts.items():
        is_stationary = next(iter(settings.values())).is_stationary
        what = "pairs with any alarm" if is_stationary else "windows whose shift was named"
        target = f"at most {FALSE_ALARM_RATE:g}" if is_stationary else f"at least {FOUND_TARGET:g}"
        lines += ["", f"{case} ({what}; target {target})"]
        for setting, count in settings.items():
            found = count.figures()
            share = (
                f"{count.hits}/{count.windows} = {found['share']:.3f} [{found['low']:.3f}, "
                f"{found['high']:.3f}]"
            )
            outcome = ("  met" if found["met"] else "  MISSED") if setting == ours else ""
            lines.append(f"  {setting:<28}{share:<36}{outcome}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
