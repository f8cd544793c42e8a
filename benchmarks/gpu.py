"""Run all measurements that need a GPU, in one call of at most nine minutes, unattended.

Run by `make gpu` or `python -m benchmarks.gpu`. The benchmark ran on Python 3.12 with CUDA's torch
2.11 and numpy 2.5. The benchmark also needs msgspec, pyarrow and safetensors. It reports which of
these packages are absent, and downloads nothing. Each step is a process that writes
build/benchmarks/gpu/STEP.json. If a step has a document of the current commit, it is skipped. A
second call therefore resumes the first call. The program exits with code 3 before a step that may
exceed `--minutes`. Packages that are absent, and measurements that lack a GPU, are skipped and
reported. The complete documents become gpu.json, which `make performance` puts on the page.
gpu.tar.gz has all documents and logs. If the folder of the steps is absent, it is restored from
gpu.tar.gz, so that another machine can resume. `gpu_steps` defines the steps.
"""

import argparse
import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.command import MEASURED, benchmark_parser, documented
from benchmarks.gpu_plan import STEPS
from evergreen.runtime.durable import write_whole

CALL_MINUTES, STEP_MINUTES = 9.0, 3.0
UNFINISHED = 3
NEEDED = ("msgspec", "numpy", "pyarrow", "safetensors", "torch")
"""Packages that every step needs."""


def is_done(path: Path, commit: str | None, *, is_quick: bool) -> bool:
    """Return whether a step has a document of this commit and size.

    `commit` shows that there are uncommitted changes, but not which. A document of earlier
    uncommitted changes therefore also counts as done.
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
    """Return one document of all steps, with the machine and the date of the first step."""
    first = documents[0]
    skipped = [reason for each in documents for reason in each["skipped"]]
    return {
        **first,
        "command": f"python -m benchmarks.gpu{' --quick' if first['is_quick'] else ''}",
        "seconds": sum(each["seconds"] for each in documents),
        "other_work_share": max(each["other_work_share"] for each in documents),
        "figures": [figure for each in documents for figure in each["figures"]],
        "skipped": sorted(set(skipped)),
    }


def restore(folder: Path, archive: Path) -> None:
    """Unpack the steps of an earlier call into `folder`, if the folder is absent."""
    if archive.exists() and not folder.exists():
        folder.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")


def pack(folder: Path, output: Path, archive: Path) -> None:
    """Write the documents and logs of all steps, and the combined document, into one archive."""
    with tarfile.open(archive, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name)
        if output.exists():
            packed.add(output, output.name)


def run_steps(flags: argparse.Namespace) -> int:
    """Run the missing steps until the time runs out, and return the exit code of `main`."""
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
        outcome = run_step(name, output, is_quick=flags.quick, minutes=min(left, STEP_MINUTES))
        has_failed |= not outcome.startswith("done")
        print(f"{name}: {outcome}", flush=True)
    return int(has_failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing steps.

    Returns 0 if all documents exist, 1 if a step failed, or 3 if the time ran out. Exits with 2 if
    a package of `NEEDED` is not installed.
    """
    parser = benchmark_parser(
        "gpu", __doc__, quick="tiny tables and few steps, to test that it runs, also without a GPU"
    )
    parser.add_argument("--step", choices=STEPS, help="run only this step, in this process")
    parser.add_argument(
        "--minutes",
        type=float,
        default=CALL_MINUTES,
        help="maximum minutes of this call (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=MEASURED / "gpu",
        help="folder of the steps (default: %(default)s)",
    )
    flags = parser.parse_args(argv)
    if absent := [name for name in NEEDED if find_spec(name) is None]:
        parser.error(f"{sys.executable} lacks {', '.join(absent)}: pip install {' '.join(absent)}")
    if flags.step:
        measure(flags)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also end the running step on SystemExit
    archive = flags.folder.with_suffix(".tar.gz")
    restore(flags.folder, archive)
    flags.folder.mkdir(parents=True, exist_ok=True)
    try:
        return run_steps(flags)
    finally:
        combine(flags.folder, flags.output)
        pack(flags.folder, flags.output, archive)
        print(f"written: {archive}", flush=True)


def combine(folder: Path, output: Path) -> None:
    """Write one document from the documents of all steps, and print the skipped parts."""
    paths = (folder / f"{name}.json" for name in STEPS)
    if found := [json.loads(path.read_text()) for path in paths if path.exists()]:
        document = combined(found)
        write_whole(output, json.dumps(document, indent=1) + "\n")
        print("\n".join(f"left out: {each}" for each in document["skipped"]))
        print(f"written: {output}")


if __name__ == "__main__":
    sys.exit(main())
