"""Tests of pandas rows and times in the inference client, in the environment that has pandas."""

import numpy as np
import pandas as pd
import pytest

from evergreen.config.features import CategoricalOptions, Features, ListOptions, category_of
from evergreen.runtime.errors import ContractError
from inference_client.publisher import Outcome
from inference_client.rows import feature_rows

SHOP = Features(
    numeric=("price",),
    categorical=("item", "color"),
    lists=("tags",),
    categorical_options={"color": CategoricalOptions(type="string")},
    list_options={"tags": ListOptions(table="item", max=2)},
)


def columns(**changed):
    return {
        "price": [1.0, 2.0],
        "item": [1, 2],
        "color": ["red", "blue"],
        "tags": [[1], [2, 3]],
        **changed,
    }


@pytest.mark.parametrize("missing", [pd.NA, pd.NaT, np.nan, None], ids=str)
def test_pandas_missing_values_are_missing_in_every_kind_of_column(missing):
    given = columns(
        price=[1.0, missing],
        item=[1, missing],
        color=["red", missing],
        tags=[[1, missing], missing],
    )
    rows = feature_rows(given, SHOP)
    assert np.isnan(rows.dense[:, 0]).tolist() == [False, True]
    assert rows.categorical.tolist() == [[1, category_of("red"), 1, -1], [-1, -1, -1, -1]]
    by_row = [{name: values[at] for name, values in given.items()} for at in range(2)]
    np.testing.assert_array_equal(feature_rows(by_row, SHOP).categorical, rows.categorical)


@pytest.mark.parametrize("dtype", ["Int64", "UInt64", "Float64", "object"])
def test_nullable_series_are_columns(dtype):
    found = feature_rows(
        columns(price=pd.Series([3, pd.NA], dtype=dtype), item=pd.Series([7, pd.NA], dtype=dtype)),
        SHOP,
    )
    np.testing.assert_array_equal(found.dense[:, 0], [3, np.nan])
    assert found.categorical[:, 0].tolist() == [7, -1]


def test_unsigned_ids_of_64_bits_and_nullable_booleans_are_exact():
    ids = pd.Series([2**64 - 1, 2**64 - 2], dtype="UInt64")
    found = feature_rows(columns(item=ids, color=pd.Series([True, False], dtype="boolean")), SHOP)
    assert found.categorical[:, 0].tolist() == [
        category_of(str(2**64 - 1)),
        category_of(str(2**64 - 2)),
    ]
    assert found.categorical[:, 1].tolist() == [category_of("true"), category_of("false")]


@pytest.mark.parametrize("name", ["price", "item", "color", "tags"])
@pytest.mark.parametrize(
    "value", [pd.Timestamp("2026-03-01"), pd.Timedelta("1s"), pd.Interval(0, 1)], ids=str
)
def test_values_that_are_none_of_column_are_named(name, value):
    with pytest.raises(ContractError, match=f"column {name}, row 1 is .*expected"):
        feature_rows(columns(**{name: [columns()[name][0], value]}), SHOP)
    if name != "tags":
        with pytest.raises(ContractError, match=f"column {name}, row 0 is .*expected"):
            feature_rows(
                columns(**{name: np.array(["2026-03-01", "2026-03-02"], "datetime64[ns]")}), SHOP
            )


def test_timestamp_with_zone_is_time_of_outcome_and_others_are_named():
    assert Outcome(request_id="r", time=pd.Timestamp("1970-01-01T01:00:01.5+01:00")).time == 1.5
    assert (
        Outcome(request_id="r", time=pd.Timestamp("1970-01-01T00:00:01.5Z").to_datetime64()).time
        == 1.5
    )
    for wrong in (pd.Timestamp("2026-03-01"), pd.NaT, pd.NA):
        with pytest.raises(
            ContractError, match="outcome time is .*expected seconds since the epoch"
        ):
            Outcome(request_id="r", time=wrong)
    with pytest.raises(ContractError, match="outcome row is <NA>"):
        Outcome(request_id="r", row=pd.NA)
