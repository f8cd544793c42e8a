"""Fixtures for the tests in tests/evergreen/serving."""

from tests.support.served_models import (  # noqa: F401  fixtures
    client,
    deploy,
    deployment,
    exported,
    make_candidate,
    make_parts,
    make_version,
    open_bucket,
    open_objects,
    put_live,
    raw_rows,
    repository,
    settings,
    triton,
    unserved,
    with_scores,
)
