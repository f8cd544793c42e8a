"""Runs the pipeline as a process of this machine, one at a time; the process outlives the monitor that started it.

The kernel enforces the rule: the process inherits a locked file, which is free again exactly when the process has
ended, whatever became of the monitor meanwhile. A run leaves its outcome in the model store (`store.runs`), its
exit code and its output in `<state>/runs`, so that a restarted monitor still learns how it ended.
"""

import fcntl
import json
import logging
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from components.contracts.retrain_request import RetrainRequest
from components.runtime.durable import write_whole
from components.runtime.errors import PermanentError
from components.store import runs
from monitoring.acting.trigger import ALREADY, BUSY, FAILED, REFUSED, RELEASED, RUNNING, STARTED, UNKNOWN, RunState

logger = logging.getLogger(__name__)

_STATE_OF_EXIT_CODE = {0: RELEASED, 1: REFUSED}
_KEEP_EXIT_CODE = '"$@"; code=$?; printf %s "$code" >"$0.aside" && mv "$0.aside" "$0"; exit "$code"'
"""Shell around the process: its exit code outlives a monitor that was not there to wait for it."""


class LocalTrigger:
    """Starts `run_command --request <file>` in a session of its own."""

    poll_seconds = 0.0

    def __init__(self, state: Path, store: Path, run_command: str) -> None:
        """Creates the folders; starts nothing.

        `run_command` is quoted as for a shell.

        Raises:
            PermanentError: the command line cannot be parsed.
        """
        try:
            self._command = shlex.split(run_command)
        except ValueError as error:
            raise PermanentError(f"run_command is {run_command!r}: {error}") from error
        self._requests, self._store = (state / "requests").absolute(), store
        self._lock, self._runs = (state / "run.lock").absolute(), (state / "runs").absolute()
        self._child: subprocess.Popen[bytes] | None = None
        for folder in (self._requests, self._runs):
            folder.mkdir(parents=True, exist_ok=True)

    def submit(self, request: RetrainRequest) -> str:
        """See `trigger.Trigger`."""
        name = request.request_id
        with self._held_lock() as lock:
            if lock is None:
                return ALREADY if self._lock.read_text() == name else BUSY
            if self._end_of(name) is not None:
                return ALREADY
            path = self._requests / f"{name}.json"
            request.write(path)
            self._start_process(name, [*self._command, "--request", str(path)], lock)
        return STARTED

    def state(self, request_id: str) -> RunState:
        """See `trigger.Trigger`."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        with self._held_lock() as lock:
            if lock is None and self._lock.read_text() == request_id:
                return RunState(RUNNING)
        return self._end_of(request_id) or RunState(UNKNOWN, "the run's process is gone and left no outcome")

    def _end_of(self, name: str) -> RunState | None:
        """How the run ended; None if it never ran or left nothing."""
        outcome = runs.find_outcome(self._store, name)
        if outcome is not None:
            return RunState(outcome.state, f"{outcome.step}: {outcome.reason}", outcome.version)
        with suppress(FileNotFoundError):
            code = int((self._runs / f"{name}.exit").read_text())
            reason = f"exit code {code}, see {self._runs / f'{name}.log'}"
            return RunState(_STATE_OF_EXIT_CODE.get(code, FAILED), reason)
        return None

    def _start_process(self, name: str, argv: Sequence[str], lock: int) -> None:
        os.truncate(lock, 0)
        os.pwrite(lock, name.encode(), 0)
        with open(self._runs / f"{name}.log", "ab") as log:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _KEEP_EXIT_CODE, str(self._runs / f"{name}.exit"), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )
        # For people, and for whoever ends a whole demo; that the run is active is known by the lock.
        note = {"request_id": name, "process_group": self._child.pid, "command": list(argv)}
        write_whole(self._runs / f"{name}.json", json.dumps(note, indent=2) + "\n")
        logger.info("run %s started as process %d", name, self._child.pid)

    @contextmanager
    def _held_lock(self) -> Iterator[int | None]:
        """The lock's descriptor, locked; None while a run holds it. A process started inside inherits the lock."""
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
