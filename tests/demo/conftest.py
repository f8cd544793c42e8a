"""Fixtures for the tests in this folder."""

from tests.support.served_clients import (  # noqa: F401  fixtures
    make_rows,
    objects,
    publish,
    read_log,
    score_rows,
    served,
    server,
    store,
)
from tests.support.small_pipelines import (  # noqa: F401  fixtures
    run_tiny,
)
