"""Raw rows: one shown item each, with its features, whether it was clicked, and what served it.

Joins everything that writes raw rows (users' files, the simulated world, the monitor's archive) to everything
that reads them (extraction, validation, preprocessing, serving). Which features a row has is `config.features`';
reading files is left to extraction.

Raw rows are Parquet: `label` int32, the features with null for missing, then the log columns. Rows of a lake are the
same, but may hold words where raw rows hold the categories that they stand for (`lake_types`); the monitor's archive,
which knows no words, adds categories to the same columns.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evergreen.config.data import OWN_COLUMNS, WEIGHT
from evergreen.config.features import MISSING_CATEGORY, Features, ListOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LABEL, REQUEST_ID, ROW, EVENT_TIME, MODEL_VERSION, SCORE, POSITION, PROPENSITY = OWN_COLUMNS[:8]
SHADOW_VERSION, SHADOW_SCORE, CANARY = OWN_COLUMNS[8:]

SERVED_BY = (MODEL_VERSION, SCORE, POSITION, PROPENSITY)
"""Columns that a file may lack, and that are null then."""

SHADOW_TYPES: dict[str, str] = {SHADOW_VERSION: "int32", SHADOW_SCORE: "float32"}
"""Columns after the raw ones in files that hold a row scored in the shadow too (`registry.traffic_plan`), null in its
other rows. Readers of raw rows ask for columns by name and do not meet them; the canary's evidence does."""

CANARY_TYPES: dict[str, str] = {CANARY: "bool"}
"""Column in files that hold a row that a canary answered; false in other rows. Optional groups follow the raw columns
in this order: shadow, canary."""

WEIGHT_TYPES: dict[str, str] = {WEIGHT: "float32"}
"""Column after the raw ones in rows of a recommender whose file names a weight (`ColumnNames.weight`): of a finite
number of at least 0, and never null. Files of a lake may lack it, as the monitor's archive does: their rows count 1."""

ROW_TYPES: dict[str, str] = {
    LABEL: "int32",
    REQUEST_ID: "string",
    ROW: "int32",
    EVENT_TIME: "timestamp[us, tz=UTC]",
    MODEL_VERSION: "int32",
    SCORE: "float32",
    POSITION: "int32",
    PROPENSITY: "float64",
}
"""Arrow type of each column that every raw row has; the features stand behind the first."""
FINITE = "a finite number"
"""The rule for a numeric value that is there, for people; `is_infinite` finds the values that break it."""
LIST = "list<{type}>"
"""Arrow type of a list of elements of a type."""


def raw_types(features: Features, *, weighted: bool = False) -> dict[str, str]:
    """Arrow type of each raw column, in file order; the last is the weight where rows are `weighted`.

    Only the features may be null, and the last four columns: `model_version` and `score` in rows that no model of ours
    served, `position` in rows outside ranked lists, `propensity` where no client explored. `request_id` and `row`
    together identify a row. `position` is the row's place in the list that the request showed, from 1; `propensity` the
    probability with which it stood there (`contracts.exploration`).
    """
    return {
        LABEL: ROW_TYPES[LABEL],
        **dict.fromkeys(features.numeric, "float32"),
        **dict.fromkeys(features.categorical, "int64"),
        **dict.fromkeys(features.lists, LIST.format(type="int64")),
        **ROW_TYPES,
        **(WEIGHT_TYPES if weighted else {}),
    }


def lake_types(features: Features, *, weighted: bool = False) -> dict[str, str]:
    """Arrow type of each column of rows that a person's files bring to a lake, in file order."""
    words = {name: LIST.format(type="string") if name in features.lists else "string" for name in features.words}
    return {**raw_types(features, weighted=weighted), **words}


def known_columns(features: Features) -> frozenset[str]:
    """What a raw file may hold without being asked."""
    return frozenset(OWN_COLUMNS).union(features.names)


CLOCK_AHEAD_SECONDS = 3600.0
"""A time that is noted this far ahead is of a clock that was wrong: nobody waits until it has come."""


def is_infinite(values: "NDArray[np.floating[Any]]") -> "NDArray[np.bool_]":
    """Return which numeric values break the contract; NaN means missing, which is allowed.

    >>> import numpy as np
    >>> is_infinite(np.array([1.0, np.nan, np.inf, -np.inf])).tolist()
    [False, False, True, True]
    """
    import numpy as np  # here, because parsers of flags import this module

    infinite: NDArray[np.bool_] = np.isinf(values)
    return infinite


def microseconds(time: float) -> int:
    """Seconds since the epoch as `event_time` keeps them, in whole microseconds.

    Whoever compares a live time with an archived one counts so: in floats, an archived row could fall on the other side
    of a bound than the live row.

    >>> microseconds(1763000000.25), microseconds(1.0000006)
    (1763000000250000, 1000001)
    """
    return round(time * 1e6)


def is_visible(name: str) -> bool:
    """Whether a file of a lake or an archive is there for readers: a dot or underscore starts unfinished work or notes.

    >>> is_visible("part-00000.parquet"), is_visible(".part-00000.parquet"), is_visible("_SUCCESS")
    (True, False, False)
    """
    return not name.startswith((".", "_"))


DAY_PARTITION = "day={day}"
"""Lake folder of one UTC day; `day` is YYYY-MM-DD of `event_time`."""

VERSION_PARTITION = "version={version}"
"""Sub-folder of a day's folder with a back-filled version of the day, from 1 up; Parquet files directly in the day's
folder are version 0, which the uploader goes on appending to. The highest complete version is the day, and beside it
files of version 0 that its marker does not name: they came later (`extraction.lake_files`)."""
VERSION_COMPLETE = "_SUCCESS"
"""Marker in such a folder, written last, since a bucket has no rename: without it the version does not exist."""

OUTCOME_PARTITION = "outcomes/day={day}"
"""Folder, of an archive and of a lake, of outcomes that came after their rows were archived. `day` is YYYY-MM-DD, in
UTC, of the prediction where it is known, else of the outcome."""
EVENT = "event"
OUTCOME_TIME = "outcome_time"
STORED_AT = "stored_at"
WINDOW_SECONDS = "window_seconds"
OUTCOME_TYPES: dict[str, str] = {
    REQUEST_ID: "string",
    ROW: "int32",
    EVENT: "string",
    OUTCOME_TIME: "timestamp[us, tz=UTC]",
    STORED_AT: "timestamp[us, tz=UTC]",
    WINDOW_SECONDS: "float64",
}
"""Arrow type of each column of a late outcome's file, in file order; none is null. `request_id` and `row` name the
raw row; `event` is one of `records.EVENTS`; `stored_at` is when the monitor stored it, `outcome_time` when it
happened. `window_seconds` is the attribution window of its kind that the monitor had when it wrote the file, 0 where it
awaits none of the kind: the outcome counts if `outcome_time` is at most that long after its row's `event_time`,
both in whole microseconds. The same outcome may be there more than once."""


def feature_matrix(batch: Any, names: Sequence[str], dtype: str, *, missing: float) -> "NDArray[Any]":
    """Columns `names` of an Arrow record batch as one array [n, len(names)] of `dtype`, nulls as `missing`.

    The batch is only asked what pyarrow's answers, which is no dependency of the contracts.
    """
    import numpy as np  # here, because parsers of flags import this module

    if not names:
        return np.empty((batch.num_rows, 0), dtype)
    columns = [batch.column(name).cast(dtype).fill_null(missing).to_numpy(zero_copy_only=False) for name in names]
    return np.stack(columns, axis=1)


def category_matrix(batch: Any, features: Features) -> "NDArray[np.int64]":
    """The categories of an Arrow record batch, [n, `features.places`]: of a list those elements that count.

    `MISSING_CATEGORY` where there is none.
    """
    import numpy as np

    plain = feature_matrix(batch, features.categorical, "int64", missing=MISSING_CATEGORY)
    lists = [list_matrix(batch.column(name), features.list_options_of(name)) for name in features.lists]
    return np.concatenate([plain, *lists], axis=1)


def list_matrix(column: Any, options: ListOptions) -> "NDArray[np.int64]":
    """The elements that count of an Arrow array of lists, [n, `options.max`], in their order and at its begin."""
    elements = column.flatten().fill_null(MISSING_CATEGORY).to_numpy(zero_copy_only=False)
    return placed_lists(elements, list_lengths(column), options)


def placed_lists(
    elements: "NDArray[np.int64]", lengths: "NDArray[np.int64]", options: ListOptions
) -> "NDArray[np.int64]":
    """As `list_matrix`, of lists with these lengths, whose elements follow each other."""
    import numpy as np

    places = np.arange(options.max)
    kept = np.minimum(lengths, options.max)
    first = np.cumsum(lengths) - lengths + (lengths - kept if options.keep == "newest" else 0)
    row, place = np.nonzero(places < kept[:, None])
    found = np.full((len(lengths), options.max), MISSING_CATEGORY)
    found[row, place] = elements[first[row] + place]
    return found


def list_lengths(column: Any) -> "NDArray[np.int64]":
    """How many elements of `column.flatten()` belong to each of its lists; an Arrow array of lists."""
    import numpy as np

    # A null list may have elements, which are nobody's.
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    lengths: NDArray[np.int64] = np.where(is_null, 0, np.diff(column.offsets.to_numpy())).astype(np.int64)
    return lengths
