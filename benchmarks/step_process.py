"""The training step as a process of its own: how long it takes on few rows, and the memory it holds at its peak.

Linux: memory is read from the process's status while it runs. Anonymous memory is what counts; pages of mapped files
are the kernel's to drop and are told apart.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.encoded_rows import StepInputs

REPOSITORY = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.005
_IMPORTED = re.compile(r"^import time:\s+(\d+) \|", re.MULTILINE)
_AFTER_IMPORTS = """
import components.training.pytorch.engine, components.training.step
print(open("/proc/self/status").read())
"""


class StepFailed(Exception):
    """The step ended with an error; the message ends with its last words."""


class Memory(NamedTuple):
    """Bytes in memory."""

    anonymous: int
    file: int
    """Of mapped files, shared ones and libraries included."""


class StepRun(NamedTuple):
    """One run of the step."""

    seconds: float
    peak: Memory
    """Each at its own highest."""
    import_seconds: float
    """Time in imports; 0 where it was not asked for."""


def run_step(inputs: StepInputs, folder: Path, *flags: str, import_times: bool = False) -> StepRun:
    """Runs `python -m components.training` from scratch in the new folder `folder`.

    Raises:
        StepFailed: its exit code was not 0.
    """
    folder.mkdir()
    command = [sys.executable, *(["-X", "importtime"] if import_times else []), "-m", "components.training"]
    command += [f"--store={folder / 'store'}", f"--work={folder / 'work'}", f"--output={folder / 'model.json'}"]
    command += [f"--training-set={inputs.training_set}", f"--validation-report={inputs.validation_report}"]
    with open(folder / "log", "w") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--run=benchmark", "--parent=none", *flags], cwd=REPOSITORY, stdout=log, stderr=log
        )
        peak = Memory(0, 0)
        while process.poll() is None:
            now = memory_of(process.pid)
            peak = Memory(max(peak.anonymous, now.anonymous), max(peak.file, now.file))
            time.sleep(_POLL_SECONDS)
        seconds = time.perf_counter() - began
    said = (folder / "log").read_text(errors="replace")
    if process.returncode:
        raise StepFailed(f"the training step ended with {process.returncode}: {said[-500:]}")
    return StepRun(seconds, peak, sum(map(int, _IMPORTED.findall(said))) / 1e6)


def memory_of(pid: int) -> Memory:
    """Memory of a process now; zeros once it has ended."""
    try:
        return memory_in(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return Memory(0, 0)


def memory_after_imports() -> Memory:
    """Memory of a process that has imported what the step imports, and did nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_IMPORTS], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return memory_in(done.stdout)


def memory_in(status: str) -> Memory:
    """What the text of a `/proc/PID/status` says."""
    kib = dict(re.findall(r"^(RssAnon|RssFile|RssShmem):\s+(\d+) kB", status, re.MULTILINE))
    # A process that is ending has no such lines.
    return Memory(1024 * int(kib.get("RssAnon", 0)), 1024 * (int(kib.get("RssFile", 0)) + int(kib.get("RssShmem", 0))))
