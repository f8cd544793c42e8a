"""The section `data`: the names of the columns that every row has.

The default names are those of the lake. `contracts.raw_rows` has their types.
"""

from dataclasses import dataclass

from evergreen.runtime.errors import ContractError

OWN_COLUMNS = (
    *("label", "request_id", "row", "event_time", "model_version", "score", "position", "propensity"),
    *("shadow_version", "shadow_score", "canary"),
)
"""Columns that rows have whatever their features: no feature has one of these names."""
WEIGHT = "sample_weight"
"""Column of a row's weight, in rows of a recommender whose file names one (`ColumnNames.weight`)."""
TIME_FORMATS = (
    "iso", "YYYYMMDD", "YYMMDDhh", "YYYYMMDDhh", "YYMMDDhhmm", "YYYYMMDDhhmm", "YYYYMMDDhhmmss",
    "seconds", "milliseconds", "microseconds", "nanoseconds",
)  # fmt: skip
"""How files may write times: as ISO 8601, as the digits of a UTC time, or as a count since 1970."""


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Names that a user's files give to the columns of every raw row.

    A column with a name of its own must be in the files. A column with its default name may be absent, except the
    label. Without `row`, the rows of a request are numbered in file order. Without `request_id`, each row is a request
    of its own. Without `event_time`, rows have no time until they are given one.

    Raises:
        ContractError: a name is empty, or stands for two columns.

    >>> ColumnNames(label="clicked", event_time="ts").request_id
    'request_id'
    """

    label: str = "label"
    """1 where the row was clicked, else 0."""
    weight: str | None = None
    """How much the row counts beside others: a finite number of at least 0, such as 10 where one in ten rows without a
    click was kept. Rows that the monitor archived count 1. Training weighs all that it does by it, the gate what
    depends on the click rate; nothing is weighted without the key, and backend hugectr refuses it."""
    request_id: str = "request_id"
    """Which rows were shown together; without the column each row is a request of its own."""
    row: str = "row"
    """Number of the row in its request; without the column the rows are numbered in file order."""
    event_time: str = "event_time"
    """When the row was shown; without the column rows have no time until `evergreen ingest` gives them one."""
    time_format: str | None = None
    """How the files write times, one of `TIME_FORMATS`; without it the form is found from the values, and refused where
    two forms fit or the times would lie outside 1990 to tomorrow."""
    user: str | None = None
    """The categorical feature that says who saw the row. With it the gate counts the rows of a user as alike, and tells
    how well each user's rows are ordered."""
    item: str | None = None
    """The categorical feature that says what was shown. With it the gate also judges the rows of items that are new in
    this round, and of those without an id of their own, each as a slice."""

    def __post_init__(self) -> None:
        names = [self.label, self.request_id, self.row, self.event_time]
        names += [] if self.weight is None else [self.weight]
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise ContractError(
                f"columns are named {names}, expected a name for each of label, request, row and time, and another for "
                "a weight"
            )
        if self.time_format is not None and self.time_format not in TIME_FORMATS:
            raise ContractError(f"time_format is {self.time_format!r}, expected one of {', '.join(TIME_FORMATS)}")

    @property
    def has_weights(self) -> bool:
        """Return whether rows have sample weights."""
        return self.weight is not None
