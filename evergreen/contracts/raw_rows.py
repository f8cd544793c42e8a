"""Raw rows: each row is one shown item with its features, its label and its version.

The version is the model version that served the item. Raw rows come from users' files, from the
simulator and from the monitor's archive. Extraction, validation, preprocessing and serving read raw
rows. `evergreen.config.features` defines the features.

The columns of a raw Parquet file are `label` (int32), the features (null if missing), and the log
columns. Files of a lake have the same columns, but a column of categories may contain strings
instead of numbers (`lake_types`). The monitor's archive contains categories only.
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
"""Columns that a file of raw rows may lack. If a file lacks one of these columns, the values of the
column are null for the file's rows."""

SHADOW_TYPES: dict[str, str] = {SHADOW_VERSION: "int32", SHADOW_SCORE: "float32"}
"""Optional columns after the raw columns. A file has these columns if a shadow version scored at
least one of its rows (`evergreen.registry.traffic_plan`). In rows without shadow scores, the
columns are null. Readers of raw rows select columns by name and skip the shadow columns. Only the
reader of the canary's evidence reads the shadow columns."""

CANARY_TYPES: dict[str, str] = {CANARY: "bool"}
"""Optional column, true in the rows that a canary answered. A file without canary rows lacks the
column. The optional columns follow the raw columns in this order: shadow, canary."""

WEIGHT_TYPES: dict[str, str] = {WEIGHT: "float32"}
"""Additional column after the other raw columns, if the recommender's file names a weight
(`ColumnNames.weight`). A weight is a finite number of at least 0, and never null. Some files of a
lake may lack the weight column, for example files from the monitor's archive. If a file has no
weight column, all its rows have weight 1."""

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
"""Arrow type of each column that all raw rows have. The feature columns are inserted after the
first of these columns."""
FINITE = "a finite number"
"""Rule for numeric values, as stated in error messages. The rule does not apply to missing values.
The function `is_infinite` finds values that break the rule."""
_LIST = "list<{type}>"
"""Arrow type of a list whose elements have `type`."""


def raw_types(features: Features, *, weighted: bool = False) -> dict[str, str]:
    """Return the Arrow type of each raw column, in file order.

    Besides the features, four columns may be null: `model_version` and `score` in rows that were
    not served by our models, `position` in rows outside ranked lists, and `propensity` in rows
    without exploration. `request_id` and `row` together identify a row. `position` is the position
    of the row in the list that the request showed, counted from 1. `propensity` is the probability
    that the row is shown at `position` (`evergreen.contracts.exploration`).

    Args:
        features: Features of the recommender.
        weighted: Whether rows have a weight. The weight is the last column.
    """
    return {
        LABEL: ROW_TYPES[LABEL],
        **dict.fromkeys(features.numeric, "float32"),
        **dict.fromkeys(features.categorical, "int64"),
        **dict.fromkeys(features.lists, _LIST.format(type="int64")),
        **ROW_TYPES,
        **(WEIGHT_TYPES if weighted else {}),
    }


def lake_types(features: Features, *, weighted: bool = False) -> dict[str, str]:
    """Return the Arrow type of each column in a user's files, in file order."""
    words = {
        name: _LIST.format(type="string") if name in features.lists else "string"
        for name in features.string_features
    }
    return {**raw_types(features, weighted=weighted), **words}


def known_columns(features: Features) -> frozenset[str]:
    """Return the names of columns that cause no warning in a raw file."""
    return frozenset(OWN_COLUMNS).union(features.names)


CLOCK_AHEAD_SECONDS = 3600.0
"""Maximum clock skew in seconds. A time that is further in the future than the maximum comes from a
wrong clock. Programs do not wait for such a time."""


def is_infinite(values: "NDArray[np.floating[Any]]") -> "NDArray[np.bool_]":
    """Return whether each numeric value is infinite, and therefore invalid.

    NaN means missing and is valid.

    >>> import numpy as np
    >>> is_infinite(np.array([1.0, np.nan, np.inf, -np.inf])).tolist()
    [False, False, True, True]
    """
    import numpy as np  # imported here, because parsers of flags import this module

    infinite: NDArray[np.bool_] = np.isinf(values)
    return infinite


def microseconds(time: float) -> int:
    """Convert seconds since the epoch to whole microseconds, the unit of a stored `event_time`.

    Convert a new time with this function before you compare it with an archived time. If the two
    times were compared as floats, rounding could put them on different sides of a bound.

    >>> microseconds(1763000000.25), microseconds(1.0000006)
    (1763000000250000, 1000001)
    """
    return round(time * 1e6)


def is_visible(name: str) -> bool:
    """Return whether the readers of a lake or an archive read files with the name `name`.

    A name with a leading dot or underscore belongs to an unfinished file or a note.

    >>> is_visible("part-00000.parquet"), is_visible(".part-00000.parquet"), is_visible("_SUCCESS")
    (True, False, False)
    """
    return not name.startswith((".", "_"))


DAY_PARTITION = "day={day}"
"""Lake folder of one UTC day. `day` is the UTC date of the rows' `event_time`, as YYYY-MM-DD."""

VERSION_PARTITION = "version={version}"
"""Sub-folder of a day's folder. The sub-folder contains a back-filled version of the day. Versions
are numbered from 1. Parquet files directly in the day's folder are version 0, to which the uploader
appends. Readers use the complete version with the highest number. Readers also use files of version
0 that arrived after the back-filled version was written. The marker of the back-filled version does
not name the later files (`components.extraction.lake_files`)."""
VERSION_COMPLETE = "_SUCCESS"
"""Marker file in the folder of a complete version. The marker is written last, because files of a
bucket cannot be renamed. Readers ignore a version without the marker."""

OUTCOME_PARTITION = "outcomes/day={day}"
"""Folder of late outcomes in an archive or a lake. Late outcomes arrive after their rows were
archived. `day` is a UTC day, YYYY-MM-DD: the day of the prediction if it is known, else the day of
the outcome."""
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
"""Arrow type of each column in a file with late outcomes, in file order. No column contains nulls.
`request_id` and `row` identify the raw row, and `event` is one of `records.EVENTS`. `outcome_time`
is the time of the event, and `stored_at` is the time when the monitor stored the event.
`window_seconds` is the attribution window for this kind of event, as set when the monitor wrote the
file. `window_seconds` is 0 if the monitor does not expect this kind of event. The outcome counts if
`outcome_time` is at most `window_seconds` after the row's `event_time`, both in whole microseconds.
A file may have the same outcome more than once."""


def feature_matrix(
    batch: Any, names: Sequence[str], dtype: str, *, missing: float
) -> "NDArray[Any]":
    """Return columns of an Arrow record batch as one array, [n, len(names)].

    The function does not import pyarrow, because the contracts do not depend on pyarrow.

    Args:
        batch: The record batch.
        names: The columns.
        dtype: Type of the array.
        missing: Value that replaces null.
    """
    import numpy as np  # imported here, because parsers of flags import this module

    if not names:
        return np.empty((batch.num_rows, 0), dtype)
    columns = [
        batch.column(name).cast(dtype).fill_null(missing).to_numpy(zero_copy_only=False)
        for name in names
    ]
    return np.stack(columns, axis=1)


def category_matrix(batch: Any, features: Features) -> "NDArray[np.int64]":
    """Return the categories of an Arrow record batch, [n, `features.positions`].

    For a list, only the elements that the model uses are returned. The value for a missing category
    is `MISSING_CATEGORY`.
    """
    import numpy as np

    plain = feature_matrix(batch, features.categorical, "int64", missing=MISSING_CATEGORY)
    lists = [
        list_matrix(batch.column(name), features.list_options_of(name)) for name in features.lists
    ]
    return np.concatenate([plain, *lists], axis=1)


def list_matrix(column: Any, options: ListOptions) -> "NDArray[np.int64]":
    """Return the used elements of each list, left-aligned, [n, `options.max`]."""
    elements = column.flatten().fill_null(MISSING_CATEGORY).to_numpy(zero_copy_only=False)
    return placed_lists(elements, list_lengths(column), options)


def placed_lists(
    elements: "NDArray[np.int64]", lengths: "NDArray[np.int64]", options: ListOptions
) -> "NDArray[np.int64]":
    """Return the result of `list_matrix` for lists whose elements are stored one after the other.

    Args:
        elements: Elements of all lists, one list after the other.
        lengths: Number of elements of each list, [n].
        options: Options of the list.
    """
    import numpy as np

    positions = np.arange(options.max)
    kept = np.minimum(lengths, options.max)
    first = np.cumsum(lengths) - lengths + (lengths - kept if options.keep == "newest" else 0)
    row, position = np.nonzero(positions < kept[:, None])
    found = np.full((len(lengths), options.max), MISSING_CATEGORY)
    found[row, position] = elements[first[row] + position]
    return found


def list_lengths(column: Any) -> "NDArray[np.int64]":
    """Return the length of each list in an Arrow array. A null list has the length 0."""
    import numpy as np

    # Arrow may store elements for a null list. Elements of null lists are ignored.
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    lengths: NDArray[np.int64] = np.where(is_null, 0, np.diff(column.offsets.to_numpy())).astype(
        np.int64
    )
    return lengths
