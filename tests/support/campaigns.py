"""Faults by the hundred: programs that are struck at random moments, and a client that says what it has sent."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from tests.support.paths import REPOSITORY

SHARE = float(os.environ.get("EVERGREEN_CAMPAIGN_SHARE", "1"))
"""Share of a campaign's faults that are tried, to see whether it runs."""


def faults(number: int) -> int:
    """Return how many of a campaign's faults are tried."""
    return max(int(number * SHARE), 4)


class Program:
    """A program that is started again whenever it has ended, as its supervisor does."""

    def __init__(self, start: Callable[[], subprocess.Popen], *, may_end: tuple[int, ...] = ()) -> None:
        self._start, self._may_end = start, may_end
        self.process = start()
        self.ends: list[int] = []
        """Exit codes by which it ended itself."""

    def keep_up(self) -> None:
        """Start it again if it has ended, which only exit codes of `may_end` allow."""
        if (code := self.process.poll()) is not None:
            assert code in self._may_end, f"{self.process.args} ended with {code}"
            self.ends.append(code)
            self.process = self._start()

    def suffer(self, blow: signal.Signals, seconds: float) -> None:
        """Kill it and start it again, or stop it for some seconds."""
        self.keep_up()
        self.process.send_signal(blow)
        if blow == signal.SIGKILL:
            self.process.wait()
            self.process = self._start()
        else:
            time.sleep(seconds)
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Ask it to end."""
        self.keep_up()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(300) == 0, self.process.args


def strike(programs: list[Program], chance: random.Random, *, kills: int, stops: int, pause: float) -> None:
    """Strike the programs in turn, after pauses of up to so many seconds."""
    blows = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    chance.shuffle(blows)
    for number, blow in enumerate(blows):
        time.sleep(chance.uniform(0.0, pause))
        programs[number % len(programs)].suffer(blow, chance.uniform(0.02, 0.6))
        for program in programs:
            program.keep_up()


def client(url: str, said: Path, *, number: int, log: Path) -> subprocess.Popen:
    """Start the client `number` of `campaign_client`, which says to `said` what it sends to `url`."""
    command = [sys.executable, "-m", "tests.support.campaign_client", url, str(said), str(number)]
    with open(log, "ab") as file:
        return subprocess.Popen(command, cwd=REPOSITORY, stderr=file)


def expect_each_once(said: Path, lake: Path) -> int:
    """Compare what clients said with a lake: each row and each outcome that was sent is in one file, once.

    Returns:
        The number of requests that the clients said the log has.
    """
    asked, sent = {}, set()
    for line in said.read_text().splitlines():
        told = json.loads(line)
        asked |= {name: tuple(each) for name, each in told.get("asked", {}).items()}
        sent |= set(told.get("sent", ()))
    rows = _once(lake, "day=*/*.parquet", ("request_id", "row", "score", "I1", "label"))
    late = _once(lake, "outcomes/day=*/*.parquet", ("request_id", "row", "outcome_time"))
    for (name, row), (score, feature, label) in rows.items():
        num_rows, clicked = asked[name]
        assert row < num_rows, f"{name} has no row {row}"
        assert score == feature, f"row {row} of {name} has another row's score"
        assert not label or row == clicked, f"row {row} of {name} was not clicked"
    lost = [name for name in sent if any((name, row) not in rows for row in range(asked[name][0]))]
    assert lost == [], f"{len(lost)} of {len(sent)} requests were sent and are not in the lake"
    halves = [name for name, row in rows if any((name, each) not in rows for each in range(asked[name][0]))]
    assert halves == []
    clicks = {(name, asked[name][1]) for name in sent if asked[name][1] is not None}
    labelled = {key for key, (*_, label) in rows.items() if label}
    assert clicks <= labelled | late.keys(), "a click is neither a label nor late"
    assert not labelled & late.keys(), "a click is a label, and late"
    return len(sent)


def _once(lake: Path, pattern: str, columns: tuple[str, ...]) -> dict[tuple[str, int], tuple]:
    """The rows of the files by request and row, each of which is there once."""
    found: dict[tuple[str, int], tuple] = {}
    for path in sorted(lake.glob(pattern)):
        table = pq.ParquetFile(path).read(columns=list(columns))
        for name, row, *values in zip(*(table[column].to_pylist() for column in columns)):
            assert (name, row) not in found, f"row {row} of {name} is there twice"
            found[name, row] = tuple(values)
    return found
