"""Client of one Kubeflow Pipelines server: find its objects, and start and end runs.

The client is used by the monitor's trigger, by `evergreen submit` and by the trials of a search.
Every request has a timeout, while kfp's own client waits forever for a server that never answers.
Every failure is an error of `evergreen.runtime.errors`. The monitor decides when to start a run.
`pipelines.submit` uploads pipelines and creates schedules. kfp is imported only when a connection
is made, because many programs need only the names below.
"""

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError

logger = logging.getLogger(__name__)

PIPELINE_NAME = "evergreen-retraining"
"""Name of the uploaded pipeline."""
EXPERIMENT = "evergreen-retraining"
"""Name of the experiment. The monitor starts no run while another run of this experiment is
active."""
SERVICE_ACCOUNT = "evergreen-pipeline"
"""Kubernetes service account of the steps' pods. `k8s/base/pipelines` creates it."""
POD_NAME, POD_UID = "EVERGREEN_POD_NAME", "EVERGREEN_POD_UID"
"""Names of the environment variables that contain the name and the UID of a step's own pod. If an
object must be deleted together with the pod, the pod owns the object."""
TOKEN_PATH = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105
_TOKEN_PATH_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105
ACTIVE_STATES = ("RUNTIME_STATE_UNSPECIFIED", "PENDING", "RUNNING", "PAUSED", "CANCELING")
_ENDED_STATES = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")
_TEMPORARY_STATUSES = (401, 403, 408, 409, 429)
"""HTTP statuses below 500 that mean a temporary error. Before the next attempt, the token may be
renewed, the right may be granted, or the conflict may end."""
_REFUSALS = re.compile("ResourceNotFoundError|Invalid input error")
"""Patterns of error texts that mean a permanent error, whatever the HTTP status is."""
_PAGE = 100


@dataclass(frozen=True)
class PipelineVersion:
    """An uploaded version of a pipeline."""

    pipeline_id: str
    version_id: str
    name: str = ""
    """Display name. Empty if only the id of the version is known."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """A run with the state FAILED in Kubeflow."""

    name: str
    """Display name. Other runs may have the same name."""
    run_id: str
    text: str
    """Final state of the run in Kubeflow, with the failed tasks and the message."""
    link: str
    """Address of the run's page."""


class KubeflowServer:
    """A connection to a server. The constructor sends no request.

    Args:
        host: Address of the KFP API, such as `http://localhost:8888`.
        namespace: Namespace in a multi-user installation. The namespace must be empty in a
            single-user installation.
        token_file: File with the token. The file is read again for each request. If `token_file` is
            empty, kfp's variable `KF_PIPELINES_SA_TOKEN_PATH` names the file. If the variable is
            not set, the file is the pod's projected token. If this default file is absent, no token
            is sent. A single-user installation needs no token.
        timeout_seconds: Timeouts of each request: one for connecting, and one for reading.

    Every method raises TemporaryError if the server does not answer, reports an error of its own,
    or does not accept the token now. Every method raises PermanentError if the server refuses the
    request.

    Raises:
        ContractError: The file `token_file` does not exist.
    """

    def __init__(
        self,
        host: str,
        *,
        namespace: str = "",
        token_file: str = "",
        timeout_seconds: tuple[float, float] = (5.0, 30.0),
    ) -> None:
        from kfp.client import Client, ServiceAccountTokenVolumeCredentials

        if token_file and not Path(token_file).is_file():
            raise ContractError(
                f"token file {token_file} is absent, expected the server's token in it"
            )
        path = token_file or os.environ.get(_TOKEN_PATH_VARIABLE, TOKEN_PATH)
        credentials = (
            ServiceAccountTokenVolumeCredentials(path)
            if token_file or os.path.exists(path)
            else None
        )
        self.host, self.namespace = host, namespace
        with self.requests(), warnings.catch_warnings():
            # kfp warns at every start that it "only works with v2.0.0-beta.2 and later".
            warnings.simplefilter("ignore", FutureWarning)
            # The constructor of kfp's client sends a request if the namespace is absent or is the
            # default "kubeflow".
            self.client = Client(host=host, namespace="unset", credentials=credentials)
        self.client._context_setting["namespace"] = namespace
        rest = self.client._run_api.api_client.rest_client
        rest.request = partial(_request_with_timeout, rest.request, timeout_seconds)
        # By default, urllib3 makes three more attempts, so the wait would be four times as long.
        rest.pool_manager.connection_pool_kw["retries"] = 0

    @contextmanager
    def requests(self, action: str = "") -> Iterator[None]:
        """Translate the errors of kfp's client, and redirect its printed links to standard error.

        Args:
            action: Text at the beginning of the error message.
        """
        import urllib3.exceptions
        from kfp_server_api.exceptions import ApiException

        prefix = f"{action}: " if action else ""
        server = f"{prefix}KFP at {self.host}"
        try:
            with redirect_stdout(sys.stderr):
                yield
        except (TemporaryError, PermanentError) as error:
            # A nested call has translated the error already. Add only the action, in front of the
            # message.
            raise type(error)(f"{prefix}{error}") from error
        except ApiException as error:
            temporary = (
                not error.status or error.status >= 500 or error.status in _TEMPORARY_STATUSES
            )
            # The server returns status 500 with code 13 for a deleted version and for an invalid
            # request.
            temporary = temporary and not _REFUSALS.search(str(error.body or ""))
            text = f"{server} answered {error.status} {error.reason}: {str(error.body or '')[:300]}"
            raise (TemporaryError if temporary else PermanentError)(text) from error
        except urllib3.exceptions.HTTPError as error:
            raise TemporaryError(f"{server} does not answer: {error}") from error
        except (OSError, ValueError) as error:
            raise PermanentError(f"{server}: {error}") from error

    def health(self) -> tuple[bool, datetime | None]:
        """Return whether the installation is multi-user, and the server's time.

        The time is None if the server does not send it.
        """
        with self.requests():
            answer, _, headers = (
                self.client._healthz_api.healthz_service_get_healthz_with_http_info()
            )
            date = headers.get("Date")
            return bool(answer.multi_user), parsedate_to_datetime(date) if date else None

    def experiment_id(self, name: str) -> str:
        """Return the id of the experiment, and create the experiment if it is absent."""
        with self.requests():
            return str(
                self.client.create_experiment(name, namespace=self.namespace or None).experiment_id
            )

    def find_experiment(self, name: str) -> str | None:
        """Return the id of the experiment, or None if it is absent."""
        with self.requests():
            try:
                return str(
                    self.client.get_experiment(None, name, self.namespace or None).experiment_id
                )
            except ValueError as error:
                if not str(error).startswith("No experiment is found"):
                    raise
                return None

    def find_pipeline(self, name: str) -> str | None:
        """Return the id of the uploaded pipeline with this display name, or None if there is none.

        If kfp's client searches by name, it omits the namespace and finds only shared pipelines.

        Raises:
            PermanentError: several pipelines have the name.
        """
        # kfp's client would also send an empty namespace, which a single-user server refuses.
        scope = {"namespace": self.namespace} if self.namespace else {}
        with self.requests():
            found = (
                self.client.list_pipelines(filter=_filter_by_name(name), **scope).pipelines or []
            )
        if len(found) > 1:
            raise PermanentError(f"{len(found)} pipelines are named {name}, expected one")
        return str(found[0].pipeline_id) if found else None

    def find_version(self, pipeline_id: str, name: str) -> Any | None:
        """Return the version with this display name, or None if it is absent."""
        with self.requests():
            answer = self.client.list_pipeline_versions(pipeline_id, filter=_filter_by_name(name))
        return answer.pipeline_versions[0] if answer.pipeline_versions else None

    def newest_version(self, pipeline_id: str) -> PipelineVersion | None:
        """Return the version that was uploaded last, or None if there is none.

        The server's times have a resolution of one second. Uploading a new pipeline also creates a
        version with the pipeline's name. If several versions were uploaded in the same second, a
        version that `evergreen submit` created is preferred.
        """
        with self.requests():
            answer = self.client.list_pipeline_versions(
                pipeline_id, page_size=_PAGE, sort_by="created_at desc"
            )
        found = answer.pipeline_versions
        if not found:
            return None
        tied = [each for each in found if each.created_at == found[0].created_at]
        newest = next(
            (each for each in tied if (each.description or "").startswith("sha256:")), found[0]
        )
        return PipelineVersion(
            pipeline_id, str(newest.pipeline_version_id), str(newest.display_name)
        )

    def find_runs(self, experiment_id: str, *, name: str) -> list[Any]:
        """Return the experiment's runs with this display name."""
        return self._list_all("runs", experiment_id, _filter_by_name(name))

    def active_runs(self, experiment_id: str) -> list[Any]:
        """Return the experiment's runs that have not ended."""
        predicate = {
            "operation": "IN",
            "key": "state",
            "stringValues": {"values": list(ACTIVE_STATES)},
        }
        return self._list_all("runs", experiment_id, json.dumps({"predicates": [predicate]}))

    def find_schedules(self, experiment_id: str, *, name: str) -> list[Any]:
        """Return the experiment's recurring runs with this display name."""
        return self._list_all("recurring_runs", experiment_id, _filter_by_name(name))

    def start_run(
        self,
        experiment_id: str,
        name: str,
        *,
        source: Path | PipelineVersion,
        parameters: Mapping[str, Any],
        service_account: str = "",
        description: str = "",
    ) -> str:
        """Start one run and return its id.

        Args:
            experiment_id: Experiment of the run.
            name: Name in Kubeflow's list. Other runs may have the same name.
            source: Compiled file, or uploaded version.
            parameters: Parameters of the pipeline that differ from their defaults.
            service_account: Service account of the steps' pods. If the account is empty, the server
                chooses one.
            description: Text for people, on the run's page.
        """
        with self.requests(), self._described(description):
            made = self.client.run_pipeline(
                experiment_id,
                name,
                params=dict(parameters),
                service_account=service_account or None,
                **source_arguments(source),
            )
        return str(made.run_id)

    @contextmanager
    def _described(self, description: str) -> Iterator[None]:
        """Set this description on every run that is created in the body of the `with` statement.

        kfp's client has no argument for the description.
        """
        api = self.client._run_api
        create = api.run_service_create_run

        def create_described(run: Any, **options: Any) -> Any:
            run.description = description or None
            return create(run=run, **options)

        api.run_service_create_run = create_described
        try:
            yield
        finally:
            del api.run_service_create_run

    def failed_runs(self, experiment_id: str, *, among: int) -> list[FailedRun]:
        """Return the failed runs of an experiment, newest first.

        Only the newest runs are examined. `among` is the number of runs that are examined.
        """
        with self.requests():
            answer = self.client.list_runs(
                experiment_id=experiment_id, page_size=among, sort_by="created_at desc"
            )
        return [
            FailedRun(
                name=run.display_name,
                run_id=run.run_id,
                text=describe_end(run),
                link=self.link_to(run.run_id),
            )
            for run in answer.runs or []
            if run.state == "FAILED"
        ]

    def get_run(self, run_id: str) -> Any:
        """Return the run as the server describes it now."""
        with self.requests():
            return self.client.get_run(run_id)

    def link_to(self, run_id: str) -> str:
        """Return the address of the run's page, if `host` also serves the pages."""
        return f"{self.host.rstrip('/')}/#/runs/details/{run_id}"

    def terminate_run(self, run_id: str) -> None:
        """Request that the server cancels the run."""
        with self.requests():
            self.client.terminate_run(run_id)

    def _list_all(self, kind: str, experiment_id: str, wanted: str) -> list[Any]:
        found: list[Any] = []
        token = ""
        while True:
            with self.requests():
                answer = getattr(self.client, f"list_{kind}")(
                    page_token=token, page_size=_PAGE, experiment_id=experiment_id, filter=wanted
                )
            found += getattr(answer, kind) or []
            token = answer.next_page_token or ""
            if not token:
                return found


def wait(
    server: KubeflowServer,
    run_id: str,
    *,
    seconds: float,
    poll_seconds: float = 15.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Wait until the run has ended, and return the server's description of the run.

    KFP reports success for a run whose gate refused the model. kfp's own function for waiting does
    not know CANCELED (kubeflow/pipelines issue 14473) and would wait forever.

    Args:
        server: Kubeflow Pipelines server of the run.
        run_id: Kubeflow's id of the run.
        seconds: Longest wait.
        poll_seconds: Pause between two requests.
        sleep: Function that pauses for a number of seconds.

    Raises:
        PermanentError: the run does not exist.
        TemporaryError: the run is active after `seconds`. It continues.
    """
    deadline = time.monotonic() + seconds
    state = "not known yet"
    while True:
        try:
            run = server.get_run(run_id)
        except TemporaryError as error:
            logger.warning("%s", error)  # a run takes hours, and the server may restart meanwhile
        else:
            if run.state != state:
                state = str(run.state)
                logger.info("run %s is %s", run_id, state)
            if state in _ENDED_STATES:
                return run
        if time.monotonic() + poll_seconds > deadline:
            raise TemporaryError(f"run {run_id} is {state} after {seconds:g} s, and continues")
        sleep(poll_seconds)


_GROUPS = re.compile(
    r"executor|root|(exit-handler|condition|for-loop)-\d+(\.onExit)?|.*\(\d+\)|"
    + PIPELINE_NAME
    + "-[a-z0-9]+"
)
"""Names of tasks that are neither steps nor drivers: task groups, task attempts, and the workflow
itself."""


def describe_end(run: Any) -> str:
    """Return the final state of a run in Kubeflow, with the failed tasks and the message.

    A run has no message if its first pod could not be created. A task is named `executor` only if
    it is the pod of a step.
    """
    tasks = (run.run_details.task_details if run.run_details else None) or []
    failed = sorted({str(task.display_name) for task in tasks if task.state == "FAILED"})
    named = [name for name in failed if not _GROUPS.fullmatch(name)]
    texts = [f"{', '.join(named)} failed"] if named else []
    if run.state == "FAILED" and not any(task.display_name == "executor" for task in tasks):
        account = run.service_account or "the server's default"
        texts.insert(0, "no step ran" if tasks else "Kubeflow names no task that ran")
        texts.append(f"expected service account {account} to exist and its pods to be admitted")
    if run.error and run.error.message:
        texts.append(str(run.error.message))
    state = "was terminated by a person" if run.state == "CANCELED" else f"ended {run.state}"
    return f"run {run.run_id} {state}" + (f": {'; '.join(texts)}" if texts else "")


def source_arguments(source: Path | PipelineVersion) -> dict[str, str]:
    """Return the arguments for kfp's client to start a compiled file or an uploaded version."""
    if isinstance(source, PipelineVersion):
        return {"pipeline_id": source.pipeline_id, "version_id": source.version_id}
    return {"pipeline_package_path": str(source)}


def _filter_by_name(name: str) -> str:
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})


def _request_with_timeout(
    request: Any, timeout: tuple[float, float], *args: Any, **kwargs: Any
) -> Any:
    return request(
        *args, **{**kwargs, "_request_timeout": kwargs.get("_request_timeout") or timeout}
    )
