"""Tests of the interpretation of values in files, for all types."""

import pyarrow as pa
import pytest

from evergreen.rows.values import CATEGORIES, LABELS, NUMBERS, REQUEST_IDS, STRINGS, ListRule

LISTS = {
    '["a", "b"]': ["a", "b"],
    "['a', \"it's\"]": ["a", "it's"],
    "[1 2  3]": ["1", "2", "3"],
    "[1, true, null]": ["1", "true"],
    "a|b": ["a", "b"],
    "a||b": ["a", "b"],
    "[]": None,
    "NULL": None,
    "[1, 'x]": "wrong",
    '["a, "b"]': "wrong",
    '["a","b"': "wrong",
    "[Decimal('1.0')]": "wrong",
    "[1 2 ... 9]": "wrong",
    "[[1], [2]]": "wrong",
    "[" * 5000 + "]" * 5000: "wrong",
}


@pytest.mark.parametrize(("text", "expected"), LISTS.items(), ids=[text[:12] for text in LISTS])
def test_lists_in_text_are_read_or_malformed_and_never_reversed(text, expected):
    parsed = ListRule(STRINGS, "|").parse(pa.array([text, "z"]))
    assert parsed.values.to_pylist() == [None if expected == "wrong" else expected, ["z"]]
    assert parsed.is_wrong.to_pylist() == [expected == "wrong", False]


def test_labels_have_exactly_two_values():
    parsed = LABELS.parse(pa.array(["1", "0.0", "TRUE", "false", "true.000", "2", "", "-1"]))
    assert parsed.values.to_pylist() == [1, 0, 1, 0, None, None, None, None]
    assert parsed.is_wrong.to_pylist() == [False] * 4 + [True, True, False, True]


def test_integers_beyond_float_precision_are_numbers_in_every_type():
    for column in (pa.array([2**53 + 1, 1]), pa.array([str(2**53 + 1), "1"])):
        assert NUMBERS.parse(column).is_wrong.to_pylist() == [False, False]


@pytest.mark.parametrize(
    "values", [pa.array([2**63 + 5, 7], pa.uint64()), pa.array([str(2**63 + 5), "7"])]
)
def test_ids_of_64_bits_are_exact(values):
    found = CATEGORIES.parse(values)
    assert found.is_wrong.to_pylist() == [False, False]
    assert len(set(found.values.to_pylist())) == 2


def test_missing_request_id_is_no_fault():
    parsed = REQUEST_IDS.parse(pa.array(["q1", "", None, "NULL"]))
    assert (parsed.values.to_pylist(), parsed.is_wrong.to_pylist()) == (
        ["q1", None, None, None],
        [False] * 4,
    )
    assert not REQUEST_IDS.is_required
