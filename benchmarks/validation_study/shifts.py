"""Draw windows of a stationary simulator with requests as in a log, and plant shifts.

The simulator draws independent rows, but the rows of a real log depend on each other. The rows of a
request share the user's columns, so that 20,000 rows have as much information about these columns
as 313 independent rows. Each shift changes only the property in its name. If a shift of a user's
column changes a row, it changes all rows of the same request. A shift of an item's column changes
each row independently. The correlation of rows within a request therefore stays the same. `methods`
finds the shifts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.simulated_effects import effects_of
from demo.simulation.simulator import SimulatedRows, Simulator, raw_table, sigmoid
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import CATEGORICAL, DENSE

ROWS_PER_REQUEST = 64
USER_COLUMNS = DENSE[:6] + CATEGORICAL[:13]
"""Columns that are equal in all rows of a request. The other columns are drawn per row, like
properties of an item."""
_FIRST_SECOND = 1_760_000_000.0
EQUAL, UNEQUAL, INDEPENDENT = "equal", "unequal", "independent"
"""Kinds of requests: 64 rows each, 64 rows on average, and one row each. The sizes around the
average are geometric, so some requests have hundreds of rows."""


class DrawnWindow(NamedTuple):
    """Rows in time order."""

    rows: SimulatedRows
    request: NDArray[np.int64]
    """Index of each row's request, from 0, ascending, shape [n]."""


def draw_window(
    simulator: Simulator, rows: int, random: Generator, *, requests: str = EQUAL
) -> DrawnWindow:
    """Draw a window whose clicks follow the true probabilities of its rows.

    Args:
        simulator: Simulator of the rows.
        rows: Number of rows.
        random: Random generator. Two generators with the same seed draw the same window.
        requests: How rows form requests: `EQUAL`, `UNEQUAL` or `INDEPENDENT`.
    """
    drawn = simulator.draw(rows, random)
    if requests == INDEPENDENT:
        return DrawnWindow(drawn, np.arange(rows))
    # `rows` requests are always enough for `rows` rows, because each request has at least one row.
    sizes = (
        random.geometric(1 / ROWS_PER_REQUEST, rows)
        if requests == UNEQUAL
        else np.full(rows, ROWS_PER_REQUEST)
    )
    request = np.repeat(np.arange(rows), sizes)[:rows]
    first = np.searchsorted(request, request)
    dense, categorical = drawn.dense.copy(), drawn.categorical.copy()
    for names, values in ((DENSE, dense), (CATEGORICAL, categorical)):
        shared = [i for i, name in enumerate(names) if name in USER_COLUMNS]
        values[:, shared] = values[first][:, shared]
    probability = sigmoid(
        simulator.strength * effects_of(simulator.tables, dense, categorical) + simulator.bias
    )
    label = (random.random(rows) < probability).astype(np.int32)
    return DrawnWindow(SimulatedRows(dense, categorical, probability, label), request)


def column_of(window: DrawnWindow, name: str) -> NDArray[np.float32] | NDArray[np.int64]:
    """Return the values [n] of a feature, with missing values as in tensors (`config.features`)."""
    if name in DENSE:
        return window.rows.dense[:, DENSE.index(name)]
    return window.rows.categorical[:, CATEGORICAL.index(name)]


def with_columns(
    window: DrawnWindow, columns: dict[str, NDArray[np.float32] | NDArray[np.int64]]
) -> DrawnWindow:
    """Return a copy of the window with some features replaced. The clicks do not change."""
    dense, categorical = window.rows.dense.copy(), window.rows.categorical.copy()
    for name, values in columns.items():
        if name in DENSE:
            dense[:, DENSE.index(name)] = values
        else:
            categorical[:, CATEGORICAL.index(name)] = values
    return window._replace(rows=window.rows._replace(dense=dense, categorical=categorical))


def write_window(window: DrawnWindow, folder: Path, *, name: str) -> None:
    """Write one Parquet file in the raw schema into the new folder `folder`.

    The request ids begin with `name`, so they are unique.
    """
    folder.mkdir(parents=True)
    number = np.arange(len(window.rows.label))
    table = raw_table(
        window.rows,
        request_ids=[f"{name}-{i}" for i in window.request.tolist()],
        row=(number - np.searchsorted(window.request, window.request)).astype(np.int32),
        times=_FIRST_SECOND + number * 0.1,
    )
    pq.write_table(table, folder / "part-00000.parquet")


# -- plant shifts

NULL_SHARE, MEAN_SHIFT, UNIT = 0.1, 0.2, np.float32(1000.0)
MAX_SHARE = 0.3
"""`double_category` doubles the most frequent category whose share is at most this value."""


class Shift(NamedTuple):
    """One kind of shift in given columns."""

    kind: str
    columns: tuple[str, ...]
    """Features with a shift. A method must name all of these features."""

    def plant(self, window: DrawnWindow, random: Generator) -> DrawnWindow:
        """Return a window with the shift."""
        return _PLANTERS[self.kind](window, self.columns, random)

    @property
    def name(self) -> str:
        """Name that is shown in tables."""
        return f"{self.kind}: {', '.join(self.columns)}"


def double_category(
    window: DrawnWindow, columns: tuple[str, ...], random: Generator
) -> DrawnWindow:
    """Double the share of one category among the rows with a value.

    All other categories lose rows in the same proportion.
    """
    values = column_of(window, columns[0]).copy()
    present = values != MISSING_CATEGORY
    chosen, share = doubled_category(values[present])
    is_changed = _draw_changed(window, columns[0], share / (1.0 - share), random=random)
    values[is_changed & present] = chosen
    return with_columns(window, {columns[0]: values})


def doubled_category(values: NDArray[np.int64]) -> tuple[int, float]:
    """Return the most frequent value with a share of at most `MAX_SHARE`, and its share.

    Ties are broken by value.
    """
    found, counts = np.unique(values, return_counts=True)
    counts = np.where(counts <= MAX_SHARE * len(values), counts, 0)
    return int(found[counts.argmax()]), float(counts.max() / len(values))


def lose_values(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Remove the values of a tenth of the rows."""
    values = column_of(window, columns[0]).copy()
    values[_draw_changed(window, columns[0], NULL_SHARE, random=random)] = (
        np.nan if columns[0] in DENSE else MISSING_CATEGORY
    )
    return with_columns(window, {columns[0]: values})


def raise_mean(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Raise a column's mean by a fifth of its standard deviation. Values remain integers."""
    values = column_of(window, columns[0]).astype(np.float64)
    raised = _between(
        values + MEAN_SHIFT * np.nanstd(values), lambda numbers: numbers, window, random=random
    )
    return with_columns(window, {columns[0]: raised})


def raise_log_mean(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Raise the mean of log(1 + value - minimum) by a fifth of its standard deviation.

    Every value grows by the same factor, so the shift can be found even if the column has heavy
    tails. `raise_mean` is harder to find, because the standard deviation of a heavy-tailed column
    is many times its median.
    """
    values = column_of(window, columns[0]).astype(np.float64)
    least = np.nanmin(values)
    logs = np.log1p(values - least)
    raised = np.expm1(logs + MEAN_SHIFT * np.nanstd(logs)) + least
    whole = _between(raised, lambda numbers: np.log1p(numbers - least), window, random=random)
    return with_columns(window, {columns[0]: whole})


def change_unit(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Multiply every value by a thousand."""
    return with_columns(window, {columns[0]: column_of(window, columns[0]) * UNIT})


def swap_columns(window: DrawnWindow, columns: tuple[str, ...], random: Generator) -> DrawnWindow:
    """Swap the values of two columns."""
    first, second = columns
    return with_columns(
        window, {first: column_of(window, second), second: column_of(window, first)}
    )


def _between(
    values: NDArray[np.float64],
    scale: Callable[[Any], Any],
    window: DrawnWindow,
    *,
    random: Generator,
) -> NDArray[np.float32]:
    """Round each value to the integer below or above, at random.

    On average, `scale` of the result equals `scale` of `values`. All rows of a request use the same
    random number.
    """
    low = np.floor(values)
    up = (scale(values) - scale(low)) / (scale(low + 1) - scale(low))
    drawn = random.random(len(values))[window.request]
    return (low + (drawn < up)).astype(np.float32)


def _draw_changed(
    window: DrawnWindow, column: str, share: float, *, random: Generator
) -> NDArray[np.bool_]:
    """Draw the rows [n] that a shift changes.

    In a user's column, all rows of a drawn request change. In other columns, rows are drawn
    independently.
    """
    is_changed = random.random(len(window.request)) < share
    return is_changed[window.request] if column in USER_COLUMNS else is_changed


_PLANTERS: dict[str, Callable[[DrawnWindow, tuple[str, ...], Generator], DrawnWindow]] = {
    "one category doubles": double_category,
    "10 % null": lose_values,
    "mean +0.2 sd": raise_mean,
    "mean of the logarithm +0.2 sd": raise_log_mean,
    "unit x1000": change_unit,
    "swapped columns": swap_columns,
}
KINDS = tuple(_PLANTERS)

_ITEM_CATEGORIES, _ITEM_NUMBERS = (
    ("C14", "C17", "C18", "C23", "C26"),
    ("I7", "I9", "I10", "I11", "I13"),
)
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
        **{
            kind: tuple((name,) for name in numbers)
            for kind in KINDS
            if kind.startswith(("mean", "unit"))
        },
        "swapped columns": swaps,
    }
    return tuple(Shift(kind, columns) for kind in KINDS for columns in placed[kind])


ITEM_SHIFTS = _shifts(
    _ITEM_CATEGORIES,
    _ITEM_NUMBERS,
    ("I8", "I10", "I13", "C17", "C25"),
    swaps=(("I7", "I9"), ("I8", "I11"), ("I10", "I12"), ("C14", "C17"), ("C18", "C15")),
)
"""Shifts for columns with one value per row, such as properties of an item."""
USER_SHIFTS = _shifts(
    _USER_CATEGORIES, _USER_NUMBERS, ("I2", "C10"), swaps=(("I2", "I5"), ("C2", "C10"))
)
"""Shifts for the columns in `USER_COLUMNS`, which have one value per request."""
assert not set(USER_COLUMNS) & {c for shift in ITEM_SHIFTS for c in shift.columns}
assert (
    {c for shift in USER_SHIFTS for c in shift.columns}
    <= set(USER_COLUMNS)
    <= set(DENSE + CATEGORICAL)
)
