"""Brings a user's Criteo files into the lake: `python -m components.extraction.ingest`.

Criteo's rows have no times, so they get some: spread evenly, in file order, over whole days. The earlier share becomes
the lake, the later one a Parquet file to replay as traffic. Rows are spooled to disk first, because their spacing
needs their number, which malformed rows make known only at the end. Everything appears at the end or not at all;
ingesting the same files again replaces what they left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """What becomes of the rows.

    Raises:
        ContractError: a value is out of its range.
    """

    last_day: date
    """UTC day of the last row, replayed rows included."""
    days: int
    """Whole days, ending with `last_day`, over which the rows spread."""
    max_rows: int | None
    """Rows taken from the beginning; None = all."""
    lake_fraction: float
    """Share of the rows, the earlier ones, that go to the lake; in (0, 1]."""
    max_malformed_fraction: float
    """Share of a file's rows that may be malformed and set aside."""

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        from components.contracts.errors import ContractError

        if self.days < 1:
            raise ContractError(f"days is {self.days}, expected at least 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise ContractError(f"max_rows is {self.max_rows}, expected at least 1")
        if not 0 < self.lake_fraction <= 1:
            raise ContractError(f"lake_fraction is {self.lake_fraction}, expected more than 0 and at most 1")


def ingest(files: list[Path], lake: Path, replay: Path, settings: IngestSettings) -> dict[str, int]:
    """Ingests the files in order; returns counts: rows, lake_rows, replay_rows, set_aside, clicks.

    Rows set aside are kept in `<replay>.set_aside.jsonl`, which exists only if there are any.

    Raises:
        ContractError: a file is of no known form, damaged or too malformed, or there is no row at all.
    """
    from components.contracts.errors import ContractError
    from components.extraction.set_aside import SetAside

    tag = _tag(files)
    with _workshop(lake) as aside, _workshop(replay.parent) as replay_aside:
        with SetAside(aside / "set_aside.jsonl", max_fraction=settings.max_malformed_fraction) as set_aside:
            total, clicks = _spool(files, aside / "spool.arrow", set_aside, settings.max_rows)
            set_aside.judge()
        if total == 0:
            raise ContractError(f"{files[0].parent} holds no row, expected Criteo rows")
        lake_rows = max(1, int(total * settings.lake_fraction))
        _lay_out(aside / "spool.arrow", total, lake_rows, aside / "lake", replay_aside, tag=tag, settings=settings)
        _publish_replay(replay_aside, replay, aside / "set_aside.jsonl")
        _publish_lake(aside / "lake", lake, tag=tag)
    return {
        "rows": total,
        "lake_rows": lake_rows,
        "replay_rows": total - lake_rows,
        "set_aside": set_aside.num_rows,
        "clicks": clicks,
    }
