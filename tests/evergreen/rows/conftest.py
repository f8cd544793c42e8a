"""Fixtures of this folder's tests."""

from tests.support.click_logs import (  # noqa: F401  fixtures
    clicks,
    criteo_rows,
    raw_table,
    read,
    run_step,
    truth,
    write_lake,
    write_text,
)
