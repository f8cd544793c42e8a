"""Common interface of folders and buckets: named objects whose generation changes at every write.

The implementations are `folder.FolderObjects` and `bucket.BucketObjects`. Both implementations pass
the same conformance suite. A write is atomic: a reader gets either the complete old object or the
complete new object. With `if_generation`, a write is conditional, as in Cloud Storage. A writer can
then detect that another writer came first.

Objects can be downloaded to local files, also several at the same time. `Objects.fetch` describes
how bytes are transferred and verified. Extraction caches objects that it reads repeatedly.
"""

import base64
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple, Protocol

from evergreen.runtime.durable import fsync_path
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError

ABSENT = 0
"""Generation that represents an absent object, as in Cloud Storage."""
_MAX_NAME_BYTES = 900
"""Longest name in UTF-8 bytes. Cloud Storage allows 1024 bytes including the prefix."""
_MAX_PART_BYTES = 200
"""Maximum length in bytes of a name between two slashes. File systems allow 255 bytes, and the name
of a temporary file has an additional suffix."""

_BUFFER_BYTES = 1 << 20


class Changed(TemporaryError):
    """The object is no longer at the expected generation, because another writer came first."""


class Differs(PermanentError):
    """Error about an existing object whose bytes differ from the uploaded file."""


class ObjectInfo(NamedTuple):
    """One entry of a listing."""

    name: str
    """Name relative to the root, with parts separated by `/`."""
    size: int
    """Size in bytes."""
    generation: int
    """Generation. The generation changes with every write and is never `ABSENT`."""
    crc32c: str | None = None
    """CRC32C of the content in base64, as Cloud Storage writes it. None for a folder, which stores
    no checksum."""
    written_at: float = 0.0
    """Time of the write in seconds since the epoch."""


class Stored(NamedTuple):
    """Content of an object, and the generation that was read."""

    content: bytes
    generation: int


def file_crc32c(file: BinaryIO) -> str:
    """Return the CRC32C of a whole file in base64, as Cloud Storage writes it.

    After the call, the position of `file` is at its end.

    >>> file_crc32c(BytesIO(b"rows"))
    'r5sJTQ=='
    """
    import google_crc32c  # the environments of some steps have no google_crc32c

    file.seek(0)
    checksum = google_crc32c.Checksum()
    while content := file.read(_BUFFER_BYTES):
        checksum.update(content)
    return base64.b64encode(checksum.digest()).decode()


class Objects(Protocol):
    """Objects below one root.

    Every method raises TemporaryError if a retry may help. Every method raises PermanentError if a
    retry cannot help (no permission, no bucket, disk full). Every method raises ContractError for a
    name that `check_name` refuses.
    """

    uri: str
    """`file:///...` or `gs://bucket/prefix`, without a trailing slash."""

    def read(self, name: str) -> Stored | None:
        """Return the content of a small object, or None if the object is absent.

        The checksum of the object is verified if it has one.
        """

    def fetch(self, wanted: ObjectInfo, part: Path) -> None:
        """Download one generation of an object to the local file `part`.

        The bytes are verified and flushed to disk. For a bucket, the call resumes an earlier call
        that was interrupted or killed. If `part` has content, it counts as the first bytes of the
        object, and only the remaining bytes are requested. The complete file is compared with the
        CRC32C of the listing. After a mismatch, the download starts again from the first byte, a
        limited number of times. After an error, `part` still contains the bytes that have arrived.
        Only one call at a time may use the same `part`.

        Args:
            wanted: Entry of the object, as returned by `list`.
            part: Local file, which is created if it is absent.

        Raises:
            Changed: the object no longer has the generation in `wanted`.
            TemporaryError: no byte arrived within the retry time of a call, or the bytes stay
                corrupt.
            PermanentError: a retry cannot help, or the local disk failed.
        """

    def write(self, name: str, content: bytes | Path, *, if_generation: int | None = None) -> int:
        """Write the complete object and return its new generation.

        Args:
            name: Name of the object.
            content: Bytes of the object, or a local file to copy.
            if_generation: Generation that the write may replace. With `ABSENT`, the object is
                written only if it does not exist. With None, the object is always written.

        Raises:
            Changed: the object has another generation.
        """

    def upload(self, name: str, path: Path) -> bool:
        """Upload the local file `path` as `name` unless that object exists.

        When the call returns, the stored object is flushed, and the local file may be deleted. The
        stored object has been compared with the local file, byte for byte in a folder, and by size
        and the service's CRC32C in a bucket. If the object already exists with the same bytes, the
        upload succeeds, whichever process wrote the object. The call may therefore be repeated,
        even by two processes at once. Returns True if this call wrote the object, and False if it
        existed.

        Raises:
            Differs: the object exists with other bytes. The existing object is not changed.
            TemporaryError: the bytes that arrived differ from those sent. In this case, the object
                is not created.
        """

    def copy(self, source: str, target: str) -> int:
        """Copy `source` to the new object `target` within the storage, and return its generation.

        Raises:
            ContractError: there is no `source`.
            Changed: `target` exists.
        """

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects whose names start with `prefix`, ordered by name."""

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """Delete the object. An absent object is not an error, with or without a condition.

        Raises:
            Changed: the object exists, but has another generation.
        """

    def move(self, source: str, target: str) -> None:
        """Rename every object `source/...` to `target/...`.

        In a local folder, one rename moves all objects. In a bucket, objects are moved one at a
        time, so do not publish `target` before this method returns.

        Raises:
            ContractError: no object exists at `source`, or an object exists at `target`.
        """

    def local(self, name: str) -> Path | None:
        """Return the local file of the object if the root is a folder, or None for a bucket."""


@contextmanager
def opened(content: bytes | Path) -> Iterator[BinaryIO]:
    """Yield the content to write as an open file, positioned at its start."""
    if isinstance(content, bytes):
        yield BytesIO(content)
    else:
        with open(content, "rb") as file:
            yield file


def check_name(name: str, uri: str) -> str:
    r"""Return the object's name, after checking that folders and buckets accept it.

    Raises:
        ContractError: the name leaves the root, is too long, or has a control character or an empty
            part. A part that starts with a dot is also refused, because unfinished files and locks
            have such names.

    >>> check_name("click_model/1/model.onnx", "file:///models")
    'click_model/1/model.onnx'
    """
    parts = name.split("/")
    if any(not part or part.startswith(".") for part in parts):
        raise ContractError(
            f"object is {name!r}, expected a name below {uri} without empty or hidden parts"
        )
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise ContractError(f"object is {name!r}, expected a name without control characters")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError as error:
        raise ContractError(f"object is {name!r}, expected a name that UTF-8 can encode") from error
    if max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(sizes) - 1 > _MAX_NAME_BYTES:
        raise ContractError(
            f"object is {name!r}, expected at most {_MAX_NAME_BYTES} bytes, {_MAX_PART_BYTES} "
            "between two slashes"
        )
    return name


NUM_TRANSFERS = 8
"""Number of parallel transfers. Google's client has a pool of ten connections."""


class Download(NamedTuple):
    """Object to download, and its local files."""

    wanted: ObjectInfo
    part: Path
    """Local file with the bytes that have arrived. No other code opens this file."""
    path: Path
    """Local file for the complete object."""


def download_all(objects: Objects, downloads: Sequence[Download]) -> None:
    """Download every object to its path, the largest object first.

    After the first failure, no new transfer starts. A later call continues with the bytes that have
    arrived. All paths must differ.

    Raises:
        Changed, TemporaryError, PermanentError: the first error of `Objects.fetch`. The error is
            raised after every running transfer has stopped.
    """

    def transfer(download: Download) -> None:
        objects.fetch(download.wanted, download.part)
        os.replace(download.part, download.path)
        fsync_path(download.path.parent)

    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="download") as threads:
        ordered = sorted(downloads, key=lambda download: -download.wanted.size)
        try:
            for done in as_completed([threads.submit(transfer, download) for download in ordered]):
                done.result()
        finally:
            threads.shutdown(cancel_futures=True)


def download(objects: Objects, name: str, path: Path) -> None:
    """Download the complete object to `path`, or leave `path` unchanged.

    Raises:
        ContractError: the object does not exist.
        TemporaryError, PermanentError: the download failed.
    """
    found = [each for each in objects.list(name) if each.name == name]
    if not found:
        raise ContractError(f"{objects.uri}/{name} is absent, expected an object")
    download_all(objects, [Download(found[0], path.with_name(f".{path.name}.part"), path)])


@contextmanager
def local_copy(objects: Objects, name: str) -> Iterator[Path]:
    """Yield a local file of the object. For an object in a bucket, the file is a temporary copy.

    Raises:
        ContractError: the object is not in the bucket.
        TemporaryError, PermanentError: the download failed.
    """
    if (local := objects.local(name)) is not None:
        yield local
        return
    with TemporaryDirectory(prefix="evergreen-object-") as folder:
        path = Path(folder) / "content"
        download(objects, name, path)
        yield path
