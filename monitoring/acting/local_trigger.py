"""Runs the pipeline as a process of this machine, one at a time (`monitoring.acting.processes`).

A run leaves its outcome in the model store (`store.run_notes`), and its exit code in `<state>/runs`, so a restarted
monitor still learns it. A request of a lower term than one that was seen comes from a replica that is no longer the
leader, and is refused.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from components.contracts.retrain_request import RetrainRequest
from components.runtime.durable import write_whole
from components.runtime.errors import PermanentError
from components.store import run_notes
from monitoring.acting.processes import Processes
from monitoring.acting.trigger import ALREADY, BUSY, FAILED, REFUSED, RELEASED, RUNNING, STARTED, UNKNOWN, RunState

logger = logging.getLogger(__name__)

_STATE_OF_EXIT_CODE = {0: RELEASED, 1: REFUSED}
_TERM_FILE = "term.txt"


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
        self._requests, self._store = (state / "requests").absolute(), store
        self._requests.mkdir(parents=True, exist_ok=True)
        self._processes = Processes(state / "run.lock", state / "runs")

    def submit(self, request: RetrainRequest) -> str:
        """See `trigger.Trigger`."""
        name = request.request_id
        with self._processes.held_lock() as lock:
            if lock is None:
                return ALREADY if self._processes.noted_name() == name else BUSY
            if self._ended(name) is not None:
                return ALREADY
            self._refuse_stale(request)
            request.write(self._requests / f"{name}.json")
            argv = [*self._command, "--request", str(self._requests / f"{name}.json")]
            self._processes.start(name, argv, lock)
        return STARTED

    def state(self, request_id: str) -> RunState:
        """See `trigger.Trigger`."""
        if self._processes.running() == request_id:
            return RunState(RUNNING)
        return self._ended(request_id) or RunState(UNKNOWN, "the run's process is gone and left no outcome")

    def _ended(self, name: str) -> RunState | None:
        """How the run ended; None if it never ran or left nothing."""
        outcome = run_notes.find_outcome(self._store, name)
        if outcome is not None:
            return RunState(outcome.state, f"{outcome.step}: {outcome.reason}", outcome.version)
        code = self._processes.exit_code(name)
        if code is None:
            return None
        return RunState(
            _STATE_OF_EXIT_CODE.get(code, FAILED), f"exit code {code}, see {self._processes.log_path(name)}"
        )

    def _refuse_stale(self, request: RetrainRequest) -> None:
        """Only while the lock is held, so that reading and noting the term are one step."""
        path = self._requests / _TERM_FILE
        newest = int(path.read_text()) if path.exists() else 0
        if 0 < request.fence < newest:
            raise PermanentError(f"{request.request_id} is of term {request.fence}, term {newest} has asked since")
        if request.fence > newest:
            write_whole(path, f"{request.fence}\n")
