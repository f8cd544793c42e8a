"""Tests of converting feature columns to arrays, with nulls replaced."""

import numpy as np
import pyarrow as pa
import pytest

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts import raw_rows
from testing.recommenders import SHOP


@pytest.mark.parametrize(
    ("names", "dtype", "missing"),
    [
        (SHOP.features.numeric, "float32", np.nan),
        (SHOP.features.categorical, "int64", MISSING_CATEGORY),
    ],
)
def test_nulls_become_stated_value_and_all_others_stay(raw_table, names, dtype, missing):
    batch = pa.Table.to_batches(raw_table(200))[0]
    assert sum(batch.column(name).null_count for name in names) > 0
    expected = [
        [missing if v is None else v for v in batch.column(name).to_pylist()] for name in names
    ]
    found = raw_rows.feature_matrix(batch, names, dtype, missing=missing)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, np.array(expected, dtype=dtype).T)


def test_values_of_another_type_are_refused_and_not_converted():
    batch = pa.record_batch({"item": pa.array([1.5])})
    with pytest.raises(pa.ArrowInvalid):
        raw_rows.feature_matrix(batch, ["item"], "int64", missing=MISSING_CATEGORY)
