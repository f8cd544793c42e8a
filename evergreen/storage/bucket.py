"""Objects of a Cloud Storage bucket, read and written with Google's own client.

The client retries temporary failures (429, 5xx, lost connections) for `retry_seconds`. If an answer
is lost, the conditional write may still have succeeded. Every write therefore adds a signature to
the object's metadata. If the write is repeated, this signature shows that an earlier attempt
succeeded. Each read gets one generation of an object, and compares the bytes with the CRC32C of
that generation. Exceptions of the client are translated to errors of `evergreen.runtime.errors`.
The module supports version 3 of the client. The module also handles the exceptions that version 2
raises on reads, because Beam pins version 2 in the validation image. If `STORAGE_EMULATOR_HOST` is
set, the client uses that emulator without credentials.
"""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import requests
import urllib3
from google.api_core import exceptions as refusals
from google.auth import exceptions as auth
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from evergreen.runtime.durable import flushed_to_disk
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError, first_line
from evergreen.storage.objects import (
    ABSENT,
    Changed,
    Differs,
    ObjectInfo,
    Stored,
    check_name,
    file_crc32c,
    opened,
)

try:
    from google.cloud.storage import exceptions as transfers
except ImportError:  # Version 2 of the client has its transfers in a separate package.
    from google import resumable_media as transfers

logger = logging.getLogger(__name__)

_ROLE = "roles/storage.objectUser"
"""Role that readers and writers need. The role can get, list, create and delete objects, but cannot
read the bucket's own properties."""
_RETRY_SECONDS = 60.0
_FIRST_DELAY_SECONDS = 0.5
_CHUNK_BYTES = 8 << 20
"""Size of the parts in which objects above `_ONE_REQUEST_BYTES` are uploaded. If a connection is
lost, only the last part is sent again."""
_ONE_REQUEST_BYTES = 8 << 20
"""Largest object that the client sends in one request, regardless of `chunk_size`."""
_CALL_SECONDS = 60.0
"""Maximum time in seconds that an attempt waits for a byte from the service."""
_READ_ATTEMPTS = 5
"""Maximum number of reads of a small object. A second read is needed if the object was replaced or
corrupted during the first read."""
_FETCH_ATTEMPTS = 3
"""If a large object was corrupted on the way, it is read at most this number of times. If a large
object was replaced, the read raises `Changed` instead."""
_SIGNATURE = "evergreen-write"
_CONTENT_TYPE = "application/octet-stream"


class BucketObjects:
    """Objects of a bucket. See `objects.Objects`.

    Args:
        uri: `gs://bucket` or `gs://bucket/prefix`.
        retry_seconds: Seconds for which one call is retried.
        first_delay_seconds: Upper bound of the wait before the first retry. The pause doubles with
            every retry.
        call_seconds: Seconds that one attempt waits for the next byte.
        chunk_bytes: Size of the parts in which a large object is sent, one part per request. The
            size is a multiple of 256 KiB.
    """

    def __init__(
        self,
        uri: str,
        *,
        retry_seconds: float = _RETRY_SECONDS,
        first_delay_seconds: float = _FIRST_DELAY_SECONDS,
        call_seconds: float = _CALL_SECONDS,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._name, _, prefix = uri.removeprefix("gs://").rstrip("/").partition("/")
        self.uri = uri.rstrip("/")
        if not uri.startswith("gs://") or not self._name:
            raise ContractError(f"uri is {uri!r}, expected gs://bucket or gs://bucket/prefix")
        self._root = f"{prefix}/" if prefix else ""
        self._chunk_bytes = chunk_bytes
        self._call = {
            "timeout": call_seconds,
            "retry": DEFAULT_RETRY.with_delay(
                initial=first_delay_seconds, maximum=10.0, multiplier=2.0
            ).with_timeout(retry_seconds),
        }
        self._translated = partial(_translated, bucket=self._name)
        with self._translated(self.uri):
            self._client = _client()
        self._bucket = self._client.bucket(self._name)
        self._is_bucket_known = False

    def read(self, name: str) -> Stored | None:
        """See `Objects.read`."""
        problem = "replaced"
        for _ in range(_READ_ATTEMPTS):
            blob, content = self._blob(name), io.BytesIO()
            with self._translated(f"{self.uri}/{name}"):
                try:
                    # One request returns content, generation and checksum of the same write. The
                    # client's own check ignores objects that were uploaded in several parts.
                    blob.download_to_file(content, raw_download=True, checksum=None, **self._call)
                except refusals.NotFound:
                    if not content.tell():
                        self._check_bucket()
                        return None
                    continue  # the local bytes belong to a write that no longer exists
                except refusals.RequestRangeNotSatisfiable:
                    continue
                expected = blob.crc32c or self._crc32c_of(blob)
            found = file_crc32c(content)
            if found == expected:
                return Stored(content.getvalue(), int(blob.generation))
            if expected is not None:
                problem = f"corrupt (CRC32C {found}, expected {expected})"
        raise TemporaryError(
            f"{self.uri}/{name} was {problem} while it was read, {_READ_ATTEMPTS} times"
        )

    def fetch(self, wanted: ObjectInfo, part: Path) -> None:
        """See `Objects.fetch`."""
        thing = f"{self.uri}/{check_name(wanted.name, self.uri)}"
        part.parent.mkdir(parents=True, exist_ok=True)
        # Write without a buffer, so that no byte that has arrived is lost if the process is killed.
        with self._translated(thing), flushed_to_disk(open(part, "a+b", buffering=0)) as file:
            for _ in range(_FETCH_ATTEMPTS):
                while file.seek(0, os.SEEK_END) < wanted.size:
                    self._fetch_rest(wanted, file)
                size, checksum = file.tell(), file_crc32c(file)
                if (size, checksum) == (wanted.size, wanted.crc32c):
                    return
                found = f"CRC32C {checksum}, {size} bytes"
                logger.warning("%s arrived corrupt (%s): the download starts again", thing, found)
                file.truncate(0)
        raise TemporaryError(
            f"{thing} was corrupt ({found}), expected CRC32C {wanted.crc32c}, {wanted.size} bytes"
        )

    def write(self, name: str, content: bytes | Path, *, if_generation: int | None = None) -> int:
        """See `Objects.write`."""
        blob = self._blob(name)
        signature = uuid4().hex
        blob.metadata = {_SIGNATURE: signature}
        with self._translated(f"{self.uri}/{name}"), opened(content) as source:
            checksum, size = file_crc32c(source), source.tell()
            is_large = size > _ONE_REQUEST_BYTES
            blob.chunk_size = self._chunk_bytes if is_large else None
            try:
                blob.upload_from_file(
                    source,
                    rewind=True,
                    size=size,
                    content_type=_CONTENT_TYPE,
                    if_generation_match=if_generation,
                    # The server verifies the checksum anyway. After a failed check of a large
                    # object, the client library deletes the object. It could then delete an object
                    # that another writer has written in the meantime.
                    checksum=None if is_large else "crc32c",
                    crc32c_checksum_value=checksum,
                    **self._call,
                )
            except refusals.PreconditionFailed:
                generation = self._signed_generation(name, signature)
                if generation is None:
                    raise
                return generation
            return int(blob.generation)

    def upload(self, name: str, path: Path) -> bool:
        """See `Objects.upload`."""
        is_new = False
        check_name(name, self.uri)
        with self._translated(f"{self.uri}/{name}"), opened(path) as source:
            sent = file_crc32c(source), source.tell()
        if (stored := self._checksum_of(name)) is None:
            try:
                self.write(name, path, if_generation=ABSENT)
                is_new = True
            except Changed:
                logger.info("%s/%s: another writer came first", self.uri, name)
            except PermanentError as error:
                # Bytes that were corrupted on the way may arrive intact at the next attempt.
                if (
                    isinstance(error.__cause__, refusals.BadRequest)
                    and "crc32c" in str(error).lower()
                ):
                    raise TemporaryError(str(error)) from error
                raise
            stored = self._checksum_of(name)
        if stored is None:
            raise TemporaryError(f"{self.uri}/{name} was removed while it was uploaded")
        if stored != sent:
            found = (
                f"(CRC32C {stored[0]}, {stored[1]} bytes), expected those of {path} "
                f"({sent[0]}, {sent[1]} bytes)"
            )
            raise Differs(f"{self.uri}/{name} exists with other bytes {found}")
        return is_new

    def copy(self, source: str, target: str) -> int:
        """See `Objects.copy`."""
        return self._copy(self._blob(source), target)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Objects.list`. Objects with hidden names are skipped, as in a folder."""
        with self._translated(f"{self.uri}/{prefix}"):
            blobs = self._client.list_blobs(self._bucket, prefix=self._root + prefix, **self._call)
            found = [
                ObjectInfo(
                    b.name[len(self._root) :],
                    int(b.size),
                    int(b.generation),
                    b.crc32c,
                    b.updated.timestamp(),
                )
                for b in blobs
            ]
        return sorted(
            each
            for each in found
            if not any(part[:1] in ("", ".") for part in each.name.split("/"))
        )

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """See `Objects.delete`."""
        blob = self._blob(name)
        with self._translated(f"{self.uri}/{name}"):
            try:
                blob.delete(if_generation_match=if_generation, **self._call)
            except refusals.NotFound:
                self._check_bucket()

    def move(self, source: str, target: str) -> None:
        """See `Objects.move`."""
        check_name(source, self.uri)
        check_name(target, self.uri)
        moved = self.list(f"{source}/")
        if not moved:
            raise ContractError(
                f"{self.uri}/{source} cannot be moved to {target}: the folder does not exist"
            )
        if self.list(f"{target}/"):
            raise ContractError(f"{self.uri}/{target} exists already, expected nothing there")
        for each in moved:
            blob = self._bucket.blob(self._full(each.name), generation=each.generation)
            self._copy(blob, target + each.name[len(source) :])
        for each in moved:
            self.delete(each.name, if_generation=each.generation)

    def local(self, name: str) -> Path | None:
        """See `Objects.local`."""
        check_name(name, self.uri)
        return None

    def _full(self, name: str) -> str:
        return self._root + check_name(name, self.uri)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._full(name))

    def _fetch_rest(self, wanted: ObjectInfo, file: BinaryIO) -> None:
        """Request the missing bytes, and return when some have arrived.

        The client's retry deadline counts from the start of a call, even while bytes arrive. If the
        connection of a large download is cut after this deadline, the client does not retry, and
        `fetch` calls this method again.
        """
        before = file.tell()
        blob = self._bucket.blob(self._full(wanted.name), generation=wanted.generation)
        try:
            with self._translated(f"{self.uri}/{wanted.name}"):
                try:
                    blob.download_to_file(
                        file, start=before or None, raw_download=True, checksum=None, **self._call
                    )
                except (refusals.NotFound, refusals.RequestRangeNotSatisfiable) as error:
                    self._check_bucket()
                    problem = (
                        f"{self.uri}/{wanted.name} is no longer at generation {wanted.generation}"
                    )
                    raise Changed(
                        f"{problem}: it was replaced or removed after it was listed"
                    ) from error
            if file.tell() == before:
                raise TemporaryError(
                    f"{self.uri}/{wanted.name}: the answer ends at byte {before} of {wanted.size}"
                )
        except Changed:
            raise
        except TemporaryError as error:
            if file.tell() == before:
                raise
            logger.info(
                "the download resumes at byte %d of %d: %s", file.tell(), wanted.size, error
            )

    def _checksum_of(self, name: str) -> tuple[str, int] | None:
        """Return CRC32C and size as computed by the service, or None if the object is absent."""
        with self._translated(f"{self.uri}/{name}"):
            found = self._bucket.get_blob(self._full(name), **self._call)
            if found is None:
                self._check_bucket()
                return None
            return str(found.crc32c), int(found.size)

    def _crc32c_of(self, blob: Any) -> str | None:
        """Request the checksum of the generation that was read.

        The server's previous answer may contain no checksum.

        Returns None if that generation was replaced or deleted.
        """
        found = self._bucket.get_blob(blob.name, generation=blob.generation, **self._call)
        return None if found is None else str(found.crc32c)

    def _copy(self, source: Any, target: str) -> int:
        """Copy `source` to an unused name, and return the generation of the copy.

        A `source` that carries a generation is copied at that generation.
        """
        blob = self._blob(target)
        signature = uuid4().hex
        blob.metadata, blob.content_type = {_SIGNATURE: signature}, _CONTENT_TYPE
        token: str | None = None
        with self._translated(f"{self.uri}/{target}"):
            try:
                while True:
                    token, _, _ = blob.rewrite(
                        source, token=token, if_generation_match=ABSENT, **self._call
                    )
                    if token is None:
                        return int(blob.generation)
            except refusals.PreconditionFailed:
                generation = self._signed_generation(target, signature)
                if generation is None:
                    raise
                return generation
            except refusals.NotFound as error:
                self._check_bucket()
                raise ContractError(
                    f"{source.name} is absent in bucket {self._name}, expected an object"
                ) from error

    def _signed_generation(self, name: str, signature: str) -> int | None:
        """Return the object's generation if it has this signature, else None."""
        found = self._bucket.get_blob(self._full(name), **self._call)
        if found is None or (found.metadata or {}).get(_SIGNATURE) != signature:
            return None
        return int(found.generation)

    def _check_bucket(self) -> None:
        """Raise an error if the bucket does not exist.

        The server's answer is the same for an absent bucket and an absent object.
        """
        if not self._is_bucket_known:
            next(iter(self._client.list_blobs(self._bucket, max_results=1, **self._call)), None)
            self._is_bucket_known = True


def _client() -> Any:
    # If this variable is unset, the client requests the bucket's own properties in the background,
    # for traces that nobody collects. The role of the account does not include the permission to
    # read these properties.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    if not os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client()
    # An emulator runs on this machine or nearby, so the configured proxy must not be used.
    session = requests.Session()
    session.trust_env = False
    return storage.Client(_http=session)


@contextmanager
def _translated(thing: str, bucket: str) -> Iterator[None]:
    """Translate the client's exceptions about `thing`, an object or a prefix of `bucket`.

    Raises:
        Changed: the precondition of a write failed.
        TemporaryError: the failure was temporary, and the client's own retries did not help.
        PermanentError: permission, bucket, credentials or space is missing, or a local file fails.
    """
    try:
        yield
    except refusals.RetryError as error:
        raise TemporaryError(
            f"{thing}: given up after retries ({_service_message(error.cause or error)})"
        ) from error
    except refusals.GoogleAPICallError as error:
        raise _refusal(error, thing, bucket) from error
    except auth.DefaultCredentialsError as error:
        raise PermanentError(
            f"{thing}: no credentials for bucket {bucket} ({first_line(error)})"
        ) from error
    except auth.GoogleAuthError as error:
        kind = TemporaryError if error.retryable else PermanentError
        raise kind(f"{thing}: cannot sign in for bucket {bucket} ({first_line(error)})") from error
    except (
        transfers.InvalidResponse,
        transfers.DataCorruption,
        urllib3.exceptions.HTTPError,
    ) as error:
        raise TemporaryError(f"{thing}: {first_line(error)}") from error
    except (
        requests.ConnectionError,
        requests.Timeout,
        requests.exceptions.ChunkedEncodingError,
    ) as error:
        raise TemporaryError(f"{thing}: {first_line(error)}") from error
    except (ConnectionError, TimeoutError) as error:
        raise TemporaryError(f"{thing}: {first_line(error)}") from error
    except requests.RequestException as error:
        raise PermanentError(f"{thing}: {first_line(error)}") from error
    except OSError as error:
        raise PermanentError(f"{error.filename or thing}: {error.strerror or error}") from error


def _refusal(error: refusals.GoogleAPICallError, thing: str, bucket: str) -> Exception:
    message = _service_message(error)
    if isinstance(error, refusals.PreconditionFailed):
        return Changed(f"{thing} is not at the generation expected: another writer came first")
    if isinstance(error, (refusals.Forbidden, refusals.Unauthorized)):
        return PermanentError(
            f"{thing}: refused ({message}); the account needs {_ROLE} on bucket {bucket}, "
            "and the bucket needs free space"
        )
    if isinstance(error, refusals.NotFound):
        return PermanentError(f"{thing}: absent ({message}); expected bucket {bucket} to exist")
    if isinstance(error, (refusals.TooManyRequests, refusals.ServerError)) or error.code == 408:
        return TemporaryError(f"{thing}: {message}")
    return PermanentError(f"{thing}: {message}")


def _service_message(error: BaseException) -> str:
    """Return the status and the error message of the service, without the URL of the request."""
    response = getattr(error, "response", None)
    if response is None:
        return first_line(error)
    try:
        words = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = response.reason or "without a word"
    return f"{response.status_code} {words}"
