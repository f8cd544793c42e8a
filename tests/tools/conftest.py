"""Fixtures of this folder's tests."""

from tests.support.served_clients import (  # noqa: F401  fixtures
    read_log,
    score_rows,
    server,
    store,
)
