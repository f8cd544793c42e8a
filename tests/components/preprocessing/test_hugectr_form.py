"""Tests that HugeCTR's own Parquet reader would accept the written folder."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.preprocessing.encode import verify_file
from evergreen.contracts.raw_rows import LABEL
from evergreen.runtime.errors import PermanentError
from testing.recommenders import SHOP
from tests.support.errors import raises

FEATURES = SHOP.features


@pytest.fixture
def encoded_folder(tmp_path):
    """Two files in HugeCTR's form with 5 rows each.

    All ids have the value 4, but one position of a list is empty.
    """
    columns = {name: np.ones(5, np.float32) for name in (LABEL, *FEATURES.dense_inputs)}
    columns |= {name: np.full(5, 4) for name in FEATURES.id_names}
    columns["genres/2"][3] = 0
    for name in ("part-00000.parquet", "part-00001.parquet"):
        pq.write_table(pa.table(columns), tmp_path / name)
    return tmp_path


def verify(folder, slot_sizes=None):
    sizes = slot_sizes or [5] * len(FEATURES.slots)
    return sum(verify_file(path, FEATURES, sizes) for path in sorted(folder.glob("*.parquet")))


def test_verification_accepts_and_counts_what_is_right(encoded_folder):
    assert verify(encoded_folder) == 10


def test_verification_refuses_id_of_next_slot(encoded_folder):
    with raises(PermanentError, "shop", "4 to 4", "expected 1 to 3"):
        verify(encoded_folder, slot_sizes=[5, 4, 5, 5])
    with raises(PermanentError, "genres/0", "4 to 4", "expected 0 to 3"):
        verify(encoded_folder, slot_sizes=[5, 5, 5, 4])


@pytest.mark.parametrize(
    ("position", "name", "values", "message"),
    [
        pytest.param(0, LABEL, pa.array([1] * 5, pa.int32()), "int32", id="integer label"),
        pytest.param(0, "target", pa.array([1] * 5, pa.float32()), "target", id="another name"),
        pytest.param(
            1, "price", pa.array([1] * 4 + [None], pa.float32()), "price .* 1 nulls", id="null"
        ),
        pytest.param(
            2, "age", pa.array([np.nan] * 5, pa.float32()), "column age .* 5 values", id="nan"
        ),
        pytest.param(3, "item", pa.array([0] * 5), "column item .* ids from 0", id="padding"),
    ],
)
def test_verification_refuses_what_hugectr_would_misread(
    encoded_folder, position, name, values, message
):
    path = encoded_folder / "part-00001.parquet"
    pq.write_table(pq.read_table(path).set_column(position, name, values), path)
    with pytest.raises(PermanentError, match=message):
        verify(encoded_folder)
