"""Fixtures for the tests in tests/demo."""

import pytest

from evergreen.contracts.criteo import CRITEO_RECOMMENDER
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


@pytest.fixture(scope="session")
def recommender():
    """The recommender of the simulator."""
    return CRITEO_RECOMMENDER
