"""Classify predictions with a known id as redeliveries or as reused ids.

The log delivers at least once, so an equal request under a known id is a redelivery. A different
request under a known id comes, for example, from a client that passes a session id. The request
cannot be stored, because a click identifies its row by the request's id. Instead, the request
becomes a dead letter with a reason, so that the loss is counted.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.records import OutcomeBatch, Predictions


class KnownRequest(NamedTuple):
    """Fields of a stored prediction that remain after its rows are archived."""

    number: int
    time: float
    model_version: int
    num_rows: int
    canary: bool


class Classified(NamedTuple):
    """Indexes of classified predictions. Each prediction is in exactly one of the three arrays."""

    new: NDArray[np.int64]
    """New predictions, ascending. An id is new if it is not stored yet. If several predictions have
    the same new id, only the first prediction is in this array."""
    redelivered: list[int]
    reused: list[int]
    """Predictions with the id of another request."""


def classify(
    predictions: Predictions,
    known: Mapping[str, KnownRequest],
    block_of: Callable[[int], tuple[int, Predictions] | None],
) -> Classified:
    """Classify predictions as new, redelivered or reused.

    Args:
        predictions: Predictions in any order. If several new predictions have the same id, only the
            first prediction is new. The other predictions are compared with the first prediction.
        known: Stored requests with these ids.
        block_of: Function that reads the block of a stored prediction. The argument is the number
            of the prediction. The result is the block and the number of its first prediction, or
            None if the rows are archived. For archived rows, only the time, the version and the
            number of rows are compared.
    """
    new: dict[str, int] = {}
    redelivered: list[int] = []
    reused: list[int] = []
    equal_so_far: list[tuple[int, int]] = []
    for index, request_id in enumerate(predictions.ids.tolist()):
        if (stored := known.get(request_id)) is not None:
            if stored[1:] == _header(predictions, index):
                equal_so_far.append((stored.number, index))
            else:
                reused.append(index)
        elif (first := new.setdefault(request_id, index)) != index:
            is_equal = _same_request(_at(predictions, first), _at(predictions, index))
            (redelivered if is_equal else reused).append(index)
    block: tuple[int, Predictions] | None = None
    for number, index in sorted(equal_so_far):  # sort by block, so that each block is read once
        if block is None or not block[0] <= number < block[0] + len(block[1]):
            block = block_of(number)
        is_equal = block is None or _same_request(
            _at(block[1], number - block[0]), _at(predictions, index)
        )
        (redelivered if is_equal else reused).append(index)
    return Classified(np.array(sorted(new.values()), np.int64), redelivered, sorted(reused))


def _header(predictions: Predictions, index: int) -> tuple[float, int, int, bool]:
    return (
        float(predictions.times[index]),
        int(predictions.versions[index]),
        int(predictions.sizes[index]),
        bool(predictions.canary[index]),
    )


def _at(predictions: Predictions, index: int) -> Predictions:
    return predictions.between(index, index + 1)


def _same_request(one: Predictions, other: Predictions) -> bool:
    """Return whether two requests are equal, bit for bit."""
    arrays = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(Predictions))
    # Compare bytes, because missing values are NaN, which is not equal to itself.
    return all(
        a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()
        for a, b in arrays
    )


def reused_key(message_id: str, payload: bytes) -> str:
    """Return the key of a message with a reused id.

    All deliveries of the message have the same key.
    """
    return f"{message_id}/{hashlib.blake2b(payload, digest_size=8).hexdigest()}"


def batch_key(outcome: OutcomeBatch) -> str:
    """Return the key that recognizes a redelivered outcome batch.

    The key includes the content, because a publisher that numbers its batches from 1 after each
    start reuses their ids for other outcomes.
    """
    digest = hashlib.blake2b("\0".join(outcome.request_ids).encode(), digest_size=8)
    for array in (outcome.rows, outcome.times):
        digest.update(array.tobytes())
    return f"{outcome.batch_id}/{outcome.event}/{digest.hexdigest()}"


def reuse_reason(request_id: str) -> str:
    """Return the dead-letter reason of a prediction with the id of another request."""
    return (
        f"request id {request_id[:128]!r} names another request with other content, expected a "
        "new id for each: "
        "clicks under it count for the first"
    )
