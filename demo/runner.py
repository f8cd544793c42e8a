"""Run a compiled pipeline on this machine, with an environment in place of each image.

KFP 2.17's SubprocessRunner runs every task in the driver's own interpreter. For each task, KFP's
dispatcher looks up the task handler as an attribute of a module. This module replaces the attribute
during a run, so that each task's unchanged command line runs in the environment of its image. KFP
has no extension point for this purpose, because `local.init` rejects custom runners. A test fails
if KFP stops calling the handler.

The monitor's local trigger starts a run as a process and reads its exit code. A person starts a run
with `evergreen run`. The output of each task goes to its own log file. The run's notes name the
step that failed, and the reason. Steps run at low priority, so that they do not slow down a server
on the same machine (`at_low_priority`).
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

from controller.deployment_target import TargetSettings
from demo import environments
from demo.stack import ended_with_parent
from evergreen.contracts.manifests import RetrainRequest
from evergreen.registry.recommenders import served_name
from evergreen.registry.runs import (
    STOPPED,
    RunOutcome,
    conclude,
    find_outcome,
    new_run_name,
    read_notes,
    write_outcome,
)
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from pipelines.images import ENVIRONMENT_OF_STEP, step_of_image
from pipelines.package import read_locations, with_locations

logger = logging.getLogger(__name__)

_REFUSED_EXIT_CODE = 2
"""Exit code of a step that would fail in every retry, because its flags are wrong or its input is
invalid."""
STEP_NICENESS = 10
"""Niceness of a step. A server on the same machine runs at niceness 0."""
_TORCH_THREADS = "1"
"""Number of threads of a step that uses PyTorch, unless OMP_NUM_THREADS is set. In a low-priority
step, each thread waits for the other threads and for all other processes. While a server was
running, a training step took 25 s with two threads, and 9 s with one thread."""
_STOP_SECONDS = 5.0
"""Time in seconds in which an interrupted step may end by itself."""
_YIELD = (
    'level=$1; shift; { echo "$level" > /proc/self/autogroup; } 2> /dev/null; exec nice -n '
    '"$level" "$@"'
)


class PipelineFailed(PermanentError):
    """A task of the pipeline failed, so the run ended.

    The run's notes and the task's log contain the reason.
    """


def run_pipeline(
    package: Path,
    arguments: Mapping[str, Any],
    *,
    locations: Mapping[str, str] = MappingProxyType({}),
    name: str,
    root: Path,
    logs: Path,
    pythons: Mapping[str, Path],
    source: Path,
) -> None:
    """Run the compiled pipeline to its end, one task after another.

    Args:
        package: The compiled pipeline, for any placement.
        arguments: Parameters that differ from their defaults.
        locations: Folders and servers that replace the locations in the compiled file
            (`pipelines.locations`).
        name: Name of the run.
        root: Folder of KFP's artifacts, which are small manifests and reports.
        logs: Folder of the log files, one per task.
        pythons: Interpreter of each environment in `images.ENVIRONMENT_OF_STEP`.
        source: Folder of our packages, for PYTHONPATH.

    Raises:
        PipelineFailed: a task refused its input, or failed in every retry.
    """
    from kfp import components as kfp_components
    from kfp import dsl, local
    from kfp.local import executor_input_utils, subprocess_task_handler
    from kfp.local.orchestrator import task_executor

    root.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="evergreen-") as temporary,
        _kfp_output_to(logs / "kfp.log"),
    ):
        refused: set[str] = set()
        handler = _task_handler(
            pythons=pythons, source=source, logs=logs, temporary=Path(temporary), refused=refused
        )
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
        text = with_locations(package, locations)
        # KFP's local runner has no workflow name, and its run id is random. The name of the run is
        # unique, because `run_once` refuses a name that exists.
        for placeholder in (
            dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
            dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        ):
            text = text.replace(placeholder, "")
        pipeline = kfp_components.load_component_from_text(text)
        # KFP retries every failed task, and waits before each retry. Skip this wait after a
        # refusal, so that a person at a terminal does not wait for minutes.
        waits = SimpleNamespace(sleep=lambda seconds: None if refused else time.sleep(seconds))
        with (
            mock.patch.object(subprocess_task_handler, "SubprocessTaskHandler", handler),
            mock.patch.object(task_executor, "time", waits),
            # Replace KFP's own name, which contains the time, by the name of the run, as on a
            # cluster.
            mock.patch.object(
                executor_input_utils, "get_local_pipeline_resource_name", return_value=name
            ),
        ):
            try:
                pipeline(**arguments)
            except RuntimeError as error:  # raised by KFP when a task fails
                raise PipelineFailed(str(error)) from error


def _task_handler(
    *, pythons: Mapping[str, Path], source: Path, logs: Path, temporary: Path, refused: set[str]
) -> type:
    """Return a KFP task handler class that runs each task in the environment of its image.

    A step that refuses its input is added to `refused`, and does not run again.
    """
    from kfp.local import status
    from kfp.local.task_handler_interface import ITaskHandler

    class EnvironmentTaskHandler(ITaskHandler):  # type: ignore[misc]
        """Handler that runs the command of one task as a process with its own process group."""

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
            """Run the task, and return its status in KFP's terms.

            The task's output is appended to the log of its step.
            """
            if self._step in refused:
                return status.Status.FAILURE
            interpreter = pythons[ENVIRONMENT_OF_STEP[self._step]]
            has_torch = ENVIRONMENT_OF_STEP[self._step] == "training"
            environment = {
                **({"OMP_NUM_THREADS": _TORCH_THREADS} if has_torch else {}),
                **os.environ,
                "PATH": f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', '')}",
                "VIRTUAL_ENV": str(interpreter.parent.parent),
                "PYTHONPATH": str(source),
                "TMPDIR": str(
                    temporary
                ),  # the command's `mktemp -d` folders are removed after the run
                **self._variables,
            }
            environment.pop("PYTHONHOME", None)
            begun = time.monotonic()
            with open(logs / f"{self._step}.log", "ab") as log:
                code = _run_step(self._command, environment, log)
            seconds = time.monotonic() - begun
            logger.info("step %s exited with code %d after %.0f s", self._step, code, seconds)
            if code == _REFUSED_EXIT_CODE:
                refused.add(self._step)
            return status.Status.SUCCESS if code == 0 else status.Status.FAILURE

    return EnvironmentTaskHandler


def at_low_priority(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` at low priority.

    The caller must start the command in a session of its own. With autogroup, Linux first divides
    processor time among sessions, and the niceness of a process counts only within its session.
    Therefore the session also gets this niceness.
    """
    return ["sh", "-c", _YIELD, "sh", str(STEP_NICENESS), *command]


def _run_step(command: list[str], environment: Mapping[str, str], log: Any) -> int:
    process = subprocess.Popen(
        at_low_priority(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # KFP starts the step in a shell. Both the shell and the step can be ended, because they
        # have their own process group. `at_low_priority` also requires a separate session for the
        # command.
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        if process.returncode is None:  # Ctrl-C or SIGTERM interrupted this function
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, wait for the step to write its note, then send SIGKILL."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_STOP_SECONDS)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:  # the shell can end before the step
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        logger.debug("process group %d has ended, or did not end in time", process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _kfp_output_to(log_path: Path) -> Iterator[None]:
    """Redirect the output and log of KFP to a file.

    KFP's handlers replace the handlers of the root logger, and print all inputs of a task. This
    module's own log also goes to the earlier handlers of the root logger, so that a person sees
    each step.
    """
    root_logger = logging.getLogger()
    handlers, level = root_logger.handlers[:], root_logger.level
    with (
        open(log_path, "a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        for handler in handlers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for handler in handlers:
                logger.removeHandler(handler)
            root_logger.handlers[:] = handlers
            root_logger.setLevel(level)


EXIT_CODES = {"released": 0, "canary": 0, "evaluated": 0, "refused": 1, "failed": 3}


class LocalFolders:
    """Folders on one machine that replace the cluster's shared volume."""

    def __init__(self, *, root: Path) -> None:
        self.root = root
        self.lake = root / "lake"
        """Click logs by day."""
        self.store = root / "store"
        """Model registry: models, releases, promotion journal, notes of runs."""
        self.work = root / "work"
        """Folder for intermediate files of the runs."""
        self.repository = root / "repository"
        """Triton's model repository."""
        self.artifacts = root / "artifacts"
        """Folder of the artifacts that KFP stores."""
        self.logs = root / "logs"
        """Folder of the log files, one file per task and per process."""

    def locations(self) -> dict[str, str]:
        """Create the folders, and return the locations for a compiled pipeline.

        Raises:
            ContractError: one of the folders cannot be created.
        """
        for folder in (self.lake, self.store, self.work, self.repository):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ContractError(
                    f"folder {folder} cannot be created: {error.strerror}"
                ) from error
        return {
            "lake": self.lake.as_uri(),
            "store": self.store.as_uri(),
            "work": self.work.as_uri(),
            "server": "python",
            "device": "cpu",
        }


def run_once(
    package: Path,
    folders: LocalFolders,
    *,
    parameters: Mapping[str, Any],
    request: RetrainRequest | None,
    locations: Mapping[str, str] = MappingProxyType({}),
    triton_urls: str = "",
) -> RunOutcome:
    """Run the compiled pipeline once in these folders, and return its outcome.

    A release needs a controller. If no controller is at work in the folders' model repository, one
    runs until the pipeline ends.

    Args:
        package: The compiled pipeline, for any placement.
        folders: Folders of the run.
        parameters: Parameters of the run that differ from their defaults.
        request: The monitor's request, or None for a run that a person started.
        locations: Folders and servers that replace the locations in `folders`, such as another
            lake.
        triton_urls: Servers of a controller that runs only during this run. Empty = a new version
            is only published.

    Raises:
        ContractError: an environment is absent, a folder cannot be created, or a run with this name
            has ended.
        PermanentError: the run ended without an outcome, because KFP failed.
    """
    pythons = {name: environments.python_of(name) for name in set(ENVIRONMENT_OF_STEP.values())}
    for name, python in sorted(pythons.items()):
        if not python.exists():  # else the task would run in the next `python3` on PATH
            raise ContractError(
                f"environment {name} is absent, expected {python}; `make environments` builds it"
            )
    run_parameters = {**parameters, **(request.pipeline_arguments() if request else {})}
    name = run_parameters.get("trigger_id") or new_run_name("manual")
    read_locations(package)  # fails for a file without locations
    locations = {**folders.locations(), **locations}
    if find_outcome(folders.store, name):
        raise ContractError(
            f"run {name} already has an outcome in {folders.store}, expected the trigger_id of a "
            "new run"
        )
    logs = folders.logs / "runs" / name
    signal.signal(signal.SIGTERM, _stop_run)
    logger.info("run %s started", name)
    failure = ""
    with _controller(folders, triton_urls, log=logs / "controller.log"):
        try:
            run_pipeline(
                package,
                run_parameters,
                locations=locations,
                name=name,
                root=folders.artifacts,
                logs=logs,
                pythons=pythons,
                source=environments.REPOSITORY,
            )
        except PipelineFailed as error:
            failure = str(error)
        except (KeyboardInterrupt, SystemExit):
            # The pipeline's exit handler, which records the outcome, does not run any more.
            if find_outcome(folders.store, name) is None:
                write_outcome(folders.store, _outcome_of_stopped(folders.store, name, request))
            raise
    outcome = find_outcome(folders.store, name)
    if outcome is None:
        raise PermanentError(
            f"run {name} ended without an outcome: {failure or 'see'} {logs / 'kfp.log'}"
        )
    logger.info("run %s %s at %s: %s", name, outcome.state, outcome.step, outcome.reason)
    return outcome


def _outcome_of_stopped(store: Path, run: str, request: RetrainRequest | None) -> RunOutcome:
    return conclude(
        store,
        read_notes(store, run),
        run=run,
        trigger_id=request.request_id if request else "",
        kfp_state=STOPPED,
        ended_at=datetime.now(timezone.utc).isoformat(),
    )


@contextlib.contextmanager
def _controller(folders: LocalFolders, triton_urls: str, *, log: Path) -> Iterator[None]:
    """Run a controller while the `with` block runs, unless a controller is already at work."""
    if served_name(folders.store) is None or _is_controlled(folders):
        yield
        return
    flags = ["--store", str(folders.store), "--repository", folders.repository.as_uri()]
    command = [sys.executable, "-m", "controller", *flags, "--triton-urls", triton_urls]
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "PYTHONPATH": str(environments.REPOSITORY)}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            ended_with_parent(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        _end_group(process)


def _is_controlled(folders: LocalFolders) -> bool:
    """Return whether a controller is at work in the folders' model repository."""
    target = TargetSettings(store=folders.store, repository=folders.repository.as_uri())
    try:
        with target.open_repository().locked():
            return False
    except TemporaryError:
        return True


def _stop_run(signum: int, _frame: Any) -> None:
    """Raise SystemExit, which also ends the running task.

    A second signal does not interrupt the exit.
    """
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)
