"""Fixtures for the tests in this folder."""

from tests.support.served_clients import (  # noqa: F401  fixtures
    read_log,
    score_rows,
    server,
    store,
)
