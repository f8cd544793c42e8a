"""What an archive must hold after its requests matured, and what it does hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from components.contracts.records import PredictionBatch

Rows = dict[tuple[str, int], tuple[int, float]]
"""(request, row) to (label, score)."""


def expected_rows(batches: Iterable[PredictionBatch], clicked: Collection[tuple[str, int]] = ()) -> Rows:
    return {
        (batch.request_id, i): (int((batch.request_id, i) in clicked), float(batch.scores[i]))
        for batch in batches
        for i in range(len(batch))
    }


def archived_rows(rows: Collection[Mapping[str, Any]]) -> Rows:
    found = {(row["request_id"], row["row"]): (row["label"], row["score"]) for row in rows}
    assert len(found) == len(rows), "a row is archived twice"
    return found
