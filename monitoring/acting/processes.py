"""One process at a time, which outlives the monitor that started it, and whose end is learned after a restart too.

The kernel holds the rule: the process inherits a locked file, which is free again exactly when it has ended, whatever
became of the monitor meanwhile. Its exit code and its output stay in a folder under its name. What is run, and what an
exit code means, is the callers' (`local_trigger`, `correction`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from components.runtime.durable import write_whole

logger = logging.getLogger(__name__)

_KEEP_EXIT_CODE = '"$@"; code=$?; printf %s "$code" >"$0.aside" && mv "$0.aside" "$0"; exit "$code"'
"""Shell around the process: its exit code outlives a monitor that was not there to wait for it."""


class Processes:
    """Runs under one lock, noted in one folder."""

    def __init__(self, lock: Path, folder: Path) -> None:
        """Prepares the folder; starts nothing."""
        self._lock, self.folder = lock.absolute(), folder.absolute()
        self._child: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, argv: Sequence[str], lock: int, environment: Mapping[str, str] | None = None) -> None:
        """Starts `argv` in a session of its own.

        Args:
            name: Of its notes: `<folder>/<name>.{json,log,exit}`.
            argv: Program and arguments; no shell sees them.
            lock: From `held_lock`, which it inherits.
            environment: Its variables; None = the monitor's.
        """
        os.truncate(lock, 0)
        os.pwrite(lock, name.encode(), 0)
        with open(self.folder / f"{name}.log", "ab") as log:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _KEEP_EXIT_CODE, str(self.folder / f"{name}.exit"), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
                env=environment,
            )
        # For `stop`, for people, and for whoever ends a whole demo; that it runs is known by the lock.
        note = {"request_id": name, "process_group": self._child.pid, "command": list(argv)}
        write_whole(self.folder / f"{name}.json", json.dumps(note, indent=2) + "\n")
        logger.info("run %s started as process %d", name, self._child.pid)

    def running(self) -> str | None:
        """Name of the process at work; None where none is."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        with self.held_lock() as lock:
            return self.noted_name() if lock is None else None

    def noted_name(self) -> str:
        """Name of the process that was started last; empty before the first."""
        return self._lock.read_text()

    def exit_code(self, name: str) -> int | None:
        """With what the process ended; None where it did not, or was killed before it could say."""
        with suppress(FileNotFoundError):
            return int((self.folder / f"{name}.exit").read_text())
        return None

    def log_path(self, name: str) -> Path:
        """What the process printed."""
        return self.folder / f"{name}.log"

    def stop(self, name: str) -> None:
        """Kills the process `name` and its children, if it runs."""
        if self.running() == name:
            with suppress(ProcessLookupError, FileNotFoundError):
                os.killpg(json.loads((self.folder / f"{name}.json").read_text())["process_group"], signal.SIGKILL)

    @contextmanager
    def held_lock(self) -> Iterator[int | None]:
        """The lock's descriptor, locked; None while a process holds it. A process started inside inherits the lock."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield descriptor
        finally:
            # Closing, unlike unlocking, leaves the lock with a process that inherited the same open file.
            os.close(descriptor)
