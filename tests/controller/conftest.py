"""Fixtures for the tests in this folder."""

from tests.support.served_models import (  # noqa: F401  fixtures
    client,
    deploy,
    deployment,
    exported,
    make_candidate,
    make_parts,
    open_objects,
    raw_rows,
    repository,
    settings,
    triton,
    unserved,
    with_scores,
)
