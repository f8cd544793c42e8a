"""Rows that stable and canary both scored, with what came of them: the pairs that a canary is judged by.

Reads matured rows where the monitor leaves them, the archive and the lake (`day=YYYY-MM-DD/*.parquet` of
`contracts.criteo` with its shadow columns). A row counts whichever arm served it: requests are drawn for the shadow
alike in both arms, and nobody chose their rows. Ranked lists, whose rows the serving arm chose, have no shadow columns
there (`monitoring.memory.archive`), so where all traffic is ranked there are no pairs, and a person advances the
canary. What the pairs say is `canary.policy`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.contracts import criteo
from components.storage.folder import FolderObjects
from components.storage.objects import Objects
from components.store.archived_rows import ArchivedFile, MovedAway, archived_files, arrow_schema

COLUMNS = (
    criteo.REQUEST_ID,
    criteo.ROW,
    criteo.EVENT_TIME,
    criteo.LABEL,
    criteo.MODEL_VERSION,
    criteo.SCORE,
    criteo.SHADOW_VERSION,
    criteo.SHADOW_SCORE,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Rows in the order of their time, request and place in it; each row once."""

    labels: NDArray[np.uint8]
    """[n] 0 or 1."""
    stable: NDArray[np.float32]
    """[n] probabilities by the stable version, whether served or in the shadow."""
    canary: NDArray[np.float32]
    """[n] probabilities by the canary."""
    requests: NDArray[np.int64]
    """[n] number of the request that a row belongs to, from 0."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def first(self, num_rows: int) -> Pairs:
        """The oldest `num_rows` of them."""
        return Pairs(
            labels=self.labels[:num_rows],
            stable=self.stable[:num_rows],
            canary=self.canary[:num_rows],
            requests=self.requests[:num_rows],
        )


def read_pairs(places: Sequence[Path | Objects], *, stable: int, canary: int, since: datetime) -> Pairs:
    """The pairs of two versions in `places` with an event time of `since` or later.

    A file may move from the archive to the lake meanwhile: name the archive first, and it is seen at least once.

    Args:
        places: Archive, lake, or both; of a lake in a bucket the files of these days are fetched one by one.
        stable: Version of the stable arm.
        canary: Version of the canary.
        since: When the stage began, with its time zone.

    Raises:
        ContractError: a file is damaged.
        TemporaryError, PermanentError: the bucket cannot be read.
    """
    types = {**criteo.RAW_TYPES, **criteo.SHADOW_TYPES}
    schema = arrow_schema({name: types[name] for name in COLUMNS})
    tables = [schema.empty_table()]
    first_day = since.astimezone(timezone.utc).date().isoformat()
    for place in places:
        for each in archived_files(FolderObjects(place) if isinstance(place, Path) else place, first_day=first_day):
            if (table := _shadow_rows(each)) is not None:
                tables.append(table.cast(schema))
    rows = pa.concat_tables(tables)
    served, shadow = rows[criteo.MODEL_VERSION], rows[criteo.SHADOW_VERSION]
    by_stable = pc.and_(pc.equal(served, stable), pc.equal(shadow, canary))
    by_canary = pc.and_(pc.equal(served, canary), pc.equal(shadow, stable))
    recent = pc.greater_equal(rows[criteo.EVENT_TIME], pa.scalar(since, schema.field(criteo.EVENT_TIME).type))
    rows = rows.filter(pc.and_(recent, pc.or_(by_stable, by_canary)))
    keys = [criteo.EVENT_TIME, criteo.REQUEST_ID, criteo.ROW]
    return _paired(rows.sort_by([(key, "ascending") for key in keys]), stable)


def _shadow_rows(archived: ArchivedFile) -> Any:
    """The columns of one file; None where it holds no shadow scores, or has moved on."""
    try:
        with archived.opened() as file:
            has_shadow = criteo.SHADOW_SCORE in file.schema_arrow.names
            return file.read(columns=list(COLUMNS)) if has_shadow else None
    except MovedAway:
        return None


def _paired(rows: Any, stable: int) -> Pairs:
    """Both arms' scores of rows sorted by time; of rows with one identity the first stays."""
    requests, codes = np.unique(rows[criteo.REQUEST_ID].to_numpy().astype(str), return_inverse=True)
    codes = codes.reshape(-1).astype(np.int64)
    place = rows[criteo.ROW].to_numpy().astype(np.int64)
    _, first = np.unique(np.stack([codes, place], axis=1), axis=0, return_index=True)
    at = np.sort(first)
    served, shadow = (rows[name].to_numpy()[at] for name in (criteo.SCORE, criteo.SHADOW_SCORE))
    by_stable = rows[criteo.MODEL_VERSION].to_numpy()[at] == stable
    return Pairs(
        labels=rows[criteo.LABEL].to_numpy()[at].astype(np.uint8),
        stable=np.where(by_stable, served, shadow).astype(np.float32),
        canary=np.where(by_stable, shadow, served).astype(np.float32),
        requests=codes[at],
    )
