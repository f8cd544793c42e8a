"""Which storage a URI means."""

from __future__ import annotations

from components.contracts.uris import local_path
from components.storage.folder import FolderObjects
from components.storage.objects import Objects


def open_objects(uri: str) -> Objects:
    """The objects below `uri`: `file:///folder`, an absolute path, or `gs://bucket/prefix`.

    Raises:
        ContractError: `uri` is none of these.
    """
    if uri.startswith("gs://"):
        from components.storage.bucket import BucketObjects

        return BucketObjects(uri)
    return FolderObjects(local_path(uri))
