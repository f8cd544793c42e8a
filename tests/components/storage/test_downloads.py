"""An object is read by its URI."""

from __future__ import annotations

import pytest

from components.runtime.errors import ContractError
from components.storage.locations import read_object


def test_an_object_is_read_by_its_uri(open_bucket):
    open_bucket("gs://models").write("a b/c.json", b"{}")
    assert read_object("gs://models/a b/c.json") == b"{}"
    for uri, message in (("gs://models/a b", "a b is absent"), ("/a/file", "expected gs://bucket/name")):
        with pytest.raises(ContractError, match=message):
            read_object(uri)
