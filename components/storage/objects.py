"""What a folder and a bucket have in common: named objects, each with a generation that changes at every write.

The implementations are `folder.FolderObjects` and `bucket.BucketObjects`; both take the same exam. A write is atomic:
a reader sees the whole object before it or the whole one after it. `if_generation` makes a write conditional, as
Cloud Storage's generation preconditions do, which is what lets two writers notice each other.

Objects become files of this machine one alone, or several at a time. How the bytes of one arrive and are proven is
`Objects.fetch`. Extraction caches what it reads repeatedly.
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

from components.runtime.durable import fsync_path
from components.runtime.errors import ContractError, PermanentError, TemporaryError

ABSENT = 0
"""The generation of an object that does not exist, as Cloud Storage counts."""
MAX_NAME_BYTES = 900
"""Of a whole name, in UTF-8; Cloud Storage takes 1024 with what stands before it."""
MAX_PART_BYTES = 200
"""Between two slashes; a file system takes 255 with what a write aside adds."""

_BUFFER_BYTES = 1 << 20


class Changed(TemporaryError):
    """The object is not at the generation that the writer had seen: another writer came first."""


class Differs(PermanentError):
    """The object is there already with other bytes than those to upload: one name was given twice."""


class ObjectInfo(NamedTuple):
    """One entry of a listing."""

    name: str
    """Relative to the root, parts separated by `/`."""
    size: int
    """Bytes."""
    generation: int
    """Differs after every write; never `ABSENT`."""
    crc32c: str | None = None
    """Of the content, in base64 as Cloud Storage writes it; None for a folder, which keeps none."""
    written_at: float = 0.0
    """When it was written, seconds since the epoch."""


class Stored(NamedTuple):
    """An object's content and the generation that was read."""

    content: bytes
    generation: int


def file_crc32c(file: BinaryIO) -> str:
    """CRC32C of a file from its start, as Cloud Storage writes it; leaves the file at its end.

    >>> file_crc32c(BytesIO(b"rows"))
    'r5sJTQ=='
    """
    import google_crc32c  # not there where no step reads buckets

    file.seek(0)
    checksum = google_crc32c.Checksum()
    while content := file.read(_BUFFER_BYTES):
        checksum.update(content)
    return base64.b64encode(checksum.digest()).decode()


class Objects(Protocol):
    """Objects below one root.

    Every method raises TemporaryError where a retry may help, PermanentError where it cannot (no permission, no such
    bucket, disk full), and ContractError for a name that `check_name` refuses.
    """

    uri: str
    """`file:///...` or `gs://bucket/prefix`, without a slash at its end."""

    def read(self, name: str) -> Stored | None:
        """The object, checked against its checksum where there is one; None if absent. For small objects."""

    def fetch(self, wanted: ObjectInfo, part: Path) -> None:
        """Makes the local file `part` the bytes of one write of an object, proven and flushed to disk.

        A bucket continues where an earlier call ended, after a cut connection as after a kill: what `part` holds is
        taken for the object's first bytes, and only the rest is asked for. The whole is proven by the CRC32C of the
        listing; what proves wrong is fetched again from its start, a few times. On error `part` keeps what arrived.
        One call at a time for one `part`.

        Args:
            wanted: The object's entry in `list`.
            part: Local file; made where it is absent.

        Raises:
            Changed: the object is no longer at that generation.
            TemporaryError: nothing came for as long as one call is tried again, or the bytes stay wrong.
            PermanentError: also where the local disk fails.
        """

    def write(self, name: str, content: bytes | Path, *, if_generation: int | None = None) -> int:
        """Writes the object whole (a Path is a local file to copy); its new generation.

        Args:
            name: Which object.
            content: Its bytes, or the local file that holds them.
            if_generation: Write only over this generation; `ABSENT` = only if there is none; None = whatever is there.

        Raises:
            Changed: the object is at another generation.
        """

    def upload(self, name: str, path: Path) -> bool:
        """Makes the local file `path` the object `name` where there is none, and proves that its bytes are stored.

        After it returns the file may go: what is stored was compared with it, byte for byte in a folder, by size and
        by the CRC32C that the service keeps in a bucket, and is flushed to disk. An object of the same bytes is done,
        whoever wrote it, so the call may be repeated, also by two at once. True where this call wrote
        the object; False where it was there.

        Raises:
            Differs: the object is there with other bytes; it stays as it is.
            TemporaryError: what arrived is not what was sent; it was not made an object.
        """

    def copy(self, source: str, target: str) -> int:
        """Makes `target` an object with the content of `source`, without a way through this machine; its generation.

        Raises:
            ContractError: there is no `source`.
            Changed: there is a `target` already.
        """

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose names start with `prefix`, in name order."""

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """Removes the object; one that is absent is no error, with a condition neither.

        Raises:
            Changed: the object is there, at another generation.
        """

    def move(self, source: str, target: str) -> None:
        """Renames every object `source/...` to `target/...`.

        One rename in a folder; object by object in a bucket, so `target` must not be announced before it returns.

        Raises:
            ContractError: there is nothing at `source`, or something at `target`.
        """

    def local(self, name: str) -> Path | None:
        """The file that is the object, where the root is a folder of this machine; None for a bucket."""


@contextmanager
def opened(content: bytes | Path) -> Iterator[BinaryIO]:
    """Yields what is to be written, as a file at its start."""
    if isinstance(content, bytes):
        yield BytesIO(content)
    else:
        with open(content, "rb") as file:
            yield file


def check_name(name: str, uri: str) -> str:
    r"""`name`, if an object below `uri` may have it, in a folder as in a bucket.

    Raises:
        ContractError: the name leaves the root, has an empty part, one that starts with a dot (those are unfinished
            files and locks), a control character, or is too long.

    >>> check_name("click_model/1/model.onnx", "file:///models")
    'click_model/1/model.onnx'
    """
    parts = name.split("/")
    if any(not part or part.startswith(".") for part in parts):
        raise ContractError(f"object is {name!r}, expected a name below {uri} without empty or hidden parts")
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise ContractError(f"object is {name!r}, expected a name without control characters")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError as error:
        raise ContractError(f"object is {name!r}, expected a name that UTF-8 can write") from error
    if max(sizes) > MAX_PART_BYTES or sum(sizes) + len(sizes) - 1 > MAX_NAME_BYTES:
        raise ContractError(
            f"object is {name!r}, expected at most {MAX_NAME_BYTES} bytes, {MAX_PART_BYTES} between two slashes"
        )
    return name


NUM_TRANSFERS = 8
"""At a time; Google's client keeps ten connections."""


class Download(NamedTuple):
    """One object to fetch."""

    wanted: ObjectInfo
    part: Path
    """What has arrived so far; no reader looks at it."""
    path: Path
    """Where it lies once it is whole."""


def download_all(objects: Objects, downloads: Sequence[Download]) -> None:
    """Brings every object to its path, whole; large ones first, so that no single one is waited for at the end.

    After the first failure no transfer begins; what arrived is kept for the next try. No two downloads have the same
    path.

    Raises:
        Changed, TemporaryError, PermanentError: see `Objects.fetch`; the first one. No transfer continues.
    """

    def bring(download: Download) -> None:
        objects.fetch(download.wanted, download.part)
        os.replace(download.part, download.path)
        fsync_path(download.path.parent)

    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="download") as threads:
        ordered = sorted(downloads, key=lambda download: -download.wanted.size)
        try:
            for done in as_completed([threads.submit(bring, download) for download in ordered]):
                done.result()
        finally:
            threads.shutdown(cancel_futures=True)


def download(objects: Objects, name: str, path: Path) -> None:
    """Makes the file at `path` the object's content, whole or not at all.

    Raises:
        ContractError: there is no such object.
        TemporaryError, PermanentError: it cannot be fetched.
    """
    found = [each for each in objects.list(name) if each.name == name]
    if not found:
        raise ContractError(f"{objects.uri}/{name} is absent, expected an object")
    download_all(objects, [Download(found[0], path.with_name(f".{path.name}.part"), path)])


@contextmanager
def local_copy(objects: Objects, name: str) -> Iterator[Path]:
    """Yields the object's file: itself in a folder; for a bucket a copy, which is removed afterwards.

    Raises:
        ContractError: there is no such object in the bucket.
        TemporaryError, PermanentError: it cannot be fetched.
    """
    if (local := objects.local(name)) is not None:
        yield local
        return
    with TemporaryDirectory(prefix="evergreen-object-") as folder:
        path = Path(folder) / "content"
        download(objects, name, path)
        yield path
