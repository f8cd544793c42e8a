"""Tests of category values: all spellings of a value are one string."""

import itertools

import pytest

from evergreen.config.features import MAX_CATEGORY, category_of
from evergreen.contracts.values import MISSING_TEXTS, NoCategory, is_missing_text, text_of_value
from tests.support.errors import raises

TRUE, FALSE = 1, 0
"""Integers that are stored for the booleans true and false in a categorical column. Programs
without a boolean type have many spellings of the same boolean."""


@pytest.mark.parametrize("is_string", [True, False])
@pytest.mark.parametrize("spelled", [True, "True", "true", "TRUE", "tRuE", " True ", 1, "1", 1.0])
def test_boolean_is_one_category_in_any_spelling(spelled, is_string):
    assert category_of(text_of_value(spelled, is_string=is_string)) == TRUE


@pytest.mark.parametrize("spelled", [False, "False", "false", "FALSE", "fALSE", "\tfalse", 0, "0"])
def test_false_is_another_category_than_true(spelled):
    assert category_of(text_of_value(spelled, is_string=True)) == FALSE != TRUE
    if isinstance(spelled, str):
        assert category_of(spelled) == FALSE


@pytest.mark.parametrize("text", ["truth", "t", "yes", "falsetto", "true false", "10"])
def test_other_words_are_not_booleans(text):
    assert text_of_value(text, is_string=True) == text
    assert category_of(text) not in (TRUE, FALSE)


@pytest.mark.parametrize(
    ("word", "spaces"), [*itertools.product(sorted(MISSING_TEXTS), ["", " ", "\t ", "\n"])]
)
def test_missing_values_are_missing_in_string_and_number_columns(word, spaces):
    for is_string in (True, False):
        assert text_of_value(f"{spaces}{word}{spaces}", is_string=is_string) is None
    assert is_missing_text(f"{spaces}{word}{spaces}")


def test_list_of_missing_words_is_exact():
    expected = ["", "NULL", "null", "None", "none", "\\N", "NA", "N/A", "n/a", "#N/A", "<NA>"]
    expected += ["NaN", "nan", "NaT", "-", "?"]
    assert sorted(MISSING_TEXTS) == sorted(expected)
    assert not any(map(is_missing_text, ["0", "Na", "NULLS", "-1", "??", "no", "n a"]))


@pytest.mark.parametrize(
    "number", [0, 7, -5, 2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 9, 2**64 - 1, -(2**63)]
)
def test_integer_of_64_bits_is_exact_category_as_int_and_as_text(number):
    assert (
        text_of_value(number, is_string=False)
        == text_of_value(str(number), is_string=False)
        == str(number)
    )
    assert (
        text_of_value(number, is_string=True)
        == text_of_value(str(number), is_string=True)
        == str(number)
    )


def test_neighbours_beyond_2_to_53_are_different_categories():
    ids = [2**63 + at for at in range(100)]
    assert len({category_of(text_of_value(each, is_string=False)) for each in ids}) == 100


@pytest.mark.parametrize("value", [7.0, -5.0, 0.0, -0.0, 2.0**53 - 1, float(MAX_CATEGORY)])
def test_integral_float_below_2_to_53_is_integer(value):
    assert text_of_value(value, is_string=True) == text_of_value(int(value), is_string=False)


@pytest.mark.parametrize(
    "value",
    [2.0**53, -(2.0**53), 9007199254741002.0, 1e300, "9007199254741002.0", "9007199254740992."],
)
def test_float_that_can_mean_two_numbers_is_refused_by_value(value):
    with raises(NoCategory, "expected an int or a text", 9007199254740992) as refused:
        text_of_value(value, is_string=False)
    assert repr(value) in str(refused.value)


def test_float_of_32_bits_is_exact_below_2_to_24():
    assert text_of_value(2.0**24 - 1, is_string=False, exact_below=2**24) == "16777215"
    with raises(NoCategory, "below 16777216"):
        text_of_value(2.0**24, is_string=True, exact_below=2**24)


@pytest.mark.parametrize("value", [1.5, float("inf"), -(2**63) - 1, 2**64, b"7", [7], object()])
def test_invalid_category_is_refused_by_value(value):
    for is_string in (True, False):
        with raises(NoCategory, "expected a") as refused:
            text_of_value(value, is_string=is_string)
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    "text", ["red", "0x1f", "1_0", " 1", "1.5", "1e3", "\u0661", str(2**64), "9" * 20, "1" * 21]
)
def test_non_integer_text_is_refused_where_numbers_are_stored(text):
    assert text_of_value(text, is_string=True) == text
    with raises(NoCategory, "64 bits", "true or false"):
        text_of_value(text, is_string=False)


@pytest.mark.parametrize(
    ("text", "word"), [("+5", "5"), ("007", "7"), ("7.0", "7"), ("-3.", "-3"), ("-0", "0")]
)
def test_text_of_integer_is_that_number_in_number_columns(text, word):
    assert text_of_value(text, is_string=False) == word
    assert text_of_value(text, is_string=True) == text
