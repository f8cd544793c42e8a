"""Failures between client and server, sorted by what the caller must do next.

`translated` is the one place that knows Triton's status codes and messages.
"""

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError


class ServerUnavailable(TemporaryError):
    """No server answers there, it refuses work (queue full), or it is switching versions."""


class DeadlineExpired(TemporaryError):
    """No answer within the deadline; the server may still be working on it."""


class Overloaded(TemporaryError):
    """Too many requests wait for the server already; nothing was sent. Send fewer, or later."""


class ServerFault(TemporaryError):
    """The server failed inside; the message is its own."""


class VersionsMixed(TemporaryError):
    """The parts of one large request were answered by different versions again and again."""


class ModelAbsent(PermanentError):
    """The server does not serve this model."""


class AccessDenied(PermanentError):
    """The server takes no call with this token or certificate, or without one."""


class BadReply(PermanentError):
    """The server's answer is not one probability per row."""


class UnusableScores(BadReply):
    """A model gave some rows no probability. `scores` has them as NaN, [n] float32; `model_version` is whose they are.

    The request is logged without being answered, so that the monitor learns of it.
    """

    def __init__(self, message: str, *, scores: NDArray[np.float32], model_version: int) -> None:
        super().__init__(message)
        self.scores = scores
        self.model_version = model_version


class BadRequest(ContractError):
    """The rows are not those that the model takes: refused by the server, or by this client before sending."""


_SWITCHING = ("not at ready state", "no available versions")
"""Triton's NOT_FOUND texts while a model is being loaded, or while the server stops; both end soon."""


def translated(error: InferenceServerException, *, server: str, model: str, deadline_seconds: float) -> Exception:
    """Our error for a Triton error; the message names the server."""
    status = str(error.status() or "").rpartition(".")[2]
    # A server-side traceback names its paths: keep the first line.
    text = (error.message() or "").strip().partition("\n")[0] or status
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExpired(f"server {server} did not answer within {deadline_seconds:g} s")
    if status == "RESOURCE_EXHAUSTED" and "larger than max" in text:
        return BadRequest(f"server {server} takes no message of this size: {text}")
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
