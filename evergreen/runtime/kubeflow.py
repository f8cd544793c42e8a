"""One Kubeflow Pipelines server: connect to it, find what is on it, start and end runs.

The monitor's trigger, `evergreen submit` and a trial of a search use it. Every request ends in time (kfp's client sets
no timeout and waits forever on a server that accepts and never answers), and every failure is one of `runtime.errors`.
When a run is due is the monitor's decision; uploads and schedules are `pipelines.submit`'s. kfp is imported when a
connection is made, so that a program that only needs the names below does not load it.
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
"""The monitor starts no run while another run of the same experiment is active."""
SERVICE_ACCOUNT = "evergreen-pipeline"
"""Kubernetes service account of the steps' pods, made by `k8s/base/pipelines`."""
POD_NAME, POD_UID = "EVERGREEN_POD_NAME", "EVERGREEN_POD_UID"
"""Variables with a step's own pod, where the step makes what must not outlive it."""
TOKEN_PATH = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105
TOKEN_PATH_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105
ACTIVE_STATES = ("RUNTIME_STATE_UNSPECIFIED", "PENDING", "RUNNING", "PAUSED", "CANCELING")
ENDED_STATES = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")
_TEMPORARY_STATUSES = (401, 403, 408, 409, 429)
"""Beside those from 500 on: a token is rotated, rights are granted, and a conflict is over at the next attempt."""
_REFUSALS = re.compile("ResourceNotFoundError|Invalid input error")
"""Texts of answers that no repetition changes, whatever their status."""
_PAGE = 100


@dataclass(frozen=True)
class PipelineVersion:
    """An uploaded version of a pipeline."""

    pipeline_id: str
    version_id: str
    name: str = ""
    """For people; empty where only the id is known."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """A run that Kubeflow calls failed."""

    name: str
    """Kubeflow's, which other runs may have too."""
    run_id: str
    text: str
    """Kubeflow's words for its end: state, failed tasks, message."""
    link: str
    """Address of its page."""


class KubeflowServer:
    """A connection; the constructor calls nobody.

    Args:
        host: Address of the KFP API, such as `http://localhost:8888`.
        namespace: Namespace of a multi-user installation; empty on a single-user one, which refuses any.
        token_file: File of the token to show, read anew at each request; empty = kfp's own variable, else where a pod's
            projected token is mounted, if it is; else none is shown, as a single-user installation wants.
        timeout_seconds: To connect and to read, of each request.

    Every method raises:
        TemporaryError: the server does not answer, is in trouble, or does not accept the token now.
        PermanentError: it refused.

    Raises:
        ContractError: `token_file` is given and absent.
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
            raise ContractError(f"token file {token_file} is absent, expected the server's token in it")
        path = token_file or os.environ.get(TOKEN_PATH_VARIABLE, TOKEN_PATH)
        credentials = ServiceAccountTokenVolumeCredentials(path) if token_file or os.path.exists(path) else None
        self.host, self.namespace = host, namespace
        with self.requests(), warnings.catch_warnings():
            # "only works with v2.0.0-beta.2 and later", at every start.
            warnings.simplefilter("ignore", FutureWarning)
            # Without a namespace, or with its own default ("kubeflow"), the constructor asks the server at once.
            self.client = Client(host=host, namespace="unset", credentials=credentials)
        self.client._context_setting["namespace"] = namespace
        rest = self.client._run_api.api_client.rest_client
        rest.request = partial(_request_with_timeout, rest.request, timeout_seconds)
        # urllib3 would try three more times and so wait four times as long.
        rest.pool_manager.connection_pool_kw["retries"] = 0

    @contextmanager
    def requests(self, action: str = "") -> Iterator[None]:
        """Translates what kfp's client raises inside, and sends the links that it prints to standard error.

        Args:
            action: Begins the error's message.
        """
        import urllib3.exceptions
        from kfp_server_api.exceptions import ApiException

        prefix = f"{action}: " if action else ""
        server = f"{prefix}KFP at {self.host}"
        try:
            with redirect_stdout(sys.stderr):
                yield
        except (TemporaryError, PermanentError) as error:
            # Of a method that was called inside, and is translated already.
            raise type(error)(f"{prefix}{error}") from error
        except ApiException as error:
            temporary = not error.status or error.status >= 500 or error.status in _TEMPORARY_STATUSES
            # The server answers 500, code 13, to a version that was deleted and to a request that is wrong.
            temporary = temporary and not _REFUSALS.search(str(error.body or ""))
            text = f"{server} answered {error.status} {error.reason}: {str(error.body or '')[:300]}"
            raise (TemporaryError if temporary else PermanentError)(text) from error
        except urllib3.exceptions.HTTPError as error:
            raise TemporaryError(f"{server} does not answer: {error}") from error
        except (OSError, ValueError) as error:
            raise PermanentError(f"{server}: {error}") from error

    def health(self) -> tuple[bool, datetime | None]:
        """Return whether the installation has several users, and the server's time, where it tells one."""
        with self.requests():
            answer, _, headers = self.client._healthz_api.healthz_service_get_healthz_with_http_info()
            date = headers.get("Date")
            return bool(answer.multi_user), parsedate_to_datetime(date) if date else None

    def experiment_id(self, name: str) -> str:
        """Id of the experiment, which is created if it is absent."""
        with self.requests():
            return str(self.client.create_experiment(name, namespace=self.namespace or None).experiment_id)

    def find_experiment(self, name: str) -> str | None:
        """Id of the experiment; None if it is absent."""
        with self.requests():
            try:
                return str(self.client.get_experiment(None, name, self.namespace or None).experiment_id)
            except ValueError as error:
                if not str(error).startswith("No experiment is found"):
                    raise
                return None

    def find_pipeline(self, name: str) -> str | None:
        """Id of the uploaded pipeline of that display name; None if it is absent.

        The client's own search by name leaves the namespace out, and so finds shared pipelines only.

        Raises:
            PermanentError: several have the name.
        """
        # The client sends an empty namespace too, and a single-user server refuses that.
        scope = {"namespace": self.namespace} if self.namespace else {}
        with self.requests():
            found = self.client.list_pipelines(filter=_filter_by_name(name), **scope).pipelines or []
        if len(found) > 1:
            raise PermanentError(f"{len(found)} pipelines are named {name}, expected one")
        return str(found[0].pipeline_id) if found else None

    def find_version(self, pipeline_id: str, name: str) -> Any | None:
        """The version of that display name; None if it is absent."""
        with self.requests():
            answer = self.client.list_pipeline_versions(pipeline_id, filter=_filter_by_name(name))
        return answer.pipeline_versions[0] if answer.pipeline_versions else None

    def newest_version(self, pipeline_id: str) -> PipelineVersion | None:
        """Return the version that was uploaded last; None if there is none.

        The server's times have whole seconds. Of several in the last one those of `evergreen submit` come first: a
        pipeline is made together with a version of its own name.
        """
        with self.requests():
            answer = self.client.list_pipeline_versions(pipeline_id, page_size=_PAGE, sort_by="created_at desc")
        found = answer.pipeline_versions
        if not found:
            return None
        tied = [each for each in found if each.created_at == found[0].created_at]
        newest = next((each for each in tied if (each.description or "").startswith("sha256:")), found[0])
        return PipelineVersion(pipeline_id, str(newest.pipeline_version_id), str(newest.display_name))

    def find_runs(self, experiment_id: str, *, name: str) -> list[Any]:
        """The experiment's runs of that display name."""
        return self._list_all("runs", experiment_id, _filter_by_name(name))

    def active_runs(self, experiment_id: str) -> list[Any]:
        """The experiment's runs that have not ended."""
        predicate = {"operation": "IN", "key": "state", "stringValues": {"values": list(ACTIVE_STATES)}}
        return self._list_all("runs", experiment_id, json.dumps({"predicates": [predicate]}))

    def find_schedules(self, experiment_id: str, *, name: str) -> list[Any]:
        """The experiment's recurring runs of that display name."""
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
            name: Name in Kubeflow's list. Other runs may have it too.
            source: Compiled file, or uploaded version.
            parameters: Parameters of the pipeline that differ from their defaults.
            service_account: Service account of the steps' pods; empty = the server's own choice.
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
        """Gives runs that are created inside this description: kfp's client has no argument for it."""
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
        """Return the failed runs among the newest of an experiment, newest first."""
        with self.requests():
            answer = self.client.list_runs(experiment_id=experiment_id, page_size=among, sort_by="created_at desc")
        return [
            FailedRun(name=run.display_name, run_id=run.run_id, text=describe_end(run), link=self.link_to(run.run_id))
            for run in answer.runs or []
            if run.state == "FAILED"
        ]

    def get_run(self, run_id: str) -> Any:
        """The run as the server describes it now."""
        with self.requests():
            return self.client.get_run(run_id)

    def link_to(self, run_id: str) -> str:
        """Address of the run's page, where `host` serves the pages too."""
        return f"{self.host.rstrip('/')}/#/runs/details/{run_id}"

    def terminate_run(self, run_id: str) -> None:
        """Asks the server to cancel the run."""
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
    """Wait until the run has ended, and return it as the server describes it then.

    KFP calls a run successful whose gate refused the model. kfp's own waiting does not know CANCELED
    (kubeflow/pipelines issue 14473) and would wait forever.

    Args:
        server: Kubeflow Pipelines server of the run.
        run_id: Kubeflow's id of the run.
        seconds: Longest wait.
        poll_seconds: Pause between two requests.
        sleep: Function that pauses.

    Raises:
        PermanentError: There is no such run.
        TemporaryError: The run is active after `seconds`. It continues.
    """
    deadline = time.monotonic() + seconds
    state = "not known yet"
    while True:
        try:
            run = server.get_run(run_id)
        except TemporaryError as error:
            logger.warning("%s", error)  # the server may restart during a run of hours
        else:
            if run.state != state:
                state = str(run.state)
                logger.info("run %s is %s", run_id, state)
            if state in ENDED_STATES:
                return run
        if time.monotonic() + poll_seconds > deadline:
            raise TemporaryError(f"run {run_id} is {state} after {seconds:g} s, and continues")
        sleep(poll_seconds)


_GROUPS = re.compile(
    r"executor|root|(exit-handler|condition|for-loop)-\d+(\.onExit)?|.*\(\d+\)|" + PIPELINE_NAME + "-[a-z0-9]+"
)
"""Names of tasks that are no step and no driver: groups of tasks, their tries, and the workflow."""


def describe_end(run: Any) -> str:
    """Return what Kubeflow tells of a run that ended: its state, the tasks that failed, a message.

    A run whose first pod could not be created has no message. Only a step's pod is named `executor`.
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
    """The arguments by which kfp's client takes a compiled file or an uploaded version."""
    if isinstance(source, PipelineVersion):
        return {"pipeline_id": source.pipeline_id, "version_id": source.version_id}
    return {"pipeline_package_path": str(source)}


def _filter_by_name(name: str) -> str:
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})


def _request_with_timeout(request: Any, timeout: tuple[float, float], *args: Any, **kwargs: Any) -> Any:
    return request(*args, **{**kwargs, "_request_timeout": kwargs.get("_request_timeout") or timeout})
