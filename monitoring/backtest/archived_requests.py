"""The requests of an archive or a lake as the live judge saw them: matured, in order of event time, day by day.

Reads the files that `monitoring.memory.archive` wrote, in a folder or a bucket; rows that no model of ours served are
passed over. Labels are those of the click window, as archived: late outcomes changed no live decision and change none
here. Memory holds one day. Judging is left to `monitoring.backtest.judging`.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.contracts import raw_rows
from components.contracts.features import MISSING_CATEGORY, Features
from components.contracts.records import PredictionBatch
from components.runtime.errors import ContractError
from components.storage.objects import Objects
from components.store.archived_rows import ArchivedFile, archived_files, arrow_schema
from components.store.promotion_journal import moment_of
from monitoring.rows import MaturedRequest

_NEEDED = (
    raw_rows.LABEL,
    raw_rows.REQUEST_ID,
    raw_rows.ROW,
    raw_rows.EVENT_TIME,
    raw_rows.MODEL_VERSION,
    raw_rows.SCORE,
)


class ArchivedRequest(NamedTuple):
    """One request of the archive."""

    matured: MaturedRequest
    """`time` in seconds, of whole microseconds."""
    is_canary: bool
    features: PredictionBatch | None
    """With the features, where the caller reads them."""


class Span(NamedTuple):
    """Event times to read, seconds since the epoch; None = no end."""

    start: float | None = None
    """Inclusive."""
    end: float | None = None
    """Exclusive."""


WHOLE = Span()


def parse_time(text: str) -> float:
    """Seconds since the epoch."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return moment_of(text).timestamp()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no ISO 8601 time and no seconds since the epoch") from error


def read_requests(
    archive: Objects, span: Span = WHOLE, *, features: Features | None = None, user: str | None = None
) -> Iterator[ArchivedRequest]:
    """Every served request in `span`, by (time, request id).

    `features` are read too, where drift is to be judged; `user` is the column of the users, which the live judge knew,
    None = the recommender names none.

    Raises:
        ContractError: there is no such file, or one is damaged, lacks a column or has one of another type; names it.
    """
    for _, table in read_days(archive, span, features=features, user=user):
        yield from _requests(table, features, user)


def read_days(
    archive: Objects,
    span: Span = WHOLE,
    *,
    features: Features | None = None,
    user: str | None = None,
    newest_first: bool = False,
) -> Iterator[tuple[str, pa.Table]]:
    """Each day that `span` touches, with its served rows by (time, request id, row); else as `read_requests`."""
    by_day: dict[str, list[ArchivedFile]] = {}
    for file in archived_files(archive):
        by_day.setdefault(file.day, []).append(file)
    if not by_day:
        raise ContractError(f"{archive.uri} has no day=YYYY-MM-DD/*.parquet, expected a monitor's archive or a lake")
    for day in sorted(by_day, reverse=newest_first):
        if _touches(day, span):
            yield day, _served_rows([_raw_columns(file, features, user) for file in by_day[day]], span)


def _touches(day: str, span: Span) -> bool:
    start = np.datetime64(day, "s").astype(np.int64)
    after_start = span.start is None or span.start < start + 86_400
    return bool(after_start and (span.end is None or span.end > start))


def _raw_columns(archived: ArchivedFile, features: Features | None, user: str | None) -> pa.Table:
    """What is needed of one file, in the contract's types."""
    if features is None and user is not None:
        features = Features(numeric=(), categorical=(user,))
    wanted = features.names if features else ()
    types = {**(raw_rows.raw_types(features) if features else raw_rows.ROW_TYPES), **raw_rows.CANARY_TYPES}
    with archived.opened() as file:
        found = file.schema_arrow.names
        if missing := [column for column in _NEEDED if column not in found]:
            raise ContractError(f"{archived.uri} lacks column {missing[0]}, expected the raw columns")
        columns = [*_NEEDED, *(column for column in (*wanted, raw_rows.CANARY) if column in found)]
        try:
            schema = arrow_schema({name: types[name] for name in columns})
            table = file.read(columns=columns).select(columns)
            # A feature that the recommender got later is missing in the rows before.
            for name in wanted:
                if name not in found:
                    schema = schema.append(arrow_schema({name: types[name]}).field(0))
                    table = table.append_column(schema.field(name), pa.nulls(len(table), schema.field(name).type))
            # Rows that a person's files brought to a lake may hold words; nobody served them.
            return table.filter(pc.is_valid(table[raw_rows.MODEL_VERSION])).cast(schema)
        except ValueError as error:
            raise ContractError(f"{archived.uri} has other columns than a monitor's archive: {error}") from error


def _served_rows(tables: Sequence[pa.Table], span: Span) -> pa.Table:
    """The rows of a day that a model of ours served in `span`, in order."""
    table = pa.concat_tables(tables, promote_options="default")
    served = pc.and_(pc.is_valid(table[raw_rows.SCORE]), pc.is_valid(table[raw_rows.MODEL_VERSION]))
    micros = pc.cast(table[raw_rows.EVENT_TIME], pa.int64())
    for bound, keeps in ((span.start, pc.greater_equal), (span.end, pc.less)):
        if bound is not None:
            served = pc.and_(served, keeps(micros, raw_rows.microseconds(bound)))
    order = [(raw_rows.EVENT_TIME, "ascending"), (raw_rows.REQUEST_ID, "ascending"), (raw_rows.ROW, "ascending")]
    return table.filter(served).sort_by(order).combine_chunks()


def _requests(table: pa.Table, features: Features | None, user: str | None) -> Iterator[ArchivedRequest]:
    if not len(table):
        return
    times = table[raw_rows.EVENT_TIME].cast(pa.int64()).to_numpy()
    names = np.asarray(table[raw_rows.REQUEST_ID].to_pylist(), object)
    starts = np.flatnonzero(np.r_[True, (times[1:] != times[:-1]) | (names[1:] != names[:-1])])
    ends = np.r_[starts[1:], len(table)]
    labels = table[raw_rows.LABEL].to_numpy().astype(np.uint8)
    scores = table[raw_rows.SCORE].to_numpy().astype(np.float32)
    versions = table[raw_rows.MODEL_VERSION].to_numpy()
    canary = table[raw_rows.CANARY].fill_null(False).to_numpy() if raw_rows.CANARY in table.column_names else None
    users = None if user is None else table[user].fill_null(MISSING_CATEGORY).to_numpy()
    dense = categorical = None
    if features is not None:
        batch = table.to_batches()[0]
        dense = raw_rows.feature_matrix(batch, features.numeric, "float32", missing=np.nan)
        categorical = raw_rows.category_matrix(batch, features)
    for start, end in zip(starts.tolist(), ends.tolist()):
        rows = slice(start, end)
        matured = MaturedRequest(
            str(names[start]),
            float(times[start]) / 1e6,
            int(versions[start]),
            labels[rows],
            scores[rows],
            users=None if users is None else users[rows],
        )
        is_canary = canary is not None and bool(canary[start])
        request = None
        if dense is not None and categorical is not None:
            request = PredictionBatch(
                request_id=matured.request_id,
                time=matured.time,
                model_version=matured.model_version,
                dense=dense[rows],
                categorical=categorical[rows],
                scores=scores[rows],
                canary=is_canary,
            )
        yield ArchivedRequest(matured, is_canary, request)
