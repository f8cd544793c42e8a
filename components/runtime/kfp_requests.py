"""How our programs speak to the Kubeflow Pipelines API: every request ends in time; what things are called there.

Joins the monitor's trigger and `evergreen submit` to kfp's client, which sets no timeout and waits for ever on a server
that accepts and never answers. The client's class is given, not imported: kfp is no dependency of the contracts. What
a failure means is the caller's.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

Timeout = tuple[float, float]
"""Seconds to connect and to read."""
PIPELINE_NAME = "evergreen-retraining"
"""Of the uploaded pipeline."""
EXPERIMENT = "evergreen-retraining"
"""Runs in one experiment see each other: the monitor starts none while another is active in it."""
SERVICE_ACCOUNT = "evergreen-pipeline"
"""Kubernetes service account of the steps' pods, made by `k8s/base/pipelines`."""
TOKEN_PATH = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105
TOKEN_PATH_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105


def token_path(given: str = "") -> str | None:
    """File of the token that the server is shown; None = none is shown, as a single-user installation wants.

    Args:
        given: By the user; else kfp's own variable, else where a pod's projected token is mounted, if it is.
    """
    path = given or os.environ.get(TOKEN_PATH_VARIABLE, TOKEN_PATH)
    return path if given or os.path.exists(path) else None


def connect(make_client: Callable[..., Any], *, host: str, namespace: str, timeout: Timeout, **options: Any) -> Any:
    """A client whose every request ends in time, and which calls nobody until it is asked to.

    Args:
        make_client: `kfp.Client`.
        host: Address of the KFP API.
        namespace: Of a multi-user installation; empty on a single-user one.
        timeout: Of each request.
        **options: Further arguments of `make_client`.
    """
    with warnings.catch_warnings():
        # "only works with v2.0.0-beta.2 and later", at every start.
        warnings.simplefilter("ignore", FutureWarning)
        # Given none, or its own default ("kubeflow"), the constructor itself asks the server, and without a timeout.
        client = make_client(host=host, namespace="unset", **options)
    client._context_setting["namespace"] = namespace
    rest = client._run_api.api_client.rest_client
    rest.request = partial(_with_timeout, rest.request, timeout)
    # urllib3 would try three more times and so wait four times as long.
    rest.pool_manager.connection_pool_kw["retries"] = 0
    return client


def named(name: str) -> str:
    """The API's filter for what has this display name."""
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})


def find_pipeline(client: Any, name: str, *, namespace: str) -> str | None:
    """Id of the uploaded pipeline of that name; None where there is none.

    Args:
        client: See `connect`. Its own search by name leaves the namespace out, and so finds shared pipelines only.
        name: Its display name.
        namespace: Of a multi-user installation; empty on a single-user one.

    Raises:
        ValueError: several have the name.
    """
    # The client sends any text, also an empty one, and a single-user server refuses that.
    scope = {"namespace": namespace} if namespace else {}
    answer = client.list_pipelines(filter=named(name), **scope)
    found = answer.pipelines or []
    if len(found) > 1:
        raise ValueError(f"{len(found)} pipelines are named {name}, expected one")
    return str(found[0].pipeline_id) if found else None


def _with_timeout(request: Any, timeout: Timeout, *args: Any, **kwargs: Any) -> Any:
    return request(*args, **{**kwargs, "_request_timeout": kwargs.get("_request_timeout") or timeout})
