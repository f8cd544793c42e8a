"""Fixtures for the tests in tests/evergreen/rows."""

from tests.support.click_logs import (  # noqa: F401  fixtures
    clicks,
    criteo_rows,
    expected_rows,
    raw_table,
    read,
    recommender,
    run_step,
    write_lake,
    write_text,
)
