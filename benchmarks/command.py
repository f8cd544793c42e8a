"""Provide the flags, the JSON document and the child processes that benchmarks share.

Each document has `benchmark`, `command`, `date` (UTC), `commit`, `is_quick`, `seconds` and
`figures` (rows of `spread.Figure`). The fields `machine` (facts), `limits` (peak rates at that
time) and `other_work_share` describe the machine. Each benchmark adds further fields.
`benchmarks.page` writes docs/design/performance.md from the documents. Each benchmark defines its
own measurements and output.
"""

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.spread import named
from demo.environments import REPOSITORY
from evergreen.runtime.durable import write_whole

MEASURED = Path("build/benchmarks")
"""Folder of the documents."""


def benchmark_parser(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the flags `--quick` and `--output`.

    `quick` is the help text of the flag `--quick`, and `--output` is the path of the document.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(benchmark=name)
    parser.add_argument("--quick", action="store_true", help=quick)
    output = MEASURED / f"{name}.json"
    parser.add_argument(
        "--output",
        type=Path,
        default=output,
        help="JSON file with all figures (default: %(default)s)",
    )
    return parser


@contextmanager
def documented(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a document for figures, and write it to `flags.output` if the block succeeds.

    Prints the machine's facts first. The function prints the figures at the end. If other work on
    the machine makes the figures doubtful, it also prints a warning. A `Spread` is written as a
    JSON object.
    """
    facts, limits = machine.facts(), machine.limits()
    other_work, began = machine.OtherWork(), time.monotonic()
    print("; ".join(f"{name} {value}" for name, value in (facts | limits).items()), flush=True)
    document: dict[str, Any] = {
        "benchmark": flags.benchmark,
        "command": f"python -m benchmarks.{flags.benchmark}{' --quick' if flags.quick else ''}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": facts.pop("revision"),
        "is_quick": flags.quick,
        "machine": facts,
        "limits": limits,
        "figures": [],
    }
    yield document
    document["seconds"], document["other_work_share"] = time.monotonic() - began, other_work.share()
    print(f"\n{flags.benchmark}, in {document['seconds']:,.0f} s")
    for figure in document["figures"]:
        figure.print()
    if warning := other_work.warning():
        print(warning)
    write_whole(flags.output, json.dumps(named(document), indent=1, default=str) + "\n")
    print(f"written: {flags.output}")


def run_to_end(command: Sequence[str]) -> str:
    """Run a command in the repository's root, and return its output.

    Raises:
        RuntimeError: the command failed. The message contains the end of the command's output.
    """
    done = subprocess.run(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{command[1:4]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


_POLL_SECONDS = 0.02


class StepProcessFailed(Exception):
    """A process failed. The error message contains the end of the output."""


class Run(NamedTuple):
    """Resources of one process."""

    seconds: float
    processor_seconds: float
    """Processor seconds of the process and its children."""
    peak: int
    """Peak anonymous memory in bytes."""


def measure(command: list[str]) -> Run:
    """Run a command in the repository's root, and measure the command and its child processes.

    Raises:
        StepProcessFailed: the command failed.
    """
    before = os.times()
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(anonymous_memory, _tree(process.pid))))
        time.sleep(_POLL_SECONDS)
    seconds = time.perf_counter() - began
    text, after = process.communicate()[0], os.times()
    if process.returncode:
        raise StepProcessFailed(f"{command[2:4]} ended with {process.returncode}: {text[-500:]}")
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return Run(seconds, used, peak)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield from _tree(child)


def anonymous_memory(pid: int) -> int:
    """Return the anonymous memory of a process in bytes, or 0 once it has ended."""
    try:
        found = re.search(
            r"^Pss_Anon:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
        )
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0
