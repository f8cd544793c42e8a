"""Sends the compiled pipeline to a Kubeflow Pipelines server and starts a run.

Deciding that a run is due, and that only one runs at a time, is the monitor's; this is a person's door.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from components.contracts.errors import PermanentError, TemporaryError
from components.contracts.kfp_requests import connect
from pipelines.package import check_parameters
from pipelines.retraining import PIPELINE_NAME

REQUEST_TIMEOUT_SECONDS = (5.0, 30.0)
"""To connect, to read."""


def submit(
    package: Path,
    *,
    host: str,
    namespace: str,
    experiment: str,
    parameters: Mapping[str, Any],
    upload_version: str | None,
    timeout_seconds: tuple[float, float] = REQUEST_TIMEOUT_SECONDS,
) -> str:
    """Starts one run and returns its id.

    Args:
        package: Compiled pipeline.
        host: Address of the KFP API, such as `http://localhost:8888`.
        namespace: Namespace of a multi-user installation; empty on a single-user one, which refuses any.
        experiment: Name of the experiment that the run belongs to; created if absent.
        parameters: Pipeline parameters that differ from their defaults.
        upload_version: Also upload the file under this version name, so that the UI offers it.
        timeout_seconds: To connect and to read, of each request.

    Raises:
        ContractError: the package is no compiled pipeline, or has no such parameter.
        TemporaryError: the server does not answer, or is in trouble.
        PermanentError: the server refused.
    """
    check_parameters(package, parameters)
    from kfp.client import Client

    # kfp prints links for people; standard output is the run's id alone.
    with _translated(host), redirect_stdout(sys.stderr):
        client = connect(Client, host=host, namespace=namespace, timeout=timeout_seconds)
        if upload_version is not None:
            _upload(client, package, upload_version, namespace)
        run = client.create_run_from_pipeline_package(
            str(package), arguments=dict(parameters), experiment_name=experiment, namespace=namespace or None
        )
    return str(run.run_id)


def _upload(client: Any, package: Path, version: str, namespace: str) -> None:
    pipeline_id = client.get_pipeline_id(PIPELINE_NAME)
    if pipeline_id is None:
        uploaded = client.upload_pipeline(str(package), pipeline_name=PIPELINE_NAME, namespace=namespace or None)
        pipeline_id = uploaded.pipeline_id
    client.upload_pipeline_version(str(package), pipeline_version_name=version, pipeline_id=pipeline_id)


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
