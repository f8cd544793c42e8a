"""The demo's processes: started with a log file each, watched, and all ended, whatever happens to the demo.

Every process carries this stack's tag in its environment, so that also grandchildren (a pipeline run started by the
monitor, its tasks) are found and ended; nothing outlives the demo. What the processes do is their rooms'.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from components.runtime.errors import PermanentError
from pipelines.local.observations import last_word
from pipelines.local.tether import tethered

TAG_VARIABLE = "EVERGREEN_STACK"
KILL_SECONDS = 10.0
"""How long killed processes may take to disappear."""


class ProcessDied(PermanentError):
    """A process of the stack ended on its own."""


class Stack:
    """Named processes of one demo run; a context manager that leaves none behind."""

    def __init__(self, *, logs: Path, variables: Mapping[str, str]) -> None:
        """Prepares an empty stack.

        Args:
            logs: Folder for `<name>.log` of each process.
            variables: Environment variables on top of this process's own.
        """
        self._logs = logs
        self._tag = uuid4().hex
        self._variables = {**os.environ, **variables, TAG_VARIABLE: self._tag}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._may_end: set[str] = set()
        logs.mkdir(parents=True, exist_ok=True)

    @property
    def tag_variables(self) -> dict[str, str]:
        """The variable that makes a process one of this stack's; for processes started by others."""
        return {TAG_VARIABLE: self._tag}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        stdin: bool = False,
        may_end: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a process whose output goes to its log.

        Args:
            name: Names the process and its log.
            command: What to start.
            stdin: Whether lines can be sent to it.
            may_end: Whether it may end by itself with code 0 while others are waited for.
            variables: Environment variables for it alone, on top of the stack's.
        """
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                tethered(command),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._variables, **(variables or {})},
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends them in order
                text=True,
            )
        self._processes[name] = process
        if may_end:
            self._may_end.add(name)
        return process

    def tell(self, name: str, line: str) -> None:
        """Sends one line to a process.

        Raises:
            ProcessDied: it is gone.
        """
        stream = self._processes[name].stdin
        assert stream is not None
        try:
            stream.write(line + "\n")
            stream.flush()
        except BrokenPipeError as error:
            raise ProcessDied(self._obituary(name)) from error

    def check(self) -> None:
        """Raises `ProcessDied` if a process ended that was not asked to, with the last line that it wrote."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and not (code == 0 and name in self._may_end):
                raise ProcessDied(self._obituary(name))

    def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        what: str,
        seconds: float,
        watch: Callable[[], None] = lambda: None,
        every: float = 0.2,
    ) -> None:
        """Polls until `condition` holds, while every process must live.

        Raises:
            ProcessDied: a process ended meanwhile.
            PermanentError: it took longer than `seconds`; `what` is named.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            watch()
            if time.monotonic() > deadline:
                raise PermanentError(f"{what} did not happen within {seconds:.0f} s, see {self._logs}")
            time.sleep(every)

    def wait_for_exit(self, name: str, *, seconds: float) -> int:
        """Waits for a process to end by itself and returns its exit code; it no longer has to live.

        Raises:
            PermanentError: it took longer than `seconds`.
        """
        process = self._processes[name]
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise PermanentError(f"{name} did not end within {seconds:.0f} s, see {self._logs}") from error
        del self._processes[name]
        return code

    def stop(self, name: str, *, seconds: float = 20.0) -> None:
        """Ends a process: SIGTERM, then SIGKILL after `seconds`."""
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Stack:
        """The stack."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything, the newest process first."""
        for name in reversed(list(self._processes)):
            self.stop(name, seconds=8.0)
        deadline = time.monotonic() + KILL_SECONDS
        while (left := tagged_processes(self._tag)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _obituary(self, name: str) -> str:
        code = self._processes[name].poll()
        path = self._logs / f"{name}.log"
        return f"{name} ended with code {code}: {last_word(path)} (see {path})"


def tagged_processes(tag: str) -> list[int]:
    """Ids of the processes that carry the stack's tag."""
    marker = f"{TAG_VARIABLE}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
