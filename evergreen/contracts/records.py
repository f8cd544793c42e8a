"""Log records: predictions, and the outcomes that arrive later.

The inference client publishes log records, and the monitor consumes them. Each message of the log
contains one batch. `evergreen.contracts.record_format` defines the encoding, and
`evergreen.events.event_log` the transport. The monitor joins predictions and outcomes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.raw_rows import FINITE, is_infinite
from evergreen.runtime.errors import ContractError

_OF_RECOMMENDER = ("recommender", "recommender_digest")
"""Fields of a prediction batch that identify the recommender of its rows."""
# Cache the dtypes of the arrays. Without the cache, decoding a message of one row spent a fifth of
# its time on creating dtypes.
_EXPECTED: dict[type[Any], np.dtype[Any]] = {
    kind: np.dtype(kind) for kind in (np.float32, np.float64, np.int32, np.int64)
}

MAX_VERSION = 2**31 - 1
"""Maximum model version. The archive's version column has a type with this maximum."""
MAX_ID_CHARACTERS = 128
"""Maximum number of characters of an id, a name or a digest in a record. The archive repeats a
request's id in each of its rows."""
MAX_ROWS_PER_RECORD = 2048
"""Maximum number of rows in a prediction record. A record with this number of rows and 39 columns
has 0.57 MB. Event logs accept messages of up to 1 MB."""
END_OF_TIME = 253_402_300_800.0
"""Start of the year 10000 in seconds since the epoch. Python's calendar ends before the year
10000."""

CLICK = "click"
CONVERSION = "conversion"
EVENTS = (CLICK, CONVERSION)


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictionBatch:
    """Record of one scored request with its rows.

    Raises:
        ContractError: a type, shape or dtype is not as stated, or there are no rows or columns. The
            error is also raised if a version or time is out of range, or a text is too long or
            cannot be encoded in UTF-8. The error is also raised if a numeric value is infinite, or
            a score is not a probability.
    """

    request_id: str
    time: float
    """Time when the request was answered, in seconds since the epoch, UTC."""
    model_version: int
    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, c], -1 = missing."""
    scores: NDArray[np.float32]
    """[n] probabilities. NaN if the model returned no score. The caller received no scores for this
    request."""
    positions: NDArray[np.int32] | None = None
    """[n] position in the ranked list that the request showed, from 1. None if the request did not
    show a ranked list."""
    propensities: NDArray[np.float64] | None = None
    """[n] probability of each row's position (`evergreen.contracts.exploration`). None without
    exploration."""
    shadow_version: int | None = None
    """Model version that scored the rows as shadow traffic. None if there was no shadow traffic."""
    shadow_scores: NDArray[np.float32] | None = None
    """[n] probabilities from the shadow version. Shadow scores were not served to users. The scores
    are required if `shadow_version` is set, and not allowed otherwise."""
    canary: bool = False
    """Whether a canary scored the request. A canary is a version that gets a share of the traffic
    beside the live version."""
    recommender: str | None = None
    """Name of the rows' recommender. None if the writer of the record did not know the
    recommender."""
    recommender_digest: str | None = None
    """Digest of the recommender that the writer used (`evergreen.config.spec.Recommender.digest`).
    None if the writer of the record did not know the recommender."""

    def __post_init__(self) -> None:
        n = len(self.scores)
        _check_text("request_id", self.request_id)
        _check_time("time", self.time)
        _check_version("model_version", self.model_version)
        if type(self.canary) is not bool:
            raise ContractError(f"canary is {_short(self.canary)}, expected true or false")
        if n == 0:
            raise ContractError(
                f"prediction batch {self.request_id} has no rows, expected one or more"
            )
        _check_matrix("dense", self.dense, np.float32, num_rows=n)
        _check_matrix("categorical", self.categorical, np.int64, num_rows=n)
        if self.dense.shape[1] + self.categorical.shape[1] == 0:
            raise ContractError(
                f"prediction batch {self.request_id} has no columns, expected one or more"
            )
        for name in _OF_RECOMMENDER:
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
        _check_array("scores", self.scores, np.float32, shape=(n,))
        if self.positions is not None:
            _check_array("positions", self.positions, np.int32, shape=(n,))
            if (least := int(self.positions.min())) < 1:
                raise ContractError(
                    f"prediction batch {self.request_id} has position {least}, expected at least 1"
                )
        if self.propensities is not None:
            _check_array("propensities", self.propensities, np.float64, shape=(n,))
        if (self.shadow_version is None) != (self.shadow_scores is None):
            raise ContractError(
                f"prediction batch {self.request_id} has a shadow version without scores or vice "
                "versa"
            )
        if self.shadow_scores is not None:
            _check_array("shadow_scores", self.shadow_scores, np.float32, shape=(n,))
        if self.shadow_version is not None:
            _check_version("shadow_version", self.shadow_version)
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("scores", "shadow_scores", "propensities"):
            values = getattr(self, name)
            # If any value is NaN, the minimum and the maximum are NaN, and both comparisons are
            # false.
            if values is None or (
                np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) <= 1
            ):
                continue
            if name != "scores" or np.fmin.reduce(values) < 0 or np.fmax.reduce(values) > 1:
                raise ContractError(f"prediction batch {self.request_id} has {name} outside [0, 1]")
        if (infinite := is_infinite(self.dense)).any():
            row, column = np.argwhere(infinite)[0].tolist()
            raise ContractError(
                f"prediction batch {self.request_id} has {self.dense[row, column]} in row {row} of "
                "numeric column "
                f"{column}, expected {FINITE}"
            )

    def __len__(self) -> int:
        return len(self.scores)


R = TypeVar("R", bound="Requests")


def micros_of(times: NDArray[np.float64]) -> NDArray[np.int64]:
    """Convert times in seconds to microseconds.

    For a single time, `evergreen.contracts.raw_rows.microseconds` does the same.
    """
    return np.rint(times * 1e6).astype(np.int64)


NO_POSITION = -(2**31)
"""Value of `Requests.positions` for a row outside ranked lists."""
NO_VERSION = -1
"""Value of `Predictions.shadow_versions` if the request has no shadow scores."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Columns of several requests.

    Each column is an array, with one value per request, [m], or per row, [n].

    The rows of a request are consecutive. Requests that arrive together are decoded, stored and
    counted by one call. The arrays are faster than one object per request: for requests with a
    single row, creating the objects took most of the time.
    """

    ids: NDArray[np.object_]
    """[m] ids, of type str."""
    times: NDArray[np.float64]
    """[m] times, in seconds since the epoch, UTC."""
    versions: NDArray[np.int32]
    """[m] model versions."""
    sizes: NDArray[np.int64]
    """[m] number of rows of each request, at least 1."""
    scores: NDArray[np.float32]
    """[n] probabilities."""
    positions: NDArray[np.int32]
    """[n] position in the ranked list that the request showed, from 1. The value is `NO_POSITION`
    if the request showed no list."""

    OF_REQUESTS: ClassVar[tuple[str, ...]] = ("ids", "times", "versions", "sizes")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        """Return the total number of rows."""
        return len(self.scores)

    @property
    def micros(self) -> NDArray[np.int64]:
        """Return `times` in whole microseconds."""
        return micros_of(self.times)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return the position of each request's first row, [m]."""
        return np.cumsum(self.sizes) - self.sizes

    def select(self: R, chosen: NDArray[np.integer] | NDArray[np.bool_]) -> R:
        """Return the requests at the positions `chosen`. `chosen` may also be a mask [m]."""
        if chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        if np.array_equal(chosen, np.arange(len(self))):
            return self
        sizes = self.sizes[chosen]
        ends = np.cumsum(sizes)
        return self._select_rows(
            chosen, np.repeat(self.starts[chosen] - ends + sizes, sizes) + np.arange(sizes.sum())
        )

    def between(self: R, start: int, stop: int) -> R:
        """Return the requests from position `start` up to but excluding `stop`, without copying."""
        first = int(self.sizes[:start].sum())
        return self._select_rows(
            slice(start, stop), slice(first, first + int(self.sizes[start:stop].sum()))
        )

    def _select_rows(self: R, chosen: Any, rows: Any) -> R:
        return replace(
            self,
            **{name: getattr(self, name)[chosen if of else rows] for name, of in self._columns()},
        )

    def to(self, kind: type[R], **more: NDArray[Any]) -> R:
        """Return the same requests as an object of class `kind`.

        Args:
            kind: Class of the result.
            more: Values of the columns that only `kind` has.
        """
        return kind(
            **{name: getattr(self, name) for name, _ in kind._columns() if name not in more}, **more
        )

    def ordered(self: R, times: NDArray[Any]) -> R:
        """Return the requests in the order of `times`, [m].

        Requests with equal times are ordered by id.
        """
        return self.select(self.order(times))

    def order(self, times: NDArray[Any]) -> NDArray[np.int64]:
        """Return the order of the requests by `times`, [m].

        Requests with equal times are ordered by id.
        """
        order = np.argsort(times, kind="stable")
        in_order = times[order]
        if (in_order[1:] == in_order[:-1]).any():
            order = np.argsort(self.ids, kind="stable")
            order = order[np.argsort(times[order], kind="stable")]
        return order

    def by_version(self: R) -> Iterator[tuple[int, R]]:
        """Yield each model version with its requests.

        The versions are in the order of their last requests.
        """
        versions, from_end = np.unique(self.versions[::-1], return_index=True)
        for version in versions[np.argsort(-from_end)].tolist():
            yield version, self.select(self.versions == version)

    @classmethod
    def joined(cls: type[R], parts: Sequence[R]) -> R:
        """Concatenate `parts`, which must not be empty."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{
                name: np.concatenate([getattr(each, name) for each in parts])
                for name, _ in cls._columns()
            }
        )

    @classmethod
    def _columns(cls) -> list[tuple[str, bool]]:
        """Return the name of each array, and whether it has one value per request or per row."""
        return [(each.name, each.name in cls.OF_REQUESTS) for each in fields(cls)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions(Requests):
    """Columns of the prediction batches of one recommender."""

    canary: NDArray[np.bool_]
    """[m], see `PredictionBatch.canary`."""
    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, c], -1 = missing."""
    propensities: NDArray[np.float64]
    """[n], NaN without exploration."""
    shadow_versions: NDArray[np.int32]
    """[m] shadow version, or `NO_VERSION` if no shadow version scored the request."""
    shadow_scores: NDArray[np.float32]
    """[n], NaN without a shadow version."""

    OF_REQUESTS: ClassVar[tuple[str, ...]] = (*Requests.OF_REQUESTS, "canary", "shadow_versions")

    @classmethod
    def of(cls, batches: Sequence[PredictionBatch]) -> "Predictions":
        """Return the rows of prediction batches as arrays.

        There must be at least one batch, and all batches must have the same columns.
        """
        sizes = np.array([len(batch) for batch in batches], np.int64)
        shadow_versions = [
            NO_VERSION if each.shadow_version is None else each.shadow_version for each in batches
        ]
        return cls(
            ids=np.array([batch.request_id for batch in batches], object),
            times=np.array([batch.time for batch in batches], np.float64),
            versions=np.array([batch.model_version for batch in batches], np.int32),
            sizes=sizes,
            scores=np.concatenate([batch.scores for batch in batches]),
            positions=_joined_or(
                [batch.positions for batch in batches], sizes, np.int32(NO_POSITION)
            ),
            canary=np.array([batch.canary for batch in batches], np.bool_),
            dense=np.concatenate([batch.dense for batch in batches]),
            categorical=np.concatenate([batch.categorical for batch in batches]),
            propensities=_joined_or(
                [batch.propensities for batch in batches], sizes, np.float64(np.nan)
            ),
            shadow_versions=np.array(shadow_versions, np.int32),
            shadow_scores=_joined_or(
                [batch.shadow_scores for batch in batches], sizes, np.float32(np.nan)
            ),
        )


def _joined_or(
    given: Sequence[NDArray[Any] | None], sizes: NDArray[np.int64], missing: np.generic
) -> NDArray[Any]:
    """Concatenate arrays.

    If an array is None, all its rows get the value `missing`.
    """
    return np.concatenate(
        [
            np.full(size, missing) if array is None else array
            for array, size in zip(given, sizes.tolist())
        ]
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OutcomeBatch:
    """Outcomes that the client received together and logs as one record.

    A row counts as not clicked if no outcome arrives within its attribution window.

    Raises:
        ContractError: a type, shape or dtype is not as stated, a row or time is out of range, a
            text is too long or cannot be encoded in UTF-8, or there are no outcomes.
    """

    batch_id: str
    time: float
    """Time of the batch's newest event, in seconds since the epoch, UTC."""
    event: str
    """`click` or `conversion`."""
    request_ids: tuple[str, ...]
    rows: NDArray[np.int32]
    """[n] row number of each event within its request."""
    times: NDArray[np.float64]
    """[n] time of each event, in seconds since the epoch."""

    def __post_init__(self) -> None:
        n = len(self.request_ids)
        _check_text("batch_id", self.batch_id)
        _check_time("time", self.time)
        if n == 0:
            raise ContractError(
                f"outcome batch {self.batch_id} has no outcomes, expected one or more"
            )
        for request_id in self.request_ids:
            _check_text("request_id", request_id)
        if self.event not in EVENTS:
            raise ContractError(f"outcome event is {_short(self.event)}, expected one of {EVENTS}")
        _check_array("rows", self.rows, np.int32, shape=(n,))
        _check_array("times", self.times, np.float64, shape=(n,))
        if np.minimum.reduce(self.rows) < 0:
            raise ContractError(f"outcome batch {self.batch_id} has rows below 0")
        for time in self.times.tolist():
            _check_time("time", time)

    def __len__(self) -> int:
        return len(self.request_ids)


Record = PredictionBatch | OutcomeBatch


def record_id(record: Record) -> str:
    """Return the id of a record, which is the same for every delivery of the record."""
    return record.request_id if isinstance(record, PredictionBatch) else record.batch_id


def _check_text(name: str, value: Any) -> None:
    """Refuse a text that is empty, too long, or cannot be encoded in UTF-8.

    JSON can contain half a surrogate pair, which Python accepts but no database or file can store.
    """
    try:
        if isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARACTERS and value.encode():
            return
    except UnicodeEncodeError:
        pass
    size = f" ({len(value)} characters)" if isinstance(value, str) else ""
    raise ContractError(
        f"{name} is {_short(value)}{size}, expected a name of 1 to {MAX_ID_CHARACTERS} characters"
    )


def _check_version(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise ContractError(f"{name} is {_short(value)}, expected a 32-bit integer of at least 0")


def _check_time(name: str, value: Any) -> None:
    # The value is not converted to a float, because an integer from JSON may be too large for a
    # float.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < END_OF_TIME
    ):
        raise ContractError(f"{name} is {_short(value)}, expected seconds since the epoch")


def _short(value: Any) -> str:
    return repr(value[:40] if isinstance(value, str) else value)[:40]


def _check_array(
    name: str, array: NDArray[Any], dtype: type[Any], *, shape: tuple[int, ...]
) -> None:
    if array.dtype != _EXPECTED[dtype] or array.shape != shape:
        raise ContractError(
            f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}"
        )


def _check_matrix(name: str, array: NDArray[Any], dtype: type[Any], *, num_rows: int) -> None:
    if array.dtype != _EXPECTED[dtype] or array.ndim != 2 or len(array) != num_rows:
        expected = f"{np.dtype(dtype)} [{num_rows}, any]"
        raise ContractError(f"{name} is {array.dtype} {list(array.shape)}, expected {expected}")
