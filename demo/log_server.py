"""The record log of one demo: a SQLite file, or a server that the demo starts among its processes.

The user chooses (`make demo LOG=...`). What a log promises is `events.event_log`'s; the demo's client and monitor are
given its URL, and only they the variable that makes Google's library talk to the emulator. The Pub/Sub emulator is a
part of Google's Cloud SDK, in Java, which evergreen does not bring.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import executable
from urllib.parse import quote

from demo.stack import LOOPBACK, Stack, answers, free_port
from evergreen.runtime.errors import ContractError

HOST_VARIABLE = "PUBSUB_EMULATOR_HOST"
"""Tells Google's client library to talk to an emulator, without credentials."""
_NAME = "cloud-pubsub-emulator"
_INSIDE_SDK = "platform/pubsub-emulator/bin"


def find_emulator(environment: Mapping[str, str] = os.environ) -> Path:
    """The emulator's start script: on PATH, or in the Cloud SDK whose gcloud is on PATH.

    Raises:
        ContractError: it is not there, or no Java to run it; says which.
    """
    search = environment.get("PATH", "")
    found = shutil.which(_NAME, path=search)
    if found is None and (gcloud := shutil.which("gcloud", path=search)):
        found = shutil.which(_NAME, path=str(Path(gcloud).resolve().parents[1] / _INSIDE_SDK))
    if found is None:
        raise ContractError(
            "Google's Pub/Sub emulator is not on this machine, expected it on PATH or in the Cloud SDK of gcloud: "
            "install it with 'gcloud components install pubsub-emulator' or your package manager's "
            "google-cloud-cli-pubsub-emulator"
        )
    if "JAVA_HOME" not in environment and shutil.which("java", path=search) is None:
        raise ContractError(f"{found} needs Java, expected 'java' on PATH or in JAVA_HOME: install a Java runtime")
    return Path(found)


def emulator_command(script: Path, port: int) -> list[str]:
    """Starts the emulator on loopback; it answers HTTP 200 on `/` when it is ready."""
    return [str(script), "--host=127.0.0.1", f"--port={port}"]


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
        cluster = [executable, "-m", "demo.kafka_cluster", "--address", str(address), "--topic", "clicks"]
        stack.start("kafka", cluster)
        stack.wait_until(address.exists, what="the start of the Kafka cluster", seconds=READY_SECONDS)
        return LogPlace(url=f"kafka://{address.read_text().strip()}/clicks")
    return sqlite_log(root)


def _start_emulator(stack: Stack) -> LogPlace:
    port = free_port()
    address = f"{LOOPBACK}:{port}"
    stack.start("pubsub_emulator", emulator_command(find_emulator(), port))
    stack.wait_until(
        lambda: answers(f"http://{address}/"), what="the start of the Pub/Sub emulator", seconds=READY_SECONDS
    )
    # After connecting nothing is known of what is read for a lease: 10 s is the shortest that Pub/Sub takes.
    url = "pubsub://evergreen-demo/clicks?lease_seconds=10&settle_seconds=1"
    return LogPlace(url=url, variables={HOST_VARIABLE: address})
