"""Processes on this machine: started with a log file each, watched, reached over loopback, and all ended in the end.

Every process carries its stack's tag in its environment, so that grandchildren (a pipeline run started by the monitor,
its tasks) are found and ended too; nothing outlives the demo. What the processes do is their rooms'.
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
"""Opens URLs without a proxy."""


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def answers(url: str) -> bool:
    """Whether a server answers GET with a success."""
    try:
        with DIRECT.open(url, timeout=1):
            return True
    except (OSError, HTTPException):
        return False


# PR_SET_PDEATHSIG (1), set in the child, which then becomes the command. The check is for a parent gone before.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def tethered(command: Sequence[str], death_signal: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command line that runs `command` and sends it `death_signal` when this process is gone.

    To be started by a thread that lives as long as the command should: Linux counts the starting thread's end.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(death_signal)), *command]


class JsonLines:
    """A growing file of JSON lines, read on from where the last call stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """The lines that came since the last call; all lines are in `lines`."""
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


def last_word(log: Path) -> str:
    """The last line that a process wrote to its log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no word"


def printed_json(log: Path) -> Any:
    """The JSON that a process printed; it is indented, and warnings may stand before it."""
    lines = log.read_text(errors="replace").splitlines()
    start = next((n for n, line in enumerate(lines) if line in ("{", "[")), 0)
    return json.loads("\n".join(lines[start:]))


TAG_VARIABLE = "EVERGREEN_STACK"
KILL_SECONDS = 10.0
"""How long killed processes may take to disappear."""


class ProcessDied(PermanentError):
    """A process of the stack ended on its own."""


class Stack:
    """Named processes of one demo run; a context manager that leaves none behind."""

    def __init__(self, *, logs: Path, variables: Mapping[str, str]) -> None:
        """Prepares an empty stack.

        `logs` gets `<name>.log` of each process; `variables` go on top of this process's own.
        """
        self._logs = logs
        self._tag = uuid4().hex
        self._variables = {**os.environ, **SILENT, **variables, TAG_VARIABLE: self._tag}
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

        With `stdin` lines can be sent to it; with `may_end` it may end by itself with code 0 while others are waited
        for. `variables` are for it alone, on top of the stack's.
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

    def finish(self, name: str, *, seconds: float, codes: tuple[int, ...] = (0,)) -> Path:
        """Waits for a process to end by itself with one of these exit codes; returns its log.

        Raises:
            ContractError: it ended with code 2: it could not use what it was given, and says why.
            PermanentError: it ended with another code, or took longer than `seconds`.
        """
        code, log = self.wait_for_exit(name, seconds=seconds), self._logs / f"{name}.log"
        if code in codes:
            return log
        if code == 2:
            raise ContractError(last_word(log).removeprefix("error: "))
        raise PermanentError(f"{name} ended with code {code}: {last_word(log)} (see {log})")

    def stop(self, name: str, *, seconds: float = 20.0) -> None:
        """Ends a process: SIGTERM, then SIGKILL after `seconds`."""
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
