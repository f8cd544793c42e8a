"""Tests that log records are unchanged after transport, and that other bytes are refused."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from evergreen.config.features import Features, ListOptions
from evergreen.contracts import records
from evergreen.contracts.record_format import RecordFormat
from evergreen.runtime.errors import ContractError
from testing.recommenders import SHOP, draw_arrays
from tests.support.errors import raises
from tests.support.record_messages import FORM, encode, fields_of, reader_of

INT64 = st.integers(-(2**63), 2**63 - 1)
TIMES = st.floats(0, 1e11)


def predictions(n=3, *, seed=0, **changes):
    random = np.random.default_rng(seed)
    dense, categorical = draw_arrays(SHOP.features, n, random)
    values = {
        "request_id": "r-1",
        "time": 1_760_000_000.25,
        "model_version": 7,
        "dense": dense,
        "categorical": categorical,
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
            np.testing.assert_array_equal(value, other)  # NaN equals NaN here
        else:
            assert value == other


def decode(message, form=FORM):
    """Decode the record both alone and in a batch.

    Either both decodings return equal rows, or both raise an error.
    """
    together, rest = form.decode_plain([message, b"", message], recommender=None)
    assert sorted(rest) == ([1] if together else [0, 1, 2])
    try:
        alone = form.decode(message)
    except ContractError:
        assert not together
        raise
    for each, starts in together:
        assert_same(each, records.Predictions.of([alone, alone]))
        assert starts.tolist() == [0, 2]
    return alone


NAMES = st.lists(
    st.sampled_from(["price", "Price", "item id", "item-id", "2nd", "\u00e9t\u00e9", "a"]),
    unique=True,
)


@st.composite
def any_features(draw):
    """Draw features with random names, a few of each kind."""
    names = draw(NAMES.filter(len))
    first, second = sorted(draw(st.integers(0, len(names))) for _ in range(2))
    lists = tuple(names[second:])
    options = {name: ListOptions(max=draw(st.integers(1, 3))) for name in lists}
    return Features(
        numeric=tuple(names[:first]),
        categorical=tuple(names[first:second]),
        lists=lists,
        list_options=options,
    )


FINITE_OR_MISSING = st.floats(width=32, allow_infinity=False)


@st.composite
def prediction_batches(draw):
    features, n = draw(any_features()), draw(st.integers(1, 5))
    shape = (n, len(features.positions.slots))
    batch = records.PredictionBatch(
        request_id=draw(st.text(min_size=1, max_size=128)),
        time=draw(TIMES),
        model_version=draw(st.integers(0, 2**31 - 1)),
        dense=draw(hnp.arrays(np.float32, (n, len(features.numeric)), elements=FINITE_OR_MISSING)),
        categorical=draw(hnp.arrays(np.int64, shape, elements=INT64)),
        scores=draw(hnp.arrays(np.float32, n, elements=st.floats(0, 1, width=32))),
        positions=draw(st.none() | hnp.arrays(np.int32, n, elements=st.integers(1, 2**31 - 1))),
        propensities=draw(st.none() | hnp.arrays(np.float64, n, elements=st.floats(0, 1))),
        canary=draw(st.booleans()),
        recommender=draw(st.none() | st.just("shop")),
        recommender_digest=draw(st.none() | st.text("0123456789abcdef", min_size=64, max_size=64)),
        **draw(
            st.just({})
            | st.fixed_dictionaries(
                {
                    "shadow_version": st.integers(0, 2**31 - 1),
                    "shadow_scores": hnp.arrays(np.float32, n, elements=st.floats(0, 1, width=32)),
                }
            )
        ),
    )
    return features, batch


@st.composite
def outcome_batches(draw):
    ids = draw(st.lists(st.text(min_size=1, max_size=128), min_size=1, max_size=5))
    return records.OutcomeBatch(
        batch_id=draw(st.text(min_size=1, max_size=128)),
        time=draw(TIMES),
        event=draw(st.sampled_from(records.EVENTS)),
        request_ids=tuple(ids),
        rows=draw(hnp.arrays(np.int32, len(ids), elements=st.integers(0, 2**31 - 1))),
        times=draw(hnp.arrays(np.float64, len(ids), elements=TIMES)),
    )


@given(prediction_batches() | st.tuples(any_features(), outcome_batches()))
@settings(max_examples=100, deadline=None)
def test_record_survives_wire_exactly_and_is_readable_by_published_schema(drawn):
    features, record = drawn
    form = RecordFormat(features)
    message = form.encode(record)
    assert_same(record, decode(message, form))
    read = reader_of(form.proto()).FromString(message)
    assert read.SerializeToString() == message
    if isinstance(record, records.OutcomeBatch):
        assert list(read.outcomes.times) == record.times.tolist()
        assert list(read.outcomes.request_ids) == list(record.request_ids)
        return
    np.testing.assert_array_equal(np.array(read.predictions.scores, np.float32), record.scores)
    columns = iter([*record.dense.T, *record.categorical.T])
    for name, (_, _, field, _) in zip(
        features.names, fields_of(form.proto())["Features"], strict=True
    ):
        size = features.list_options.get(name, ListOptions()).max if name in features.lists else 1
        expected = np.stack([next(columns) for _ in range(size)], axis=1).ravel()
        np.testing.assert_array_equal(
            np.array(getattr(read.predictions.features, field), expected.dtype), expected
        )


def test_column_keeps_its_field_as_others_change_and_absent_is_missing():
    short = Features(numeric=("b",), categorical=("item",))
    long = Features(numeric=("x", "b"), categorical=("c", "item"))
    before, after = (
        set(fields_of(RecordFormat(each).proto())["Features"]) for each in (short, long)
    )
    assert before < after
    sent = predictions(2, dense=np.ones((2, 1), np.float32), categorical=np.array([[7], [8]]))
    read = RecordFormat(long).decode(RecordFormat(short).encode(sent))
    np.testing.assert_array_equal(read.dense, [[np.nan, 1], [np.nan, 1]])
    assert read.categorical.tolist() == [[-1, 7], [-1, 8]]
    with pytest.raises(
        ContractError,
        match=r"features has the fields \[\d+, \d+\].*recommender's file may be newer",
    ):
        RecordFormat(short).decode(RecordFormat(long).encode(read))


def test_truncation_at_every_byte_is_refused():
    message = encode(predictions())
    for length in range(len(message)):
        with pytest.raises(ContractError):
            decode(message[:length])


@given(st.binary(max_size=40), st.integers(0, 600), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_corruption_is_refused_or_makes_another_record(inserted, at, removed):
    for record in (predictions(1), outcomes()):
        message = encode(record)
        with suppress(ContractError):
            decode(message[:at] + inserted + message[at + removed :])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dense": np.zeros((3, 12), np.float32)},
            "12 numeric and 8 categorical columns, expected 2 and 8",
        ),
        ({"categorical": np.zeros((3, 27), np.int64)}, "2 numeric and 27 categorical"),
    ],
    ids=["numeric", "categorical"],
)
def test_rows_with_other_numbers_of_columns_are_not_written(changes, message):
    with pytest.raises(ContractError, match=message):
        encode(predictions(**changes))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda sent: sent.features.price.append(1.0), "price has 4 values, expected 3"),
        (lambda sent: sent.scores.append(0.5), "item has 3 values, expected 4"),
        (lambda sent: sent.shadow_scores.append(0.5), "shadow_scores"),
        (lambda sent: setattr(sent, "shadow_version", 3), "shadow version without scores"),
        (lambda sent: setattr(sent, "model_version", -1), "model_version is -1"),
        (lambda sent: sent.ClearField("request_id"), "request_id is ''"),
    ],
    ids=["feature", "scores", "shadow scores", "shadow version", "version", "no name"],
)
def test_consistent_but_wrong_messages_are_refused(spoil, error):
    message = reader_of(FORM.proto()).FromString(encode(predictions()))
    spoil(message.predictions)
    with pytest.raises(ContractError, match=error):
        decode(message.SerializeToString())


def test_message_of_both_kinds_is_refused():
    with raises(ContractError, ["predictions", "outcomes"], "expected one kind"):
        decode(encode(predictions()) + encode(outcomes()))


@pytest.mark.parametrize("message", [b"", b"EVGR", b"\x00" * 64, b'{"request_id": 1}', b"\xff" * 9])
def test_unexpected_bytes_are_refused(message):
    with pytest.raises(
        ContractError, match=f"{len(message)} bytes is (not )?a log record|has the fields"
    ):
        decode(message)


def test_batch_of_64_rows_fits_far_below_limit():
    message = encode(predictions(64, positions=np.arange(1, 65, dtype=np.int32)))
    assert 64 * (2 * 4 + 6 * 8 + 4 + 4) < len(message) < 5_300


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
