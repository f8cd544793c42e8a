"""Runs the pipeline on Kubeflow Pipelines, through kfp's client.

KFP has no idempotency key and run names are not unique (kubeflow/pipelines issue 10446). So the run is named by the
request, the experiment is searched for that name first, then for any active run. Between check and creation another
replica may create a run too (one that was frozen and does not know yet that it leads no more): after creating, each
looks again, and of several active runs only the one that the server created first stays; whoever sees a later one of
its own terminates it. What the run's parameters mean is the pipeline's concern.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from components.contracts.retrain_request import RetrainRequest
from components.runtime.errors import ContractError, PermanentError
from components.runtime.kubeflow import ACTIVE_STATES, KubeflowServer, PipelineVersion
from components.store.run_notes import RunOutcome, find_outcome
from monitoring.acting.trigger import ALREADY, BUSY, FAILED, RELEASED, RUNNING, STARTED, UNKNOWN, RunState
from monitoring.settings import MonitorSettings

logger = logging.getLogger(__name__)

DEAD_STATES = ("FAILED", "CANCELED")
"""A run of the same name in one of these does not keep the request from being submitted again."""
REQUEST_TIMEOUT_SECONDS = (5.0, 15.0)
"""To connect, to read."""


class KubeflowTrigger:
    """Submits to one experiment."""

    poll_seconds = 15.0
    """Two calls each time, of a run that takes minutes."""

    def __init__(
        self,
        server: KubeflowServer,
        *,
        experiment: str,
        package: str = "",
        pipeline_id: str = "",
        pipeline_name: str = "",
        version_id: str = "",
        service_account: str = "",
        arguments: dict[str, Any] | None = None,
        store: Path | None = None,
    ) -> None:
        """Binds a server; see `connect`.

        Args:
            server: The connection.
            experiment: Name of the experiment; created if missing.
            package: Compiled pipeline, or
            pipeline_id: an uploaded pipeline, or
            pipeline_name: the same by its name, and
            version_id: its version; empty = the newest at each request.
            service_account: Kubernetes service account of the run's pods; empty = the server's own choice.
            arguments: Pipeline parameters beside those that the request decides.
            store: The model store, where the run leaves its outcome; None or not mounted = only KFP's word is known.
        """
        self._server, self._experiment = server, experiment
        self._package, self._version_id = package, version_id
        self._pipeline_id, self._pipeline_name = pipeline_id, pipeline_name
        self._service_account, self._arguments, self._store = service_account, arguments or {}, store

    @classmethod
    def connect(
        cls, settings: MonitorSettings, *, timeout_seconds: tuple[float, float] = REQUEST_TIMEOUT_SECONDS
    ) -> KubeflowTrigger:
        """The trigger that the settings describe; does not call the server.

        Raises:
            ContractError: the further pipeline parameters are no JSON object.
        """
        try:
            arguments = json.loads(settings.pipeline_arguments)
        except ValueError as error:
            raise ContractError(f"pipeline_arguments is {settings.pipeline_arguments!r}: {error}") from error
        if not isinstance(arguments, dict):
            raise ContractError(f"pipeline_arguments is {settings.pipeline_arguments!r}, expected a JSON object")
        return cls(
            KubeflowServer(
                settings.kubeflow_host, namespace=settings.kubeflow_namespace, timeout_seconds=timeout_seconds
            ),
            experiment=settings.kubeflow_experiment,
            package=settings.pipeline_package,
            pipeline_id=settings.pipeline_id,
            pipeline_name=settings.pipeline_name,
            version_id=settings.pipeline_version_id,
            service_account=settings.kubeflow_service_account,
            arguments=arguments,
            store=settings.store,
        )

    def submit(self, request: RetrainRequest) -> str:
        """See `trigger.Trigger`."""
        server = self._server
        with server.requests(f"submitting {request.request_id}"):
            experiment_id = server.experiment_id(self._experiment)
            named = server.find_runs(experiment_id, name=request.request_id)
            if any(run.state not in DEAD_STATES for run in named):
                return ALREADY
            if server.active_runs(experiment_id):
                return BUSY
            run_id = server.start_run(
                experiment_id,
                request.request_id,
                source=self._source(),
                parameters={**self._arguments, **request.pipeline_arguments()},
                service_account=self._service_account,
            )
            logger.info("run %s started as %s", request.request_id, run_id)
            return self._settled(experiment_id, request.request_id, run_id)

    def state(self, request_id: str) -> RunState:
        """See `trigger.Trigger`.

        KFP calls a refused run successful; its outcome in the model store tells them apart. Where there is none, a
        successful run counts as released.
        """
        with self._server.requests(f"looking for {request_id}"):
            experiment_id = self._server.find_experiment(self._experiment)
            runs = self._server.find_runs(experiment_id, name=request_id) if experiment_id else []
        if not runs:
            missing = "run of this name" if experiment_id else f"experiment {self._experiment} any more"
            return RunState(UNKNOWN, f"the server has no {missing}")
        newest = _telling(runs)
        if _is_active(newest):
            # `reason` is only for people: a paused run is one that somebody has to resume.
            return RunState(RUNNING, f"it is {newest.state}" if newest.state in ("PAUSED", "CANCELING") else "")
        outcome = self._find_outcome(request_id)
        if outcome is not None and (newest.state == "SUCCEEDED" or outcome.state == FAILED):
            return RunState(outcome.state, f"{outcome.step}: {outcome.reason}", outcome.version)
        reason = f"run {newest.run_id} is {newest.state}"
        return RunState(RELEASED if newest.state == "SUCCEEDED" else FAILED, reason)

    def _settled(self, experiment_id: str, name: str, run_id: str) -> str:
        """What became of the run that was just created, beside those that others created at the same time."""
        active = self._server.active_runs(experiment_id)
        first = min(active, key=_age, default=None)
        if first is None or first.run_id == run_id or run_id not in {run.run_id for run in active}:
            return STARTED
        logger.warning("run %s was created first, terminating %s", first.run_id, run_id)
        self._server.terminate_run(run_id)
        return ALREADY if first.display_name == name else BUSY

    def _find_outcome(self, request_id: str) -> RunOutcome | None:
        try:
            return find_outcome(self._store, request_id) if self._store else None
        except (OSError, ValueError) as error:
            raise PermanentError(f"reading the outcome of {request_id}: {error}") from error

    def _source(self) -> Path | PipelineVersion:
        """What a request runs: the package, or an uploaded version.

        Looked for at each request, so that whoever uploads a version need not restart the monitor.
        """
        if self._package:
            return Path(self._package)
        pipeline_id = self._pipeline_id or self._server.find_pipeline(self._pipeline_name)
        if pipeline_id is None:
            raise PermanentError(f"pipeline {self._pipeline_name} is not on the server, expected it to be uploaded")
        if self._version_id:
            return PipelineVersion(pipeline_id, self._version_id)
        newest = self._server.newest_version(pipeline_id)
        if newest is None:
            raise PermanentError(f"pipeline {self._pipeline_name or pipeline_id} has no version, expected at least one")
        return newest


def _is_active(run: Any) -> bool:
    return run.state is None or run.state in ACTIVE_STATES


def _age(run: Any) -> tuple[str, str]:
    """Orders runs by their creation, as the server counts; runs of one second by id, so that all see one order."""
    return str(run.created_at), str(run.run_id)


def _telling(runs: list[Any]) -> Any:
    """The run of a name that tells how the request fares: one at work, else one that succeeded, else the newest.

    A name has several where a dead run was repeated, or where two replicas created it at the same time.
    """
    for kind in ([run for run in runs if _is_active(run)], [run for run in runs if run.state == "SUCCEEDED"], runs):
        if kind:
            return max(kind, key=_age)
    raise AssertionError("no runs")
