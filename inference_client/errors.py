"""Errors between client and server.

The base class of each error shows what the caller must do next.

Only the function `translated` depends on Triton's status codes and messages.
"""

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError


class ServerUnavailable(TemporaryError):
    """The server does not answer, has a full queue, or is switching versions."""


class DeadlineExpired(TemporaryError):
    """No answer arrived within the deadline. The server may still be working on the request."""


class Overloaded(TemporaryError):
    """Too many requests are already waiting for the server.

    Nothing was sent. Send fewer requests, or retry later.
    """


class ServerFault(TemporaryError):
    """Internal error of the server, with the server's message."""


class VersionsMixed(TemporaryError):
    """Parts of one large request were repeatedly answered by different versions."""


class ModelAbsent(PermanentError):
    """The server does not serve this model."""


class AccessDenied(PermanentError):
    """The server rejects the token or the certificate, or requires one."""


class BadReply(PermanentError):
    """The server's answer does not contain one probability per row."""


class UnusableScores(BadReply):
    """The model returned values that are not probabilities.

    `scores` [n] float32 has NaN in place of invalid values.

    `model_version` is the version that returned the values. The request is logged although it
    fails, so that the monitor detects the bad version.
    """

    def __init__(self, message: str, *, scores: NDArray[np.float32], model_version: int) -> None:
        super().__init__(message)
        self.scores = scores
        self.model_version = model_version


class BadRequest(ContractError):
    """The rows do not match the model's input. The server or this client has rejected the rows."""


_SWITCHING = ("not at ready state", "no available versions")
"""Texts of Triton's NOT_FOUND errors while a model is loading or the server is stopping. The errors
of both kinds are temporary."""


def translated(
    error: InferenceServerException, *, server: str, model: str, deadline_seconds: float
) -> Exception:
    """Return the client's own error for an error from Triton. The message names the server."""
    status = str(error.status() or "").rpartition(".")[2]
    # Only the first line is used, because a traceback from the server contains paths.
    text = (error.message() or "").strip().partition("\n")[0] or status
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExpired(f"server {server} did not answer within {deadline_seconds:g} s")
    if status == "RESOURCE_EXHAUSTED" and "larger than max" in text:
        return BadRequest(f"server {server} does not accept a message of this size: {text}")
    if status in ("UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED"):
        return ServerUnavailable(f"server {server} is unavailable: {text}")
    if status == "NOT_FOUND":
        if any(sign in text for sign in _SWITCHING):
            return ServerUnavailable(f"server {server} is switching versions: {text}")
        return ModelAbsent(f"server {server} does not serve model {model}: {text}")
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return AccessDenied(f"server {server} denies access: {text}")
    if status == "INVALID_ARGUMENT":
        return BadRequest(f"server {server} refused the request: {text}")
    return ServerFault(f"server {server} failed with {status or 'no status'}: {text}")
