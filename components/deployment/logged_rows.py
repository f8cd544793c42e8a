"""What a version was asked and what it answered, out of the lake or the monitor's archive, a bounded batch at a time.

Reads the raw rows that `monitoring.memory.archive` wrote, those that one model version scored, for a caller or in the
shadow. Judging the answers is `verify`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts.criteo import (
    CATEGORICAL,
    DENSE,
    MISSING_CATEGORY,
    MODEL_VERSION,
    REQUEST_ID,
    ROW,
    SCORE,
    SHADOW_SCORE,
    SHADOW_VERSION,
    feature_matrix,
)
from components.deployment.graph.parity import GoldenRows
from components.runtime.errors import ContractError
from components.storage.folder import FolderObjects
from components.storage.objects import Objects
from components.store.archived_rows import ArchivedFile, archived_files

BATCH_ROWS = 16_384
_COLUMNS = (*DENSE, *CATEGORICAL, REQUEST_ID, ROW)
_SCORES = ((MODEL_VERSION, SCORE), (SHADOW_VERSION, SHADOW_SCORE))
"""Who scored a row, and how; the second pair is there only where a row was scored in the shadow too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRows:
    """Rows of one file that the version scored; at least one."""

    name: str
    """Of the file, below the lake."""
    places: NDArray[np.int64]
    """[n] row in the file, from 0."""
    request_ids: list[str]
    """[n]."""
    rows: NDArray[np.int32]
    """[n] row of the request."""
    asked: GoldenRows
    """Raw features, and as what is expected of them the logged scores; NaN where a row was logged without one."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def first(self, num_rows: int) -> LoggedRows:
        """At most `num_rows` of the rows, the first ones."""
        kept = slice(num_rows)
        asked = GoldenRows(
            dense=self.asked.dense[kept], categorical=self.asked.categorical[kept], expected=self.asked.expected[kept]
        )
        return LoggedRows(
            name=self.name,
            places=self.places[kept],
            request_ids=self.request_ids[kept],
            rows=self.rows[kept],
            asked=asked,
        )


def read_logged_rows(lake: Path | Objects, version: int) -> Iterator[LoggedRows]:
    """The rows of `lake` that `version` scored, in the order of files and their rows.

    Scores that were served and those of the shadow come in batches of their own. Row groups whose statistics name
    other versions alone are not read; a file of a bucket is fetched whole.

    Raises:
        ContractError: a file is damaged, or lacks a column; names it.
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    for each in archived_files(FolderObjects(lake) if isinstance(lake, Path) else lake):
        with each.opened() as file:
            yield from _rows_of(file, each, version)


def _rows_of(file: Any, archived: ArchivedFile, version: int) -> Iterator[LoggedRows]:
    names, start = file.schema_arrow.names, 0
    # Rows that no model of ours served may come without the log's columns.
    pairs = [pair for pair in _SCORES if set(pair) <= set(names)]
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        place = start
        start += group.num_rows
        held = [pair for pair in pairs if _may_hold(group.column(names.index(pair[0])).statistics, group, version)]
        if not held:
            continue
        if lacking := [name for name in _COLUMNS if name not in names]:
            raise ContractError(f"{archived.uri} lacks columns {lacking}, expected those of a row that was archived")
        columns = [*_COLUMNS, *(name for pair in held for name in pair)]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[number], columns=columns):
            for scored_by, score in held:
                at = np.flatnonzero(batch.column(scored_by).fill_null(-1).to_numpy(zero_copy_only=False) == version)
                if len(at):
                    yield _logged(batch.take(pa.array(at)), archived.name, place + at, score)
            place += batch.num_rows


def _may_hold(statistics: Any, group: Any, version: int) -> bool:
    if statistics is None:
        return True
    if statistics.has_null_count and statistics.null_count == group.num_rows:
        return False
    return not statistics.has_min_max or bool(statistics.min <= version <= statistics.max)


def _logged(batch: Any, name: str, places: NDArray[np.int64], score: str) -> LoggedRows:
    return LoggedRows(
        name=name,
        places=places,
        request_ids=batch.column(REQUEST_ID).to_pylist(),
        rows=batch.column(ROW).to_numpy(zero_copy_only=False),
        asked=GoldenRows(
            dense=feature_matrix(batch, DENSE, "float32", np.nan),
            categorical=feature_matrix(batch, CATEGORICAL, "int64", MISSING_CATEGORY),
            expected=feature_matrix(batch, [score], "float32", np.nan).ravel(),
        ),
    )
