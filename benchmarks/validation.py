"""Power and false alarms of validation beside named peers, then its speed: `make benchmark-validation`.

1. Pairs of windows of a synthetic world that stands still: in how many pairs is anything alarmed? Target: at most the
   stated `false_alarm_rate`. Then windows with a planted shift: in how many is the shifted feature named? Target: 95 %.
   The validation step as a run calls it, TFDV's drift comparator with the thresholds of its guide, and Evidently's
   default preset are shown the same files. What the windows and shifts are is `benchmarks.validation_study`'s.
2. `benchmarks.validation_speed`: rows per second and memory of the statistics.

Prints tables, and writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.validation_study.plan import (
    EVIDENTLY,
    OURS,
    TFDV,
    SeenAlarms,
    StudyCase,
    StudyContestant,
    make_plan,
    show,
)
from components.drift_statistics.effects import wilson_interval
from components.runtime.durable import write_whole
from components.validation.settings import ValidationSettings
from inference_client.simulation.world import World
from pipelines.local.environments import REPOSITORY, python_of

WORLD_SEED = 7
FOUND_TARGET = 0.95
"""Least share of the windows with a shift whose shifted features are named."""


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="few windows of each kind and no Evidently: whether it runs")
    add("--only", choices=("study", "speed"), help="one section instead of both")
    add("--pairs", type=int, default=200, help="stationary pairs of windows")
    add("--windows", type=int, default=16, help="windows per shift and place")
    add("--contestants", nargs="+", choices=(OURS, TFDV, EVIDENTLY), default=[OURS, TFDV, EVIDENTLY])
    add("--output", type=Path, default=Path("build/benchmarks/validation.json"), help="JSON file with all figures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections; 0 = all figures are there, whatever they say."""
    flags = build_parser().parse_args(argv)
    facts, other_work = machine.facts(), machine.OtherWork()
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    document: dict[str, Any] = {"machine": facts, "flags": {"quick": flags.quick, "world_seed": WORLD_SEED}}
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    if flags.only != "speed":
        document["study"] = study(flags)
    if flags.only != "study":
        document["speed"] = speed(flags.quick, flags.output.with_name("validation_speed.json"))
    if warning := other_work.warning():
        print(warning)
    document["other_work_share"] = other_work.share()
    write_whole(flags.output, json.dumps(document, indent=1) + "\n")
    print(f"written: {flags.output}")
    return 0


def study(flags: argparse.Namespace) -> dict[str, Any]:
    """Shows every case to every contestant, and prints and returns the shares."""
    began, rate = time.monotonic(), ValidationSettings.false_alarm_rate
    pairs, windows = (6, 2) if flags.quick else (flags.pairs, flags.windows)
    world, results = World.create(WORLD_SEED), []

    with ExitStack() as stack:
        logs = flags.output.parent / "validation_logs"
        # Evidently takes a minute to a pair.
        names = [name for name in flags.contestants if not (flags.quick and name == EVIDENTLY)]
        contestants = {name: stack.enter_context(StudyContestant(name, logs / f"{name}.log")) for name in names}
        for number, series in enumerate(make_plan(pairs=pairs, windows=windows, quick=flags.quick)):
            seen = show(series, number, world, contestants)
            made = [count_case(case, series.rows, each) for case, each in zip(series.cases, seen) if each]
            results += made
            print(f"{time.monotonic() - began:.0f} s", flush=True)
            print(format_table(pool_cases(made), ours=OURS, false_alarm_rate=rate), flush=True)
    found = pool_cases(results)
    return {"false_alarm_rate": rate, "shares": found, "cases": results}


def speed(quick: bool, output: Path) -> dict[str, Any]:
    """The figures of `validation_speed`, in processes of their own: their memory is what is measured."""
    command = [str(python_of("validation")), "-m", "benchmarks.validation_speed", "--output", str(output)]
    subprocess.run(command + ["--quick"] * quick, check=True, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


# -- figures


def count_case(case: StudyCase, rows: int, seen: dict[str, SeenAlarms]) -> dict[str, Any]:
    """The counts of one case by setting: `false_alarm` pairs with any alarm, or `found` with every shifted feature."""
    return {
        "case": case.name,
        "rows": rows,
        "kind": case.shift.kind if case.shift else None,
        "columns": list(case.shift.columns) if case.shift else [],
        "settings": {setting: _count_alarms(case, each) for setting, each in seen.items()},
    }


def _count_alarms(case: StudyCase, seen: SeenAlarms) -> dict[str, Any]:
    wanted = set(case.shift.columns) if case.shift else set()
    hits = [wanted <= set(alarms) if wanted else bool(alarms) for alarms in seen.alarms]
    return {"windows": len(hits), "hits": sum(hits), "seconds": median(seen.seconds)}


def pool_cases(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The cases of one name taken together, by name, then setting: hits, windows, their share and its interval."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        for setting, counts in result["settings"].items():
            sums = found.setdefault(result["case"], {}).setdefault(
                setting, {"hits": 0, "windows": 0, "stationary": result["kind"] is None, "seconds": []}
            )
            sums["hits"] += counts["hits"]
            sums["windows"] += counts["windows"]
            sums["seconds"].append(counts["seconds"])
    for settings in found.values():
        for sums in settings.values():
            sums["share"] = sums["hits"] / sums["windows"]
            sums["low"], sums["high"] = wilson_interval(sums["share"], sums["windows"])
            sums["seconds"] = median(sums["seconds"])
    return found


def verdict(sums: dict[str, Any], false_alarm_rate: float) -> str:
    """Whether the share meets its target: a stationary case's at most the rate, a shifted one's at least 95 %."""
    met = sums["share"] <= false_alarm_rate if sums["stationary"] else sums["share"] >= FOUND_TARGET
    return "met" if met else "MISSED"


def format_table(found: dict[str, dict[str, dict[str, Any]]], *, ours: str, false_alarm_rate: float) -> str:
    """The shares for people; `ours` is the setting that the targets are for."""
    lines = []
    for case, settings in found.items():
        stationary = next(iter(settings.values()))["stationary"]
        what = "pairs with any alarm" if stationary else "windows whose shift was named"
        target = f"at most {false_alarm_rate:g}" if stationary else f"at least {FOUND_TARGET:g}"
        lines += ["", f"{case} ({what}; target {target})"]
        for setting, sums in settings.items():
            share = f"{sums['hits']}/{sums['windows']} = {sums['share']:.3f} [{sums['low']:.3f}, {sums['high']:.3f}]"
            outcome = f"  {verdict(sums, false_alarm_rate)}" if setting == ours else ""
            lines.append(f"  {setting:<28}{share:<36}{sums['seconds']:>8.2f} s a window{outcome}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
