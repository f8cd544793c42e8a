"""Tests of readable category values: the most frequent values are found in bounded memory."""

import json

import pyarrow as pa
import pytest

from evergreen.config.features import category_of
from evergreen.contracts.category_texts import LISTED_TEXTS, TextCounts, read_texts
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises


def test_most_frequent_strings_are_listed_by_their_categories(tmp_path):
    counts = TextCounts()
    counts.add("item", pa.array(["red shoe", "Boot", "red shoe", None, "", "7", "Ünïcode"]))
    counts.add("item", pa.array(["Boot", "Boot"]))
    counts.add("user", pa.array(["Ada"]))
    assert counts.write(tmp_path / "texts.json", without=["user"])
    words = ["Boot", "red shoe", "7", "Ünïcode"]
    assert json.loads((tmp_path / "texts.json").read_text()) == {"item": words}
    assert read_texts(tmp_path / "texts.json") == {
        "item": {category_of(word): word for word in words}
    }


@pytest.mark.parametrize(
    "columns", [[], ["user"], ["item"]], ids=["no column", "users alone", "no word"]
)
def test_without_strings_there_is_no_file(tmp_path, columns):
    counts = TextCounts()
    for column in columns:
        counts.add(column, pa.array(["Ada"] if column == "user" else [None], pa.string()))
    assert not counts.write(tmp_path / "texts.json", without=["user"])
    assert not (tmp_path / "texts.json").exists()


def test_frequent_strings_stay_listed_however_many_rare_ones_come(tmp_path):
    counts, often = TextCounts(), [f"often {i}" for i in range(50)]
    for part in range(10):
        counts.add("item", pa.array([*often * 20, *(f"rare {part} {i}" for i in range(9000))]))
    counts.write(tmp_path / "texts.json", without=[])
    (listed,) = json.loads((tmp_path / "texts.json").read_text()).values()
    assert sorted(listed[:50]) == sorted(often)
    assert len(listed) == LISTED_TEXTS
    assert sum(map(len, counts._counts.values())) <= 20 * LISTED_TEXTS


def test_corrupt_file_is_refused(tmp_path):
    (tmp_path / "texts.json").write_text("[1]")
    with raises(ContractError, "texts.json", "columns"):
        read_texts(tmp_path / "texts.json")
