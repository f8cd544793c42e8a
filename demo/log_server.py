"""Start the event log of one demo: an SQLite file, or a server process.

The user chooses the kind of the log with `make demo LOG=...`. Only the demo's client and monitor
get the URL of the log, and the variable that directs Google's library to the emulator. The Pub/Sub
emulator is a Java program of Google's Cloud SDK, which the user installs.
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
"""Variable that makes Google's client library use an emulator without credentials."""
_NAME = "cloud-pubsub-emulator"
_INSIDE_SDK = "platform/pubsub-emulator/bin"


def find_emulator(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the emulator's start script, on PATH or in the Cloud SDK whose gcloud is on PATH.

    Raises:
        ContractError: the emulator or the Java to run it is absent. The message names the missing
            program.
    """
    search = environment.get("PATH", "")
    found = shutil.which(_NAME, path=search)
    if found is None and (gcloud := shutil.which("gcloud", path=search)):
        found = shutil.which(_NAME, path=str(Path(gcloud).resolve().parents[1] / _INSIDE_SDK))
    if found is None:
        raise ContractError(
            "Google's Pub/Sub emulator is absent, expected it on PATH or in the Cloud SDK of "
            "gcloud: "
            "install it with 'gcloud components install pubsub-emulator' or your package manager's "
            "google-cloud-cli-pubsub-emulator"
        )
    if "JAVA_HOME" not in environment and shutil.which("java", path=search) is None:
        raise ContractError(
            f"{found} needs Java, expected 'java' on PATH or in JAVA_HOME: install a Java runtime"
        )
    return Path(found)


def emulator_command(script: Path, port: int) -> list[str]:
    """Return the command that starts the emulator on loopback.

    The emulator returns HTTP 200 on `/` when it is ready.
    """
    return [str(script), "--host=127.0.0.1", f"--port={port}"]


LOG_KINDS = ("sqlite", "pubsub", "kafka")
_READY_SECONDS = 60.0
"""Maximum time in seconds from start to the first response. The emulator's Java takes 5 s."""


@dataclass(frozen=True, kw_only=True)
class LogLocation:
    """Location of a log for its publishers and readers."""

    url: str
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that clients of the log need."""


def check_log(kind: str) -> None:
    """Check early that the demo can start the server of its log.

    Raises:
        ContractError: the kind is unknown, or its server is not installed.
    """
    if kind not in LOG_KINDS:
        raise ContractError(f"log is {kind!r}, expected one of {', '.join(LOG_KINDS)}")
    if kind == "pubsub":
        find_emulator()


def sqlite_log(root: Path) -> LogLocation:
    """Return the log in a file of the demo's folder, which needs no server."""
    return LogLocation(url=f"sqlite:///{quote(str(root / 'click_log.sqlite'))}")


def start_log(kind: str, root: Path, stack: Stack) -> LogLocation:
    """Start the server of this kind of log in `stack`, and return the log when it is ready.

    Raises:
        ContractError: the kind is unknown, or its server is not installed.
        PermanentError: the server did not start.
    """
    check_log(kind)
    if kind == "pubsub":
        return _start_emulator(stack)
    if kind == "kafka":
        address = root / "kafka.brokers"
        address.unlink(missing_ok=True)
        cluster = [
            executable,
            "-m",
            "demo.kafka_cluster",
            "--address",
            str(address),
            "--topic",
            "clicks",
        ]
        stack.start("kafka", cluster)
        stack.wait_until(
            address.exists, what="the start of the Kafka cluster", seconds=_READY_SECONDS
        )
        return LogLocation(url=f"kafka://{address.read_text().strip()}/clicks")
    return sqlite_log(root)


def _start_emulator(stack: Stack) -> LogLocation:
    port = free_port()
    address = f"{LOOPBACK}:{port}"
    stack.start("pubsub_emulator", emulator_command(find_emulator(), port))
    stack.wait_until(
        lambda: answers(f"http://{address}/"),
        what="the start of the Pub/Sub emulator",
        seconds=_READY_SECONDS,
    )
    # After connecting, the watermark is unknown until a lease has expired. 10 s is the shortest
    # lease of Pub/Sub.
    url = "pubsub://evergreen-demo/clicks?lease_seconds=10&settle_seconds=1"
    return LogLocation(url=url, variables={HOST_VARIABLE: address})
