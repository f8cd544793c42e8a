"""Log records survive the wire exactly, and nothing else passes for one."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from components.contracts import records
from components.runtime.errors import ContractError

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
TIMES = st.floats(0, 1e11)


def predictions(n=3, *, seed=0, **changes):
    random = np.random.default_rng(seed)
    values = {
        "request_id": "r-1",
        "time": 1_760_000_000.25,
        "model_version": 7,
        "dense": np.where(random.random((n, 13)) < 0.2, np.nan, random.integers(0, 99, (n, 13))).astype(np.float32),
        "categorical": random.integers(-1, 2**32, (n, 26)),
        "scores": random.random(n).astype(np.float32),
    }
    return records.PredictionBatch(**{**values, **changes})


def outcomes(n=2, **changes):
    values = {
        "batch_id": "b-1",
        "time": 5.0,
        "event": records.CLICK,
        "request_ids": tuple(f"r-{i}" for i in range(n)),
        "rows": np.arange(n, dtype=np.int32),
        "times": np.arange(n, dtype=np.float64),
    }
    return records.OutcomeBatch(**{**values, **changes})


def assert_same(left, right):
    assert type(left) is type(right)
    for name, value in vars(left).items():
        other = vars(right)[name]
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            np.testing.assert_array_equal(value, other)  # equal NaN
        else:
            assert value == other


@st.composite
def prediction_batches(draw):
    n = draw(st.integers(1, 5))
    num_dense = draw(st.integers(0, 15))
    num_categorical = draw(st.integers(0 if num_dense else 1, 30))
    return records.PredictionBatch(
        request_id=draw(st.text(min_size=1)),
        time=draw(TIMES),
        model_version=draw(st.integers(0, 2**31 - 1)),
        dense=draw(hnp.arrays(np.float32, (n, num_dense), elements=st.floats(width=32))),
        categorical=draw(hnp.arrays(np.int64, (n, num_categorical), elements=INT64)),
        scores=draw(hnp.arrays(np.float32, n, elements=st.floats(0, 1, width=32))),
        positions=draw(st.none() | hnp.arrays(np.int32, n, elements=INT32)),
        propensities=draw(st.none() | hnp.arrays(np.float64, n, elements=st.floats(0, 1))),
        canary=draw(st.booleans()),
        recommender=draw(st.none() | st.just("shop")),
        recommender_digest=draw(st.none() | st.text("0123456789abcdef", min_size=64, max_size=64)),
        **draw(
            st.just({})
            | st.fixed_dictionaries(
                {
                    "shadow_version": st.integers(1, 2**31 - 1),
                    "shadow_scores": hnp.arrays(np.float32, n, elements=st.floats(0, 1, width=32)),
                }
            )
        ),
    )


@st.composite
def outcome_batches(draw):
    ids = draw(st.lists(st.text(min_size=1), min_size=1, max_size=5))
    return records.OutcomeBatch(
        batch_id=draw(st.text(min_size=1)),
        time=draw(TIMES),
        event=draw(st.sampled_from(records.EVENTS)),
        request_ids=tuple(ids),
        rows=draw(hnp.arrays(np.int32, len(ids), elements=st.integers(0, 2**31 - 1))),
        times=draw(hnp.arrays(np.float64, len(ids), elements=TIMES)),
    )


@given(prediction_batches() | outcome_batches())
@settings(max_examples=60, deadline=None)
def test_record_survives_the_wire_exactly(record):
    assert_same(record, records.decode(records.encode(record)))


def test_truncation_at_every_byte_is_refused():
    message = records.encode(predictions())
    for length in range(len(message)):
        with pytest.raises(ContractError):
            records.decode(message[:length])


def test_every_flipped_bit_is_refused():
    message = records.encode(outcomes())
    for at in range(len(message)):
        for bit in range(8):
            damaged = bytearray(message)
            damaged[at] ^= 1 << bit
            with pytest.raises(ContractError):
                records.decode(bytes(damaged))


def forged(record, *, version=None, kind=None, header=None, tail=b""):
    """The message of `record`, changed and given a fitting checksum."""
    body = bytearray(records.encode(record)[:-4])
    magic, old_version, old_kind, length = struct.unpack_from("<4sBBI", body)
    old_header, arrays = json.loads(body[10 : 10 + length]), bytes(body[10 + length :])
    text = json.dumps({**old_header, **header} if isinstance(header, dict) else header or old_header).encode()
    prefix = struct.pack("<4sBBI", magic, version or old_version, kind or old_kind, len(text))
    whole = prefix + text + arrays + tail
    return whole + struct.pack("<I", zlib.crc32(whole))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 1}, "format version 1, expected 2"),
        ({"kind": 9}, "kind 9, expected 1 or 2"),
        ({"tail": b"xyz"}, "3 bytes left over"),
        ({"header": {"num_rows": 4}}, "bytes early"),
        ({"header": {"num_rows": -1}}, "bytes"),
        ({"header": {"num_rows": "3"}}, "malformed header"),
        # 13 * this wraps around to a small number in 64 bits
        ({"header": {"num_rows": pow(13, -1, 2**64)}}, "bytes early"),
        ({"header": {"num_dense": 12}}, "outside|left over"),
        ({"header": {"num_categorical": 27}}, "bytes early"),
        ({"header": {"num_rows": -3, "num_dense": -13}}, "malformed header"),
        ({"header": {"num_dense": 2**70, "num_rows": 0}}, "malformed header"),
        ({"header": {"num_dense": None}}, "malformed header"),
        ({"header": {"recommender": 7}}, "recommender is 7, expected a name"),
        ({"header": ["no", "object"]}, "malformed header"),
        ({"header": {"canary": 1}}, "canary is 1, expected true or false"),
        ({"header": {"shadow_version": 8}}, "12 bytes early"),
        ({"header": {"shadow_version": 8.5}, "tail": b"\0" * 12}, "shadow_version is 8.5"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_consistent_but_wrong_message_is_refused(changes, said):
    with pytest.raises(ContractError, match=said):
        records.decode(forged(predictions(), **changes))


@pytest.mark.parametrize("message", [b"", b"EVGR", b"\x00" * 64, b'{"request_id": 1}'])
def test_foreign_bytes_are_refused(message):
    with pytest.raises(ContractError, match=f"{len(message)} bytes is no log record"):
        records.decode(message)


def test_batch_of_64_rows_fits_far_below_the_limit():
    message = records.encode(predictions(64, positions=np.arange(1, 65, dtype=np.int32)))
    assert 64 * (13 * 4 + 26 * 8 + 4 + 4) < len(message) < 18_000


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": ""},
        {"request_id": "\ud800"},
        {"time": -1.0},
        {"time": np.nan},
        {"time": 1e12},
        {"model_version": 2**31},
        {"model_version": -1},
        {"model_version": 7.0},
        {"canary": 1},
        {"recommender": ""},
        {"scores": np.array([0.1, 0.2, 1.5], np.float32)},
        {"scores": np.array([0.1, 0.2, np.nan], np.float32)},
        {"scores": np.zeros(0, np.float32)},
        {"propensities": np.array([0.5, 1.5, 0.5])},
        {"propensities": np.array([0.5, 0.5])},
        {"dense": np.zeros((2, 13), np.float32)},
        {"dense": np.zeros(3, np.float32)},
        {"categorical": np.zeros((3, 26), np.int32)},
        {"categorical": np.zeros((3, 26, 1), np.int64)},
        {"dense": np.zeros((3, 0), np.float32), "categorical": np.zeros((3, 0), np.int64)},
        {"positions": np.arange(3)},
        {"shadow_version": 8},
        {"shadow_scores": np.zeros(3, np.float32)},
        {"shadow_version": 8, "shadow_scores": np.zeros(2, np.float32)},
        {"shadow_version": True, "shadow_scores": np.zeros(3, np.float32)},
    ],
    ids=str,
)
def test_batch_that_cannot_be_read_back_is_refused_at_once(changes):
    with pytest.raises(ContractError):
        predictions(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"event": "view"},
        {"batch_id": ""},
        {"request_ids": ()},
        {"request_ids": ("a", "")},
        {"time": np.inf},
        {"rows": np.array([0, -1], np.int32)},
        {"times": np.array([0.0, np.nan])},
        {"rows": np.zeros(3, np.int32)},
        {"times": np.zeros(2, np.int64)},
    ],
    ids=str,
)
def test_outcomes_that_cannot_be_read_back_are_refused_at_once(changes):
    with pytest.raises(ContractError):
        outcomes(**changes)
