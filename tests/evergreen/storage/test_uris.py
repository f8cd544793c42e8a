"""Tests of local paths as URIs, and of URIs that are not local paths."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_uri_of_any_path_names_that_path(name):
    path = Path("/folder") / f"x{name}"
    assert local_path(path.as_uri()) == path


def test_plain_absolute_path_names_itself():
    assert local_path("/a b/c%20d#e?f") == Path("/a b/c%20d#e?f")
    assert local_path("file://localhost/a") == Path("/a")


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "relative/path",
        "gs://bucket/x",
        "file://host/x",
        "file:relative",
        "file://",
        "http://h/x",
    ],
)
def test_uri_that_is_not_on_this_machine_is_refused_with_its_value(uri):
    with pytest.raises(ContractError) as refused:
        local_path(uri)
    assert repr(uri) in str(refused.value)
