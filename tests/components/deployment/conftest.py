"""Fixtures for the tests in tests/components/deployment."""

from tests.support.served_models import (  # noqa: F401  fixtures
    client,
    make_candidate,
    make_parts,
    raw_rows,
    repository,
    settings,
    triton,
)
