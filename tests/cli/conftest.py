"""Fixtures for the tests in tests/cli."""

from tests.support.click_logs import (  # noqa: F401  fixtures
    clicks,
    criteo_rows,
    expected_rows,
    flags,
    raw_table,
    read,
    recommender,
    released,
    run_step,
    write_lake,
    write_text,
)
