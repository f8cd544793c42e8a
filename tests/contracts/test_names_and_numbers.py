"""Categories and URIs; and every doctest of the contracts runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import components.contracts
from components.contracts import criteo
from components.runtime.errors import ContractError
from components.storage.uris import local_path


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(components.contracts.__path__)])
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"components.contracts.{name}")
    assert doctest.testmod(module).failed == 0


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_category_is_the_value_of_its_hex_digits(value, upper):
    text = f"{value:08x}"
    assert criteo.parse_category(text.upper() if upper else text) == value


def test_empty_category_is_missing():
    assert criteo.parse_category("") == criteo.MISSING_CATEGORY == -1


@pytest.mark.parametrize("text", ["xyz", "0x1f", "1_0", "+1", "-1", " 1", "1 ", "123456789", "\u0661", "1\n", "nan"])
def test_what_is_not_hex_is_refused_with_its_value(text):
    with pytest.raises(ContractError, match="is not 1 to 8 hex digits") as refused:
        criteo.parse_category(text)
    assert repr(text) in str(refused.value)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_uri_of_any_path_names_that_path(name):
    path = Path("/folder") / f"x{name}"
    assert local_path(path.as_uri()) == path


def test_plain_absolute_path_names_itself():
    assert local_path("/a b/c%20d#e?f") == Path("/a b/c%20d#e?f")
    assert local_path("file://localhost/a") == Path("/a")


@pytest.mark.parametrize(
    "uri", ["", "relative/path", "gs://bucket/x", "file://host/x", "file:relative", "file://", "http://h/x"]
)
def test_uri_that_is_not_on_this_machine_is_refused_with_its_value(uri):
    with pytest.raises(ContractError) as refused:
        local_path(uri)
    assert repr(uri) in str(refused.value)
