"""Objects of a Cloud Storage bucket."""

from __future__ import annotations

from pathlib import Path

from components.storage.objects import ObjectInfo, Stored


class BucketObjects:
    """See `objects.Objects`."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")

    def read(self, name: str) -> Stored | None:
        """See `Objects.read`."""
        raise NotImplementedError

    def download(self, name: str, path: Path) -> int:
        """See `Objects.download`."""
        raise NotImplementedError

    def write(self, name: str, content: bytes | Path, *, if_generation: int | None = None) -> int:
        """See `Objects.write`."""
        raise NotImplementedError

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Objects.list`."""
        raise NotImplementedError

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """See `Objects.delete`."""
        raise NotImplementedError

    def move(self, source: str, target: str) -> None:
        """See `Objects.move`."""
        raise NotImplementedError

    def local(self, name: str) -> Path | None:
        """See `Objects.local`."""
        return None
