"""Writes a world's rows as a lake: day partitions in the raw schema, each file whole or absent.

WorldRows are drawn by `world`; extraction reads the lake.
"""

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from components.contracts import criteo, raw_rows
from components.contracts.features import MISSING_CATEGORY
from components.contracts.metrics import roc_auc
from components.runtime.errors import ContractError
from components.storage.locations import open_objects
from components.storage.objects import Objects
from components.store.archived_rows import arrow_schema
from inference_client.simulation.world import World, WorldRows

_SCHEMA = arrow_schema(criteo.RAW_TYPES)
ROWS_PER_FILE = 100_000
ROWS_PER_REQUEST = 64


@dataclass(frozen=True, kw_only=True)
class LakeReport:
    """What was written."""

    rows: int
    clicks: int
    days: list[str]
    bayes_auc: float | None
    """Best AUC that any model could reach on these rows; None unless both classes are present."""


def write_lake(world: World, uri: str, *, rows: int, days: int, last_day: date, seed: int) -> LakeReport:
    """Writes `rows` rows of `world`, spread evenly over `days` days that end with `last_day`, to a folder or a bucket.

    Each file is whole or absent; a day is complete when its last file is there.

    Raises:
        ContractError: There are fewer rows than days, no days, a day is there already, or `uri` is neither.
        TemporaryError, PermanentError: The lake cannot be written to.
    """
    if days < 1 or rows < days:
        raise ContractError(f"asked for {rows} rows over {days} days, expected at least one row a day")
    lake, random = open_objects(uri), np.random.default_rng([seed, 6])
    names = [str(last_day - timedelta(days=back)) for back in reversed(range(days))]
    if existing := [name for name in names if lake.list(f"{raw_rows.DAY_PARTITION.format(day=name)}/")]:
        raise ContractError(f"lake {uri} holds day {existing[0]} already, expected none of {names}")
    written: list[WorldRows] = []
    for number, name in enumerate(names):
        count = rows * (number + 1) // days - rows * number // days
        written += _write_day(world, lake, day=name, count=count, random=random)
    label = np.concatenate([drawn.label for drawn in written])
    bayes_auc = roc_auc(label, np.concatenate([drawn.probability for drawn in written]))
    return LakeReport(rows=rows, clicks=int(label.sum()), days=names, bayes_auc=bayes_auc)


def raw_table(rows: WorldRows, *, request_ids: list[str], row: NDArray[np.int32], times: NDArray[np.float64]) -> Any:
    """The rows as an Arrow table in the raw schema; `times` are seconds since the epoch. No model scored them."""
    columns: dict[str, Any] = {raw_rows.LABEL: pa.array(rows.label)}
    for i, name in enumerate(criteo.DENSE):
        values = rows.dense[:, i]
        columns[name] = pa.array(values, mask=np.isnan(values))
    for i, name in enumerate(criteo.CATEGORICAL):
        keys = rows.categorical[:, i]
        columns[name] = pa.array(keys, mask=keys == MISSING_CATEGORY)
    columns[raw_rows.REQUEST_ID] = pa.array(request_ids)
    columns[raw_rows.ROW] = pa.array(row)
    columns[raw_rows.EVENT_TIME] = pa.array((times * 1e6).astype(np.int64))
    columns |= dict.fromkeys(raw_rows.SERVED_BY, pa.nulls(len(row)))
    return pa.table([columns[field.name].cast(field.type) for field in _SCHEMA], schema=_SCHEMA)


def _write_day(world: World, lake: Objects, *, day: str, count: int, random: Generator) -> list[WorldRows]:
    midnight = datetime.combine(date.fromisoformat(day), time(tzinfo=timezone.utc)).timestamp()
    written = []
    for part, start in enumerate(range(0, count, ROWS_PER_FILE)):
        number = np.arange(start, min(start + ROWS_PER_FILE, count))
        drawn = world.draw(len(number), random)
        request = number // ROWS_PER_REQUEST
        table = raw_table(
            drawn,
            request_ids=[f"simulated-{world.seed}-{day}-{i}" for i in request.tolist()],
            row=(number % ROWS_PER_REQUEST).astype(np.int32),
            times=midnight + (request.astype(np.float64) * ROWS_PER_REQUEST + 0.5) * (86_400.0 / count),
        )
        content = BytesIO()
        pq.write_table(table, content)
        lake.write(f"{raw_rows.DAY_PARTITION.format(day=day)}/part-{part:05d}.parquet", content.getvalue())
        written.append(drawn)
    return written
