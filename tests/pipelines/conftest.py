"""Fixtures for the tests in this folder."""

from tests.support.small_pipelines import (  # noqa: F401  fixtures
    compile_with,
)
