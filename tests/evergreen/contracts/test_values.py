"""Tests of category values: all spellings of a value are one string."""

import itertools

import pytest

from evergreen.config.features import MAX_CATEGORY, category_of
from evergreen.contracts.values import MISSING_WORDS, NoCategory, is_missing_word, word_of
from tests.support.errors import raises

TRUE, FALSE = 1, 0
"""Categories of the booleans true and false. Programs without a boolean type have many spellings of
the same boolean."""


@pytest.mark.parametrize("holds_words", [True, False])
@pytest.mark.parametrize("spelled", [True, "True", "true", "TRUE", "tRuE", " True ", 1, "1", 1.0])
def test_boolean_is_one_category_in_any_spelling(spelled, holds_words):
    assert category_of(word_of(spelled, holds_words=holds_words)) == TRUE


@pytest.mark.parametrize("spelled", [False, "False", "false", "FALSE", "fALSE", "\tfalse", 0, "0"])
def test_false_is_another_category_than_true(spelled):
    assert category_of(word_of(spelled, holds_words=True)) == FALSE != TRUE
    if isinstance(spelled, str):
        assert category_of(spelled) == FALSE


@pytest.mark.parametrize("text", ["truth", "t", "yes", "falsetto", "true false", "10"])
def test_other_words_are_not_booleans(text):
    assert word_of(text, holds_words=True) == text
    assert category_of(text) not in (TRUE, FALSE)


@pytest.mark.parametrize(
    ("word", "spaces"), [*itertools.product(sorted(MISSING_WORDS), ["", " ", "\t ", "\n"])]
)
def test_missing_values_are_missing_in_string_and_number_columns(word, spaces):
    for holds_words in (True, False):
        assert word_of(f"{spaces}{word}{spaces}", holds_words=holds_words) is None
    assert is_missing_word(f"{spaces}{word}{spaces}")


def test_list_of_missing_words_is_exact():
    expected = ["", "NULL", "null", "None", "none", "\\N", "NA", "N/A", "n/a", "#N/A", "<NA>"]
    expected += ["NaN", "nan", "NaT", "-", "?"]
    assert sorted(MISSING_WORDS) == sorted(expected)
    assert not any(map(is_missing_word, ["0", "Na", "NULLS", "-1", "??", "no", "n a"]))


@pytest.mark.parametrize(
    "number", [0, 7, -5, 2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 9, 2**64 - 1, -(2**63)]
)
def test_integer_of_64_bits_is_exact_category_as_int_and_as_text(number):
    assert (
        word_of(number, holds_words=False) == word_of(str(number), holds_words=False) == str(number)
    )
    assert (
        word_of(number, holds_words=True) == word_of(str(number), holds_words=True) == str(number)
    )


def test_neighbours_beyond_2_to_53_are_different_categories():
    ids = [2**63 + at for at in range(100)]
    assert len({category_of(word_of(each, holds_words=False)) for each in ids}) == 100


@pytest.mark.parametrize("value", [7.0, -5.0, 0.0, -0.0, 2.0**53 - 1, float(MAX_CATEGORY)])
def test_integral_float_below_2_to_53_is_integer(value):
    assert word_of(value, holds_words=True) == word_of(int(value), holds_words=False)


@pytest.mark.parametrize(
    "value",
    [2.0**53, -(2.0**53), 9007199254741002.0, 1e300, "9007199254741002.0", "9007199254740992."],
)
def test_float_that_can_mean_two_numbers_is_refused_by_value(value):
    with raises(NoCategory, "expected an int or a text", 9007199254740992) as refused:
        word_of(value, holds_words=False)
    assert repr(value) in str(refused.value)


def test_float_of_32_bits_is_exact_below_2_to_24():
    assert word_of(2.0**24 - 1, holds_words=False, exact_below=2**24) == "16777215"
    with raises(NoCategory, "below 16777216"):
        word_of(2.0**24, holds_words=True, exact_below=2**24)


@pytest.mark.parametrize("value", [1.5, float("inf"), -(2**63) - 1, 2**64, b"7", [7], object()])
def test_invalid_category_is_refused_by_value(value):
    for holds_words in (True, False):
        with raises(NoCategory, "expected a") as refused:
            word_of(value, holds_words=holds_words)
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    "text", ["red", "0x1f", "1_0", " 1", "1.5", "1e3", "\u0661", str(2**64), "9" * 20, "1" * 21]
)
def test_non_integer_text_is_refused_where_numbers_are_stored(text):
    assert word_of(text, holds_words=True) == text
    with raises(NoCategory, "64 bits", "true or false"):
        word_of(text, holds_words=False)


@pytest.mark.parametrize(
    ("text", "word"), [("+5", "5"), ("007", "7"), ("7.0", "7"), ("-3.", "-3"), ("-0", "0")]
)
def test_text_of_integer_is_that_number_in_number_columns(text, word):
    assert word_of(text, holds_words=False) == word
    assert word_of(text, holds_words=True) == text
