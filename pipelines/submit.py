"""Sends the compiled pipeline to a Kubeflow Pipelines server: a version of it, a run, a schedule, a run's end.

Deciding that a run is due, and that only one runs at a time, is the monitor's; this is a person's and a CI's door. What
is asked twice is done once: a version of the same name and content is kept, a schedule of the same name is replaced.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.runtime.kfp_requests import (
    EXPERIMENT,
    PIPELINE_NAME,
    SERVICE_ACCOUNT,
    connect,
    find_pipeline,
    named,
    token_path,
)

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_SECONDS = (5.0, 30.0)
"""To connect, to read."""
POLL_SECONDS = 15.0
ENDED_STATES = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")
_PAGE = 100


class Version(NamedTuple):
    """An uploaded version of a pipeline."""

    pipeline_id: str
    version_id: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run, or each run of a schedule, is made of."""

    source: Path | Version
    """A compiled file, or what was uploaded."""
    parameters: Mapping[str, Any]
    """Pipeline parameters that differ from their defaults."""
    experiment: str = EXPERIMENT
    """Created if absent."""
    service_account: str = SERVICE_ACCOUNT
    """Empty = the server's own choice."""


class KfpServer:
    """One Kubeflow Pipelines server.

    Every method raises:
        TemporaryError: the server does not answer, or is in trouble.
        PermanentError: it refused.
    """

    def __init__(
        self,
        host: str,
        *,
        namespace: str = "",
        token_file: str = "",
        timeout_seconds: tuple[float, float] = REQUEST_TIMEOUT_SECONDS,
    ) -> None:
        """Calls nobody yet.

        Args:
            host: Address of the KFP API, such as `http://localhost:8888`.
            namespace: Namespace of a multi-user installation; empty on a single-user one, which refuses any.
            token_file: File of the token to show, read anew at each request; empty = see `kfp_requests.token_path`.
            timeout_seconds: To connect and to read, of each request.

        Raises:
            ContractError: there is no such file.
        """
        from kfp.client import Client, ServiceAccountTokenVolumeCredentials

        if token_file and not Path(token_file).is_file():
            raise ContractError(f"token file {token_file} is absent, expected the server's token in it")
        path = token_path(token_file)
        credentials = ServiceAccountTokenVolumeCredentials(path) if path else None
        self._host, self._namespace = host, namespace
        with self._asked():
            self._client = connect(
                Client, host=host, namespace=namespace, timeout=timeout_seconds, credentials=credentials
            )

    def upload(self, package: Path, version: str, *, pipeline: str = PIPELINE_NAME) -> Version:
        """Offers the file as this version of the pipeline, which is created if absent.

        A version of that name with the same content is kept. The server numbers versions by time, and who wants the
        newest (the monitor) takes the one that was uploaded last.

        Raises:
            PermanentError: the name is another file's.
        """
        digest = f"sha256:{hashlib.sha256(package.read_bytes()).hexdigest()}"
        with self._asked():
            pipeline_id = find_pipeline(self._client, pipeline, namespace=self._namespace)
            if pipeline_id is None:
                uploaded = self._client.upload_pipeline(
                    str(package), pipeline_name=pipeline, namespace=self._namespace or None
                )
                pipeline_id = str(uploaded.pipeline_id)
            if (known := self._version(pipeline_id, version)) is not None:
                return self._kept(known, version, digest)
            try:
                made = self._client.upload_pipeline_version(
                    str(package), pipeline_version_name=version, pipeline_id=pipeline_id, description=digest
                )
            except Exception as error:
                # Somebody uploaded it in between, such as a CI job of the same revision.
                if getattr(error, "status", None) != 409 or (known := self._version(pipeline_id, version)) is None:
                    raise
                return self._kept(known, version, digest)
        logger.info("uploaded version %s of %s", version, pipeline)
        return Version(pipeline_id, str(made.pipeline_version_id))

    def start(self, run: Run) -> str:
        """Starts one run and returns its id."""
        name = f"{PIPELINE_NAME} {datetime.now(timezone.utc):%Y-%m-%d %H-%M-%S}"
        with self._asked():
            made = self._client.run_pipeline(
                self._experiment_id(run.experiment),
                name,
                params=dict(run.parameters),
                service_account=run.service_account or None,
                **_source(run),
            )
        return str(made.run_id)

    def schedule(self, run: Run, cron: str, *, name: str = PIPELINE_NAME) -> str:
        """Starts such a run whenever `cron` (UTC, seconds first) says, and returns the schedule's id.

        One that was made before with the same name is replaced by the new one, or kept where it is the same. A run that
        is due while the one before is at work waits for it; of several that were missed only the last is made up.

        Raises:
            ContractError: `cron` has not six fields.
        """
        cron = check_cron(cron)
        parameters = {"trigger_reason": f"schedule {cron}", **run.parameters}
        with self._asked():
            experiment_id = self._experiment_id(run.experiment)
            known = self._schedules(experiment_id, name)
            same = [each for each in known if _is_same(each, run, cron, parameters)]
            if same:
                kept = str(same[0].recurring_run_id)
                logger.info("schedule %s is there already, and kept", name)
            else:
                made = self._client.create_recurring_run(
                    experiment_id,
                    name,
                    description=_digest(run),
                    cron_expression=cron,
                    max_concurrency=1,
                    no_catchup=True,
                    params=parameters,
                    service_account=run.service_account or None,
                    **_source(run),
                )
                kept = str(made.recurring_run_id)
            # Afterwards: an error before leaves the old schedule, one here leaves both until the next call.
            for each in known:
                if each.recurring_run_id != kept:
                    self._client.delete_recurring_run(each.recurring_run_id)
                    logger.info("schedule %s of before was deleted", name)
        return kept

    def wait(
        self,
        run_id: str,
        *,
        seconds: float,
        poll_seconds: float = POLL_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Waits until the run succeeded. KFP calls a run successful whose gate refused the model.

        kfp's own waiting knows no CANCELED (kubeflow/pipelines issue 14473) and would wait for ever.

        Raises:
            PermanentError: it ended otherwise, or there is no such run.
            TemporaryError: it is still at work after `seconds`; it goes on.
        """
        deadline = time.monotonic() + seconds
        state = "not known yet"
        while True:
            try:
                with self._asked():
                    run = self._client.get_run(run_id)
            except TemporaryError as error:
                logger.warning("%s", error)  # a server that restarts is no end of a run of hours
            else:
                if run.state != state:
                    state = str(run.state)
                    logger.info("run %s is %s", run_id, state)
                if state == "SUCCEEDED":
                    return
                if state in ENDED_STATES:
                    told = f": {run.error.message}" if run.error and run.error.message else ""
                    raise PermanentError(f"run {run_id} ended {state}{told}")
            if time.monotonic() + poll_seconds > deadline:
                raise TemporaryError(f"run {run_id} is {state} after {seconds:g} s, and goes on")
            sleep(poll_seconds)

    def _experiment_id(self, name: str) -> str:
        return str(self._client.create_experiment(name, namespace=self._namespace or None).experiment_id)

    def _version(self, pipeline_id: str, name: str) -> Any | None:
        answer = self._client.list_pipeline_versions(pipeline_id, filter=named(name))
        return answer.pipeline_versions[0] if answer.pipeline_versions else None

    def _kept(self, known: Any, name: str, digest: str) -> Version:
        described = str(known.description or "")
        if described.startswith("sha256:") and described != digest:
            raise PermanentError(
                f"version {name} is on {self._host} with other content ({described[:19]}, this file is "
                f"{digest[:19]}), expected a name that is not taken"
            )
        told = "" if described else "; who uploaded it said nothing of its content"
        logger.info("version %s is there already, and used%s", name, told)
        return Version(str(known.pipeline_id), str(known.pipeline_version_id))

    def _schedules(self, experiment_id: str, name: str) -> list[Any]:
        found: list[Any] = []
        token = ""
        while True:
            answer = self._client.list_recurring_runs(
                page_token=token, page_size=_PAGE, experiment_id=experiment_id, filter=named(name)
            )
            found += answer.recurring_runs or []
            token = answer.next_page_token or ""
            if not token:
                return found

    @contextmanager
    def _asked(self) -> Iterator[None]:
        # kfp prints links for people; standard output is ids alone.
        with _translated(self._host), redirect_stdout(sys.stderr):
            yield


def check_cron(cron: str) -> str:
    """The expression with single spaces.

    The server takes five fields too, but reads them as seconds to months: `0 3 * * *`, daily at three to everybody
    else, would run every hour.

    Raises:
        ContractError: it has not six fields.
    """
    fields = cron.split()
    if len(fields) != 6:
        raise ContractError(
            f"schedule {cron!r} has {len(fields)} fields, expected 6: second, minute, hour, day, month, weekday"
        )
    return " ".join(fields)


def _source(run: Run) -> dict[str, Any]:
    if isinstance(run.source, Version):
        return {"pipeline_id": run.source.pipeline_id, "version_id": run.source.version_id}
    return {"pipeline_package_path": str(run.source)}


def _digest(run: Run) -> str:
    """What tells two schedules of files apart: the server gives a file back in its own words."""
    if isinstance(run.source, Version):
        return ""
    return f"sha256:{hashlib.sha256(run.source.read_bytes()).hexdigest()}"


def _is_same(known: Any, run: Run, cron: str, parameters: Mapping[str, Any]) -> bool:
    reference = known.pipeline_version_reference
    version = Version(reference.pipeline_id, reference.pipeline_version_id) if reference else None
    of_source = version == run.source if isinstance(run.source, Version) else (known.description or "") == _digest(run)
    schedule = known.trigger.cron_schedule if known.trigger else None
    asked = (known.runtime_config.parameters if known.runtime_config else None) or {}
    account = not run.service_account or known.service_account == run.service_account
    return bool(
        of_source and account and schedule and schedule.cron == cron and asked == parameters and known.mode == "ENABLE"
    )


@contextmanager
def _translated(host: str) -> Iterator[None]:
    import urllib3.exceptions
    from kfp_server_api.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        temporary = not error.status or error.status >= 500 or error.status in (408, 429)
        text = f"KFP at {host} answered {error.status} {error.reason}: {str(error.body or '')[:300]}"
        raise (TemporaryError if temporary else PermanentError)(text) from error
    except urllib3.exceptions.HTTPError as error:
        raise TemporaryError(f"KFP at {host} does not answer: {error}") from error
    except (OSError, ValueError) as error:
        raise PermanentError(f"KFP at {host}: {error}") from error
