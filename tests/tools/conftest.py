"""Fixtures for the tests in tests/tools."""

import pytest

from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from tests.support.served_clients import (  # noqa: F401  fixtures
    read_log,
    score_rows,
    server,
    store,
)


@pytest.fixture(scope="session")
def recommender():
    """Recommender of the programs in docs/guides/log-from-your-service.md."""
    return CRITEO_RECOMMENDER
