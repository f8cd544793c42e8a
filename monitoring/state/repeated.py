"""Predictions under an id that is known: the same request delivered again, or another one that must not be mixed up.

A log delivers at least once, so a request that is equal in every value is no news. Another request under the same id,
as from a site that passes a session's id, cannot be kept: clicks name a row by that id. The monitor sets it aside with
a reason, so that it is counted and no row is lost in silence.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.records import OutcomeBatch, Predictions


class KnownRequest(NamedTuple):
    """What is held of a stored prediction, also when its rows are archived."""

    number: int
    time: float
    model_version: int
    num_rows: int
    canary: bool


class ToldApart(NamedTuple):
    """Places of predictions, each of which is in one of these."""

    new: NDArray[np.int64]
    """The first of each id that is not known, ascending."""
    redelivered: list[int]
    reused: list[int]
    """They have the id of another request."""


def tell_apart(
    predictions: Predictions,
    known: Mapping[str, KnownRequest],
    held: Callable[[int], tuple[int, Predictions] | None],
) -> ToldApart:
    """Sort predictions by whether their ids are known, and with which content.

    Args:
        predictions: In any order; of two new ones with one id the first counts.
        known: The stored requests with these ids.
        held: Returns the block of the stored prediction of a number, with the number of its first one; None if its
            rows are archived. Then time, version and number of rows decide.
    """
    new: dict[str, int] = {}
    redelivered: list[int] = []
    reused: list[int] = []
    equal_so_far: list[tuple[int, int]] = []
    for place, request_id in enumerate(predictions.ids.tolist()):
        if (stored := known.get(request_id)) is not None:
            if stored[1:] == _header(predictions, place):
                equal_so_far.append((stored.number, place))
            else:
                reused.append(place)
        elif (first := new.setdefault(request_id, place)) != place:
            is_equal = same_request(_at(predictions, first), _at(predictions, place))
            (redelivered if is_equal else reused).append(place)
    block: tuple[int, Predictions] | None = None
    for number, place in sorted(equal_so_far):  # in the order of the blocks, so that each is read once
        if block is None or not block[0] <= number < block[0] + len(block[1]):
            block = held(number)
        is_equal = block is None or same_request(_at(block[1], number - block[0]), _at(predictions, place))
        (redelivered if is_equal else reused).append(place)
    return ToldApart(np.array(sorted(new.values()), np.int64), redelivered, sorted(reused))


def _header(predictions: Predictions, place: int) -> tuple[float, int, int, bool]:
    return (
        float(predictions.times[place]),
        int(predictions.versions[place]),
        int(predictions.sizes[place]),
        bool(predictions.canary[place]),
    )


def _at(predictions: Predictions, place: int) -> Predictions:
    return predictions.between(place, place + 1)


def same_request(one: Predictions, other: Predictions) -> bool:
    """Return whether two requests are equal, bit for bit."""
    arrays = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(Predictions))
    # Bytes, because NaN stands for a missing value and equals nothing.
    return all(a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes() for a, b in arrays)


def reused_key(message_id: str, payload: bytes) -> str:
    """Return the name under which a message with a reused id is counted once, however often it is delivered."""
    return f"{message_id}/{hashlib.blake2b(payload, digest_size=8).hexdigest()}"


def batch_key(outcome: OutcomeBatch) -> str:
    """Return the name by which a redelivered outcome batch is recognized.

    A publisher that counts its batches from 1 after each start reuses their ids for other outcomes, which must count.
    """
    digest = hashlib.blake2b("\0".join(outcome.request_ids).encode(), digest_size=8)
    for array in (outcome.rows, outcome.times):
        digest.update(array.tobytes())
    return f"{outcome.batch_id}/{outcome.event}/{digest.hexdigest()}"


def reuse_reason(request_id: str) -> str:
    """Return why a prediction under the id of another request is a dead letter."""
    return (
        f"request id {request_id[:128]!r} names another request with other content, expected a new id for each: "
        "clicks under it count for the first"
    )
