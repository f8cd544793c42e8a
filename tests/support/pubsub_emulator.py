"""Google's Pub/Sub emulator as a child process, started once on a free port and always stopped."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from demo.log_server import emulator_command, find_emulator
from testing.processes import freeze_group, http_get

_START_SECONDS = 60.0


class Emulator:
    """One emulator.

    If `start` is called after `stop`, the emulator is empty but has the same port.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._script = folder, find_emulator()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with open(self._folder / "emulator.log", "ab") as log:
            self._process = subprocess.Popen(
                emulator_command(self._script, self.port),
                stdout=log,
                stderr=log,
                env={**os.environ, "JAVA_OPTS": "-Xmx512m -XX:TieredStopAtLevel=1"},
                start_new_session=True,  # the script may leave Java as its child, so both are in one group  # noqa: E501
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                text = (self._folder / "emulator.log").read_text()
                self.stop()
                raise AssertionError(f"the Pub/Sub emulator did not start: {text[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill the script and its Java, as a power cut would."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)

    def freeze(self) -> None:
        """Stop answering until `thaw`. Connections stay open."""
        freeze_group(self._process.pid)

    def thaw(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        return http_get(f"http://{self.address}/", timeout=2).status == 200
