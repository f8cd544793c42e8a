"""Fault campaigns: programs are killed at random while a client records what it sends."""

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

from testing.paths import REPOSITORY

SHARE = float(os.environ.get("EVERGREEN_CAMPAIGN_SHARE", "1"))
"""Share of a campaign's faults to inject. A run with a small share only tests the code of the
campaign."""


def faults(number: int) -> int:
    """Return how many of a campaign's faults are injected."""
    return max(int(number * SHARE), 4)


class Program:
    """A program that is restarted each time it ends, as a supervisor would do."""

    def __init__(
        self, start: Callable[[], subprocess.Popen], *, may_end: tuple[int, ...] = ()
    ) -> None:
        self._start, self._may_end = start, may_end
        self.process = start()
        self.ends: list[int] = []
        """Exit codes with which the program ended by itself."""

    def restart_if_ended(self) -> None:
        """Restart the program if it has ended.

        The exit code of an ended program must be one of `may_end`.
        """
        if (code := self.process.poll()) is not None:
            assert code in self._may_end, f"{self.process.args} ended with {code}"
            self.ends.append(code)
            self.process = self._start()

    def disturb(self, sent_signal: signal.Signals, seconds: float) -> None:
        """Kill and restart the program, or pause the program for `seconds`."""
        self.restart_if_ended()
        self.process.send_signal(sent_signal)
        if sent_signal == signal.SIGKILL:
            self.process.wait()
            self.process = self._start()
        else:
            time.sleep(seconds)
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Send SIGTERM and wait for exit code 0."""
        self.restart_if_ended()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(300) == 0, self.process.args


def inject_faults(
    programs: list[Program], chance: random.Random, *, kills: int, stops: int, pause: float
) -> None:
    """Kill or pause the programs in turn, after random waits of up to `pause` seconds."""
    signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    chance.shuffle(signals)
    for number, sent_signal in enumerate(signals):
        time.sleep(chance.uniform(0.0, pause))
        programs[number % len(programs)].disturb(sent_signal, chance.uniform(0.02, 0.6))
        for program in programs:
            program.restart_if_ended()


def client(url: str, record: Path, *, number: int, log: Path) -> subprocess.Popen:
    """Start a `campaign_client` with the number `number`, which sends to `url`.

    The client writes a record of its messages to the file `record`.
    """
    command = [sys.executable, "-m", "tests.support.campaign_client", url, str(record), str(number)]
    with open(log, "ab") as file:
        return subprocess.Popen(command, cwd=REPOSITORY, stderr=file)


def expect_each_once(record: Path, lake: Path) -> int:
    """Assert that each row and outcome that clients sent is in the lake exactly once.

    Returns:
        The number of requests in the log, according to the clients.
    """
    requested, sent = {}, set()
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        requested |= {name: tuple(each) for name, each in entry.get("requested", {}).items()}
        sent |= set(entry.get("sent", ()))
    rows = _once(lake, "day=*/*.parquet", ("request_id", "row", "score", "I1", "label"))
    late = _once(lake, "outcomes/day=*/*.parquet", ("request_id", "row", "outcome_time"))
    for (name, row), (score, feature, label) in rows.items():
        num_rows, clicked = requested[name]
        assert row < num_rows, f"{name} has no row {row}"
        assert score == feature, f"row {row} of {name} has another row's score"
        assert not label or row == clicked, f"row {row} of {name} was not clicked"
    lost = [
        name for name in sent if any((name, row) not in rows for row in range(requested[name][0]))
    ]
    assert lost == [], f"{len(lost)} of {len(sent)} requests were sent and are not in the lake"
    halves = [
        name
        for name, row in rows
        if any((name, each) not in rows for each in range(requested[name][0]))
    ]
    assert halves == []
    clicks = {(name, requested[name][1]) for name in sent if requested[name][1] is not None}
    labelled = {key for key, (*_, label) in rows.items() if label}
    assert clicks <= labelled | late.keys(), "a click is neither a label nor late"
    assert not labelled & late.keys(), "a click is both a label and late"
    return len(sent)


def _once(lake: Path, pattern: str, columns: tuple[str, ...]) -> dict[tuple[str, int], tuple]:
    """Return the rows of the files, keyed by request and row. Each row must occur exactly once."""
    found: dict[tuple[str, int], tuple] = {}
    for path in sorted(lake.glob(pattern)):
        table = pq.ParquetFile(path).read(columns=list(columns))
        for name, row, *values in zip(*(table[column].to_pylist() for column in columns)):
            assert (name, row) not in found, f"row {row} of {name} occurs twice"
            found[name, row] = tuple(values)
    return found
