"""What `evergreen submit` asks a Kubeflow Pipelines server for: a version of the pipeline, a run, a schedule.

For a person and for CI. The monitor decides when a run is due, and that only one runs at a time. The connection is
`runtime.kubeflow`'s. A version of the same name and content is kept, and a schedule of the same name is replaced.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergreen.contracts.manifests import CURRENT
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.flags import whoami
from evergreen.runtime.kubeflow import (
    EXPERIMENT,
    PIPELINE_NAME,
    SERVICE_ACCOUNT,
    KubeflowServer,
    PipelineVersion,
    source_arguments,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a run, or each run of a schedule, is made of."""

    source: Path | PipelineVersion
    """A compiled file, or what was uploaded."""
    parameters: Mapping[str, Any]
    """Pipeline parameters that differ from their defaults."""
    experiment: str = EXPERIMENT
    """Created if absent."""
    service_account: str = SERVICE_ACCOUNT
    """Empty = the server's own choice."""


def upload(
    server: KubeflowServer, package: Path, version: str, *, pipeline: str = PIPELINE_NAME, about: str = ""
) -> PipelineVersion:
    """Upload the file as this version of the pipeline, which is created if it is absent.

    A version of that name with the same content is kept. The server orders versions by time, and whoever wants the
    newest (the monitor) takes the one that was uploaded last.

    Args:
        server: Kubeflow Pipelines server.
        package: The compiled pipeline.
        version: Name of the version.
        pipeline: Name of the pipeline.
        about: What the version's page says beside the file's hash.

    Raises:
        PermanentError: the name belongs to another file.
    """
    digest = f"sha256:{hashlib.sha256(package.read_bytes()).hexdigest()}"
    pipeline_id = server.find_pipeline(pipeline)
    with server.requests():
        if pipeline_id is None:
            uploaded = server.client.upload_pipeline(
                str(package), pipeline_name=pipeline, namespace=server.namespace or None
            )
            pipeline_id = str(uploaded.pipeline_id)
        if (known := server.find_version(pipeline_id, version)) is not None:
            return _keep_version(server, known, name=version, digest=digest)
        made = server.client.upload_pipeline_version(
            str(package),
            pipeline_version_name=version,
            pipeline_id=pipeline_id,
            description=f"{digest} {about}".strip(),
        )
    logger.info("uploaded version %s of %s: %s", version, pipeline, about)
    return PipelineVersion(pipeline_id, str(made.pipeline_version_id))


def start(server: KubeflowServer, run: RunRequest, *, name: str) -> str:
    """Start one run under this name, described by its parameters' reason and recommender, and return its id.

    A server may create a run although its answer is lost. So a run of this name that is there afterwards is the one.

    Raises:
        TemporaryError: the server does not answer, and no such run is there yet.
    """
    reason = run.parameters.get("trigger_reason") or "no reason given"
    recommender = run.parameters.get("recommender", CURRENT)
    experiment_id = server.experiment_id(run.experiment)
    before = {str(each.run_id) for each in server.find_runs(experiment_id, name=name)}
    try:
        run_id = server.start_run(
            experiment_id,
            name,
            source=run.source,
            parameters=run.parameters,
            service_account=run.service_account,
            description=f"{reason}; asked by {whoami()}; recommender {recommender}",
        )
    except TemporaryError as error:
        run_id = _created_late(server, experiment_id, name, before=before, error=error)
    logger.info("run %s started as %s", name, run_id)
    return run_id


def _created_late(
    server: KubeflowServer, experiment_id: str, name: str, *, before: set[str], error: TemporaryError
) -> str:
    """Return the id of the run that a request created whose answer is lost.

    Raises:
        TemporaryError: `error`, if there is no such run yet.
    """
    try:
        made = [str(each.run_id) for each in server.find_runs(experiment_id, name=name)]
    except TemporaryError:
        made = []
    new = [run_id for run_id in made if run_id not in before]
    if not new:
        raise TemporaryError(
            f"{error}; the server may create the run later all the same: look for {name!r} there before you submit "
            "again"
        ) from error
    logger.warning("%s; the server created the run all the same", error)
    return new[0]


def schedule(server: KubeflowServer, run: RunRequest, cron: str, *, name: str = PIPELINE_NAME) -> str:
    """Starts such a run whenever `cron` (UTC, seconds first) says, and returns the schedule's id.

    An earlier schedule of the same name is replaced. A run that is due while the one before is active waits for it; of
    several that were missed only the last is made up.

    Raises:
        ContractError: `cron` has not six fields.
    """
    cron = check_cron(cron)
    experiment_id = server.experiment_id(run.experiment)
    known = server.find_schedules(experiment_id, name=name)
    with server.requests():
        made = server.client.create_recurring_run(
            experiment_id,
            name,
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,
            params={"trigger_reason": f"schedule {cron}", **run.parameters},
            service_account=run.service_account or None,
            **source_arguments(run.source),
        )
        # Last: an error before this leaves the old schedule, an error here leaves both until the next call.
        for each in known:
            server.client.delete_recurring_run(each.recurring_run_id)
            logger.info("the previous schedule %s was deleted", name)
    return str(made.recurring_run_id)


def check_cron(cron: str) -> str:
    """The expression with single spaces.

    The server takes five fields too, but reads them as seconds to months: `0 3 * * *`, daily at three to everybody
    else, would run every hour.

    Raises:
        ContractError: it has not six fields.

    >>> check_cron(" 0 0  3 * * *")
    '0 0 3 * * *'
    """
    fields = cron.split()
    if len(fields) != 6:
        raise ContractError(
            f"schedule {cron!r} has {len(fields)} fields, expected 6: second, minute, hour, day, month, weekday"
        )
    return " ".join(fields)


def _keep_version(server: KubeflowServer, known: Any, *, name: str, digest: str) -> PipelineVersion:
    described = str(known.description or "").partition(" ")[0]
    if described.startswith("sha256:") and described != digest:
        raise PermanentError(
            f"version {name} is on {server.host} with other content ({described[:19]}, this file is "
            f"{digest[:19]}), expected a name that is not taken"
        )
    note = "" if described else "; its description does not say what it contains"
    logger.info("version %s exists already and is used%s", name, note)
    return PipelineVersion(str(known.pipeline_id), str(known.pipeline_version_id))
