"""Runs the pipeline as a process of this machine.

One run at a time is held by the kernel: the run inherits a locked file, `<state>/run.lock`, which is free again
exactly when the run has ended, whatever became of the monitor meanwhile. The run's exit code lands in
`<state>/runs/<id>.exit`, so a restarted monitor still learns it; the outcome itself is `contracts.run_notes`'.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.contracts import run_notes
from components.contracts.durable import write_whole
from components.contracts.errors import PermanentError
from components.contracts.retrain_request import RetrainRequest
from monitoring.acting.trigger import ALREADY, BUSY, FAILED, REFUSED, RELEASED, RUNNING, STARTED, UNKNOWN, RunState

logger = logging.getLogger(__name__)

_KEEP_EXIT_CODE = '"$@"; code=$?; printf %s "$code" >"$0.aside" && mv "$0.aside" "$0"; exit "$code"'
"""Shell around the run: its exit code outlives a monitor that was not there to wait for it."""
_STATE_OF_EXIT_CODE = {0: RELEASED, 1: REFUSED}


class LocalTrigger:
    """Starts `run_command --request <file>` in a session of its own."""

    poll_seconds = 0.0

    def __init__(self, state: Path, store: Path, run_command: str) -> None:
        """Prepares the folders; starts nothing.

        Args:
            state: The monitor's state folder.
            store: The model store, where the run leaves its outcome.
            run_command: Command line, quoted as for a shell.

        Raises:
            PermanentError: the command line cannot be parsed.
        """
        try:
            self._command = shlex.split(run_command)
        except ValueError as error:
            raise PermanentError(f"run_command is {run_command!r}: {error}") from error
        self._requests, self._runs = (state / "requests").absolute(), (state / "runs").absolute()
        self._lock, self._store = state.absolute() / "run.lock", store
        self._child: subprocess.Popen[bytes] | None = None
        for folder in (self._requests, self._runs):
            folder.mkdir(parents=True, exist_ok=True)

    def submit(self, request: RetrainRequest) -> str:
        """See `trigger.Trigger`."""
        name = request.request_id
        with self._held_lock() as lock:
            if lock is None:
                return ALREADY if self._running_id() == name else BUSY
            if self._ended(name) is not None:
                return ALREADY
            request.write(self._requests / f"{name}.json")
            os.truncate(lock, 0)
            os.pwrite(lock, name.encode(), 0)
            self._start(name, lock)
        return STARTED

    def state(self, request_id: str) -> RunState:
        """See `trigger.Trigger`."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        with self._held_lock() as lock:
            if lock is None and self._running_id() == request_id:
                return RunState(RUNNING)
        return self._ended(request_id) or RunState(UNKNOWN, "the run's process is gone and left no outcome")

    def _ended(self, name: str) -> RunState | None:
        """How the run ended; None if it never ran or left nothing."""
        outcome = run_notes.find_outcome(self._store, name)
        if outcome is not None:
            return RunState(outcome.state, f"{outcome.step}: {outcome.reason}", outcome.version)
        exit_path = self._runs / f"{name}.exit"
        if not exit_path.exists():
            return None
        code = int(exit_path.read_text())
        return RunState(_STATE_OF_EXIT_CODE.get(code, FAILED), f"exit code {code}, see {self._runs / name}.log")

    def _start(self, name: str, lock: int) -> None:
        argv = [*self._command, "--request", str(self._requests / f"{name}.json")]
        with open(self._runs / f"{name}.log", "ab") as log:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _KEEP_EXIT_CODE, str(self._runs / f"{name}.exit"), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )
        # For people and for whoever stops a whole demo; this module itself relies on the lock.
        note = {"request_id": name, "process_group": self._child.pid, "command": argv}
        write_whole(self._runs / f"{name}.json", json.dumps(note, indent=2) + "\n")
        logger.info("run %s started as process %d", name, self._child.pid)

    def _running_id(self) -> str:
        return self._lock.read_text()

    @contextmanager
    def _held_lock(self) -> Iterator[int | None]:
        """The lock's descriptor, locked; None while a run holds it. A run started inside inherits the lock."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield descriptor
        finally:
            # Closing, unlike unlocking, leaves the lock with a run that inherited the same open file.
            os.close(descriptor)
