"""Fixtures for the tests in tests/pipelines."""

from tests.support.small_pipelines import (  # noqa: F401  fixtures
    compile_with,
)
