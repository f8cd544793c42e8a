"""The real commands of the loop as processes, and simulated Criteo files for them."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from demo.simulation.simulator import Simulator
from evergreen.contracts import criteo
from testing.paths import REPOSITORY

MARK = "EVERGREEN_TEST"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests in tests/loop a long timeout, because they start real servers for minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


def processes_mentioning(text: str) -> dict[int, str]:
    """Return the other processes whose command line or environment contains `text`, by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if text.encode() in command + (entry / "environ").read_bytes():
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@dataclass(kw_only=True)
class Command:
    """An `evergreen` command that is running. The output of the command goes to a file."""

    process: subprocess.Popen[bytes]
    output_path: Path
    mark: str
    """Unique text in the environment of the process, by which its descendants are found."""

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], *, seconds: float = 400) -> None:
        """Wait until `condition` is true, and fail if the command ends first."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"the command ended with {self.process.returncode}:\n{self.output}"
            )
            assert time.monotonic() < deadline, (
                f"the text did not appear within {seconds} s:\n{self.output}"
            )
            time.sleep(0.05)

    def end(self, *, seconds: float = 800) -> int:
        return self.process.wait(seconds)

    def running(self) -> dict[int, str]:
        """Return all running processes of the command, including its own."""
        return processes_mentioning(f"{MARK}={self.mark}")


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of a command."""

    code: int
    output: str
    left: dict[int, str]
    """Processes of the command that were still running at its end."""


@contextlib.contextmanager
def _started(words: list[str], *, output: Path) -> Iterator[Command]:
    output.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with open(output, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )
    command = Command(process=process, output_path=output, mark=mark)
    try:
        yield command
    finally:
        for pid in command.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _run_to_end(words: list[str], *, output: Path, seconds: float = 800) -> CommandResult:
    with _started(words, output=output) as command:
        code = command.end(seconds=seconds)
        return CommandResult(code=code, output=command.output, left=command.running())


@pytest.fixture(scope="session")
def started() -> Callable[..., contextlib.AbstractContextManager[Command]]:
    """Starts `evergreen <words>` in its own session.

    All processes of the command end when the block ends.
    """
    return _started


@pytest.fixture(scope="session")
def run_to_end() -> Callable[..., CommandResult]:
    """Runs `evergreen <words>` and returns its result."""
    return _run_to_end


@pytest.fixture(scope="session")
def turned(tmp_path_factory, run_to_end):
    """Folder, result and summary of one small demo that has finished.

    Tests may read the folder, but must change only copies of it.
    """
    folder = tmp_path_factory.mktemp("loop") / "a demo"
    ended = run_to_end(
        ["demo", "--rows", "60000", "--folder", str(folder)], output=folder.parent / "screen.log"
    )
    assert ended.code == 0, ended.output
    return folder, ended, json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="session")
def write_kaggle() -> Callable[[Path, int], Path]:
    """Writes simulated rows as a CSV file with the columns of Criteo's files on Kaggle.

    The columns are Id, Label, I1 to I13 and C1 to C26.
    """

    def write(path: Path, rows: int) -> Path:
        drawn = Simulator.create(11).draw(rows, np.random.default_rng([11, 1]))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            file.write(",".join(["Id", "Label", *criteo.DENSE, *criteo.CATEGORICAL]) + "\n")
            for number in range(rows):
                integers = [
                    "" if value != value else str(int(value))
                    for value in drawn.dense[number].tolist()
                ]
                categories = [
                    "" if value < 0 else f"{value:08x}"
                    for value in drawn.categorical[number].tolist()
                ]
                label = str(int(drawn.label[number]))
                file.write(",".join([str(number), label, *integers, *categories]) + "\n")
        return path

    return write


@pytest.fixture(scope="session")
def write_clicks() -> Callable[[Path, int], Path]:
    """Writes rows of a shop as CSV.

    Items whose number is a multiple of 3 get more clicks. Rows with a low price also get more
    clicks.
    """

    def write(path: Path, rows: int) -> Path:
        draw = random.Random(3)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["ts", "impression", "clicked", "price", "age", "item", "shop"])
            for at in range(rows):
                item, price, time = (
                    draw.randrange(60),
                    draw.random(),
                    datetime(2026, 11, 1) + timedelta(seconds=30 * at),
                )
                rate = 0.05 + 0.35 * (item % 3 == 0) + 0.35 * (price < 0.3)
                shown = [time.isoformat(), f"q{at // 5}", int(draw.random() < rate)]
                price_text = "" if at % 9 == 0 else f"{100 * price:.2f}"
                out.writerow(
                    [*shown, price_text, draw.randrange(-9, 90), f"item {item}", draw.randrange(5)]
                )
        return path

    return write
