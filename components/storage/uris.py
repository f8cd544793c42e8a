"""What a URI names, a folder of this machine or a bucket; and the objects there.

Every step that reads or writes data named by a URI asks here. Only `file://` and plain absolute paths have a local
path: on a cluster the steps share a mounted volume.
"""

import warnings
from pathlib import Path
from urllib.parse import unquote, urlparse

from components.runtime.errors import ContractError
from components.storage.folder import FolderObjects
from components.storage.objects import Objects


def is_bucket_uri(uri: str) -> bool:
    """Whether `uri` names a Cloud Storage bucket or something in one.

    >>> is_bucket_uri("gs://bucket/lake"), is_bucket_uri("file:///data/lake"), is_bucket_uri("/data/lake")
    (True, False, False)
    """
    return uri.startswith("gs://")


def local_path(uri: str) -> Path:
    """The absolute local path that `uri` names.

    Raises:
        ContractError: `uri` is empty, relative, or of a scheme that is not mounted on this machine.

    >>> str(local_path("file:///data/a%20b")), str(local_path("/data/a b"))
    ('/data/a b', '/data/a b')
    """
    parsed = urlparse(uri)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost") and parsed.path.startswith("/"):
        return Path(unquote(parsed.path))
    if not parsed.scheme and uri.startswith("/"):
        return Path(uri)
    raise ContractError(f"uri is {uri!r}, expected file:///... or an absolute path")


def typed_uri(text: str) -> str:
    """What a person typed for a folder, as a URI or an absolute path: a relative path counts from the working folder.

    For command lines only: what a manifest or a pipeline names is whole already, and a relative path there is a
    mistake. An empty text, and whatever has a scheme, is left for `local_path` to judge.

    >>> typed_uri("gs://bucket/models"), typed_uri("/data/a b"), typed_uri("")
    ('gs://bucket/models', '/data/a b', '')
    >>> typed_uri("store") == str(Path("store").resolve())
    True
    """
    if not text or urlparse(text).scheme:
        return text
    return text if Path(text).is_absolute() else str(Path(text).resolve())


def typed_folder(text: str, flag: str) -> Path:
    """The folder of this machine that a person typed, for something that must be there already.

    Raises:
        ContractError: it is absent, no folder, or not of this machine.
    """
    folder = local_path(typed_uri(text))
    if not folder.is_dir():
        raise ContractError(f"{flag} is {text!r}, but {folder} is no folder, expected one that is there")
    return folder


def open_objects(uri: str, *, readable: bool = False) -> Objects:
    """The objects below `uri`: `file:///folder`, an absolute path, or `gs://bucket/prefix`.

    Args:
        uri: Where they are.
        readable: Whether other users may read files that are written there; a bucket has its own rules.

    Raises:
        ContractError: `uri` is none of these, or the library of buckets is not installed.
    """
    if is_bucket_uri(uri):
        with warnings.catch_warnings():
            # Google's packages warn of an old Python at import, which nobody here can change.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                from components.storage.bucket import BucketObjects
            except ModuleNotFoundError as error:
                raise ContractError(
                    f"{uri} needs {error.name}, expected it to be installed, as it is by evergreen-client[gcs]"
                ) from error

        return BucketObjects(uri)
    return FolderObjects(local_path(uri), readable=readable)
