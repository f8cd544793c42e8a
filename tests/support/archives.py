"""Reference archives: the rows and outcomes that an archive must contain.

A reference archive contains only matured requests. `archived_rows` reads the monitor's archive for
the comparison.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.contracts import raw_rows
from evergreen.contracts.records import PredictionBatch

Rows = dict[tuple[str, int], tuple[int, float]]
"""Maps (request, row) to (label, score)."""


def expected_rows(
    batches: Iterable[PredictionBatch], clicked: Collection[tuple[str, int]] = ()
) -> Rows:
    return {
        (batch.request_id, i): (int((batch.request_id, i) in clicked), float(batch.scores[i]))
        for batch in batches
        for i in range(len(batch))
    }


def archived_rows(rows: Collection[Mapping[str, Any]]) -> Rows:
    found = {(row["request_id"], row["row"]): (row["label"], row["score"]) for row in rows}
    assert len(found) == len(rows), "a row is archived twice"
    return found


def values_of(row: Mapping[str, Any], features: Features) -> tuple[list[float], list[int]]:
    """Return the values of an archived row in the order of the served tensors."""
    dense = [np.nan if row[name] is None else row[name] for name in features.numeric]
    categorical = [
        MISSING_CATEGORY if row[name] is None else row[name] for name in features.categorical
    ]
    for name, (start, stop, _) in zip(features.lists, features.positions.lists):
        elements = row[name] or []
        categorical += elements + [MISSING_CATEGORY] * (stop - start - len(elements))
    return dense, categorical


def outcome_files(bench: Any) -> dict[str, list[tuple[str, int, str]]]:
    """Map each day folder of the archive to its outcomes (request, row, event), in order."""
    found: dict[str, list[tuple[str, int, str]]] = {}
    for path in sorted(bench.settings.archive.glob("outcomes/day=*/part-*.parquet")):
        for row in pq.ParquetFile(path).read().to_pylist():
            found.setdefault(path.parent.name, []).append(
                (row["request_id"], row["row"], row["event"])
            )
    return found


def outcomes(bench: Any) -> list[tuple[str, int, str]]:
    return sorted(each for rows in outcome_files(bench).values() for each in rows)


def day_folders(root: Path, table: pa.Table) -> Iterator[tuple[pa.Table, Path]]:
    """Yield each UTC day's rows and the day's new folder below `root`, in order of the days."""
    days = [str(time.date()) for time in table[raw_rows.EVENT_TIME].to_pylist()]
    for day in sorted(set(days)):
        folder = root / raw_rows.DAY_PARTITION.format(day=day)
        folder.mkdir(parents=True, exist_ok=True)
        yield table.filter(pa.array([each == day for each in days])), folder
