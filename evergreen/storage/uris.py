"""URIs of local folders and buckets, and the objects below them.

Every step that reads or writes data by URI uses this module. Object storage is Google Cloud Storage
(GCS, `gs://`). S3 and Azure are not supported. Only `file://` URIs and absolute paths have a local
path. On a cluster, the steps of a run share a mounted volume.
"""

import warnings
from pathlib import Path
from urllib.parse import unquote, urlparse

from evergreen.runtime.errors import ContractError
from evergreen.storage.folder import FolderObjects
from evergreen.storage.objects import Objects


def is_bucket_uri(uri: str) -> bool:
    """Return whether `uri` refers to a Cloud Storage bucket, or to an object in one.

    >>> is_bucket_uri("gs://bucket/lake"), is_bucket_uri("file:///data/lake"), is_bucket_uri("/data/lake")
    (True, False, False)
    """  # noqa: E501
    return uri.startswith("gs://")


def local_path(uri: str) -> Path:
    """Return the absolute local path that `uri` names.

    Raises:
        ContractError: `uri` is empty, relative, or has a scheme that is not mounted on this
            machine.

    >>> str(local_path("file:///data/a%20b")), str(local_path("/data/a b"))
    ('/data/a b', '/data/a b')
    """
    parsed = urlparse(uri)
    if (
        parsed.scheme == "file"
        and parsed.netloc in ("", "localhost")
        and parsed.path.startswith("/")
    ):
        return Path(unquote(parsed.path))
    if not parsed.scheme and uri.startswith("/"):
        return Path(uri)
    raise ContractError(f"uri is {uri!r}, expected file:///... or an absolute path")


def typed_uri(text: str) -> str:
    """Convert a folder from the command line to a URI or an absolute path.

    A relative path is resolved against the current working folder. Use this for command lines only:
    manifests and pipelines name complete URIs, so a relative path there is a mistake. Empty text
    and text with a scheme are returned unchanged, and `local_path` checks them.

    >>> typed_uri("gs://bucket/models"), typed_uri("/data/a b"), typed_uri("")
    ('gs://bucket/models', '/data/a b', '')
    >>> typed_uri("store") == str(Path("store").resolve())
    True
    """
    if not text or urlparse(text).scheme:
        return text
    return text if Path(text).is_absolute() else str(Path(text).resolve())


def typed_folder(text: str, flag: str) -> Path:
    """Return the existing local folder whose path a person typed.

    Raises:
        ContractError: the path is absent, is not a folder, or is not on this machine.
    """
    folder = local_path(typed_uri(text))
    if not folder.is_dir():
        raise ContractError(
            f"{flag} is {text!r}, but {folder} is not a folder, expected an existing folder"
        )
    return folder


def open_objects(uri: str, *, readable: bool = False) -> Objects:
    """Open the objects below `uri`: `file:///folder`, an absolute path, or `gs://bucket/prefix`.

    Args:
        uri: Root of the objects.
        readable: Whether other users may read new files. The parameter has no effect in a bucket,
            which has its own permissions.

    Raises:
        ContractError: `uri` has none of these forms, or the library for buckets is not installed.
    """
    if is_bucket_uri(uri):
        with warnings.catch_warnings():
            # Google's packages warn at import about an old Python version. The user cannot change
            # this version.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                from evergreen.storage.bucket import BucketObjects
            except ModuleNotFoundError as error:
                raise ContractError(
                    f"{uri} needs the package {error.name}, which evergreen-client[gcs] installs"
                ) from error

        return BucketObjects(uri)
    return FolderObjects(local_path(uri), readable=readable)
