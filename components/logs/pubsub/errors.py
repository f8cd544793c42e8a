"""Pub/Sub's failures, sorted once into those worth another try and those that are not."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError

from components.runtime.errors import PermanentError, TemporaryError, first_line

RETRYABLE = (
    exceptions.Aborted,
    exceptions.Cancelled,
    exceptions.DeadlineExceeded,
    exceptions.InternalServerError,
    exceptions.ResourceExhausted,
    exceptions.ServiceUnavailable,
    exceptions.Unknown,
    exceptions.RetryError,
    FutureTimeoutError,
    TimeoutError,
    GoogleAuthError,
)
"""As the library's own list for streams; a token that cannot be fetched now may come later."""


def translated(error: BaseException, what: str) -> TemporaryError | PermanentError:
    """The error that says what the caller must do about `error`, which happened to `what`."""
    text = f"{what}: {first_line(error)}"
    if isinstance(error, RETRYABLE):
        return TemporaryError(text)
    return PermanentError(text)
