"""Tests that each number is rounded to the nearest number in the precision of its vector."""

import numpy as np
import pytest

from evergreen.config.release import TABLE_TYPES, RolloutSettings, served_tables
from evergreen.networks.rounding import round_table
from evergreen.runtime.errors import ContractError
from testing.recommenders import shop_with
from tests.support.errors import raises
from tests.support.rounded import rounded

TABLE = np.random.default_rng(0).standard_t(3, (70_000, 3)).astype(np.float32)
TABLE[:4] = [[0, 0, 0], [1e-45, -3e-43, 2e-44], [-7, 0, 7], [3, 4e-9, -1e4]]


@pytest.mark.parametrize("numbers", TABLE_TYPES)
def test_each_number_becomes_nearest_and_each_vector_is_rounded_by_itself(numbers):
    found = round_table(TABLE, numbers)
    vectors, largest = found.vectors(), np.abs(TABLE).max(axis=1, keepdims=True).astype(np.float64)
    assert found.values.dtype == numbers
    half_step = {
        "float32": 0,
        "float16": np.maximum(np.abs(TABLE) * 2.0**-11, 2.0**-25),
        "int8": largest / 254,
    }[numbers]
    assert (np.abs(vectors - TABLE.astype(np.float64)) <= half_step * 1.001 + 1e-43).all()
    assert not vectors[0].any()
    np.testing.assert_array_equal(vectors[2:300], rounded(TABLE[2:300], numbers))
    shuffled = np.random.default_rng(1).permutation(len(TABLE))
    np.testing.assert_array_equal(
        round_table(TABLE[shuffled], numbers).vectors(), vectors[shuffled]
    )


def test_size_of_table_follows_settings():
    found = {numbers: round_table(TABLE, numbers) for numbers in TABLE_TYPES}
    assert [each.values.nbytes / TABLE.nbytes for each in found.values()] == [1, 1 / 2, 1 / 4]
    assert found["int8"].scales.nbytes == 4 * len(TABLE)
    assert found["float32"].values is TABLE


@pytest.mark.parametrize("numbers", ["float16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_infinite_number_is_reported_for_its_own_vector(numbers, bad):
    table = np.ones((3, 2), np.float32)
    table[1, 0] = bad
    assert np.isfinite(round_table(table, numbers).vectors()).all(axis=1).tolist() == [
        True,
        False,
        True,
    ]


def test_unknown_number_format_of_tables_is_refused_by_gate_and_by_release():
    recommender = shop_with(release={"tables": "int4"})
    for read in (served_tables, lambda each: each.section("release", RolloutSettings)):
        with raises(ContractError, "tables", "'int4'", "float32, float16, int8"):
            read(recommender)
