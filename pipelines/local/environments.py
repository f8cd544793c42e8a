"""Builds the virtual environments from their locks, once: one per image, stamped with the hash of its locks.

Runs before anything is installed, under any Python 3.11: standard library only. `make` calls it; nothing is rebuilt
while a lock is unchanged. Which packages are in a lock is said in `requirements/*.in`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ENVIRONMENTS = ("driver", "validation", "preprocessing", "training", "serving")
BENCHMARKS = "benchmarks"
"""Holds what training is measured against."""
SERVING_PEERS = "serving-peers"
"""Holds what serving is measured against."""
MONITOR_PEERS = "monitor-peers"
"""Holds what the monitor is measured against."""
VALIDATION_PEERS = "validation-peers"
"""Holds what validation's alarms are measured against."""
ON_DEMAND = (BENCHMARKS, SERVING_PEERS, MONITOR_PEERS, VALIDATION_PEERS)
"""Built on request only, and without tests of their own."""
REPOSITORY = Path(__file__).resolve().parents[2]
STAMP = "locks.sha256"
NUM_BUILDERS = 2


class BuildFailed(Exception):
    """An environment could not be built; the message names its log."""


def python_of(environment: str, repository: Path = REPOSITORY) -> Path:
    """The interpreter of `environment`."""
    return repository / ".venvs" / environment / "bin" / "python"


def locks_of(environment: str, repository: Path = REPOSITORY) -> list[Path]:
    """The lock of the image, then that of what tests need on top."""
    kinds = ("",) if environment in ON_DEMAND else ("", ".test")
    return [repository / "requirements" / f"{environment}{kind}.lock" for kind in kinds]


def lock_hash(environment: str, repository: Path = REPOSITORY) -> str:
    """Hash that changes when the environment has to be rebuilt."""
    digest = hashlib.sha256(sys.version.encode())
    for lock in locks_of(environment, repository):
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def is_current(environment: str, repository: Path = REPOSITORY) -> bool:
    """Whether the environment was built, to its end, from today's locks."""
    stamp = repository / ".venvs" / environment / STAMP
    # The interpreter is a link to the machine's, which an upgrade of the system may have taken away.
    working = stamp.exists() and python_of(environment, repository).exists()
    return working and stamp.read_text() == lock_hash(environment, repository)


def build(environment: str, repository: Path = REPOSITORY) -> float:
    """Builds one environment afresh and returns the seconds it took.

    Raises:
        BuildFailed: pip or venv failed, or a file could not be written.
    """
    started = time.monotonic()
    try:
        _build(environment, repository)
    except OSError as error:
        raise BuildFailed(f"environment {environment} could not be built: {error}") from error
    return time.monotonic() - started


def _build(environment: str, repository: Path) -> None:
    folder = repository / ".venvs" / environment
    log = folder.with_name(f"{environment}.log")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    pip = [str(python_of(environment, repository)), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    commands += [[*pip, "--no-deps", "-r", str(lock)] for lock in locks_of(environment, repository)]
    if environment in ("training", BENCHMARKS):
        # Where the pin resolves to torch's CUDA build, the wheel asks for its CUDA libraries by itself.
        commands += [[*pip, next(line for line in _lines(locks_of(environment, repository)[0]) if "torch==" in line)]]
    if environment == "driver":
        commands += [[*pip, "--no-deps", "--no-build-isolation", "-e", str(repository)]]
    with open(log, "w") as output:
        for command in commands:
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=repository).returncode:
                last = next((line for line in reversed(_lines(log)) if line.strip()), "no word")
                raise BuildFailed(f"environment {environment} could not be built, see {log}: {last}")
    (folder / STAMP).write_text(lock_hash(environment, repository))


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the environments that are missing or out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", nargs="*", default=list(ENVIRONMENTS), help="default: all of them")
    names = parser.parse_args(argv).environments
    if sys.version_info[:2] != (3, 11):
        print(f"error: this is Python {sys.version.split()[0]}, expected 3.11", file=sys.stderr)
        return 2
    (REPOSITORY / ".venvs").mkdir(exist_ok=True)
    with open(REPOSITORY / ".venvs" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make`s at once: the second waits and finds the work done
        missing = [name for name in names if not is_current(name)]
        if not missing:
            return 0
        print(f"building environments (once): {', '.join(missing)}", flush=True)
        with ThreadPoolExecutor(NUM_BUILDERS) as builders:
            for name, future in [(name, builders.submit(build, name)) for name in missing]:
                try:
                    print(f"  {name:<14} {future.result():5.0f} s", flush=True)
                except BuildFailed as error:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    builders.shutdown(cancel_futures=True)
                    return 1
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("stopped; what is unfinished is built anew next time", file=sys.stderr)
        raise SystemExit(130) from None
