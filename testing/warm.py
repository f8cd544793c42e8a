"""Run programs quickly, in forks of a process that has already imported their libraries.

The imports take two to three of the four seconds of a small step. A forked program has its own
arguments, environment, working directory, signals and exit code, and shares no state with other
programs.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testing.paths import REPOSITORY

SERVE = """
import json, os, sys
exec(sys.argv[1])
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(job["output"], os.O_WRONLY), 1)
os.dup2(1, 2)
os.environ.clear()
os.environ.update(job["variables"])
os.chdir(job["folder"])
sys.argv = ["-c", *job["arguments"]]
exec(job["program"], {"__name__": "__main__"})
"""


class Warm:
    """A context with a process of `python` that has executed `imports` and waits.

    The process is killed when the context ends.
    """

    def __init__(self, python: Path, imports: str, variables: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [str(python), "-c", SERVE, imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *_: object) -> None:
        # The kill includes a child process whose fork has just begun.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        variables: dict[str, str],
        folder: Path,
        seconds: float = 240,
    ) -> tuple[int, str]:
        """Run `python -c program arguments` in `folder`, with `variables` in the environment.

        Returns:
            The exit code of the program and its output. If a signal ended the program, the code is
            the negative signal number.
        """
        with tempfile.NamedTemporaryFile("r", suffix=".log") as output:
            order = {"program": program, "arguments": list(arguments), "output": output.name}
            self._process.stdin.write(
                json.dumps({**order, "variables": variables, "folder": str(folder)}) + "\n"
            )
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                raise AssertionError(
                    f"not done within {seconds} s: {arguments}\n{output.read()[-4000:]}"
                )
            code = self._process.stdout.readline()
            assert code, f"the forking process ended: {arguments}"
            return int(code), output.read()
