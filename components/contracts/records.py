"""Log records: what was predicted, and what came of it later.

Joins the inference client, which publishes them, to the monitor, which consumes them. How they travel is
`logs.event_log`'s; what they mean together (the join) is the monitor's.

One message is one batch. Layout, little endian: 4 bytes magic, uint8 format version, uint8 kind, uint32 length of a
JSON header, header, the arrays named by the header back to back, uint32 CRC-32 of all that precedes.
How wide rows are stands in the header, so that whoever reads a record needs no description of its recommender.
A request of 64 rows of 39 features takes about 17 kB, far below the 1 MB that Kafka and Pub/Sub's default quotas take.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from components.runtime.errors import ContractError

T = TypeVar("T")

MAGIC = b"EVGR"
FORMAT_VERSION = 2
_PREFIX = struct.Struct("<4sBBI")
_CRC = struct.Struct("<I")
_PREDICTION, _OUTCOME = 1, 2
_OF_RECOMMENDER = ("recommender", "recommender_digest")
"""Fields of a prediction batch that tell whose rows it has."""
# Looked up: to make them for each array was a fifth of the time that a message of one row takes.
_EXPECTED: dict[type[Any], np.dtype[Any]] = {
    kind: np.dtype(kind) for kind in (np.float32, np.float64, np.int32, np.int64)
}
_STORED = {kind: expected.newbyteorder("<") for kind, expected in _EXPECTED.items()}

MAX_VERSION = 2**31 - 1
"""Of a model; what the archive's column takes."""
END_OF_TIME = 253_402_300_800.0
"""Seconds since the epoch: the year 10000, which no calendar of ours knows."""

CLICK = "click"
CONVERSION = "conversion"
EVENTS = (CLICK, CONVERSION)


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictionBatch:
    """The rows of one scored request, of any number of numeric and categorical columns, but of one at least.

    Raises:
        ContractError: types, shapes or dtypes differ from those stated, a version or time is out of range, a text has
            no UTF-8 form, a score is no probability, or there are no rows or columns.
    """

    request_id: str
    time: float
    """Seconds since the epoch, UTC, when the answer came."""
    model_version: int
    dense: NDArray[np.float32]
    """[n, d], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, c], -1 = missing."""
    scores: NDArray[np.float32]
    """[n] probabilities."""
    positions: NDArray[np.int32] | None = None
    """[n] place in the ranked list that the request showed, from 1; None where it showed none."""
    propensities: NDArray[np.float64] | None = None
    """[n] probability with which each row stood at its place (`contracts.exploration`); None where nobody explored."""
    shadow_version: int | None = None
    """Model version that scored the rows in the shadow; None = none did."""
    shadow_scores: NDArray[np.float32] | None = None
    """[n] its probabilities, which nobody was served; given with `shadow_version` or not at all."""
    canary: bool = False
    """Whether a canary answered: its version takes a share of the traffic and is not the one that serves."""
    recommender: str | None = None
    """Name of the recommender whose rows these are; None where the writer did not know it."""
    recommender_digest: str | None = None
    """Its `contracts.recommender.Recommender.digest` as the writer had it; None likewise."""

    def __post_init__(self) -> None:
        """Refuses what could not be read back."""
        n = len(self.scores)
        _check_text("request_id", self.request_id)
        _check_time("time", self.time)
        _check_version("model_version", self.model_version)
        if type(self.canary) is not bool:
            raise ContractError(f"canary is {_short(self.canary)}, expected true or false")
        if n == 0:
            raise ContractError(f"prediction batch {self.request_id} has no rows, expected one or more")
        _check_matrix("dense", self.dense, np.float32, num_rows=n)
        _check_matrix("categorical", self.categorical, np.int64, num_rows=n)
        if self.dense.shape[1] + self.categorical.shape[1] == 0:
            raise ContractError(f"prediction batch {self.request_id} has no columns, expected one or more")
        for name in _OF_RECOMMENDER:
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
        _check_array("scores", self.scores, np.float32, shape=(n,))
        if self.positions is not None:
            _check_array("positions", self.positions, np.int32, shape=(n,))
        if self.propensities is not None:
            _check_array("propensities", self.propensities, np.float64, shape=(n,))
        if (self.shadow_version is None) != (self.shadow_scores is None):
            raise ContractError(f"prediction batch {self.request_id} has a shadow version without scores or vice versa")
        if self.shadow_scores is not None:
            _check_array("shadow_scores", self.shadow_scores, np.float32, shape=(n,))
        if self.shadow_version is not None:
            _check_version("shadow_version", self.shadow_version)
        for name in ("scores", "shadow_scores", "propensities"):
            values = getattr(self, name)
            # NaN is the minimum of whatever holds one, and neither.
            if values is not None and not (np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) <= 1):
                raise ContractError(f"prediction batch {self.request_id} has {name} outside [0, 1]")

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.scores)


@dataclass(frozen=True, kw_only=True, eq=False)
class OutcomeBatch:
    """Outcomes that became known together; a row without one is no click once its attribution window closes.

    Raises:
        ContractError: types, shapes or dtypes differ from those stated, a row or time is out of range, a text has no
            UTF-8 form, or there are no outcomes.
    """

    batch_id: str
    time: float
    """Seconds since the epoch, UTC, of the newest event."""
    event: str
    """`click` or `conversion`."""
    request_ids: tuple[str, ...]
    rows: NDArray[np.int32]
    """[n] row of each event in its request."""
    times: NDArray[np.float64]
    """[n] seconds since the epoch of each event."""

    def __post_init__(self) -> None:
        """Refuses what could not be read back."""
        n = len(self.request_ids)
        _check_text("batch_id", self.batch_id)
        _check_time("time", self.time)
        if n == 0:
            raise ContractError(f"outcome batch {self.batch_id} has no outcomes, expected one or more")
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
        """Number of outcomes."""
        return len(self.request_ids)


Record = PredictionBatch | OutcomeBatch


def record_id(record: Record) -> str:
    """The id by which a record's redeliveries are recognised."""
    return record.request_id if isinstance(record, PredictionBatch) else record.batch_id


def encode(record: Record) -> bytes:
    """The message that holds `record`."""
    header: dict[str, Any]
    arrays: list[NDArray[Any]]
    if isinstance(record, PredictionBatch):
        kind = _PREDICTION
        header = {
            "request_id": record.request_id,
            "time": record.time,
            "model_version": record.model_version,
            "num_rows": len(record),
            "num_dense": record.dense.shape[1],
            "num_categorical": record.categorical.shape[1],
            "has_positions": record.positions is not None,
            "has_propensities": record.propensities is not None,
        }
        arrays = [record.dense, record.categorical, record.scores]
        arrays += [array for array in (record.positions, record.propensities) if array is not None]
        header |= {name: value for name in _OF_RECOMMENDER if (value := getattr(record, name)) is not None}
        if record.canary:
            header["canary"] = True
        if record.shadow_scores is not None:
            header["shadow_version"] = record.shadow_version
            arrays.append(record.shadow_scores)
    else:
        kind = _OUTCOME
        header = {
            "batch_id": record.batch_id,
            "time": record.time,
            "event": record.event,
            "request_ids": record.request_ids,
        }
        arrays = [record.rows, record.times]
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, kind, len(text))
    body = b"".join([prefix, text, *(np.ascontiguousarray(a).tobytes() for a in arrays)])
    return body + _CRC.pack(zlib.crc32(body))


def decode(message: bytes) -> Record:
    """The record in `message`.

    Raises:
        ContractError: no record of ours, a newer format version, damaged, truncated, or with bytes left over.
    """
    if len(message) < _PREFIX.size + _CRC.size or message[:4] != MAGIC:
        raise ContractError(f"message of {len(message)} bytes is no log record")
    _, version, kind, header_length = _PREFIX.unpack_from(message)
    if version != FORMAT_VERSION:
        raise ContractError(f"log record has format version {version}, expected {FORMAT_VERSION}")
    body = message[: -_CRC.size]
    if zlib.crc32(body) != _CRC.unpack(message[-_CRC.size :])[0]:
        raise ContractError(f"log record of {len(message)} bytes is damaged: its checksum differs")
    start = _PREFIX.size + header_length
    try:
        header = json.loads(str(body[_PREFIX.size : start], "utf-8", "surrogatepass"))
        arrays = _Arrays(body, start)
        if kind == _PREDICTION:
            record: Record = _decode_prediction(header, arrays)
        else:
            record = _decode_outcome(kind, header, arrays)
    except ContractError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ContractError(f"log record has a malformed header: {error!r}") from error
    arrays.expect_end()
    return record


def _decode_prediction(header: dict[str, Any], arrays: _Arrays) -> PredictionBatch:
    n, num_dense, num_categorical = (_field(header, f"num_{of}", int) for of in ("rows", "dense", "categorical"))
    has_positions, has_propensities = (_field(header, f"has_{of}", bool) for of in ("positions", "propensities"))
    shadow = _field(header, "shadow_version", int) if "shadow_version" in header else None
    return PredictionBatch(
        request_id=header["request_id"],
        time=header["time"],
        model_version=header["model_version"],
        dense=arrays.take(np.float32, (n, num_dense)),
        categorical=arrays.take(np.int64, (n, num_categorical)),
        scores=arrays.take(np.float32, (n,)),
        positions=arrays.take(np.int32, (n,)) if has_positions else None,
        propensities=arrays.take(np.float64, (n,)) if has_propensities else None,
        shadow_version=shadow,
        shadow_scores=arrays.take(np.float32, (n,)) if shadow is not None else None,
        canary=header.get("canary", False),
        **{name: header.get(name) for name in _OF_RECOMMENDER},
    )


def _decode_outcome(kind: int, header: dict[str, Any], arrays: _Arrays) -> OutcomeBatch:
    if kind != _OUTCOME:
        raise ContractError(f"log record has kind {kind}, expected {_PREDICTION} or {_OUTCOME}")
    request_ids = _field(header, "request_ids", list)
    n = len(request_ids)
    return OutcomeBatch(
        batch_id=header["batch_id"],
        time=header["time"],
        event=header["event"],
        request_ids=tuple(request_ids),
        rows=arrays.take(np.int32, (n,)),
        times=arrays.take(np.float64, (n,)),
    )


def _field(header: dict[str, Any], name: str, kind: type[T]) -> T:
    value = header[name]
    if type(value) is not kind:
        raise ContractError(f"log record has a malformed header: {name} is {_short(value)}, expected {kind.__name__}")
    return value


class _Arrays:
    """Takes arrays one after another from a message."""

    def __init__(self, body: bytes, start: int) -> None:
        self._body, self._at = body, start

    def take(self, dtype: type[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        count = math.prod(shape)  # of Python's integers: NumPy's wrap around
        stored = _STORED[dtype]
        size = count * stored.itemsize
        if count < 0 or self._at + size > len(self._body):
            raise ContractError(f"log record ends {_short(self._at + size - len(self._body))} bytes early")
        array = np.frombuffer(self._body, stored, count, self._at)
        self._at += size
        return array if len(shape) == 1 else array.reshape(shape)

    def expect_end(self) -> None:
        if self._at != len(self._body):
            raise ContractError(f"log record has {len(self._body) - self._at} bytes left over")


def _check_text(name: str, value: Any) -> None:
    """JSON can spell half a surrogate pair, which is text in Python alone: no database or file can hold it."""
    try:
        if isinstance(value, str) and value and value.encode():
            return
    except UnicodeEncodeError:
        pass
    raise ContractError(f"{name} is {_short(value)}, expected a name")


def _check_version(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise ContractError(f"{name} is {_short(value)}, expected a 32-bit integer of at least 0")


def _check_time(name: str, value: Any) -> None:
    # Compared and never converted: JSON's integers may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < END_OF_TIME:
        raise ContractError(f"{name} is {_short(value)}, expected seconds since the epoch")


def _short(value: Any) -> str:
    return repr(value)[:40]


def _check_array(name: str, array: NDArray[Any], dtype: type[Any], *, shape: tuple[int, ...]) -> None:
    if array.dtype != _EXPECTED[dtype] or array.shape != shape:
        raise ContractError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}")


def _check_matrix(name: str, array: NDArray[Any], dtype: type[Any], *, num_rows: int) -> None:
    if array.dtype != _EXPECTED[dtype] or array.ndim != 2 or len(array) != num_rows:
        expected = f"{np.dtype(dtype)} [{num_rows}, any]"
        raise ContractError(f"{name} is {array.dtype} {list(array.shape)}, expected {expected}")
