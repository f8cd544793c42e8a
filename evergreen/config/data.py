"""The section `data`: the names of the columns that every row has.

The default names are those of the lake. `evergreen.contracts.raw_rows` defines the types of these
columns.
"""

from dataclasses import dataclass

from evergreen.runtime.errors import ContractError

OWN_COLUMNS = (
    *(
        "label",
        "request_id",
        "row",
        "event_time",
        "model_version",
        "score",
        "position",
        "propensity",
    ),
    *("shadow_version", "shadow_score", "canary"),
)
"""Columns that every raw row has in addition to the features. A feature may not have the name of
one of these columns."""
WEIGHT = "sample_weight"
"""Column with the sample weight of each row. A lake has this column if the recommender's file names
a weight column (`ColumnNames.weight`)."""
TIME_FORMATS = (
    "iso",
    "YYYYMMDD",
    "YYMMDDhh",
    "YYYYMMDDhh",
    "YYMMDDhhmm",
    "YYYYMMDDhhmm",
    "YYYYMMDDhhmmss",
    "seconds",
    "milliseconds",
    "microseconds",
    "nanoseconds",
)
"""Accepted formats of event times in users' files: ISO 8601, the digits of a UTC time, or a count
since 1970."""


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Column names in a user's files, for the columns that every raw row has.

    A column whose name is not the default must be in the files. A column with its default name may
    be absent, except the label. If the column `row` is absent, the rows of a request are numbered
    in file order. If `request_id` is absent, each row is its own request. If `event_time` is
    absent, rows have no time until `evergreen data ingest` assigns a time.

    Raises:
        ContractError: a name is empty, or two columns have the same name.

    >>> ColumnNames(label="clicked", event_time="ts").request_id
    'request_id'
    """

    label: str = "label"
    """1 if the row was clicked, else 0."""
    weight: str | None = None
    """Sample weight of the row, a finite number of at least 0. For example, the weight is 10 for a
    row without a click if only one in ten of these rows is in the file. Rows that the monitor
    archived have weight 1. In training, the weight multiplies the loss of the row. The gate uses
    the weights in the metrics that depend on the click rate. Without this key, all rows have weight
    1. The backend `hugectr` does not support weights."""
    request_id: str = "request_id"
    """Column with the id of the request. Rows with the same id were shown together. Without this
    column, each row is its own request."""
    row: str = "row"
    """Number of the row in its request. Without this column, the rows of a request are numbered in
    file order."""
    event_time: str = "event_time"
    """Time when the row was shown. Without this column, rows have no time until `evergreen data
    ingest` assigns a time."""
    time_format: str | None = None
    """Time format of the files: `iso`, `YYYYMMDD`, `YYMMDDhh`, `YYYYMMDDhh`, `YYMMDDhhmm`,
    `YYYYMMDDhhmm`, `YYYYMMDDhhmmss`, `seconds`, `milliseconds`, `microseconds` or `nanoseconds`. If
    no format is set, the reader detects it from the values. The files are refused if two formats
    fit, or if a time is before 1990 or after tomorrow."""
    user: str | None = None
    """Categorical feature that identifies the user. If a user feature is named, the gate treats the
    rows of a user as correlated, and reports how well each user's rows are ranked."""
    item: str | None = None
    """Categorical feature that identifies the item shown. If an item feature is named, the gate
    also compares two slices: rows of items that are new in this run, and rows of items without an
    id."""

    def __post_init__(self) -> None:
        names = [self.label, self.request_id, self.row, self.event_time]
        names += [] if self.weight is None else [self.weight]
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(
            names
        ):
            raise ContractError(
                f"columns are named {names}, expected a name for each of label, request, row and "
                "time, and another for "
                "a weight"
            )
        if self.time_format is not None and self.time_format not in TIME_FORMATS:
            raise ContractError(
                f"time_format is {self.time_format!r}, expected one of {', '.join(TIME_FORMATS)}"
            )

    @property
    def has_weights(self) -> bool:
        """Return whether a weight column is named."""
        return self.weight is not None
