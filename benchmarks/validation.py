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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.validation_study import figures
from benchmarks.validation_study.contestants import EVIDENTLY, OURS, TFDV, Contestant
from benchmarks.validation_study.plan import make_plan, show
from components.runtime.durable import write_whole
from components.validation.settings import ValidationSettings
from inference_client.simulation.world import World
from pipelines.local.environments import REPOSITORY, python_of

WORLD_SEED = 7


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
    add("--lanes", type=int, default=2, help="pairs shown at a time, to processes of their own")
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
    """Shows every case to every contestant and tells the shares."""
    began, rate = time.monotonic(), ValidationSettings.false_alarm_rate
    pairs, windows = (6, 2) if flags.quick else (flags.pairs, flags.windows)
    world, results = World.create(WORLD_SEED), []

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    with ExitStack() as stack:
        logs = flags.output.parent / "validation_logs"
        # Evidently takes a minute to a pair.
        names = [name for name in flags.contestants if not (flags.quick and name == EVIDENTLY)]
        lanes = [
            {name: stack.enter_context(Contestant(name, logs / f"{name}-{lane}.log")) for name in names}
            for lane in range(flags.lanes)
        ]
        for number, series in enumerate(make_plan(pairs=pairs, windows=windows, quick=flags.quick)):
            seen = show(series, number, world, lanes, say)
            made = [figures.of_case(case, series.rows, each) for case, each in zip(series.cases, seen) if each]
            results += made
            # A run takes long: what is known is told, and kept.
            print(figures.table(figures.pooled(made), ours=OURS, false_alarm_rate=rate), flush=True)
            write_whole(flags.output.with_suffix(".part.json"), json.dumps(results, indent=1) + "\n")
    found = figures.pooled(results)
    for line in figures.missed(results, setting=OURS):
        print(f"overlooked by ours: {line}")
    return {"false_alarm_rate": rate, "shares": found, "cases": results}


def speed(quick: bool, output: Path) -> dict[str, Any]:
    """The figures of `validation_speed`, in processes of their own: their memory is what is measured."""
    command = [str(python_of("validation")), "-m", "benchmarks.validation_speed", "--output", str(output)]
    subprocess.run(command + ["--quick"] * quick, check=True, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
