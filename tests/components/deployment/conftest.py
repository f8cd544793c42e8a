"""Fixtures of this folder's tests."""

from tests.support.served_models import (  # noqa: F401  fixtures
    client,
    make_candidate,
    make_parts,
    raw_rows,
    repository,
    settings,
    triton,
)
