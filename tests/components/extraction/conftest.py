from functools import partial

import pytest

from testing.recommenders import SHOP
from tests.support.click_logs import (  # noqa: F401  fixtures
    clicks,
    criteo_rows,
    expected_rows,
    flags,
    read,
    released,
    run_main,
    run_step,
    write_lake,
    write_text,
)


@pytest.fixture
def recommender():
    """The default recommender, whose features include lists."""
    return SHOP


@pytest.fixture
def raw_table(raw_table):
    """Return rows of different times. Each row is its own request by default."""
    return partial(raw_table, request_rows=1)
