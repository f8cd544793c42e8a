"""Folder and bucket storage, each as a function that opens another handle on the same root."""

import pytest

from evergreen.storage.folder import FolderObjects


@pytest.fixture(params=["folder", "bucket"])
def open_again(request, tmp_path):
    """Opens the storage under test.

    Every call returns a separate writer and reader of the same objects.
    """
    if request.param == "folder":
        return lambda: FolderObjects(tmp_path / "a root")
    return request.getfixturevalue("open_bucket")


@pytest.fixture
def open_bucket(cloud_storage):
    """Opens a bucket's storage with short timeouts and small parts."""
    from evergreen.storage.bucket import BucketObjects

    def make(uri="gs://models/a prefix", **settings):
        timeouts = {"retry_seconds": 20.0, "first_delay_seconds": 0.001, "chunk_bytes": 2 << 20}
        return BucketObjects(uri, **{**timeouts, **settings})

    return make
