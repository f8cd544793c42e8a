"""Encoding of a log record as a Protobuf message.

The fields of the message are the columns of a recommender.

Other readers of the log (a BigQuery subscription, Flink, a notebook) use the schema that `proto`
prints. `contracts.records` describes the meaning of a record, and `events.event_log` its transport.

The values of a feature are stored as one packed field. A message of many rows is therefore only a
few bytes longer than its numbers. The number of a field is a hash of the kind and the name of its
feature. If a column is added, dropped or moved, the field numbers of the other columns stay the
same. If a packed field contains fixed-size numbers, its bytes equal those of a field of type bytes
(little endian). NumPy therefore reads these bytes directly. Decoding 64 rows of 39 columns with
NumPy takes a fifth of the time that Protobuf's Python objects take. A nested message is stored like
a field of bytes. The features of many messages can therefore be read as one array (`_Layout`).
"""

import hashlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.contracts.raw_rows import is_infinite
from evergreen.contracts.records import (
    END_OF_TIME,
    MAX_ID_CHARACTERS,
    MAX_ROWS_PER_RECORD,
    NO_POSITION,
    NO_VERSION,
    OutcomeBatch,
    PredictionBatch,
    Predictions,
    Record,
)
from evergreen.runtime.errors import ContractError

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "double": _Field.TYPE_DOUBLE,
}
_ARRAYS: Mapping[str, np.dtype[Any]] = {
    "float": np.dtype("<f4"),
    "double": np.dtype("<f8"),
    "sfixed32": np.dtype("<i4"),
    "sfixed64": np.dtype("<i8"),
}
"""NumPy type for each Protobuf type of repeated numbers. The packed form of a repeated number field
equals the bytes of an array."""


@dataclass(frozen=True)
class _FieldRow:
    """One field of a message."""

    name: str
    number: int
    type: str
    """Type of the field in the schema. For a repeated field, this is the type of its elements. For
    a nested message, this is the message's name."""
    repeated: bool = field(default=False, kw_only=True)
    comment: str = field(default="", kw_only=True)


_PREDICTIONS = (
    _FieldRow("request_id", 1, "string", comment="unique in the log"),
    _FieldRow("time", 2, "double", comment="seconds since the epoch, UTC, when the answer came"),
    _FieldRow("model_version", 3, "int32"),
    _FieldRow("scores", 4, "float", repeated=True, comment="one per row: click probability"),
    _FieldRow(
        "positions",
        5,
        "sfixed32",
        repeated=True,
        comment="one per row, from 1; absent if no list was shown",
    ),
    _FieldRow(
        "propensities",
        6,
        "double",
        repeated=True,
        comment="one per row: probability of its position; or absent",
    ),
    _FieldRow("shadow_version", 7, "int32"),
    _FieldRow(
        "shadow_scores",
        8,
        "float",
        repeated=True,
        comment="one per row by the shadow version, if there is one",
    ),
    _FieldRow("canary", 9, "bool"),
    _FieldRow("recommender", 10, "string"),
    _FieldRow("recommender_digest", 11, "string", comment="SHA-256 of the accepted description"),
    _FieldRow("features", 12, "Features"),
)
_OUTCOMES = (
    _FieldRow("batch_id", 1, "string", comment="unique in the log"),
    _FieldRow("time", 2, "double", comment="seconds since the epoch, UTC, of the newest event"),
    _FieldRow("event", 3, "string", comment="click or conversion"),
    _FieldRow("request_ids", 4, "string", repeated=True, comment="one per event: its request"),
    _FieldRow(
        "rows",
        5,
        "sfixed32",
        repeated=True,
        comment="one per event: its row in the request, from 0",
    ),
    _FieldRow(
        "times", 6, "double", repeated=True, comment="one per event: seconds since the epoch, UTC"
    ),
)
_RECORD = (
    _FieldRow("predictions", 1, "Predictions", comment="the rows of one scored request"),
    _FieldRow("outcomes", 2, "Outcomes", comment="or the outcomes of rows, once they are known"),
)
_MAX_LAYOUTS = 64
"""Maximum number of cached layouts. Messages with different numbers of rows have different
layouts."""
_OUTCOME_BYTES = 300
"""Approximate memory of a decoded outcome in bytes, including the Python objects of its id, row and
time."""
_PREDICTION_ARRAYS = ("positions", "propensities", "shadow_scores")
"""Optional arrays of a prediction record."""
_FRAME_BYTES, _COLUMN_BYTES = 1000, 8
"""Maximum size of a message in bytes, without the numbers in its arrays. `_FRAME_BYTES` covers the
ids, the names and the digest. `_COLUMN_BYTES` covers the tag and the length of each feature."""


class RecordFormat:
    """Encode and decode the records of a recommender with these features.

    >>> form = RecordFormat(Features(numeric=("price",), categorical=("item id",)))
    >>> print(*(line for line in form.proto().splitlines() if "sfixed64" in line))
        repeated sfixed64 item_id = 30076880;  // item id: one value per row, -1 = missing
    """

    def __init__(self, features: Features) -> None:
        """Build the type of the message.

        Raises:
            ContractError: the names of two features have the same hash. With 200 columns, the
                probability of equal hashes is 1 in 840.
        """
        self.features = features
        sizes = {
            name: each.stop - each.start
            for name, each in zip(features.lists, features.positions.lists)
        }
        names = _identifiers(features.names)
        fields, columns = [], []
        kinds = (
            ("numeric", "float", "NaN"),
            ("categorical", "sfixed64", "-1"),
            ("list", "sfixed64", "-1"),
        )
        for (kind, type_name, missing), of_kind in zip(
            kinds, (features.numeric, features.categorical, features.lists)
        ):
            for name in of_kind:
                size = sizes.get(name, 1)
                values = "one value" if size == 1 else f"{size} values"
                comment = f"{name}: {values} per row, {missing} = missing"
                number = _number(kind, name)
                fields.append(
                    _FieldRow(names[name], number, type_name, repeated=True, comment=comment)
                )
                columns.append((number, names[name], _ARRAYS[type_name].itemsize * size))
        if len({each.number for each in fields}) < len(fields):
            raise ContractError(
                f"two of the features {list(features.names)} have the same field number, because "
                "their names have the same hash, expected different numbers; rename one"
            )
        self._messages = {
            "Features": tuple(fields),
            "Predictions": _PREDICTIONS,
            "Outcomes": _OUTCOMES,
        }
        self._numeric = [names[name] for name in features.numeric]
        self._categorical = [names[name] for name in features.categorical]
        self._width = len(features.positions.slots)
        self._lists = [(names[name], sizes[name]) for name in features.lists]
        arrays = sum(_ARRAYS[each.type].itemsize for each in _PREDICTIONS if each.repeated)
        self._feature_bytes = 4 * len(self._numeric) + 8 * self._width
        self.row_bytes = arrays + self._feature_bytes
        """Number of bytes per row, including position, propensity and shadow score."""
        self._type, self._features_type = _message_types({**self._messages, "LogRecord": _RECORD})
        self._layout = lru_cache(_MAX_LAYOUTS)(
            partial(_Layout, self._features_type, [c[1:] for c in sorted(columns)])
        )

    def proto(self) -> str:
        """Return the schema in the format of a `.proto` file, for other readers and for Pub/Sub."""
        lines = ['syntax = "proto3";', "", "message LogRecord {"]
        for message, fields in self._messages.items():
            lines += [f"  message {message} {{", *(f"    {_line(each)}" for each in fields), "  }"]
        return "\n".join([*lines, *(f"  {_line(each)}" for each in _RECORD), "}", ""])

    def max_rows(self, num_bytes: int) -> int:
        """Return how many prediction rows fit in a message of `num_bytes`.

        The size includes positions, propensities and shadow scores.

        >>> RecordFormat(Features(numeric=("price",), categorical=("item",))).max_rows(1_000_000)
        31218
        """
        return (
            num_bytes - _FRAME_BYTES - _COLUMN_BYTES * len(self.features.names)
        ) // self.row_bytes

    def encode(self, record: Record) -> bytes:
        """Return the message that encodes `record`.

        Raises:
            ContractError: the record and the recommender differ in the number of columns.
        """
        if isinstance(record, OutcomeBatch):
            outcomes = {
                name: getattr(record, name) for name in ("batch_id", "time", "event", "request_ids")
            }
            arrays = {"rows": record.rows.tobytes(), "times": record.times.tobytes()}
            return _serialized(self._type(outcomes={**outcomes, **arrays}))
        if (record.dense.shape[1], record.categorical.shape[1]) != (
            len(self._numeric),
            self._width,
        ):
            raise ContractError(
                f"rows have {record.dense.shape[1]} numeric and {record.categorical.shape[1]} "
                "categorical columns, "
                f"expected {len(self._numeric)} and {self._width}"
            )
        columns = dict(zip(self._numeric, _columns_of(record.dense)))
        columns |= zip(
            self._categorical, _columns_of(record.categorical[:, : len(self._categorical)])
        )
        start = len(self._categorical)
        for name, size in self._lists:
            columns[name] = record.categorical[:, start : start + size].tobytes()
            start += size
        message = self._type()
        sent = message.predictions
        sent.request_id, sent.time, sent.model_version = (
            record.request_id,
            record.time,
            record.model_version,
        )
        sent.scores, sent.canary = record.scores.tobytes(), record.canary
        for name in _PREDICTION_ARRAYS:
            if (array := getattr(record, name)) is not None:
                setattr(sent, name, array.tobytes())
        for name in ("shadow_version", "recommender", "recommender_digest"):
            if (value := getattr(record, name)) is not None:
                setattr(sent, name, value)
        prefixes = self._layout(len(record)).prefixes
        sent.features = b"".join(
            [part for name, prefix in prefixes for part in (prefix, columns[name])]
        )
        return _serialized(message)

    def decoded_bytes(self, record: Record) -> int:
        """Return the approximate memory of a decoded record in bytes.

        After decoding, a record has all columns, even those that its message lacks.
        """
        return len(record) * (
            _OUTCOME_BYTES if isinstance(record, OutcomeBatch) else self.row_bytes
        )

    def decode(self, content: bytes, *, recommender: str | None = None) -> Record:
        """Decode a message and return its record.

        A feature that the message lacks is missing in all rows.

        Args:
            content: The message.
            recommender: Expected recommender of predictions, or None for any. A record that names
                no recommender is always accepted.

        Raises:
            ContractError: the message does not follow the schema, or contains an invalid value. The
                error is also raised if predictions belong to another recommender, have more than
                `MAX_ROWS_PER_RECORD` rows, or have a feature with a wrong number of values.
        """
        try:
            message: Any = self._type.FromString(content)
        except DecodeError as error:
            raise ContractError(f"message of {len(content)} bytes is not a log record") from error
        _expect_known(message, "the record")
        kinds = [name for name in ("predictions", "outcomes") if message.HasField(name)]
        if len(kinds) != 1:
            raise ContractError(
                f"message of {len(content)} bytes is a log record of {kinds}, expected one kind"
            )
        if kinds == ["outcomes"]:
            return _outcomes(message.outcomes)
        if recommender is not None and (of := message.predictions.recommender) not in (
            "",
            recommender,
        ):
            raise ContractError(f"rows are of recommender {of[:40]!r}, expected {recommender!r}")
        return self._predictions(message.predictions)

    def decode_plain(
        self,
        contents: Sequence[bytes],
        *,
        recommender: str | None,
        since: float = 0.0,
        before: float = END_OF_TIME,
        versions: Container[int] | None = None,
    ) -> tuple[list[tuple[Predictions, NDArray[np.int64]]], list[int]]:
        """Decode messages in bulk, and find the messages that `decode` must decode one at a time.

        A message can be decoded in bulk if it has all columns, but no propensities and no shadow
        scores. Messages with the same number of rows are decoded together.

        Args:
            contents: The messages.
            recommender: Recommender that the messages may name, or None for any.
            since: Earliest prediction time, in seconds since the epoch, inclusive.
            before: Latest prediction time, in seconds since the epoch, exclusive.
            versions: Model versions that the messages may name, or None for any.

        Returns:
            Two results. The first result contains, for each group of messages, the predictions and
            the positions [m] of their messages. The second result contains the positions of all
            other messages, valid or not.
        """
        alike: dict[int, list[tuple[int, Any]]] = {}
        sizes: dict[int, int] = {}
        rest = []
        read, known = self._type.FromString, ("", recommender)
        for index, content in enumerate(contents):
            try:
                message = read(content)
            except DecodeError:
                rest.append(index)
                continue
            sent = message.predictions
            num_bytes, size = len(sent.scores), len(sent.features)
            if num_bytes not in sizes and (num_rows := self._plain_rows(num_bytes, size)):
                sizes[num_bytes] = self._layout(num_rows).size
            # A message that fails this test may still be valid.
            if (
                size == sizes.get(num_bytes)
                and (
                    not (positions := sent.positions) or len(positions) == num_bytes
                )  # int32 positions and float32 scores both have 4 bytes per row
                and not (sent.propensities or sent.shadow_scores or sent.shadow_version)
                and (recommender is None or sent.recommender in known)
                and since <= sent.time < before
                and (
                    sent.model_version >= 0 if versions is None else sent.model_version in versions
                )
                and 0 < len(sent.request_id) <= MAX_ID_CHARACTERS
                and len(sent.recommender_digest) <= MAX_ID_CHARACTERS
                and not message.HasField("outcomes")
                and not len(UnknownFieldSet(message))
                and not len(UnknownFieldSet(sent))
            ):
                alike.setdefault(num_bytes, []).append((index, sent))
            else:
                rest.append(index)
        return self._read_groups(alike, rest), rest

    def _read_groups(
        self, alike: Mapping[int, list[tuple[int, Any]]], rest: list[int]
    ) -> list[tuple[Predictions, NDArray[np.int64]]]:
        """Decode groups of messages. The key of a group is the number of bytes of its scores.

        The positions of messages that turn out to be invalid are appended to `rest`.
        """
        found = []
        for num_bytes, group in alike.items():
            num_rows = num_bytes // _ARRAYS["float"].itemsize
            read_ones, usable = self._read_alike([sent for _, sent in group], num_rows)
            indexes = np.array([index for index, _ in group], np.int64)
            rest += indexes[~usable].tolist()
            found.append((read_ones.select(usable), indexes[usable]))
        return [(predictions, indexes) for predictions, indexes in found if len(predictions)]

    def _plain_rows(self, score_bytes: int, feature_bytes: int) -> int:
        """Return a message's number of rows, from the sizes of its scores and features in bytes.

        Returns 0 if no valid record has these sizes.
        """
        num_rows, rest = divmod(score_bytes, _ARRAYS["float"].itemsize)
        # The encoding adds bytes to the numbers of the features. Without this check, a corrupt
        # message could request a layout of any size.
        is_valid = (
            not rest
            and num_rows <= MAX_ROWS_PER_RECORD
            and num_rows * self._feature_bytes < feature_bytes
        )
        return num_rows if is_valid else 0

    def _read_alike(
        self, sent: Sequence[Any], num_rows: int
    ) -> tuple[Predictions, NDArray[np.bool_]]:
        """Decode messages that all have `num_rows` rows.

        Returns:
            The predictions, and a mask [m] of the valid messages that have all features.
        """
        layout, shape = self._layout(num_rows), (len(sent), num_rows)
        raw = np.frombuffer(b"".join([each.features for each in sent]), np.uint8).reshape(
            len(sent), layout.size
        )
        scores = np.frombuffer(b"".join([each.scores for each in sent]), _ARRAYS["float"])
        usable = (raw[:, layout.prefix_indexes] == layout.prefix_bytes).all(axis=1)
        usable &= ((scores >= 0) & (scores <= 1)).reshape(shape).all(axis=1)
        no_list = np.full(num_rows, NO_POSITION, np.int32).tobytes()
        positions = np.frombuffer(b"".join([each.positions or no_list for each in sent]), np.int32)
        usable &= (positions > 0).reshape(shape).all(axis=1) | np.array(
            [not each.positions for each in sent]
        )
        dense = np.empty((*shape, len(self._numeric)), np.float32)
        categorical = np.empty((*shape, self._width), np.int64)
        fields: list[tuple[NDArray[Any], str, int, int]] = [
            (dense, name, i, 1) for i, name in enumerate(self._numeric)
        ]
        fields += [(categorical, name, i, 1) for i, name in enumerate(self._categorical)]
        at = len(self._categorical)
        for name, size in self._lists:
            fields.append((categorical, name, at, size))
            at += size
        for matrix, name, at, size in fields:
            column = raw[
                :, layout.starts[name] : layout.starts[name] + num_rows * size * matrix.itemsize
            ]
            matrix[:, :, at : at + size] = (
                np.ascontiguousarray(column).view(matrix.dtype).reshape(*shape, size)
            )
        total = len(scores)
        usable &= ~is_infinite(dense).any(axis=(1, 2))
        return Predictions(
            ids=np.array([each.request_id for each in sent], object),
            times=np.array([each.time for each in sent], np.float64),
            versions=np.array([each.model_version for each in sent], np.int32),
            sizes=np.full(len(sent), num_rows, np.int64),
            scores=scores,
            positions=positions,
            canary=np.array([each.canary for each in sent], np.bool_),
            dense=dense.reshape(total, len(self._numeric)),
            categorical=categorical.reshape(total, self._width),
            propensities=np.full(total, np.nan),
            shadow_versions=np.full(len(sent), NO_VERSION, np.int32),
            shadow_scores=np.full(total, np.nan, np.float32),
        ), usable

    def _predictions(self, sent: Any) -> PredictionBatch:
        try:
            features = self._features_type.FromString(sent.features)
        except DecodeError as error:
            raise ContractError(
                f"features with {len(sent.features)} bytes cannot be decoded, expected the "
                "features of a log record"
            ) from error
        _expect_known(sent, "predictions")
        _expect_known(features, "features")
        scores = _array(sent, "scores", "float")
        # The number of rows is checked before the features, because absent columns are filled in
        # for any number of rows.
        if (n := len(scores)) > MAX_ROWS_PER_RECORD:
            raise ContractError(
                f"prediction batch has {n} rows, expected at most {MAX_ROWS_PER_RECORD}"
            )
        optional = {
            each.name: _array(sent, each.name, each.type) if getattr(sent, each.name) else None
            for each in _PREDICTIONS
            if each.name in _PREDICTION_ARRAYS
        }
        blocks = [_matrix(features, self._categorical, kind="sfixed64", num_values=n)]
        for name, size in self._lists:
            blocks.append(
                _matrix(features, [name], kind="sfixed64", num_values=n * size).reshape(n, size)
            )
        has_shadow = sent.shadow_version or optional["shadow_scores"] is not None
        return PredictionBatch(
            request_id=sent.request_id,
            time=sent.time,
            model_version=sent.model_version,
            dense=_matrix(features, self._numeric, kind="float", num_values=n),
            categorical=np.concatenate(blocks, axis=1) if self._lists else blocks[0],
            scores=scores,
            shadow_version=sent.shadow_version if has_shadow else None,
            canary=sent.canary,
            recommender=sent.recommender or None,
            recommender_digest=sent.recommender_digest or None,
            **optional,
        )


class _Layout:
    """Offset in bytes at which each column's numbers start in the message `Features`.

    A layout is valid for one number of rows.

    Protobuf writes all fields in the order of their numbers.
    """

    def __init__(self, kind: Any, columns: Sequence[tuple[str, int]], num_rows: int) -> None:
        """Compute the offsets.

        Args:
            kind: Class of the message.
            columns: Name and bytes per row of each field, in the order of the fields' numbers.
            num_rows: Number of rows.
        """
        whole = _serialized(kind(**{name: bytes(size * num_rows) for name, size in columns}))
        self.size = len(whole)
        self.prefixes: list[tuple[str, bytes]] = []
        """Name of each field, and the bytes before the numbers of the field. These bytes contain
        the tag and the length."""
        self.starts: dict[str, int] = {}
        end = 0
        for name, size in columns:
            # The tag takes 4 bytes (`_number`). The length is encoded with 7 bits in each byte.
            start = end + 4 + (max((size * num_rows).bit_length(), 1) + 6) // 7
            self.prefixes.append((name, whole[end:start]))
            self.starts[name], end = start, start + size * num_rows
        self.prefix_indexes = np.concatenate(
            [
                np.arange(self.starts[name] - len(prefix), self.starts[name])
                for name, prefix in self.prefixes
            ]
        )
        self.prefix_bytes = np.frombuffer(b"".join(prefix for _, prefix in self.prefixes), np.uint8)


def _matrix(features: Any, names: Sequence[str], *, kind: str, num_values: int) -> NDArray[Any]:
    """Return the columns with these names side by side, [num_values, names]."""
    dtype = _ARRAYS[kind]
    size = num_values * dtype.itemsize
    columns = [getattr(features, name) for name in names]
    for at, column in enumerate(columns):
        if not column:
            columns[at] = np.full(
                num_values, MISSING_CATEGORY if dtype.kind == "i" else np.nan, dtype
            ).tobytes()
        elif len(column) != size:
            raise ContractError(
                f"{names[at]} has {len(column) // dtype.itemsize} values, expected {num_values}"
            )
    return np.ascontiguousarray(
        np.frombuffer(b"".join(columns), dtype).reshape(len(columns), num_values).T
    )


def _serialized(message: Message) -> bytes:
    content: bytes = message.SerializeToString()
    return content


def _outcomes(sent: Any) -> OutcomeBatch:
    _expect_known(sent, "outcomes")
    return OutcomeBatch(
        batch_id=sent.batch_id,
        time=sent.time,
        event=sent.event,
        request_ids=tuple(sent.request_ids),
        rows=_array(sent, "rows", "sfixed32"),
        times=_array(sent, "times", "double"),
    )


def _array(message: Any, name: str, kind: str) -> NDArray[Any]:
    content, dtype = getattr(message, name), _ARRAYS[kind]
    if len(content) % dtype.itemsize:
        raise ContractError(
            f"{name} has {len(content)} bytes, expected a multiple of {dtype.itemsize}"
        )
    return np.frombuffer(content, dtype)


def _expect_known(message: Message, what: str) -> None:
    """Refuse a message with unknown fields.

    Decoding would lose the values of unknown fields. A newer client, or a client with a newer
    recommender's file, may send unknown fields.
    """
    if unknown := [each.field_number for each in UnknownFieldSet(message)]:
        raise ContractError(
            f"{what} has the fields {sorted(set(unknown))[:5]}, expected only those of this "
            "recommender's records; the "
            "client or its recommender's file may be newer"
        )


def _columns_of(matrix: NDArray[Any]) -> list[bytes]:
    """Return the bytes of each column."""
    content, size = matrix.T.tobytes(), matrix.itemsize * len(matrix)
    return [content[start : start + size] for start in range(0, len(content), size)]


def _number(kind: str, name: str) -> int:
    """Return the number of a feature's field, from 2^24 to 2^25 - 1.

    The Protobuf tag of a field with this number takes 4 bytes.
    """
    digest = hashlib.blake2b(f"{kind}/{name}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") >> 8) + (1 << 24)


def _identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return a valid and unique field name for each feature.

    The names are unique without regard to case, as BigQuery requires.

    >>> _identifiers(["item id", "item-id", "2nd"])
    {'item id': 'item_id', 'item-id': 'item_id_2', '2nd': '_2nd'}
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"^(?=\d)", "_", re.sub(r"[^A-Za-z0-9_]", "_", name))
        tries = [plain, *(f"{plain}_{at}" for at in range(2, len(taken) + 3))]
        found[name] = next(each for each in tries if each.lower() not in taken)
        taken.add(found[name].lower())
    return found


def _line(row: _FieldRow) -> str:
    comment = f"  // {row.comment}" if row.comment else ""
    return f"{'repeated ' if row.repeated else ''}{row.type} {row.name} = {row.number};{comment}"


def _message_types(messages: Mapping[str, tuple[_FieldRow, ...]]) -> tuple[Any, Any]:
    """Return the Protobuf classes for `LogRecord` and `Features`.

    In the class for `LogRecord`, the type of arrays and features is `bytes`.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="record.proto", package="evergreen", syntax="proto3"
    )
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for each in fields:
            is_array = each.repeated and each.type in _ARRAYS or each.type == "Features"
            is_list = each.repeated and not is_array
            added = described.field.add(name=each.name, number=each.number)
            added.label = _Field.LABEL_REPEATED if is_list else _Field.LABEL_OPTIONAL
            if each.type in messages and not is_array:
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".evergreen.{each.type}"
            else:
                added.type = _Field.TYPE_BYTES if is_array else _SCALARS[each.type]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    record, features = (
        pool.FindMessageTypeByName(f"evergreen.{name}") for name in ("LogRecord", "Features")
    )
    return message_factory.GetMessageClass(record), message_factory.GetMessageClass(features)
