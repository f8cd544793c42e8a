"""Runs every test and docstring example in the environment of its image, and prints the counts.

The number of parallel parts is the number of cores plus two, because parts with servers are idle
half of the time. Arguments are passed to every pytest.
"""

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from evergreen.runtime.forked import available_cores
from testing.paths import REPOSITORY
from tests.conftest import ENVIRONMENT_OF_FOLDER
from tests.support.sources import PACKAGES

PARTS = (
    ("driver", "monitor"),
    ("driver", "serving"),
    ("driver", "loop"),
    ("training", ""),
    ("driver", "rest"),
    ("driver", "crossings"),
    ("validation", ""),
    ("preprocessing", ""),
)
"""Pairs of environment and part (`conftest.FOLDERS_OF_PART`), the longest first. No test runs in
the serving environment. That environment only contains the server that the driver's tests start."""
NUM_WAITING = 2
"""Number of parallel parts in excess of the number of cores. Parts with servers and logs use half a
core or less (measured)."""
NO_TESTS_COLLECTED = 5


def run(environment: str, part: str, arguments: list[str]) -> tuple[str, int, dict[str, int]]:
    """Run one part's tests and return its name, pytest's exit code and the counts."""
    results = REPOSITORY / "build" / "tests"
    results.mkdir(parents=True, exist_ok=True)
    name = f"{environment} {part}".strip()
    junit, log = results / f"{name}.xml", results / f"{name}.log"
    junit.unlink(missing_ok=True)
    python = REPOSITORY / ".venvs" / environment / "bin" / "python"
    chosen = (
        arguments
        if "-m" in arguments
        else ["-m", "not slow and not gpu and not images", *arguments]
    )
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        chosen += ["tests", *(_files_with_examples(environment) if part in ("", "rest") else ())]
    measured = ["-m", "coverage", "run"] if "EVERGREEN_COVERAGE" in os.environ else []
    command = [
        str(python),
        *measured,
        "-m",
        "pytest",
        "-q",
        "--color=no",
        f"--junitxml={junit}",
        *chosen,
    ]
    # One thread per library, because the parts share the cores.
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "EVERGREEN_TEST_PART": part,
    }
    if measured:
        variables["PYTHONPATH"] = str(_coverage_alone())
    with open(log, "wb") as output:
        code = subprocess.run(
            command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, env=variables
        ).returncode
    print(f"== {name}\n{log.read_text(errors='replace')}", flush=True)
    return name, code, _counts(junit)


def _coverage_alone() -> Path:
    """Return a folder that contains the package `coverage` and no other package."""
    (package,) = (REPOSITORY / ".venvs" / "coverage").glob("lib/python*/site-packages/coverage")
    folder = REPOSITORY / "build" / "coverage" / "path"
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (folder / "coverage").symlink_to(package)
    return folder


def _files_with_examples(environment: str) -> list[str]:
    """Return the product modules of this environment whose docstrings have examples."""
    found = []
    for path in sorted(
        file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")
    ):
        name = path.relative_to(REPOSITORY).as_posix()
        homes = [
            home for folder, home in ENVIRONMENT_OF_FOLDER.items() if name.startswith(f"{folder}/")
        ]
        if (homes or ["driver"])[0] == environment and ">>> " in path.read_text():
            found.append(name)
    return found


def _counts(junit: Path) -> dict[str, int]:
    if not junit.exists():
        return {"tests": 0, "failed": 1, "skipped": 0}
    suite = ElementTree.parse(junit).getroot()[0].attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    return {"tests": int(suite["tests"]), "failed": failed, "skipped": int(suite["skipped"])}


def main(arguments: list[str]) -> int:
    """Run all environments and return 0 if every test passed."""
    # Restore the handling of Ctrl-C, which a shell turns off for background jobs and their
    # children. Some tests send SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ThreadPoolExecutor(available_cores() + NUM_WAITING) as runners:
        results = list(runners.map(lambda part: run(*part, arguments), PARTS))
    total = {
        key: sum(counts[key] for _, _, counts in results) for key in ("tests", "failed", "skipped")
    }
    broken = [name for name, code, _ in results if code not in (0, NO_TESTS_COLLECTED)]
    if broken:
        print(f"failed in: {', '.join(broken)}")
    passed = total["tests"] - total["failed"] - total["skipped"]
    print(f"{passed} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
