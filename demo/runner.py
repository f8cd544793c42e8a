"""Runs a compiled pipeline on this machine: KFP's local runner, each image stood in for by a virtual environment.

KFP 2.17's SubprocessRunner runs every task in the driver's own interpreter. Its dispatcher looks the task handler up
by attribute at each task, so one attribute, swapped for the length of a run, sends each task's unchanged command line
to the environment of its image instead. There is no official extension point (a runner of our own is refused by
`local.init`); a test fails if KFP stops calling the handler.

The monitor's local trigger starts a run as a process and reads its exit code; people call `evergreen run`. What a task
prints goes to one log file per task; which step failed and why is in the run's notes. Steps run at low priority, so
that they do not slow down the server beside them (`yielding`).
"""

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

from demo import environments
from evergreen.contracts.manifests import RetrainRequest
from evergreen.registry.runs import RunOutcome, find_outcome, new_run_name
from evergreen.runtime.errors import ContractError, PermanentError
from pipelines.images import ENVIRONMENT_OF_STEP, step_of_image
from pipelines.package import read_places, with_places

logger = logging.getLogger(__name__)

REFUSED_EXIT_CODE = 2
"""A step's code where no try can succeed: wrong flags, or input that is not what was agreed."""
STEP_NICENESS = 10
"""Of a step, while the server beside it has 0."""
TORCH_THREADS = "1"
"""Of a step that uses PyTorch, unless OMP_NUM_THREADS is set. At low priority, threads that wait for each other wait
for whatever else runs, too: beside a server, a training step of two threads took 25 s and one of a single thread 9."""
STOP_SECONDS = 5.0
"""How long an interrupted step may take to end by itself."""
_YIELD = 'level=$1; shift; { echo "$level" > /proc/self/autogroup; } 2> /dev/null; exec nice -n "$level" "$@"'


class PipelineFailed(PermanentError):
    """A task of the pipeline failed; the run's notes and the task's log say why."""


def run_pipeline(
    package: Path,
    arguments: Mapping[str, Any],
    *,
    places: Mapping[str, str] = MappingProxyType({}),
    name: str,
    root: Path,
    logs: Path,
    pythons: Mapping[str, Path],
    source: Path,
) -> None:
    """Run the compiled pipeline to its end, tasks one after another.

    Args:
        package: The compiled pipeline, of whatever placement.
        arguments: Parameters that differ from their defaults.
        places: Folders and servers in place of those that it was compiled for (`pipelines.places`).
        name: The run's.
        root: For KFP's artifacts: small manifests and reports.
        logs: For one file per task.
        pythons: Interpreter of each environment in `images.ENVIRONMENT_OF_STEP`.
        source: Holds our packages, for PYTHONPATH.

    Raises:
        PipelineFailed: a task failed after its retries, or at once where it refused its input.
    """
    from kfp import components as kfp_components
    from kfp import dsl, local
    from kfp.local import executor_input_utils, subprocess_task_handler
    from kfp.local.orchestrator import task_executor

    root.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="evergreen-") as temporary, _kfp_output_to(logs / "kfp.log"):
        refused: set[str] = set()
        handler = _task_handler(pythons=pythons, source=source, logs=logs, temporary=Path(temporary), refused=refused)
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
        text = with_places(package, places)
        # KFP's local runner does not know the workflow's name, and its id of a run is a random number. The run's own
        # name is unique: `run_once` refuses one that is taken.
        for placeholder in (dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER, dsl.PIPELINE_JOB_ID_PLACEHOLDER):
            text = text.replace(placeholder, "")
        pipeline = kfp_components.load_component_from_text(text)
        # KFP repeats every failed task, on a cluster as here; a person at a terminal shall not wait minutes for that.
        waits = SimpleNamespace(sleep=lambda seconds: None if refused else time.sleep(seconds))
        with (
            mock.patch.object(subprocess_task_handler, "SubprocessTaskHandler", handler),
            mock.patch.object(task_executor, "time", waits),
            # KFP's own name has a time of its own in it; on a cluster the run's is the one that it was started under.
            mock.patch.object(executor_input_utils, "get_local_pipeline_resource_name", return_value=name),
        ):
            try:
                pipeline(**arguments)
            except RuntimeError as error:  # what KFP raises when a task fails
                raise PipelineFailed(str(error)) from error


def _task_handler(*, pythons: Mapping[str, Path], source: Path, logs: Path, temporary: Path, refused: set[str]) -> type:
    """A KFP task handler class that runs a task in the environment of its image.

    A step that refused its input enters `refused`, and is not run again.
    """
    from kfp.local import status
    from kfp.local.task_handler_interface import ITaskHandler

    class EnvironmentTaskHandler(ITaskHandler):  # type: ignore[misc]
        """Runs one task's command as a process of its own group."""

        def __init__(
            self,
            *,
            image: str,
            full_command: list[str],
            pipeline_root: str,
            runner: Any,
            env_vars: dict[str, str] | None = None,
        ) -> None:
            self._step = step_of_image(image)
            self._command = full_command
            self._variables = env_vars or {}

        def run(self) -> Any:
            """The task's status; output is appended to the step's log."""
            if self._step in refused:
                return status.Status.FAILURE
            interpreter = pythons[ENVIRONMENT_OF_STEP[self._step]]
            has_torch = ENVIRONMENT_OF_STEP[self._step] == "training"
            environment = {
                **({"OMP_NUM_THREADS": TORCH_THREADS} if has_torch else {}),
                **os.environ,
                "PATH": f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', '')}",
                "VIRTUAL_ENV": str(interpreter.parent.parent),
                "PYTHONPATH": str(source),
                "TMPDIR": str(temporary),  # the command's `mktemp -d` folders go with the run
                **self._variables,
            }
            environment.pop("PYTHONHOME", None)
            with open(logs / f"{self._step}.log", "ab") as log:
                code = _run_step(self._command, environment, log)
            logger.info("step %s exited with code %d", self._step, code)
            if code == REFUSED_EXIT_CODE:
                refused.add(self._step)
            return status.Status.SUCCESS if code == 0 else status.Status.FAILURE

    return EnvironmentTaskHandler


def yielding(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` at low priority; to be started as a session of its own.

    Where Linux shares processor time among sessions first (autogroup), niceness counts only within one: then the
    session is given the same niceness.
    """
    return ["sh", "-c", _YIELD, "sh", str(STEP_NICENESS), *command]


def _run_step(command: list[str], environment: Mapping[str, str], log: Any) -> int:
    process = subprocess.Popen(
        yielding(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # KFP's command is a shell around the step: only a group of its own lets both be ended. `yielding` needs it too.
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        if process.returncode is None:  # an interruption of this process: Ctrl-C, SIGTERM
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, time for the step to write its note, then SIGKILL."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:  # the shell ends first
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        logger.debug("group %d is gone, or out of time", process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _kfp_output_to(log_path: Path) -> Iterator[None]:
    """Sends what KFP prints and logs to a file: its handlers replace the root logger's and print whole task inputs."""
    root_logger = logging.getLogger()
    handlers, level = root_logger.handlers[:], root_logger.level
    with open(log_path, "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            yield
        finally:
            root_logger.handlers[:] = handlers
            root_logger.setLevel(level)


EXIT_CODES = {"released": 0, "canary": 0, "judged": 0, "refused": 1, "failed": 3}


class LocalFolders:
    """Where a laptop keeps what a cluster keeps on its shared volume."""

    def __init__(self, *, root: Path) -> None:
        self.root = root
        self.lake = root / "lake"
        """Click logs by day."""
        self.store = root / "store"
        """Models, releases, journal, notes of runs."""
        self.work = root / "work"
        """The runs' intermediate files."""
        self.repository = root / "repository"
        """Triton's model repository."""
        self.artifacts = root / "artifacts"
        """KFP's artifacts."""
        self.logs = root / "logs"
        """One log per task and per process."""

    def places(self) -> dict[str, str]:
        """Make the folders, and return what takes the place of those that a pipeline was compiled for.

        Raises:
            ContractError: a folder cannot be made.
        """
        for folder in (self.lake, self.store, self.work, self.repository):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ContractError(f"folder {folder} cannot be made: {error.strerror}") from error
        return {
            "lake": self.lake.as_uri(),
            "store": self.store.as_uri(),
            "work": self.work.as_uri(),
            "repository": self.repository.as_uri(),
            "triton_urls": "",
            "server": "python",
            "device": "cpu",
        }


def run_once(
    package: Path,
    folders: LocalFolders,
    *,
    parameters: Mapping[str, Any],
    request: RetrainRequest | None,
    places: Mapping[str, str] = MappingProxyType({}),
) -> RunOutcome:
    """Run the compiled pipeline once in these folders, and return how it ended.

    Args:
        package: The compiled pipeline, of whatever placement.
        folders: Where it reads and writes.
        parameters: Parameters of the run that differ from their defaults.
        request: What the monitor asks for; None = a run started by hand.
        places: Places of the run that are not the folders', such as the servers that a release reaches.

    Raises:
        ContractError: an environment is absent, a folder cannot be made, or a run of that name has ended.
        PermanentError: the run ended without an outcome: KFP itself failed.
    """
    pythons = {name: environments.python_of(name) for name in set(ENVIRONMENT_OF_STEP.values())}
    for name, python in sorted(pythons.items()):
        if not python.exists():  # the task would run in whatever `python3` comes next on PATH
            raise ContractError(f"environment {name} is absent, expected {python}; `make environments` builds it")
    asked = {**parameters, **(request.pipeline_arguments() if request else {})}
    name = asked.get("trigger_id") or new_run_name("manual")
    read_places(package)  # a file without places would run in those of its defaults
    places = {**folders.places(), **places}
    if find_outcome(folders.store, name):
        raise ContractError(f"run {name} has ended in {folders.store}, expected another trigger_id")
    logs = folders.logs / "runs" / name
    signal.signal(signal.SIGTERM, _stop_run)
    logger.info("run %s started", name)
    failure = ""
    try:
        run_pipeline(
            package,
            asked,
            places=places,
            name=name,
            root=folders.artifacts,
            logs=logs,
            pythons=pythons,
            source=environments.REPOSITORY,
        )
    except PipelineFailed as error:
        failure = str(error)
    outcome = find_outcome(folders.store, name)
    if outcome is None:
        raise PermanentError(f"run {name} ended without an outcome: {failure or 'see'} {logs / 'kfp.log'}")
    logger.info("run %s %s at %s: %s", name, outcome.state, outcome.step, outcome.reason)
    return outcome


def _stop_run(signum: int, _frame: Any) -> None:
    """Leaves the run, which ends its task on the way out; a second signal does not cut that short."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)
