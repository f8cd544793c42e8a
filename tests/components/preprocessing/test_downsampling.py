"""Tests of negative downsampling: the decision on each training row is separate and repeatable."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.preprocessing.preprocess import downsample, sampled_rows
from evergreen.contracts.raw_rows import LABEL
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP


def sampled(table, rate):
    return sampled_rows(table.combine_chunks().to_batches()[0], rate)


def test_clicks_stay_and_of_rest_stated_share(raw_table):
    table = raw_table(20_000)
    clicked = table[LABEL].to_numpy() == 1
    for rate in (0.05, 0.2, 0.9, 1.0):
        mask = sampled(table, rate)
        assert mask[clicked].all()
        num = int((~clicked).sum())
        assert mask[~clicked].sum() == pytest.approx(
            num * rate, abs=4 * np.sqrt(num * rate * (1 - rate))
        )


def test_downsampling_does_not_depend_on_features_order_or_previous_row(raw_table):
    table = raw_table(20_000)
    negatives = table.filter(pa.array(table[LABEL].to_numpy() == 0))
    mask = sampled(negatives, 0.3)
    order = np.random.default_rng(1).permutation(len(mask))
    np.testing.assert_array_equal(sampled(negatives.take(pa.array(order)), 0.3), mask[order])
    row = negatives["row"].to_numpy()
    # Rows of a request are downsampled independently, so each position keeps the same share.
    for position in range(10):
        num = int((row == position).sum())
        assert mask[row == position].mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / num))
    correlation = np.corrcoef(mask[1:], mask[:-1])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(mask))


def test_copy_has_sampled_rows_in_order(tmp_path, raw_table):
    tables = [raw_table(700, seed=1), raw_table(900, seed=2)]
    (tmp_path / "raw").mkdir()
    for name, table in zip(("a", "b"), tables):
        pq.write_table(table, tmp_path / "raw" / f"{name}.parquet", row_group_size=300)
    num_rows = downsample(
        tmp_path / "raw", tmp_path / "downsampled", 0.5, features=SHOP.features, expected_rows=1_600
    )
    [path] = (tmp_path / "downsampled").glob("*.parquet")
    copied = pq.read_table(path)
    expected = pa.concat_tables([table.filter(pa.array(sampled(table, 0.5))) for table in tables])
    assert num_rows == copied.num_rows
    assert copied.equals(expected.select(copied.column_names))


def test_only_training_rows_are_downsampled(
    write_raw, write_old_rows, run_step, raw_table, reading
):
    train, holdout, old = raw_table(3_000, seed=1), raw_table(500, seed=2), raw_table(800, seed=3)
    path = write_old_rows(write_raw(train, holdout), replay=old)
    encoded_set = run_step(path, negative_rate=0.25, partition_rows=500)
    workflow = reading.workflow(encoded_set)
    for uri, table in ((encoded_set.train_uri, train), (encoded_set.replay_uri, old)):
        expected_arrays = reading.raw([table.filter(pa.array(sampled(table, 0.25)))])
        encoded = reading.encoded(uri)
        np.testing.assert_array_equal(encoded.label, expected_arrays.label)
        np.testing.assert_array_equal(
            encoded.ids, workflow.encode_categorical(expected_arrays.categorical)
        )
    assert encoded_set.num_train_rows == sampled(train, 0.25).sum()
    assert encoded_set.num_sampled_out == 3_000 - encoded_set.num_train_rows
    assert encoded_set.num_replay_rows == sampled(old, 0.25).sum()
    assert encoded_set.negative_rate == 0.25
    np.testing.assert_array_equal(
        reading.encoded(encoded_set.holdout_uri).label, reading.raw([holdout]).label
    )
    folder = local_path(encoded_set.train_uri).parent
    assert sorted(p.name for p in folder.iterdir()) == [
        "holdout",
        "raw_dataset.json",
        "replay",
        "train",
        "workflow",
    ]


def test_downsampling_to_no_old_rows_is_no_replay(write_raw, write_old_rows, run_step, raw_table):
    old = raw_table(40, seed=5)
    old = old.filter(pa.array((old[LABEL].to_numpy() == 0) & ~sampled(old, 0.3)))
    encoded_set = run_step(write_old_rows(write_raw(raw_table(500)), replay=old), negative_rate=0.3)
    assert (encoded_set.replay_uri, encoded_set.num_replay_rows) == (None, 0)


def test_rows_without_identity_or_of_other_types_cannot_be_downsampled(tmp_path, raw_table):
    rows = raw_table(50)
    at = rows.column_names.index("row")
    for name, table in (
        ("column request_id of", rows.drop(["request_id"])),
        ("column row of", rows.set_column(at, "row", pa.array(np.zeros(50)))),
    ):
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        pq.write_table(table, folder / "part.parquet")
        with pytest.raises(ContractError) as refused:
            downsample(
                folder,
                tmp_path / f"{name} downsampled",
                0.5,
                features=SHOP.features,
                expected_rows=50,
            )
        assert name in str(refused.value)
