"""How our programs speak to the Kubeflow Pipelines API: every request ends in time.

Joins the monitor's trigger and `evergreen submit` to kfp's client, which sets no timeout and waits for ever on a server
that accepts and never answers. The client's class is given, not imported: kfp is no dependency of the contracts. What
a failure means is the caller's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

Timeout = tuple[float, float]
"""Seconds to connect and to read."""


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


def _with_timeout(request: Any, timeout: Timeout, *args: Any, **kwargs: Any) -> Any:
    return request(*args, **{**kwargs, "_request_timeout": kwargs.get("_request_timeout") or timeout})
