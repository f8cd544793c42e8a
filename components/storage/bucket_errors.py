"""What Google's client raises, as our errors: correct the input, retry later, or stop.

Client 3 is meant; of client 2, which Beam holds validation's image to, what reading raises is known too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
import urllib3
from google.api_core import exceptions as refusals
from google.auth import exceptions as auth

from components.runtime.errors import PermanentError, TemporaryError, first_line
from components.storage.objects import Changed

try:
    from google.cloud.storage import exceptions as transfers
except ImportError:  # Client 2 has its transfers in a package of their own.
    from google import resumable_media as transfers

ROLE = "roles/storage.objectUser"
"""What a reader and writer needs: to get, list, create and delete objects, and nothing of the bucket itself."""


@contextmanager
def translated(thing: str, bucket: str) -> Iterator[None]:
    """Around calls of the client about `thing`, an object or a prefix of `bucket`.

    Raises:
        Changed: a precondition failed.
        TemporaryError: the client's own retries were not enough.
        PermanentError: no permission, no bucket, no credentials, no room, or a file of this machine that fails.
    """
    try:
        yield
    except refusals.RetryError as error:
        raise TemporaryError(f"{thing}: given up after retries ({_told(error.cause or error)})") from error
    except refusals.GoogleAPICallError as error:
        raise _refusal(error, thing, bucket) from error
    except auth.DefaultCredentialsError as error:
        raise PermanentError(f"{thing}: no credentials for bucket {bucket} ({first_line(error)})") from error
    except auth.GoogleAuthError as error:
        kind = TemporaryError if error.retryable else PermanentError
        raise kind(f"{thing}: cannot sign in for bucket {bucket} ({first_line(error)})") from error
    except (transfers.InvalidResponse, transfers.DataCorruption, urllib3.exceptions.HTTPError) as error:
        raise TemporaryError(f"{thing}: {first_line(error)}") from error
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
        raise TemporaryError(f"{thing}: {first_line(error)}") from error
    except (ConnectionError, TimeoutError) as error:
        raise TemporaryError(f"{thing}: {first_line(error)}") from error
    except requests.RequestException as error:
        raise PermanentError(f"{thing}: {first_line(error)}") from error
    except OSError as error:
        raise PermanentError(f"{error.filename or thing}: {error.strerror or error}") from error


def _refusal(error: refusals.GoogleAPICallError, thing: str, bucket: str) -> Exception:
    told = _told(error)
    if isinstance(error, refusals.PreconditionFailed):
        return Changed(f"{thing} is not at the generation expected: another writer came first")
    if isinstance(error, (refusals.Forbidden, refusals.Unauthorized)):
        return PermanentError(f"{thing}: refused ({told}); whoever runs this needs {ROLE} on bucket {bucket}, and room")
    if isinstance(error, refusals.NotFound):
        return PermanentError(f"{thing}: absent ({told}); expected bucket {bucket} to exist")
    if isinstance(error, (refusals.TooManyRequests, refusals.ServerError)) or error.code == 408:
        return TemporaryError(f"{thing}: {told}")
    return PermanentError(f"{thing}: {told}")


def _told(error: BaseException) -> str:
    """The status and the service's own words, without the request's whole URL."""
    response = getattr(error, "response", None)
    if response is None:
        return first_line(error)
    try:
        words = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = response.reason or "without a word"
    return f"{response.status_code} {words}"
