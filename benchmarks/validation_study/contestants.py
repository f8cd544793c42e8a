"""The asking side: each contestant is a process of its own environment that lives as long as the study.

What it is asked and answers is `answering`'s. All are asked about the same files.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pipelines.local.environments import REPOSITORY, VALIDATION_PEERS, python_of

OURS, TFDV, EVIDENTLY = "ours", "TFDV", "Evidently"
_MODULES = {
    OURS: ("validation", "benchmarks.validation_study.ours"),
    TFDV: ("validation", "benchmarks.validation_study.tfdv_comparator"),
    EVIDENTLY: (VALIDATION_PEERS, "benchmarks.validation_study.evidently_preset"),
}


class Answer(NamedTuple):
    """What a contestant said of one pair of windows."""

    alarms: dict[str, list[str]]
    """Features by the name of the setting; a contestant may have several settings."""
    seconds: float


class ContestantFailed(Exception):
    """A contestant ended instead of answering; the message names its log."""


class Contestant:
    """One contestant, started at the first question."""

    def __init__(self, name: str, log: Path) -> None:
        """Nothing is started yet; `log` takes what it prints beside its answers."""
        self.name, self._log = name, log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, before: Path, now: Path, columns: tuple[str, ...] = ()) -> Answer:
        """Its alarms about the window `now`; `columns` are all that are asked about, empty = the 39 features.

        Raises:
            ContestantFailed: it ended.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        question = {"before": str(before), "now": str(now), "columns": list(columns)}
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # It ended; its missing answer is told below.
        line = process.stdout.readline()
        if not line:
            raise ContestantFailed(
                f"{self.name} ended with code {process.wait()} instead of answering, see {self._log}"
            )
        return Answer(**json.loads(line))

    def _start(self) -> subprocess.Popen[str]:
        environment, module = _MODULES[self.name]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [str(python_of(environment)), "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._process

    def __enter__(self) -> Contestant:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.terminate()
            self._process.wait()
