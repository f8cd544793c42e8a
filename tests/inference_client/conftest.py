"""Fixtures of this folder's tests."""

from tests.support.served_clients import (  # noqa: F401  fixtures
    make_rows,
    objects,
    publish,
    read_log,
    score_rows,
    served,
    server,
    sleeps,
    store,
)
