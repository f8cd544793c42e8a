"""Which storage a URI means."""

from __future__ import annotations

import warnings

from components.runtime.errors import ContractError
from components.storage.folder import FolderObjects
from components.storage.objects import Objects
from components.storage.uris import is_bucket_uri, local_path


def open_objects(uri: str) -> Objects:
    """The objects below `uri`: `file:///folder`, an absolute path, or `gs://bucket/prefix`.

    Raises:
        ContractError: `uri` is none of these.
    """
    if is_bucket_uri(uri):
        with warnings.catch_warnings():
            # Google's packages warn of an old Python at import, which nobody here can change.
            warnings.simplefilter("ignore", FutureWarning)
            from components.storage.bucket import BucketObjects

        return BucketObjects(uri)
    return FolderObjects(local_path(uri))


def read_object(uri: str) -> bytes:
    """The content of the one small object that `uri` names, `gs://bucket/name`.

    Raises:
        ContractError: there is none, or `uri` names none.
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    root, _, name = uri.rpartition("/")
    if not is_bucket_uri(root):
        raise ContractError(f"uri is {uri!r}, expected gs://bucket/name")
    stored = open_objects(root).read(name)
    if stored is None:
        raise ContractError(f"{uri} is absent, expected an object")
    return stored.content
