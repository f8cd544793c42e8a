"""Upload the pipeline to a Kubeflow Pipelines server, and start or schedule runs.

People and CI use this module by `evergreen submit`. The monitor needs no schedule. The monitor
itself decides when its runs are due, and starts only one run at a time.
`evergreen.runtime.kubeflow` connects to the server. A version with the same name and content is
reused, and a schedule with the same name is replaced.
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
    """Parameters and options of a run, or of all runs of a schedule."""

    source: Path | PipelineVersion
    """Path of a compiled pipeline, or a version of an uploaded pipeline."""
    parameters: Mapping[str, Any]
    """Values of pipeline parameters that differ from the defaults."""
    experiment: str = EXPERIMENT
    """Name of the experiment, which is created if it is absent."""
    service_account: str = SERVICE_ACCOUNT
    """Kubernetes service account of the pods. If the name is empty, the server chooses the
    account."""


def upload(
    server: KubeflowServer,
    package: Path,
    version: str,
    *,
    pipeline: str = PIPELINE_NAME,
    about: str = "",
) -> PipelineVersion:
    """Upload the file as a version of the pipeline, and create the pipeline if it is absent.

    A version with the same name and content is reused. The server orders versions by time, and the
    monitor runs the version that was uploaded last.

    Args:
        server: Connection to a Kubeflow Pipelines server.
        package: The compiled pipeline.
        version: Name of the version.
        pipeline: Name of the pipeline.
        about: Text for the version's page. The server shows this text after the hash of the file.

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
    """Start one run under this name, and return its id.

    The run's description contains two of its parameters: the reason and the recommender. If the
    server's response is lost, the server may still have created the run. A new run with this name
    is therefore assumed to be the created run.

    Raises:
        TemporaryError: the server does not respond, and no run with this name has appeared.
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
            description=f"{reason}; requested by {whoami()}; recommender {recommender}",
        )
    except TemporaryError as error:
        run_id = _created_late(server, experiment_id, name, before=before, error=error)
    logger.info("run %s started as %s", name, run_id)
    return run_id


def _created_late(
    server: KubeflowServer,
    experiment_id: str,
    name: str,
    *,
    before: set[str],
    error: TemporaryError,
) -> str:
    """Return the id of a run whose creation request got no response.

    Raises:
        TemporaryError: no run with this name has appeared yet. The error message extends the
            message of `error`.
    """
    try:
        made = [str(each.run_id) for each in server.find_runs(experiment_id, name=name)]
    except TemporaryError:
        made = []
    new = [run_id for run_id in made if run_id not in before]
    if not new:
        raise TemporaryError(
            f"{error}. The server may still create the run: look for {name!r} there before you "
            "submit again"
        ) from error
    logger.warning("%s, but the server created the run", error)
    return new[0]


def schedule(
    server: KubeflowServer, run: RunRequest, cron: str, *, name: str = PIPELINE_NAME
) -> str:
    """Schedule runs by `cron` (UTC, seconds first), and return the schedule's id.

    An earlier schedule of the same name is replaced. If a run becomes due while another run is
    active, it waits for the end of the active run. If several runs were missed, only the last one
    is started.

    Raises:
        ContractError: `cron` does not have six fields.
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
        # Delete the old schedules last. If an error occurs before this point, only the old schedule
        # exists. If an error occurs here, both schedules exist until the next call.
        for each in known:
            server.client.delete_recurring_run(each.recurring_run_id)
            logger.info("the previous schedule %s was deleted", name)
    return str(made.recurring_run_id)


def check_cron(cron: str) -> str:
    """Return the cron line with single spaces.

    The server also accepts five fields, but reads the first field as seconds and not as minutes.
    For example, `0 3 * * *` usually means daily at three o'clock, but the server would start a run
    every hour.

    Raises:
        ContractError: the line does not have six fields.

    >>> check_cron(" 0 0  3 * * *")
    '0 0 3 * * *'
    """
    fields = cron.split()
    if len(fields) != 6:
        raise ContractError(
            f"schedule {cron!r} has {len(fields)} fields, expected 6: second, minute, hour, day, "
            "month, weekday"
        )
    return " ".join(fields)


def _keep_version(server: KubeflowServer, known: Any, *, name: str, digest: str) -> PipelineVersion:
    described = str(known.description or "").partition(" ")[0]
    if described.startswith("sha256:") and described != digest:
        raise PermanentError(
            f"version {name} is on {server.host} with other content ({described[:19]}, this file "
            f"is {digest[:19]}), expected an unused name"
        )
    note = "" if described else ", although its description has no hash of its content"
    logger.info("version %s exists already and is used%s", name, note)
    return PipelineVersion(str(known.pipeline_id), str(known.pipeline_version_id))
