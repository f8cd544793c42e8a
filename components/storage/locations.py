"""Which storage a URI means."""

import warnings

from components.runtime.errors import ContractError
from components.storage.folder import FolderObjects
from components.storage.objects import Objects
from components.storage.uris import is_bucket_uri, local_path


def open_objects(uri: str) -> Objects:
    """The objects below `uri`: `file:///folder`, an absolute path, or `gs://bucket/prefix`.

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
    return FolderObjects(local_path(uri))
