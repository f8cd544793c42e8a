"""Hundreds of faults of monitor, uploader and client at random moments.

Despite the faults, each request is in the lake exactly once.

`EVERGREEN_CAMPAIGN_SHARE=0.02` runs only 2 % of the faults.
"""

import json
import os
import random
import subprocess
import time
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor

from evergreen.events.sqlite import SqliteLog
from monitoring.journal import DECISIONS_FILE
from testing.processes import wait_for
from tests.support import campaigns
from tests.support.campaigns import Program, expect_each_once, faults, inject_faults
from tests.support.monitors import clicks, prediction, read_events, read_rows
from tests.support.record_messages import FORM, encode, reader_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

DISK_FULL = 3
"""Exit code of the uploader on a full disk. The supervisor restarts the uploader."""


class Installation:
    """A monitor, an uploader and a client with one log."""

    def __init__(self, processes, log) -> None:
        self.processes, self.log_file = processes, log
        self.url = f"sqlite:///{log}?lease_seconds=1".replace(" ", "%20")
        self.record = processes.folder / "record.jsonl"
        self.num_clients = 0
        self.monitor = Program(
            lambda: processes.monitor(log=self.url, policies="schedule", max_serving_seconds=1e9)
        )
        upload = {"archive": processes.archive, "lake": processes.lake, "interval_seconds": 0.2}
        self.uploader = Program(
            lambda: processes.start("monitoring.uploader", upload), may_end=(DISK_FULL,)
        )
        self.client = Program(self._next_client)
        self.programs = [self.monitor, self.uploader, self.client]

    def _next_client(self) -> subprocess.Popen:
        self.num_clients += 1
        log = self.processes.folder / "client.log"
        self.processes.started.append(
            campaigns.client(self.url, self.record, number=self.num_clients, log=log)
        )
        return self.processes.started[-1]

    def kill(self) -> None:
        """Kill all processes at once."""
        for program in self.programs:
            program.process.kill()
            program.process.wait()

    def num_reports(self) -> int:
        """Return the number of log lines in which the processes report a full disk."""
        texts = [path.read_text() for path in self.processes.folder.glob("*.log")]
        return sum(
            text.count(report) for text in texts for report in ("No space left", "disk is full")
        )

    def finish(self) -> int:
        """Stop all programs once nothing is pending, and return the number of logged requests."""
        size = self.record.stat().st_size
        wait_for(lambda: self.record.stat().st_size > size, "a client that is up")
        self.client.end()
        counter = self.processes.counter
        with closing(SqliteLog(self.log_file)) as log:
            wait_for(lambda: log.backlog() == 0, "the log's end", seconds=300)
            wait_for(
                lambda: counter("matured") == counter("predicted") > 0, "all labels", seconds=300
            )
            self.monitor.end()
            assert (log.backlog(), log.list_dead_letters()) == (0, [])
        self.uploader.restart_if_ended()
        archive = self.processes.archive
        wait_for(
            lambda: not [*archive.glob("day=*/*.parquet"), *archive.glob("outcomes/*/*")],
            "all files in the lake",
        )
        return expect_each_once(self.record, self.processes.lake)


def test_killed_and_stopped_at_random_moments_each_request_counts_once(processes):
    installation = Installation(processes, processes.folder / "log.db")
    number = faults(300)
    inject_faults(installation.programs, random.Random(1), kills=number, stops=number, pause=0.8)
    sent = installation.finish()
    print(f"{number} SIGKILL, {number} SIGSTOP: {sent:,} of {sent:,} requests once")


@contextmanager
def small_disk(folder, size):
    """Provide a small disk that is mounted at the folder."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, left: int):
    """Fill the disk except for `left` bytes, and return the path of the new file."""
    ballast = folder / "somebody else's"
    size = 0
    with open(ballast, "wb") as file:
        while (room := free_bytes(folder) - left) > 0:
            with suppress(OSError):  # monitor and uploader may fill the disk first
                os.posix_fallocate(file.fileno(), size, step := min(room, 1 << 22))
                size += step
    return ballast


def free_bytes(folder) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("name", ["log", "state", "archive", "lake"])
def test_each_request_counts_once_whichever_disk_fills_up(processes, name):
    p, chance, number = processes, random.Random(name), faults(25)
    folders = {"log": p.folder / "log", "state": p.state, "archive": p.archive, "lake": p.lake}
    folders["log"].mkdir()
    with small_disk(folders[name], "120m") as folder:
        installation = Installation(p, folders["log"] / "log.db")
        try:
            wait_for(lambda: p.counter("archived") > 0, "the first rows")
            num_met = sum(meets_full_disk(installation, folder, chance) for _ in range(number))
            assert num_met > 0
            assert installation.monitor.ends == installation.client.ends == []
            sent = installation.finish()
            points = [
                json.loads(line)["time"]
                for line in (p.state / DECISIONS_FILE).read_text().splitlines()
            ]
            assert points == sorted(set(points)), "a decision was written twice"
        finally:
            installation.kill()
    restarts = len(installation.uploader.ends)
    print(
        f"{number} full disks of the {name}, {num_met} met by a program, uploader started again "
        f"{restarts} times:"
        f" {sent:,} requests once"
    )


def meets_full_disk(installation: Installation, folder, chance) -> bool:
    """Fill the disk until a program reports it, for some seconds at most, and wait for recovery.

    Returns:
        Whether a process reported a full disk. SQLite reuses freed pages, and may need no space for
        a while.
    """
    before, until = installation.num_reports(), time.monotonic() + 5.0
    ballast = fill(folder, chance.choice([0, 0, 4096, chance.randrange(100_000)]))
    while time.monotonic() < until and installation.num_reports() == before:
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, 0.5))
    is_met = installation.num_reports() > before
    assert installation.processes.get("/healthz").status == 200
    ballast.unlink()
    for program in installation.programs:
        program.restart_if_ended()
    wait_for(
        lambda: installation.processes.get("/readyz").status == 200, "readiness after a full disk"
    )
    return is_met


def corrupted(chance, payload: bytes) -> bytes:
    """Return the message with one random fault, such as a flipped bit or a missing part."""
    content = bytearray(payload)
    kind, at = chance.randrange(6), chance.randrange(len(content))
    if kind == 0:
        content[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        del content[at : at + chance.randrange(1, 40)]
    elif kind == 3:
        content[at:at] = chance.randbytes(chance.randrange(1, 40))
    elif kind == 4:
        content = bytearray(chance.randbytes(chance.randrange(300)))
    else:
        content *= 2
    return bytes(content)


def with_unexpected_value(chance, payload: bytes) -> bytes:
    """Return the message with an unexpected value in one field of the published schema."""
    record = READER.FromString(payload)
    message = getattr(record, record.ListFields()[0][0].name)
    if message.DESCRIPTOR.name == "Predictions" and chance.random() < 0.5:
        message = message.features
    field = chance.choice(message.DESCRIPTOR.fields)
    value = chance.choice(WILD[field.cpp_type]) if field.cpp_type in WILD else None
    if value is None:
        message.ClearField(field.name)
    elif not field.is_repeated:
        setattr(message, field.name, value)
    elif chance.random() < 0.5 or not len(getattr(message, field.name)):
        getattr(message, field.name).append(value)
    else:
        getattr(message, field.name)[0] = value
    return record.SerializeToString()


READER = reader_of(FORM.proto())
_FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 1e-45, 3.4e38, 1.5]
_TEXTS = [
    "",
    "\x00",
    "\x1b[2J\r\n",
    "<script>alert(1)</script>",
    "é" * 128,
    "x" * 100_000,
    "../../etc/passwd",
]
_WHOLE = [0, -1, 2**31 - 1, -(2**31), 2**20]
_Type = FieldDescriptor
WILD = {
    _Type.CPPTYPE_FLOAT: _FLOATS,
    _Type.CPPTYPE_DOUBLE: [*_FLOATS, 1e300, 253_402_300_800.0],
    _Type.CPPTYPE_STRING: _TEXTS,
    _Type.CPPTYPE_INT32: _WHOLE,
    _Type.CPPTYPE_INT64: [*_WHOLE, 2**63 - 1, -(2**63)],
    _Type.CPPTYPE_BOOL: [True],
}


def test_each_fuzzed_record_counts_or_is_dead_letter_with_its_reason(processes):
    p, chance, number = processes, random.Random(3), faults(50_000)
    monitor = p.monitor(policies="schedule", max_serving_seconds=1e9, archive_roll_rows=20_000)
    wait_for(lambda: p.get("/readyz").status == 200, "the monitor")
    healthy, valid, now = {}, 0, time.time()
    for start in range(0, number, 500):
        messages = []
        for each in range(start, min(start + 500, number)):
            made = prediction(f"r{each}", 1 + each % 4, time=now, seed=each)
            payload = encode(
                made if each % 3 else clicks(f"o{each}", [(f"valid {each - each % 10}", 0, now)])
            )
            messages.append(
                (
                    f"fuzzed {each}",
                    (corrupted if each % 2 else with_unexpected_value)(chance, payload),
                )
            )
            if each % 10 == 0:
                valid_prediction = prediction(f"valid {each}", 3, time=now, seed=each)
                healthy[f"valid {each}"], valid = valid_prediction, valid + 1
                messages.append((f"valid {each}", encode(valid_prediction)))
        p.log.publish(messages)
        wait_for(lambda: p.log.backlog() < 2000, "the monitor")
        assert p.get("/healthz").status == 200
    wait_for(lambda: p.log.backlog() == 0, "all records", seconds=300)
    wait_for(
        lambda: json.loads(p.page("/status"))["log_read_up_to"] > now + 2.0,
        "the labels of all valid rows",
    )
    dead = p.log.list_dead_letters()
    assert all(each.reason and each.message_id.startswith("fuzzed") for each in dead)
    assert p.counter("dead_letter") == len(dead)
    predicted = p.counter("predicted")
    assert p.end(monitor) == 0
    rows = read_rows(p.archive)
    found = {(row["request_id"], row["row"]): np.float32(row["score"]) for row in rows}
    assert len(found) == len(rows)
    assert {
        (name, row): score
        for name, made in healthy.items()
        for row, score in enumerate(made.scores)
    }.items() <= (found.items())
    open_rows = read_events(p.state)[-1]["pending"]
    print(
        f"{number:,} records: {len(dead):,} dead letters, {predicted:.0f} rows taken in, "
        f"{len(rows):,} archived"
    )
    assert len(rows) + open_rows == predicted
