"""Fixtures of this folder's tests."""

from tests.support.small_pipelines import (  # noqa: F401  fixtures
    compile_with,
)
