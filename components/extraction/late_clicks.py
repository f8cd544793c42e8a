"""Late clicks: clicks that arrived after their rows were archived.

Late clicks (`evergreen.contracts.raw_rows.OUTCOME_TYPES`) are joined to the rows when the rows are
read. A lake has late clicks in `outcomes/day=*/`. A late click sets the label of its row to 1 if
the click happened within the attribution window. The file of late clicks states the length of this
window. The time at which the click was reported does not matter. Labels therefore mean the same as
in the monitor. The label does not change for a click after the window, for other events, for
outcomes of other rows, or for repetitions.
"""

import hashlib
import logging
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.extraction.copies import KEY
from components.extraction.lake_files import LakeFiles
from evergreen.contracts.raw_rows import (
    EVENT,
    EVENT_TIME,
    LABEL,
    OUTCOME_TIME,
    OUTCOME_TYPES,
    REQUEST_ID,
    WINDOW_SECONDS,
)
from evergreen.contracts.records import CLICK
from evergreen.rows.archived_rows import arrow_schema, bounded_batches, reading_parquet
from evergreen.rows.raw_schema import BATCH_ROWS, TIME_TYPE, open_parquet
from evergreen.rows.unfit import read_each
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError

logger = logging.getLogger(__name__)

_SCHEMA = arrow_schema(OUTCOME_TYPES)
_COUNTS_FROM = "counts_from"
"""Name of a column. A click counts for a row if the row's event time is at least this value. The
value is the click's time minus the attribution window. The unit is microseconds since the epoch, as
float64, which is exact to the year 2255."""
_NO_CLICKS = (
    _SCHEMA.empty_table().select(KEY).append_column(_COUNTS_FROM, pa.array([], pa.float64()))
)
_CLOCKS = timedelta(days=1)
"""Tolerance for clock skew. With skewed clocks, a click can be stored under the day before its
prediction's day."""


@dataclass
class LateClicks:
    """The late clicks of one lake.

    Clicks on older rows than the requested first day are not read.
    """

    files: LakeFiles
    _hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file that was read, by name."""
    _clicks: dict[date, Any] = field(default_factory=dict)
    """Clicks by partition. Each clicked (request, row) occurs once, with the smallest
    `_COUNTS_FROM` of its clicks."""

    def copy(self) -> "LateClicks":
        """Return a copy with the same clicks and an empty record of files."""
        return LateClicks(self.files, _clicks=dict(self._clicks))

    def join(self, table: Any, day: date) -> tuple[Any, int]:
        """Set the label to 1 in rows that have a late click.

        Args:
            table: Rows in the raw schema.
            day: UTC day of the rows.

        Returns:
            The rows, and the number of labels that changed from 0 to 1.

        Raises:
            UnfitFiles: files of outcomes are corrupt, or lack a column.
        """
        # If the monitor no longer had the prediction, the click is stored under the click's own
        # day. The click's day can be any number of days after the day of the prediction.
        self.read_for_rows(day)
        late = [clicks for of_day, clicks in self._clicks.items() if of_day >= day - _CLOCKS]
        if not late or not table.num_rows:
            return table, 0
        requests = table.column(REQUEST_ID)
        clicks = pa.concat_tables(late)
        clicks = clicks.filter(
            pc.is_in(clicks.column(REQUEST_ID), value_set=requests.combine_chunks())
        )
        if not clicks.num_rows:
            return table, 0
        keys = table.select(KEY).append_column("position", pa.array(np.arange(table.num_rows)))
        keys = keys.filter(pc.is_in(requests, value_set=clicks.column(REQUEST_ID).combine_chunks()))
        found = keys.join(clicks, KEY, join_type="inner")
        clicked = found.column("position").to_numpy()
        times = table.column(EVENT_TIME).cast(TIME_TYPE).cast(pa.int64()).to_numpy()
        labels = table.column(LABEL).to_numpy().copy()
        counts = (times[clicked] >= found.column(_COUNTS_FROM).to_numpy()) & (labels[clicked] == 0)
        positions = np.unique(clicked[counts])  # a row may have clicks in several partitions
        labels[positions] = 1
        at = table.schema.get_field_index(LABEL)
        changed = table.set_column(at, table.schema.field(LABEL), pa.array(labels))
        return changed, len(positions)

    @property
    def num_files(self) -> int:
        """Number of files that were read so far."""
        return len(self._hashes)

    def add_files_of(self, other: "LateClicks") -> None:
        """Add the files that another instance has read."""
        self._hashes.update(other._hashes)

    def digest(self) -> str | None:
        """Hash the names and bytes of all files that were read. Return None if no file was read."""
        if not self._hashes:
            return None
        lines = "".join(f"{name}\0{content}\n" for name, content in sorted(self._hashes.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def read_for_rows(self, oldest: date) -> None:
        """Read the clicks on rows of the day `oldest` and of later days.

        Days that were read before are skipped.

        Raises:
            UnfitFiles: files of outcomes are corrupt, or lack a column.
        """
        outcomes = {
            day: files
            for day, files in self.files.outcomes.items()
            if day >= oldest - _CLOCKS and day not in self._clicks
        }
        files = [file for of_day in outcomes.values() for file in of_day]
        paths = dict(zip(files, self.files.paths(files)))  # fetches all files at once
        for day, of_day in outcomes.items():
            read = read_each([paths[file] for file in of_day], _read_clicks)
            clicks = pa.concat_tables([_NO_CLICKS, *read])
            first = clicks.group_by(KEY).aggregate([(_COUNTS_FROM, "min")])
            names = [*KEY, f"{_COUNTS_FROM}_min"]
            self._clicks[day] = first.select(names).rename_columns(_NO_CLICKS.schema.names)
            self._hashes.update({file.name: sha256_file(paths[file]) for file in of_day})
            logger.info(
                "late clicks on rows of %s: %d in %d files",
                day,
                self._clicks[day].num_rows,
                len(of_day),
            )


def _read_clicks(path: Path) -> Any:
    """Return key and `_COUNTS_FROM` of each click in a file of outcomes."""
    file = open_parquet(path)
    if missing := [name for name in _SCHEMA.names if name not in file.schema_arrow.names]:
        raise ContractError(
            f"{path} lacks the columns {missing}, expected a file of late outcomes with "
            f"the columns {_SCHEMA.names}"
        )
    tables = [_SCHEMA.empty_table()]
    with reading_parquet(path):
        for group in range(file.num_row_groups):
            for batch in bounded_batches(path, _SCHEMA.names, group=group, batch_rows=BATCH_ROWS):
                tables.append(pa.Table.from_batches([batch]).select(_SCHEMA.names).cast(_SCHEMA))
    table = pa.concat_tables(tables)
    clicks = table.filter(pc.equal(table.column(EVENT), CLICK)).drop_null()
    windows = np.round(clicks.column(WINDOW_SECONDS).to_numpy() * 1e6)
    times = clicks.column(OUTCOME_TIME).cast(pa.int64()).to_numpy()
    return clicks.select(KEY).append_column(_COUNTS_FROM, pa.array(times - windows))
