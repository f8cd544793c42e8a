"""Run every benchmark, one after another and unattended.

`make benchmarks` runs all benchmarks. `python -m benchmarks training serving` runs only the
benchmarks named there. Each benchmark runs as a process in its environment, writes
build/benchmarks/NAME.json, and prints to NAME.log there. If a benchmark has a document of the
current commit, it is skipped. A second call therefore resumes an interrupted call. A benchmark that
fails or times out does not stop the later benchmarks. `make performance` then writes the page.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from benchmarks import machine
from benchmarks.command import MEASURED
from demo.environments import REPOSITORY, python_of


class Plan(NamedTuple):
    """Environment of a benchmark, and its time limit.

    The limit is several times the measured duration on two cores.
    """

    environment: str
    quick: int
    full: int


PLANS = {
    "lists": Plan("training", 3, 10),
    "training": Plan("benchmarks", 30, 180),
    "serving": Plan("driver", 15, 60),
    "monitor": Plan("driver", 15, 60),
    "backlog": Plan("driver", 5, 15),
    "rolling": Plan("benchmarks", 3, 10),
    "publishing": Plan("driver", 5, 15),
    "preprocessing": Plan("preprocessing", 15, 60),
    "extraction": Plan("driver", 10, 40),
    "round": Plan("driver", 30, 60),
    "scaling": Plan("training", 15, 30),
    "demo": Plan("driver", 30, 30),
    "tables": Plan("driver", 10, 20),
    "scale": Plan("driver", 10, 60),
    "year": Plan("driver", 10, 60),
    "growth": Plan("driver", 15, 120),
    "cache": Plan("driver", 5, 30),
    "suite": Plan("driver", 60, 90),
    "policies": Plan("driver", 10, 120),
    "gate": Plan("driver", 10, 120),
    "validation": Plan("validation", 10, 120),
    "quality": Plan("benchmarks", 10, 60),
    "freshness": Plan("driver", 15, 120),
}
"""Time limit of each benchmark in minutes: first the benchmarks of speed, then the studies of
decisions."""


def is_done(name: str, commit: str | None, *, is_quick: bool) -> bool:
    """Return whether `name` was measured at this commit.

    If `is_quick` is False, a quick measurement is ignored. A measurement of uncommitted changes is
    always ignored.
    """
    path = MEASURED / f"{name}.json"
    if commit is None or " " in commit or not path.exists():
        return False
    document = json.loads(path.read_text())
    return document.get("commit") == commit and (is_quick or not document["is_quick"])


def run(name: str, *, is_quick: bool, is_shown: bool) -> str:
    """Run one benchmark to its end or timeout, and return a line about its result.

    The output of the benchmark goes to the terminal or to its log.
    """
    plan, began = PLANS[name], time.monotonic()
    command = [
        str(python_of(plan.environment)),
        "-m",
        f"benchmarks.{name}",
        *["--quick"] * is_quick,
    ]
    minutes = plan.quick if is_quick else plan.full
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "ORT_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
    with open(MEASURED / f"{name}.log", "w") as log:
        shown = {} if is_shown else {"stdout": log, "stderr": log}
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | quiet,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **shown,
        )
        try:
            code = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            return f"ended after its {minutes} minutes, see {log.name}"
        finally:
            if process.poll() is None:
                # On SIGINT, a benchmark stops its servers. If the benchmark does not react to
                # SIGINT, kill it.
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    duration = f"{time.monotonic() - began:,.0f} s"
    return (
        f"done in {duration}"
        if code == 0
        else f"FAILED with {code} after {duration}, see {log.name}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested benchmarks.

    Returns 1 if any requested benchmark has no figures, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    minutes_of = ", ".join(f"{name} ({plan.quick}, {plan.full})" for name, plan in PLANS.items())
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"benchmark, and its maximum minutes, quick and full: {minutes_of}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds, to test that they run"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="also repeat benchmarks that were measured at this commit",
    )
    flags = parser.parse_args(argv)
    if unknown := set(flags.names) - set(PLANS):
        parser.error(f"no benchmark is named {sorted(unknown)}, expected {', '.join(PLANS)}")
    os.chdir(REPOSITORY)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # also end the running benchmark on SystemExit
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    MEASURED.mkdir(parents=True, exist_ok=True)
    names, commit, has_failed = flags.names or PLANS, machine.facts()["revision"], False
    minutes = sum(PLANS[name].quick if flags.quick else PLANS[name].full for name in names)
    print(f"{len(names)} benchmarks at {commit}, at most {minutes} minutes", flush=True)
    for name in names:
        if not flags.again and is_done(name, commit, is_quick=flags.quick):
            print(f"{name}: already measured at this commit", flush=True)
            continue
        print(f"{name}: ", end="", flush=True)
        outcome = run(name, is_quick=flags.quick, is_shown=len(names) == 1)
        print(outcome, flush=True)
        has_failed |= not outcome.startswith("done")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
