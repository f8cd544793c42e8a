"""Start pipeline runs locally or on Kubeflow: one run at a time, and each request once.

The input is a `RetrainRequest`. `submit` returns whether a run was started. `state` returns the
state of the run, which is its outcome after the end. The pipeline defines the parameters of a run.

A local run is a process that outlives the monitor that started it. The process inherits a locked
file. The kernel releases the lock when the process ends, whatever happens to the monitor. A run
writes its outcome to the model registry (`registry.runs`), and its exit code and output to
`<state>/runs`. A restarted monitor can therefore still read how the run ended.

KFP has no idempotency key, and run names are not unique (kubeflow/pipelines issue 10446). The run
is therefore named after the request. The experiment is searched first for a run with that name, and
then for any active run. Another monitor, started by mistake, may create a run between the search
and the creation. Therefore each monitor searches for active runs again after it has created a run.
If several runs are active, only the run that the server created first continues. A monitor
terminates its own run if another run was created first.

A server may create a run after its client has given up and repeated the request. A search for the
run of a request therefore terminates all active runs of that request except the first.
"""

import fcntl
import json
import logging
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evergreen.contracts.manifests import CURRENT, RUN_PARAMETERS, RetrainRequest
from evergreen.registry import runs
from evergreen.registry.runs import RunOutcome, find_outcome, run_title, store_name
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.kubeflow import (
    ACTIVE_STATES,
    EXPERIMENT,
    KubeflowServer,
    PipelineVersion,
    describe_end,
)

_STARTED = "started"
BUSY = "busy"
_ALREADY = "already"
RUNNING = "running"
_RELEASED = "released"
REFUSED = "refused"
FAILED = "failed"
UNKNOWN = "unknown"


class RunState(NamedTuple):
    """State of a run.

    The state is `running`, `unknown` or an outcome of `registry.runs.RunOutcome`. `unknown` means
    that the trigger cannot find the run.
    """

    state: str
    reason: str = ""
    version: int | None = None
    """Version that the run released or started as a canary, or None if unknown."""


class Trigger(Protocol):
    """Starts runs, at most one at a time."""

    @property
    def poll_seconds(self) -> float:
        """Minimum seconds between two calls of `state`. 0 means no limit."""

    def submit(self, request: RetrainRequest) -> str:
        """Start a run for the request.

        Returns:
            `started`, `busy` while another run is active, or `already` if this request was
            submitted before.

        Raises:
            TemporaryError: The trigger is unreachable. Submit the same request again.
            PermanentError: This trigger cannot start runs.
        """

    def state(self, request_id: str) -> RunState:
        """Return the state of a submitted request's run.

        Raises:
            TemporaryError: The trigger is unreachable.
            PermanentError: This trigger cannot determine the state of a run.
        """


_STATE_OF_EXIT_CODE = {0: _RELEASED, 1: REFUSED}
_KEEP_EXIT_CODE = '"$@"; code=$?; printf %s "$code" >"$0.aside" && mv "$0.aside" "$0"; exit "$code"'
"""Shell command that runs the process and writes its exit code, because the monitor may have ended
by then."""


class LocalTrigger:
    """Starts `run_command --request <file>` in a new session."""

    poll_seconds = 0.0

    def __init__(self, state: Path, store: Path, run_command: str, *, umask: int = -1) -> None:
        """Create the folders and start nothing.

        Args:
            state: State folder of the monitor, for the requests and the runs' logs.
            store: Model registry, where a run writes its outcome.
            run_command: Command line, quoted as for a shell.
            umask: Umask of the runs. -1 keeps the monitor's own.

        Raises:
            PermanentError: The command line cannot be parsed.
        """
        try:
            self._command = shlex.split(run_command)
        except ValueError as error:
            raise PermanentError(f"run_command is {run_command!r}: {error}") from error
        self._requests, self._store = (state / "requests").absolute(), store
        self._umask = umask
        self._lock, self._runs = (state / "run.lock").absolute(), (state / "runs").absolute()
        self._child: subprocess.Popen[bytes] | None = None
        for folder in (self._requests, self._runs):
            folder.mkdir(parents=True, exist_ok=True)

    def submit(self, request: RetrainRequest) -> str:
        """See `Trigger`."""
        name = request.request_id
        with self._held_lock() as lock:
            if lock is None:
                return _ALREADY if self._lock.read_text() == name else BUSY
            if self._end_of(name) is not None:
                return _ALREADY
            path = self._requests / f"{name}.json"
            request.write(path)
            self._start_process(name, [*self._command, "--request", str(path)], lock)
        return _STARTED

    def state(self, request_id: str) -> RunState:
        """See `Trigger`."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        with self._held_lock() as lock:
            if lock is None and self._lock.read_text() == request_id:
                return RunState(RUNNING)
        return self._end_of(request_id) or RunState(
            UNKNOWN, "the run's process is gone and left no outcome"
        )

    def _end_of(self, name: str) -> RunState | None:
        """Return how the run ended, or None if it never ran or left no result."""
        outcome = runs.find_outcome(self._store, name)
        if outcome is not None:
            return RunState(outcome.state, f"{outcome.step}: {outcome.reason}", outcome.version)
        with suppress(FileNotFoundError, ValueError):  # the file can be empty after a power cut
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
                umask=self._umask,
            )
        # The note is for people, and the demo uses its process id to end the run. The lock, not the
        # note, shows that the run is active.
        note = {"request_id": name, "process_group": self._child.pid, "command": list(argv)}
        try:
            write_whole(self._runs / f"{name}.json", json.dumps(note, indent=2) + "\n")
        except OSError as error:
            logger.warning("the note of run %s cannot be written: %s", name, error)
        logger.info("run %s started as process %d", name, self._child.pid)

    @contextmanager
    def _held_lock(self) -> Iterator[int | None]:
        """Lock the file and yield its descriptor, or yield None while a run has the lock.

        A child process that is started in the `with` block inherits the lock.
        """
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield descriptor
        finally:
            # Close the file instead of unlocking it, so that a process that inherited the open file
            # keeps the lock.
            os.close(descriptor)


logger = logging.getLogger(__name__)

_DEAD_STATES = ("FAILED", "CANCELED")
"""A run in one of these states does not prevent another run of the same name."""
REQUEST_TIMEOUT_SECONDS = (5.0, 15.0)
"""Timeouts in seconds, to connect and to read."""


@dataclass(frozen=True, kw_only=True)
class KubeflowSettings:
    """Server, pipeline and parameters of the runs of the kubeflow trigger."""

    kubeflow_host: str = ""
    """Kubeflow trigger: URL of the KFP API."""
    kubeflow_namespace: str = ""
    """Namespace of a multi-user installation. Empty on a single-user installation."""
    kubeflow_experiment: str = EXPERIMENT
    """Experiment of the runs, created if it does not exist. Any active run in this experiment makes
    the trigger busy."""
    kubeflow_service_account: str = ""
    """Kubernetes service account of the runs' pods. Empty means the server's default. If a server
    checks service accounts, its setting ALLOWEDSERVICEACCOUNTS must contain this account."""
    pipeline_name: str = ""
    """Name of the uploaded pipeline. The pipeline's newest version runs unless
    `pipeline_version_id` is given."""
    pipeline_version_id: str = ""
    """Version of the uploaded pipeline."""
    pipeline_arguments: str = "{}"
    """Kubeflow trigger: JSON object with further parameters of the runs. The registry and the lake
    are set by the pipeline's placement."""

    def __post_init__(self) -> None:
        try:
            given = json.loads(self.pipeline_arguments)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ContractError(
                f"pipeline_arguments is {self.pipeline_arguments!r}, expected a JSON object"
            )
        if unknown := sorted(given.keys() - set(RUN_PARAMETERS)):
            raise ContractError(
                f"pipeline_arguments names {', '.join(unknown)}, expected parameters of a run, "
                "some of "
                f"{', '.join(RUN_PARAMETERS)}; the placement sets folders and servers when "
                "the pipeline is compiled"
            )

    def expect_complete(self) -> None:
        """Check that a run can be created.

        Raises:
            ContractError: The server or the pipeline is not given.
        """
        if not self.kubeflow_host:
            raise ContractError(
                "kubeflow_host is empty, expected the URL of the KFP API for the kubeflow trigger"
            )
        if not self.pipeline_name:
            raise ContractError(
                "pipeline_name is empty, expected an uploaded pipeline for the kubeflow trigger"
            )


class KubeflowTrigger:
    """Submits runs to one Kubeflow experiment."""

    poll_seconds = 15.0
    """Each query costs two calls, and a run takes minutes, so a shorter interval is not needed."""

    def __init__(
        self,
        settings: KubeflowSettings,
        *,
        store: Path,
        timeout_seconds: tuple[float, float] = REQUEST_TIMEOUT_SECONDS,
    ) -> None:
        """Create the trigger without a call to the server.

        If the registry is not mounted, only KFP's state of a run is known.
        """
        self._arguments = json.loads(settings.pipeline_arguments)
        self._settings, self._store = settings, store
        self._server = KubeflowServer(
            settings.kubeflow_host,
            namespace=settings.kubeflow_namespace,
            timeout_seconds=timeout_seconds,
        )

    def submit(self, request: RetrainRequest) -> str:
        """See `Trigger`."""
        server = self._server
        with server.requests(f"submitting {request.request_id}"):
            experiment_id = server.experiment_id(self._settings.kubeflow_experiment)
            title = run_title(request.request_id)
            named = server.find_runs(experiment_id, name=title)
            if any(run.state not in _DEAD_STATES for run in named):
                return _ALREADY
            if server.active_runs(experiment_id):
                return BUSY
            version = self._pipeline_version()
            run_id = server.start_run(
                experiment_id,
                title,
                source=version,
                description=self._description(request),
                parameters={**self._arguments, **request.pipeline_arguments()},
                service_account=self._settings.kubeflow_service_account,
            )
            of = version.name or version.version_id
            logger.info(
                "run %s started as %s, of pipeline version %s", request.request_id, run_id, of
            )
            return self._resolve_race(experiment_id, title, run_id)

    def state(self, request_id: str) -> RunState:
        """See `Trigger`.

        KFP calls a refused run successful. Only the run's outcome in the model registry
        distinguishes a refused run from a released run. Without an outcome, a successful run counts
        as released.
        """
        name = self._settings.kubeflow_experiment
        with self._server.requests(f"looking for {request_id}"):
            experiment_id = self._server.find_experiment(name)
            runs = (
                self._server.find_runs(experiment_id, name=run_title(request_id))
                if experiment_id
                else []
            )
        if not runs:
            missing = "run of this name" if experiment_id else f"experiment {name} any more"
            return RunState(UNKNOWN, f"the server has no {missing}")
        run = _deciding_run(runs)
        for other in runs:
            if other is not run and _is_at_work(other):
                self._end_later_run(other.run_id, first=run.run_id)
        if _is_active(run):
            # `reason` is a text for people. For example, a paused run must be resumed by a person.
            return RunState(
                RUNNING, f"it is {run.state}" if run.state in ("PAUSED", "CANCELING") else ""
            )
        outcome = self._find_outcome(store_name(run.display_name, "", run.run_id))
        if outcome is not None:
            ended = (
                f"{describe_end(run)}; "
                if run.state == "CANCELED" and outcome.state == FAILED
                else ""
            )
            return RunState(
                outcome.state, f"{ended}{outcome.step}: {outcome.reason}", outcome.version
            )
        if run.state == "SUCCEEDED":
            return RunState(_RELEASED, f"run {run.run_id} is {run.state}")
        return RunState(FAILED, describe_end(run))

    def _description(self, request: RetrainRequest) -> str:
        """Describe the request's reason, origin and recommender. Kubeflow's runs have no labels."""
        recommender = self._arguments.get("recommender", CURRENT)
        return (
            f"{request.reason}; requested by the monitor as {request.request_id}; recommender "
            f"{recommender}"
        )

    def _resolve_race(self, experiment_id: str, name: str, run_id: str) -> str:
        """Terminate the new run if an older run is active, and return the result of `submit`.

        If several runs were created at the same time, the run that was created first stays.
        """
        active = self._server.active_runs(experiment_id)
        first = min(active, key=_creation_order, default=None)
        if first is None or first.run_id == run_id or run_id not in {run.run_id for run in active}:
            return _STARTED
        self._end_later_run(run_id, first=first.run_id)
        return _ALREADY if first.display_name == name else BUSY

    def _end_later_run(self, run_id: str, *, first: str) -> None:
        """Terminate this run if another run was created first.

        Raises:
            TemporaryError: The server does not respond.
        """
        logger.warning("run %s was created first, terminating %s", first, run_id)
        try:
            self._server.terminate_run(run_id)
        except PermanentError as error:
            logger.warning("run %s was not terminated, it may have ended: %s", run_id, error)

    def _find_outcome(self, run: str) -> RunOutcome | None:
        try:
            return find_outcome(self._store, run)
        except (OSError, ValueError) as error:
            raise PermanentError(f"the outcome of run {run} cannot be read: {error}") from error

    def _pipeline_version(self) -> PipelineVersion:
        """Look up the pipeline version to run. A new version needs no restart of the monitor."""
        name, version_id = self._settings.pipeline_name, self._settings.pipeline_version_id
        pipeline_id = self._server.find_pipeline(name)
        if pipeline_id is None:
            raise PermanentError(
                f"pipeline {name} is not on the server, expected it to be uploaded"
            )
        if version_id:
            return PipelineVersion(pipeline_id, version_id)
        newest = self._server.newest_version(pipeline_id)
        if newest is None:
            raise PermanentError(f"pipeline {name} has no version, expected at least one")
        return newest


def _is_active(run: Any) -> bool:
    return run.state is None or run.state in ACTIVE_STATES


def _is_at_work(run: Any) -> bool:
    return _is_active(run) and run.state != "CANCELING"


def _creation_order(run: Any) -> tuple[str, str]:
    """Sort runs by the server's creation time, then by id, so that all monitors see one order."""
    return str(run.created_at), str(run.run_id)


def _deciding_run(runs: list[Any]) -> Any:
    """Select the run that determines the state of a request, if several runs have its name.

    The order of preference is: a successful run, an active run, a run that is being cancelled, and
    the newest run. Several runs exist if a dead run was repeated, or if two monitors created the
    run at the same time. The server may also have created a run after its client gave up.
    """
    if at_work := [run for run in runs if _is_at_work(run)]:
        first = min(at_work, key=_creation_order)
    else:
        first = max(runs, key=lambda run: (_is_active(run), _creation_order(run)))
    succeeded = [run for run in runs if run.state == "SUCCEEDED"]
    return max(succeeded, key=_creation_order, default=first)
