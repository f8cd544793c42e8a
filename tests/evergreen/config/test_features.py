"""Tests that ambiguous column names, and meanings that differ from the parent's, are rejected."""

import hashlib
from dataclasses import replace

import pytest

from evergreen.config.features import (
    MAX_CATEGORY,
    CategoricalOptions,
    Features,
    NumericOptions,
    category_of,
)
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

BEFORE = Features(numeric=("price", "age"), categorical=("item", "shop"))


@pytest.mark.parametrize("name", ["", " ", "item ", "a/b", "a\nb", "\0", "\ud800", 7, None])
def test_invalid_name_is_refused_by_its_value(name):
    with pytest.raises(ContractError) as refused:
        Features(numeric=("price",), categorical=("item", name))
    assert repr([name]) in str(refused.value)


@pytest.mark.parametrize(
    "name", ["Größe in €", "a.b", "file", "order", "0", "商品", "a b", "'", "%s", "{x}", "-"]
)
def test_any_other_name_is_accepted(name):
    assert Features(numeric=(), categorical=(name,)).names == (name,)


def test_duplicate_names_and_missing_names_are_refused():
    with raises(ContractError, ["item"], "twice"):
        Features(numeric=("item",), categorical=("item",))
    with raises(ContractError, "no features"):
        Features(numeric=(), categorical=())


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            Features(numeric=("price",), categorical=("item", "shop", "age")),
            r"run change the kind of \['age'\], expected those of the parent m1; .* "
            r"`--from-scratch`$",
        ),
        (
            replace(BEFORE, numeric_options={"age": NumericOptions(fill=1)}),
            r"change the options of \['age'\], expected those of the parent m1; .* `-p "
            r"parent=none`$",
        ),
        (
            replace(BEFORE, categorical_options={"shop": CategoricalOptions(embed=8)}),
            r"change the options of \['shop'\], expected those of the parent m1; .* `-p "
            r"parent=none`$",
        ),
        (
            Features(numeric=("cost",), categorical=()),
            r"have none of \['price', 'age', 'item', 'shop'\], .* `--from-scratch`$",
        ),
    ],
)
def test_columns_with_another_meaning_than_in_parent_are_refused_by_name(now, message):
    with pytest.raises(ContractError, match=message):
        now.expect_continues(BEFORE, parent="m1")


def test_columns_may_be_added_removed_and_moved():
    Features(numeric=("size", "age"), categorical=("shop", "city", "item")).expect_continues(
        BEFORE, parent="m1"
    )


@pytest.mark.parametrize(
    "text", ["red shoe", "", "07", "-7", "+7", "7.0", " 7", "\u0667", str(2**52), "9" * 40]
)
def test_text_that_is_no_integer_in_range_is_hashed_by_52_bits_of_blake2b(text):
    bits = "".join(f"{byte:08b}" for byte in hashlib.blake2b(text.encode(), digest_size=8).digest())
    assert category_of(text) == int(bits[:52], 2) <= MAX_CATEGORY
