"""Sends the compiled pipeline to a Kubeflow Pipelines server and starts a run.

Deciding that a run is due, and that only one runs at a time, is the monitor's; this is a person's door.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.retraining import PIPELINE_NAME


def submit(
    package: Path,
    *,
    host: str,
    namespace: str,
    experiment: str,
    parameters: Mapping[str, Any],
    upload_version: str | None,
) -> str:
    """Starts one run and returns its id.

    Args:
        package: Compiled pipeline.
        host: Address of the KFP API, such as `http://localhost:8888`.
        namespace: Namespace of the experiment.
        experiment: Name of the experiment that the run belongs to; created if absent.
        parameters: Pipeline parameters that differ from their defaults.
        upload_version: Also upload the file under this version name, so that the UI offers it.
    """
    from kfp import Client

    client = Client(host=host, namespace=namespace)
    if upload_version is not None:
        if client.get_pipeline_id(PIPELINE_NAME) is None:
            client.upload_pipeline(str(package), pipeline_name=PIPELINE_NAME)
        client.upload_pipeline_version(str(package), pipeline_version_name=upload_version, pipeline_name=PIPELINE_NAME)
    run = client.create_run_from_pipeline_package(
        str(package), arguments=dict(parameters), experiment_name=experiment, namespace=namespace
    )
    return str(run.run_id)
