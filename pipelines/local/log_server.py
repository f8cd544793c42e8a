"""The record log of one demo: a SQLite file, or a server that the demo starts among its processes.

Which one is the user's to say (`make demo LOG=...`). What a log promises is `logs.event_log`'s; the demo's client
and monitor are told its URL, and they alone the variables that lead Google's library to the emulator.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from sys import executable
from urllib.parse import quote

from components.runtime.errors import ContractError
from pipelines.local.loopback import DIRECT, LOOPBACK
from pipelines.local.pubsub_emulator import HOST_VARIABLE, emulator_command, find_emulator
from pipelines.local.stack import Stack

LOG_KINDS = ("sqlite", "pubsub", "kafka")
READY_SECONDS = 60.0
"""From start to answering; the emulator's Java takes 5 s."""


@dataclass(frozen=True, kw_only=True)
class LogPlace:
    """Where a log is, for whoever publishes to it or reads it."""

    url: str
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that its users need."""


def check_log(kind: str) -> None:
    """Makes sure early that the demo will find its log's server.

    Raises:
        ContractError: an unknown kind, or a server that is not on this machine.
    """
    if kind not in LOG_KINDS:
        raise ContractError(f"log is {kind!r}, expected one of {', '.join(LOG_KINDS)}")
    if kind == "pubsub":
        find_emulator()


def sqlite_log(root: Path) -> LogPlace:
    """The log in a file of the demo's folder; nothing has to be started."""
    return LogPlace(url=f"sqlite:///{quote(str(root / 'click_log.sqlite'))}")


def start_log(kind: str, root: Path, stack: Stack) -> LogPlace:
    """The log of this kind, its server started as a process of `stack` and ready.

    Raises:
        ContractError: as `check_log`.
        PermanentError: the server did not start.
    """
    check_log(kind)
    if kind == "pubsub":
        return _start_emulator(stack)
    if kind == "kafka":
        address = root / "kafka.brokers"
        address.unlink(missing_ok=True)
        stack.start("kafka", [executable, "-m", "pipelines.local.kafka_cluster", "--address", str(address)])
        stack.wait_until(address.exists, what="the start of the Kafka cluster", seconds=READY_SECONDS)
        return LogPlace(url=f"kafka://{address.read_text().strip()}/clicks")
    return sqlite_log(root)


def _start_emulator(stack: Stack) -> LogPlace:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    stack.start("pubsub_emulator", emulator_command(find_emulator(), port))
    stack.wait_until(lambda: _answers(port), what="the start of the Pub/Sub emulator", seconds=READY_SECONDS)
    # After connecting nothing is known of what is read for a lease: 10 s is the shortest that Pub/Sub takes.
    url = "pubsub://evergreen-demo/clicks?lease_seconds=10&settle_seconds=1"
    return LogPlace(url=url, variables={HOST_VARIABLE: f"{LOOPBACK}:{port}"})


def _answers(port: int) -> bool:
    try:
        with DIRECT.open(f"http://{LOOPBACK}:{port}/", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
