"""Run all measurements that need a GPU, in steps of minutes, unattended.

Use `make gpu` or `python -m benchmarks.gpu`. The benchmark needs torch with its CUDA wheel and the
other packages of the training environment, and downloads nothing. Each step is a process that
writes build/benchmarks/gpu/STEP.json. A step with a document of the current commit is skipped, so
that a second call resumes the first. With `--minutes`, the program exits with code 3 before a step
that may exceed the limit. Packages that are absent, and measurements that lack a GPU, are skipped
and reported. The complete documents become gpu.json, which `make performance` puts on the page.
`gpu_steps` defines the steps.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.command import MEASURED, benchmark_parser, documented
from evergreen.runtime.durable import write_whole

STEP_MINUTES = 9
UNFINISHED = 3
NETWORKS, TABLES = ("dcn", "deepfm", "dlrm"), ("1.2M", "10M", "100M")
STEPS = (
    "limits",
    "tests",
    "equality",
    *(f"rates-{network}-{table}" for table in TABLES for network in NETWORKS),
    "graphs",
    "loading",
    "memory",
    "serving",
)
"""All steps, in order of importance, because the time may run out."""


def is_done(path: Path, commit: str | None, *, is_quick: bool) -> bool:
    """Return whether a step has a document of this commit and size.

    With uncommitted changes, a document counts if it was written with uncommitted changes too.
    """
    if not path.exists():
        return False
    document = json.loads(path.read_text())
    return document["commit"] == commit and document["is_quick"] == is_quick


def run_step(name: str, output: Path, *, is_quick: bool, minutes: float) -> str:
    """Run one step to its end, and return a line about its result."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--step",
        name,
        f"--output={output}",
        *["--quick"] * is_quick,
    ]
    began = time.monotonic()
    with open(output.with_suffix(".log"), "w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=60 * minutes
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {minutes:.1f} minutes"
    return (
        f"{'done' if code == 0 else f'FAILED with {code}'} in {time.monotonic() - began:.0f} s, "
        f"see {log.name}"
    )


def measure(flags: argparse.Namespace) -> None:
    """Run one GPU step in this process."""
    from benchmarks import gpu_steps

    flags.benchmark = "gpu"
    work = getattr(gpu_steps, flags.step.partition("-")[0])
    with documented(flags) as document:
        document["machine"] |= gpu_steps.gpu_facts()
        document |= gpu_steps.as_document(work(flags.step, is_quick=flags.quick))


def combined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one document of all steps, with the machine and date of the first one."""
    first = documents[0]
    skipped = [said for each in documents for said in each["skipped"]]
    return {
        **first,
        "command": f"python -m benchmarks.gpu{' --quick' if first['is_quick'] else ''}",
        "seconds": sum(each["seconds"] for each in documents),
        "other_work_share": max(each["other_work_share"] for each in documents),
        "figures": [figure for each in documents for figure in each["figures"]],
        "skipped": sorted(set(skipped)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing steps.

    Returns 0 if all documents exist, 1 if a step failed, or 3 if the time ran out.
    """
    parser = benchmark_parser(
        "gpu", __doc__, quick="tiny tables and few steps, to test that it runs, also without a GPU"
    )
    parser.add_argument("--step", choices=STEPS, help="run only this step, in this process")
    parser.add_argument("--minutes", type=float, default=1e9, help="maximum minutes of this call")
    parser.add_argument(
        "--folder",
        type=Path,
        default=MEASURED / "gpu",
        help="folder of the steps (default: %(default)s)",
    )
    flags = parser.parse_args(argv)
    if flags.step:
        measure(flags)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SystemExit also ends the running step
    flags.folder.mkdir(parents=True, exist_ok=True)
    commit, began, has_failed = machine.facts()["revision"], time.monotonic(), False
    for name in STEPS:
        output = flags.folder / f"{name}.json"
        if is_done(output, commit, is_quick=flags.quick):
            print(f"{name}: is there", flush=True)
            continue
        left = flags.minutes - (time.monotonic() - began) / 60
        if left < 1:
            print(f"{name}: no time is left, call again", flush=True)
            return UNFINISHED
        said = run_step(name, output, is_quick=flags.quick, minutes=min(left, STEP_MINUTES))
        has_failed |= not said.startswith("done")
        print(f"{name}: {said}", flush=True)
    found = [
        json.loads(path.read_text())
        for name in STEPS
        if (path := flags.folder / f"{name}.json").exists()
    ]
    if found:
        write_whole(flags.output, json.dumps(combined(found), indent=1) + "\n")
        print(
            "\n".join(
                [
                    *(f"left out: {each}" for each in combined(found)["skipped"]),
                    f"written: {flags.output}",
                ]
            )
        )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
