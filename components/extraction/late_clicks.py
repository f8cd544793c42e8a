"""Clicks that arrived after their rows were archived: the lake's `outcomes/day=*/`, joined to the rows when read.

The monitor writes a row once, with the label that it had when its window closed; what comes later goes into files of
its own (`contracts.raw_rows.OUTCOME_TYPES`). A row with a click among them has label 1 if the click happened within the
attribution window that the file names, however late it was reported: a label means the same here as in the monitor. A
click after the window, other events, outcomes of rows that are not read, and repetitions change nothing. Without such a
folder nothing is read and no row is changed.
"""

import hashlib
import logging
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.contracts.raw_rows import (
    EVENT,
    EVENT_TIME,
    LABEL,
    OUTCOME_TIME,
    OUTCOME_TYPES,
    REQUEST_ID,
    ROW,
    WINDOW_SECONDS,
)
from components.contracts.records import CLICK
from components.extraction.lake_files import LakeFiles
from components.extraction.raw_schema import open_parquet
from components.runtime.durable import sha256_file
from components.runtime.errors import ContractError
from components.storage.objects import ObjectInfo
from components.store.archived_rows import arrow_schema, reading_parquet

logger = logging.getLogger(__name__)

_SCHEMA = arrow_schema(OUTCOME_TYPES)
_KEY = [REQUEST_ID, ROW]
_COUNTS_FROM = "counts_from"
"""Event time of the oldest row that a click is in time for: its own time less the window, microseconds since the epoch
as float64, which is exact to the year 2255."""
_MICROS = pa.timestamp("us", tz="UTC")
CLOCKS = timedelta(days=1)
"""Two machines' clocks may put a click on the day before its prediction's."""


@dataclass
class LateClicks:
    """The late clicks of one lake, read as far back as the rows that they are joined to."""

    files: LakeFiles
    num_joined: int = 0
    """Rows so far whose label a late click turned from 0 to 1."""
    _hashes: dict[str, str] = field(default_factory=dict)
    _clicks: dict[date, Any] = field(default_factory=dict)
    """By partition: each clicked (request, row) once, with the least `_COUNTS_FROM` of its clicks."""

    def join(self, table: Any, day: date) -> Any:
        """Raw rows of the UTC day `day` with label 1 where a late click says so; otherwise as they are.

        Raises:
            ContractError: a file of outcomes is damaged, lacks a column, or lies in a partition that names no day.
        """
        # A click whose prediction the monitor had forgotten by then lies on its own day, any number of days later.
        late = [clicks for of_day, clicks in self._since(day - CLOCKS).items() if of_day >= day - CLOCKS]
        if not late or not table.num_rows:
            return table
        requests = table.column(REQUEST_ID)
        clicks = pa.concat_tables(late)
        clicks = clicks.filter(pc.is_in(clicks.column(REQUEST_ID), value_set=requests.combine_chunks()))
        if not clicks.num_rows:
            return table
        keys = table.select(_KEY).append_column("position", pa.array(np.arange(table.num_rows)))
        keys = keys.filter(pc.is_in(requests, value_set=clicks.column(REQUEST_ID).combine_chunks()))
        found = keys.join(clicks, _KEY, join_type="inner")
        clicked = found.column("position").to_numpy()
        times = table.column(EVENT_TIME).cast(_MICROS).cast(pa.int64()).to_numpy()
        labels = table.column(LABEL).to_numpy().copy()
        counts = (times[clicked] >= found.column(_COUNTS_FROM).to_numpy()) & (labels[clicked] == 0)
        positions = np.unique(clicked[counts])  # a row may have clicks in several partitions
        self.num_joined += len(positions)
        labels[positions] = 1
        at = table.schema.get_field_index(LABEL)
        return table.set_column(at, table.schema.field(LABEL), pa.array(labels))

    def digest(self) -> str | None:
        """SHA-256 over names and bytes of the files looked at: the version of the outcomes; None if there was none."""
        if not self._hashes:
            return None
        lines = "".join(f"{name}\0{content}\n" for name, content in sorted(self._hashes.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def _since(self, first: date) -> dict[date, Any]:
        """All partitions read so far, after reading those of `first` and later days."""
        wanted = [day for day in self.files.outcomes if day >= first and day not in self._clicks]
        self.files.paths(file for day in wanted for file in self.files.outcomes[day])  # all at once
        for day in wanted:
            files = self.files.outcomes[day]
            clicks = _with_first_time(pa.concat_tables([_SCHEMA.empty_table(), *map(self._read_clicks, files)]))
            earliest = clicks.group_by(_KEY).aggregate([(_COUNTS_FROM, "min")]).select([*_KEY, f"{_COUNTS_FROM}_min"])
            self._clicks[day] = earliest.rename_columns([*_KEY, _COUNTS_FROM])
            logger.info("late clicks on rows of %s: %d in %d files", day, self._clicks[day].num_rows, len(files))
        return self._clicks

    def _read_clicks(self, info: ObjectInfo) -> Any:
        (path,) = self.files.paths([info])
        file = open_parquet(path)
        if missing := [name for name in _SCHEMA.names if name not in file.schema_arrow.names]:
            raise ContractError(f"{path} lacks the columns {missing}, expected late outcomes")
        self._hashes[info.name] = sha256_file(path)
        with reading_parquet(path):
            table = file.read(columns=_SCHEMA.names).select(_SCHEMA.names).cast(_SCHEMA)
        return table.filter(pc.equal(table.column(EVENT), CLICK)).drop_null()


def _with_first_time(clicks: Any) -> Any:
    windows = np.round(clicks.column(WINDOW_SECONDS).to_numpy() * 1e6)
    times = clicks.column(OUTCOME_TIME).cast(pa.int64()).to_numpy()
    return clicks.select(_KEY).append_column(_COUNTS_FROM, pa.array(times - windows))
