"""Fixtures for the tests in tests/cli."""

from tests.support.click_logs import (  # noqa: F401  fixtures
    clicks,
    criteo_rows,
    flags,
    raw_table,
    read,
    recommender,
    released,
    run_step,
    truth,
    write_lake,
    write_text,
)
