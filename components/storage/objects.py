"""What a folder and a bucket have in common: named objects, each with a generation that changes at every write.

The implementations are `folder.FolderObjects` and `bucket.BucketObjects`; both take the same exam. A write is atomic:
a reader sees the whole object before it or the whole one after it. `if_generation` makes a write conditional, as
Cloud Storage's generation preconditions do, which is what lets two writers notice each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from components.contracts.errors import TemporaryError

ABSENT = 0
"""The generation of an object that does not exist, as Cloud Storage counts."""


class Changed(TemporaryError):
    """The object is not at the generation that the writer had seen: another writer came first."""


class ObjectInfo(NamedTuple):
    """What a listing tells of one object."""

    name: str
    """Relative to the root, parts separated by `/`."""
    size: int
    """Bytes."""
    generation: int
    """Differs after every write; never `ABSENT`."""


class Stored(NamedTuple):
    """An object's content and the generation that was read."""

    content: bytes
    generation: int


class Objects(Protocol):
    """Objects below one root.

    Every method raises TemporaryError where a retry may help, PermanentError where it cannot (no permission, no such
    bucket, disk full), and ContractError for a name that leaves the root.
    """

    uri: str
    """`file:///...` or `gs://bucket/prefix`, without a slash at its end."""

    def read(self, name: str) -> Stored | None:
        """The object, checked against its checksum where there is one; None if absent. For small objects."""

    def download(self, name: str, path: Path) -> int:
        """Writes the object's content to the local file `path`, whole or not at all; its generation.

        Raises:
            ContractError: there is no such object.
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

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose names start with `prefix`, in name order."""

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """Removes the object; one that is absent is no error.

        Raises:
            Changed: the object is at another generation.
        """

    def move(self, source: str, target: str) -> None:
        """Renames every object `source/...` to `target/...`.

        One rename in a folder; object by object in a bucket, so nobody may be told of `target` before it returns.

        Raises:
            ContractError: there is nothing at `source`, or something at `target`.
        """

    def local(self, name: str) -> Path | None:
        """The file that is the object, where the root is a folder of this machine; None for a bucket."""
