"""Start, watch and end processes on this machine, each with its log file.

Every process has its stack's tag in its environment. Therefore grandchildren, such as a pipeline
run of the monitor and its tasks, are found and ended too. No process outlives the demo.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from uuid import uuid4

from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.onnx_runtime import SILENT

LOOPBACK = "127.0.0.1"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener of URLs without a proxy."""


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def answers(url: str) -> bool:
    """Return whether a server responds to GET with success."""
    try:
        with DIRECT.open(url, timeout=1):
            return True
    except (OSError, HTTPException):
        return False


# The child sets PR_SET_PDEATHSIG (1) and then becomes the command. The child exits if its parent
# has already ended.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def ended_with_parent(
    command: Sequence[str], death_signal: signal.Signals = signal.SIGTERM
) -> list[str]:
    """Return a command line that runs `command`, and signals `command` when this process ends.

    Call this function from a thread that lives as long as the command should. Linux sends
    `death_signal` when the thread that started the command ends.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _LAUNCHER,
        str(os.getpid()),
        str(int(death_signal)),
        *command,
    ]


class JsonLines:
    """Reader of a growing file of JSON lines, which resumes where the last call stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Return the lines since the last call. The attribute `lines` contains all lines so far."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines() if line.strip()]
        self.lines += new
        return new


def last_line(log: Path) -> str:
    """Return the last line of a process's log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def printed_json(log: Path) -> Any:
    """Return the indented JSON that a process printed, possibly after warnings."""
    lines = log.read_text(errors="replace").splitlines()
    start = next((n for n, line in enumerate(lines) if line in ("{", "[")), 0)
    return json.loads("\n".join(lines[start:]))


_TAG_VARIABLE = "EVERGREEN_STACK"
_KILL_SECONDS = 10.0
"""Maximum time in seconds until killed processes disappear."""


class ProcessDied(PermanentError):
    """A process of the demo ended unexpectedly."""


class Stack:
    """Named processes of one demo. On exit, the context manager ends all processes."""

    def __init__(self, *, logs: Path, variables: Mapping[str, str]) -> None:
        """Create an empty stack.

        Args:
            logs: Folder of the log files `<name>.log`.
            variables: Environment variables that all processes get in addition to the current
                environment.
        """
        self._logs = logs
        self._tag = uuid4().hex
        self._variables = {**os.environ, **SILENT, **variables, _TAG_VARIABLE: self._tag}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._may_end: set[str] = set()
        logs.mkdir(parents=True, exist_ok=True)

    @property
    def tag_variables(self) -> dict[str, str]:
        """Environment variable that marks a process as part of this stack."""
        return {_TAG_VARIABLE: self._tag}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        stdin: bool = False,
        may_end: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process whose output goes to its log.

        Args:
            name: Name of the process and its log.
            command: The command line.
            stdin: Whether the process reads its standard input, to which `send_line` sends lines.
            may_end: Whether the process may end with code 0 while other processes are awaited.
            variables: Environment variables of this process, in addition to the stack's.
        """
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                ended_with_parent(command),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._variables, **(variables or {})},
                start_new_session=True,  # Ctrl-C must reach only the demo
                text=True,
            )
        self._processes[name] = process
        if may_end:
            self._may_end.add(name)
        return process

    def send_line(self, name: str, line: str) -> None:
        """Write one line to the standard input of a process.

        Raises:
            ProcessDied: the process has ended.
        """
        stream = self._processes[name].stdin
        assert stream is not None
        try:
            stream.write(line + "\n")
            stream.flush()
        except BrokenPipeError as error:
            raise ProcessDied(self._describe_exit(name)) from error

    def check(self) -> None:
        """Check that all processes are running.

        Raises:
            ProcessDied: a process ended unexpectedly. The exception's message has the last line of
                the process's log.
        """
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and not (code == 0 and name in self._may_end):
                raise ProcessDied(self._describe_exit(name))

    def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        what: str,
        seconds: float,
        watch: Callable[[], None] = lambda: None,
        every: float = 0.2,
    ) -> None:
        """Poll until `condition` holds, and check that every process is running.

        Args:
            condition: Function that returns whether the wait is over.
            what: Name of the condition for the error.
            seconds: Maximum time to wait.
            watch: Function that is called at each poll.
            every: Seconds between two polls.

        Raises:
            ProcessDied: a process ended during this time.
            PermanentError: the condition did not hold within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            watch()
            if time.monotonic() > deadline:
                raise PermanentError(
                    f"{what} did not happen within {seconds:.0f} s, see {self._logs}"
                )
            time.sleep(every)

    def wait_for_exit(self, name: str, *, seconds: float) -> int:
        """Wait for a process to end by itself, remove it from the stack, and return its exit code.

        Raises:
            PermanentError: the process did not end within `seconds`.
        """
        process = self._processes[name]
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise PermanentError(
                f"{name} did not end within {seconds:.0f} s, see {self._logs}"
            ) from error
        del self._processes[name]
        return code

    def finish(self, name: str, *, seconds: float, codes: tuple[int, ...] = (0,)) -> Path:
        """Wait for a process to end with one of `codes`, and return its log.

        Raises:
            ContractError: it ended with code 2, because its input is invalid. The message contains
                the reason.
            PermanentError: the process ended with another code, or did not end within `seconds`.
        """
        code, log = self.wait_for_exit(name, seconds=seconds), self._logs / f"{name}.log"
        if code in codes:
            return log
        if code == 2:
            raise ContractError(last_line(log).removeprefix("error: "))
        raise PermanentError(f"{name} ended with code {code}: {last_line(log)} (see {log})")

    def stop(self, name: str, *, seconds: float = 20.0) -> None:
        """End a process by SIGTERM, and after `seconds` by SIGKILL."""
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, the newest first."""
        for name in reversed(list(self._processes)):
            self.stop(name, seconds=8.0)
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := tagged_processes(self._tag)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _describe_exit(self, name: str) -> str:
        code = self._processes[name].poll()
        path = self._logs / f"{name}.log"
        return f"{name} ended with code {code}: {last_line(path)} (see {path})"


def tagged_processes(tag: str) -> list[int]:
    """Return the ids of the processes with the stack's tag."""
    marker = f"{_TAG_VARIABLE}={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
