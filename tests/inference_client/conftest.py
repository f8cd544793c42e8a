"""Fixtures for the tests in tests/inference_client."""

from tests.support.served_clients import (  # noqa: F401  fixtures
    make_rows,
    objects,
    publish,
    read_log,
    recommender,
    score_rows,
    served,
    server,
    sleeps,
    store,
)
