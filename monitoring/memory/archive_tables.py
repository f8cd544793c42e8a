"""What is archived, as Arrow tables of `contracts.raw_rows`: matured requests, and late outcomes.

Matured requests have the raw schema and the optional groups of columns that any of the rows needs. A ranked list's
shadow scores stay in the log: the arm that served the list chose its rows, and on rows that one model chose, another
one looks better than it is (ten of 200 by an equal model: by 0.04 of AUC).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts import raw_rows
from components.contracts.features import MISSING_CATEGORY
from components.contracts.raw_rows import microseconds
from components.contracts.record_format import RecordFormat
from components.contracts.records import PredictionBatch
from components.store.archived_rows import arrow_schema
from monitoring.rows import ArchiveOutcome, ArchiveRow

OUTCOME_SCHEMA = arrow_schema(raw_rows.OUTCOME_TYPES)
_OPTIONAL: dict[str, Callable[[PredictionBatch], Any]] = {
    raw_rows.SHADOW_VERSION: lambda batch: batch.shadow_version,
    raw_rows.SHADOW_SCORE: lambda batch: batch.shadow_scores,
    raw_rows.CANARY: lambda batch: batch.canary,
}
"""Where the optional columns come from."""
_DAY_SECONDS = 86_400


def build_row_table(rows: Sequence[ArchiveRow], form: RecordFormat) -> pa.Table:
    """The rows of these requests in the raw schema, in the order given; missing features are null.

    With each optional group of `contracts.raw_rows` that any of the rows has, null in the others.
    """
    features = form.features
    batches = [_without_chosen_shadow(batch) for batch in _predictions(rows, form)]
    sizes = [len(batch) for batch in batches]
    request = np.repeat(np.arange(len(batches)), sizes)
    times = np.array([microseconds(batch.time) for batch in batches], np.int64)
    dense = np.concatenate([batch.dense for batch in batches])
    categorical = np.concatenate([batch.categorical for batch in batches])
    columns: dict[str, Any] = {
        raw_rows.LABEL: np.concatenate([row.labels for row in rows]).astype(np.int32),
        raw_rows.REQUEST_ID: pa.array([batch.request_id for batch in batches]).take(pa.array(request)),
        raw_rows.ROW: np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        raw_rows.EVENT_TIME: times[request],
        raw_rows.MODEL_VERSION: np.array([batch.model_version for batch in batches], np.int32)[request],
        raw_rows.SCORE: np.concatenate([batch.scores for batch in batches]),
        raw_rows.POSITION: _column([batch.positions for batch in batches], batches, pa.int32()),
        raw_rows.PROPENSITY: _column([batch.propensities for batch in batches], batches, pa.float64()),
    }
    for i, name in enumerate(features.numeric):
        columns[name] = pa.array(np.ascontiguousarray(dense[:, i]), mask=np.isnan(dense[:, i]))
    for i, name in enumerate(features.categorical):
        values = np.ascontiguousarray(categorical[:, i])
        columns[name] = pa.array(values, mask=values == MISSING_CATEGORY)
    for name, (start, stop, _) in zip(features.lists, features.places.lists):
        columns[name] = _list_column(categorical[:, start:stop])
    schema = arrow_schema(raw_rows.raw_types(features))
    for types in (raw_rows.SHADOW_TYPES, raw_rows.CANARY_TYPES):
        group = {field: [_OPTIONAL[field.name](batch) for batch in batches] for field in arrow_schema(types)}
        if any(given is not None and given is not False for each in group.values() for given in each):
            for field, each in group.items():
                schema, columns[field.name] = schema.append(field), _column(each, batches, field.type)
    arrays = [columns[field.name] for field in schema]
    plain = [each if isinstance(each, pa.Array) else pa.array(each) for each in arrays]
    return pa.table([each.cast(field.type) for each, field in zip(plain, schema)], schema=schema)


def _list_column(places: NDArray[np.int64]) -> pa.Array:
    """The elements of each row, a list<int64> of [n, places]; null where there is none."""
    held = places != MISSING_CATEGORY
    offsets = np.concatenate([[0], np.cumsum(held.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, places[held], mask=pa.array(~held.any(axis=1)))


def _column(values: Sequence[Any], batches: Sequence[PredictionBatch], kind: pa.DataType) -> pa.Array:
    """One value per row: each batch's array [n] or one value for all of its rows, nulls where it has neither."""
    return pa.concat_arrays(
        [
            pa.nulls(len(batch), kind) if value is None else pa.array(np.broadcast_to(value, len(batch))).cast(kind)
            for value, batch in zip(values, batches)
        ]
    )


def _without_chosen_shadow(batch: PredictionBatch) -> PredictionBatch:
    if batch.positions is None or batch.shadow_scores is None:
        return batch
    return replace(batch, shadow_version=None, shadow_scores=None)


def _predictions(rows: Sequence[ArchiveRow], form: RecordFormat) -> Iterator[PredictionBatch]:
    for row in rows:
        batch = form.decode(row.payload)
        assert isinstance(batch, PredictionBatch)
        yield batch


def build_outcome_table(outcomes: Sequence[ArchiveOutcome], windows: Mapping[str, float]) -> pa.Table:
    """These outcomes in the schema of the contract, in the order given.

    There is at least one; `windows`, those of each event in seconds, 0 where absent, are written beside its outcomes.
    """
    columns = {
        raw_rows.REQUEST_ID: [each.outcome.request_id for each in outcomes],
        raw_rows.ROW: [each.outcome.row for each in outcomes],
        raw_rows.EVENT: [each.outcome.event for each in outcomes],
        raw_rows.OUTCOME_TIME: np.array([microseconds(each.outcome.time) for each in outcomes], np.int64),
        raw_rows.STORED_AT: np.array([microseconds(each.stored_at) for each in outcomes], np.int64),
        raw_rows.WINDOW_SECONDS: np.array([windows.get(each.outcome.event, 0.0) for each in outcomes], np.float64),
    }
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in OUTCOME_SCHEMA], schema=OUTCOME_SCHEMA)


def utc_day(time: float) -> str:
    """The UTC day (YYYY-MM-DD) of the time that is written, which has whole microseconds.

    >>> utc_day(86_399.9), utc_day(86_399.9999999)
    ('1970-01-01', '1970-01-02')
    """
    return _day_name(microseconds(time) // (_DAY_SECONDS * 1_000_000))


@lru_cache(maxsize=1000)
def _day_name(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_SECONDS, timezone.utc).strftime("%Y-%m-%d")
