"""Windows of a world that stands still, in requests whose rows share their user and context.

In: `inference_client.simulation`'s world. Out: rows, and the raw files that validation reads. The world's own rows are
independent; a log's are not: of a request's rows the columns of the user are the same, so that 20,000 rows say of these
columns no more than 313 independent ones. Shifts are `shifts`'.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE
from inference_client.simulation.lake import raw_table
from inference_client.simulation.world import Rows, World, sigmoid

ROWS_PER_REQUEST = 64
USER_COLUMNS = DENSE[:6] + CATEGORICAL[:13]
"""The same in all rows of a request; the others are drawn row by row, as an item's are."""
_FIRST_SECOND = 1_760_000_000.0


EQUAL, UNEQUAL, INDEPENDENT = "equal", "unequal", "independent"
"""Requests of 64 rows each; of 64 on average, the longest with some hundreds (geometric); of one row."""


class Window(NamedTuple):
    """Rows in time order."""

    rows: Rows
    request: NDArray[np.int64]
    """[n] the request that each row belongs to, from 0, ascending."""


def draw_window(world: World, rows: int, random: Generator, *, requests: str = EQUAL) -> Window:
    """A window of `rows` rows whose clicks follow the world's truth for the rows as they are.

    Args:
        world: Where the rows come from.
        rows: How many.
        random: Equal generators give equal windows.
        requests: `EQUAL`, `UNEQUAL` or `INDEPENDENT`.
    """
    drawn = world.draw(rows, random)
    if requests == INDEPENDENT:
        return Window(drawn, np.arange(rows))
    # One request per row is enough whatever their sizes are.
    sizes = random.geometric(1 / ROWS_PER_REQUEST, rows) if requests == UNEQUAL else np.full(rows, ROWS_PER_REQUEST)
    request = np.repeat(np.arange(rows), sizes)[:rows]
    first = np.searchsorted(request, request)
    dense, categorical = drawn.dense.copy(), drawn.categorical.copy()
    for names, values in ((DENSE, dense), (CATEGORICAL, categorical)):
        shared = [i for i, name in enumerate(names) if name in USER_COLUMNS]
        values[:, shared] = values[first][:, shared]
    probability = sigmoid(world.strength * world.tables.effects_of(dense, categorical) + world.bias)
    label = (random.random(rows) < probability).astype(np.int32)
    return Window(Rows(dense, categorical, probability, label), request)


def column_of(window: Window, name: str) -> NDArray[np.float32] | NDArray[np.int64]:
    """The values [n] of a feature; missing as in tensors (`contracts.criteo`)."""
    if name in DENSE:
        return window.rows.dense[:, DENSE.index(name)]
    return window.rows.categorical[:, CATEGORICAL.index(name)]


def with_columns(window: Window, columns: dict[str, NDArray[np.float32] | NDArray[np.int64]]) -> Window:
    """A copy of the window with some features replaced; clicks stay as they were."""
    dense, categorical = window.rows.dense.copy(), window.rows.categorical.copy()
    for name, values in columns.items():
        if name in DENSE:
            dense[:, DENSE.index(name)] = values
        else:
            categorical[:, CATEGORICAL.index(name)] = values
    return window._replace(rows=window.rows._replace(dense=dense, categorical=categorical))


def write_window(window: Window, folder: Path, *, name: str) -> None:
    """One Parquet file in the raw schema below the new folder `folder`; `name` sets request ids apart."""
    folder.mkdir(parents=True)
    number = np.arange(len(window.rows.label))
    table = raw_table(
        window.rows,
        request_ids=[f"{name}-{i}" for i in window.request.tolist()],
        row=(number - np.searchsorted(window.request, window.request)).astype(np.int32),
        times=_FIRST_SECOND + number * 0.1,
    )
    pq.write_table(table, folder / "part-00000.parquet")
