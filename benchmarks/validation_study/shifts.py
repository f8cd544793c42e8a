"""Windows of a world that stands still, in requests whose rows share their user, and shifts planted into them.

The world's own rows are independent; a log's are not: of a request's rows the columns of the user are the same, so
20,000 rows say no more about these columns than 313 independent ones. Each shift is what its name says and nothing
else: in a column of the user it strikes whole requests, in an item's column single rows, so that the rows of a request
stay as alike as they were. Who finds the shift is left to the contestants.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.world_effects import effects_of
from demo.simulation.world import World, WorldRows, raw_table, sigmoid
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import CATEGORICAL, DENSE

ROWS_PER_REQUEST = 64
USER_COLUMNS = DENSE[:6] + CATEGORICAL[:13]
"""The same in all rows of a request; the others are drawn row by row, as an item's are."""
_FIRST_SECOND = 1_760_000_000.0
EQUAL, UNEQUAL, INDEPENDENT = "equal", "unequal", "independent"
"""Requests of 64 rows each; of 64 on average, the longest with some hundreds (geometric); of one row."""


class DrawnWindow(NamedTuple):
    """Rows in time order."""

    rows: WorldRows
    request: NDArray[np.int64]
    """[n] the request that each row belongs to, from 0, ascending."""


def draw_window(world: World, rows: int, random: Generator, *, requests: str = EQUAL) -> DrawnWindow:
    """A window of `rows` rows whose clicks follow the world's truth for the rows as they are.

    Args:
        world: Where the rows come from.
        rows: How many.
        random: Equal generators give equal windows.
        requests: `EQUAL`, `UNEQUAL` or `INDEPENDENT`.
    """
    drawn = world.draw(rows, random)
    if requests == INDEPENDENT:
        return DrawnWindow(drawn, np.arange(rows))
    # One request per row is enough whatever their sizes are.
    sizes = random.geometric(1 / ROWS_PER_REQUEST, rows) if requests == UNEQUAL else np.full(rows, ROWS_PER_REQUEST)
    request = np.repeat(np.arange(rows), sizes)[:rows]
    first = np.searchsorted(request, request)
    dense, categorical = drawn.dense.copy(), drawn.categorical.copy()
    for names, values in ((DENSE, dense), (CATEGORICAL, categorical)):
        shared = [i for i, name in enumerate(names) if name in USER_COLUMNS]
        values[:, shared] = values[first][:, shared]
    probability = sigmoid(world.strength * effects_of(world.tables, dense, categorical) + world.bias)
    label = (random.random(rows) < probability).astype(np.int32)
    return DrawnWindow(WorldRows(dense, categorical, probability, label), request)


def column_of(window: DrawnWindow, name: str) -> NDArray[np.float32] | NDArray[np.int64]:
    """The values [n] of a feature; missing as in tensors (`config.features`)."""
    if name in DENSE:
        return window.rows.dense[:, DENSE.index(name)]
    return window.rows.categorical[:, CATEGORICAL.index(name)]


def with_columns(window: DrawnWindow, columns: dict[str, NDArray[np.float32] | NDArray[np.int64]]) -> DrawnWindow:
    """A copy of the window with some features replaced; clicks stay as they were."""
    dense, categorical = window.rows.dense.copy(), window.rows.categorical.copy()
    for name, values in columns.items():
        if name in DENSE:
            dense[:, DENSE.index(name)] = values
        else:
            categorical[:, CATEGORICAL.index(name)] = values
    return window._replace(rows=window.rows._replace(dense=dense, categorical=categorical))


def write_window(window: DrawnWindow, folder: Path, *, name: str) -> None:
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


# -- shifts

NULL_SHARE, MEAN_SHIFT, UNIT = 0.1, 0.2, np.float32(1000.0)
MAX_SHARE = 0.3
"""Of the category that doubles: the most frequent one below this share."""


class Shift(NamedTuple):
    """One kind of shift at one place."""

    kind: str
    columns: tuple[str, ...]
    """The features that a finder must name, all of them."""

    def plant(self, window: DrawnWindow, random: Generator) -> DrawnWindow:
        """The window after the shift."""
        return _PLANTERS[self.kind](window, self.columns, random)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}: {', '.join(self.columns)}"


def double_category(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """The chosen category's share of the rows with a value doubles; it takes its rows from all others alike."""
    values = column_of(window, columns[0]).copy()
    present = values != MISSING_CATEGORY
    chosen, share = doubled_category(values[present])
    struck = _strike(window, columns[0], share / (1.0 - share), random=random)
    values[struck & present] = chosen
    return with_columns(window, {columns[0]: values})


def doubled_category(values: NDArray[np.int64]) -> tuple[int, float]:
    """The most frequent of `values` whose share is at most `MAX_SHARE`, and its share; ties by value."""
    found, counts = np.unique(values, return_counts=True)
    counts = np.where(counts <= MAX_SHARE * len(values), counts, 0)
    return int(found[counts.argmax()]), float(counts.max() / len(values))


def lose_values(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """A tenth of the rows loses its value, where it had one."""
    values = column_of(window, columns[0]).copy()
    values[_strike(window, columns[0], NULL_SHARE, random=random)] = np.nan if columns[0] in DENSE else MISSING_CATEGORY
    return with_columns(window, {columns[0]: values})


def raise_mean(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """The mean rises by a fifth of the standard deviation; the values stay whole numbers."""
    values = column_of(window, columns[0]).astype(np.float64)
    raised = _between(values + MEAN_SHIFT * np.nanstd(values), lambda numbers: numbers, window, random=random)
    return with_columns(window, {columns[0]: raised})


def raise_log_mean(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """The same for log(1 + value - least value): every value grows by a factor, which heavy tails do not hide.

    The harder one: the standard deviation of a heavy-tailed column is many times its median.
    """
    values = column_of(window, columns[0]).astype(np.float64)
    least = np.nanmin(values)
    logs = np.log1p(values - least)
    raised = np.expm1(logs + MEAN_SHIFT * np.nanstd(logs)) + least
    whole = _between(raised, lambda numbers: np.log1p(numbers - least), window, random=random)
    return with_columns(window, {columns[0]: whole})


def change_unit(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Every value a thousand times as large."""
    return with_columns(window, {columns[0]: column_of(window, columns[0]) * UNIT})


def swap_columns(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Each of two columns holds the other's values."""
    first, second = columns
    return with_columns(window, {first: column_of(window, second), second: column_of(window, first)})


def _between(
    values: NDArray[np.float64], scale: Callable[[Any], Any], window: DrawnWindow, *, random: Generator
) -> NDArray[np.float32]:
    """The whole number below or above each value, by chance so that the mean on `scale` is the values' own.

    Alike in the rows of a request.
    """
    low = np.floor(values)
    up = (scale(values) - scale(low)) / (scale(low + 1) - scale(low))
    drawn = random.random(len(values))[window.request]
    return (low + (drawn < up)).astype(np.float32)


def _strike(window: DrawnWindow, column: str, share: float, *, random: Generator) -> NDArray[np.bool_]:
    """Which rows [n] are struck: whole requests for a column of the user, else single rows."""
    struck = random.random(len(window.request)) < share
    return struck[window.request] if column in USER_COLUMNS else struck


_PLANTERS: dict[str, Callable[[DrawnWindow, tuple[str, ...], Generator], DrawnWindow]] = {
    "one category doubles": double_category,
    "10 % null": lose_values,
    "mean +0.2 sd": raise_mean,
    "mean of the logarithm +0.2 sd": raise_log_mean,
    "unit x1000": change_unit,
    "swapped columns": swap_columns,
}
KINDS = tuple(_PLANTERS)

_ITEM_CATEGORIES, _ITEM_NUMBERS = ("C14", "C17", "C18", "C23", "C26"), ("I7", "I9", "I10", "I11", "I13")
_USER_CATEGORIES, _USER_NUMBERS = ("C2", "C10"), ("I2", "I5")


def _shifts(
    categories: tuple[str, ...],
    numbers: tuple[str, ...],
    nulls: tuple[str, ...],
    *,
    swaps: tuple[tuple[str, str], ...],
) -> tuple[Shift, ...]:
    placed: dict[str, tuple[tuple[str, ...], ...]] = {
        "one category doubles": tuple((name,) for name in categories),
        "10 % null": tuple((name,) for name in nulls),
        **{kind: tuple((name,) for name in numbers) for kind in KINDS if kind.startswith(("mean", "unit"))},
        "swapped columns": swaps,
    }
    return tuple(Shift(kind, columns) for kind in KINDS for columns in placed[kind])


ITEM_SHIFTS = _shifts(
    _ITEM_CATEGORIES,
    _ITEM_NUMBERS,
    ("I8", "I10", "I13", "C17", "C25"),
    swaps=(("I7", "I9"), ("I8", "I11"), ("I10", "I12"), ("C14", "C17"), ("C18", "C15")),
)
"""In columns that are drawn row by row."""
USER_SHIFTS = _shifts(_USER_CATEGORIES, _USER_NUMBERS, ("I2", "C10"), swaps=(("I2", "I5"), ("C2", "C10")))
"""In columns that are the same in all rows of a request."""
assert not set(USER_COLUMNS) & {c for shift in ITEM_SHIFTS for c in shift.columns}
assert {c for shift in USER_SHIFTS for c in shift.columns} <= set(USER_COLUMNS) <= set(DENSE + CATEGORICAL)
