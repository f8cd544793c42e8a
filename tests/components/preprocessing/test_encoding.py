"""Tests that compare both engines' output with the contract, float64 NumPy and manual counts."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from components.preprocessing import nvtabular_engine
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import CATEGORICAL, DENSE
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID
from evergreen.storage.uris import local_path
from tests.support.nasty_rows import nasty_rows, strange_workflow


def test_nvtabular_and_contract_agree_to_last_bit(write_raw, run_step, raw_table, reading):
    train, holdout = raw_table(1500, seed=1), raw_table(900, seed=2)
    large = np.full(900, 2**32 - 1)
    large[::2] = 2**31 + 1
    holdout = reading.replace(holdout, "C3", large, mask=np.arange(900) % 7 == 0)
    holdout = reading.replace(
        holdout, "I2", np.linspace(-3, 2**31, 900), mask=np.arange(900) % 5 == 0
    )
    encoded_set = run_step(write_raw(train, holdout), partition_rows=900)
    workflow = reading.workflow(encoded_set)
    for uri, table in ((encoded_set.train_uri, train), (encoded_set.holdout_uri, holdout)):
        raw, encoded = reading.raw([table]), reading.encoded(uri)
        np.testing.assert_array_equal(encoded.ids, workflow.encode_categorical(raw.categorical))
        np.testing.assert_array_equal(
            encoded.dense.view(np.int32), workflow.encode_dense(raw.dense).view(np.int32)
        )
        np.testing.assert_array_equal(encoded.label, raw.label.astype(np.float32))
        assert (encoded.ids == MISSING_ID).any()
    assert (reading.encoded(encoded_set.holdout_uri).ids == OOV_ID).any()


@pytest.mark.parametrize("threshold", [1, 10])
def test_categories_below_threshold_are_out_of_vocabulary(
    write_raw, run_step, raw_table, threshold, reading
):
    table = raw_table(600, seed=4)
    encoded_set = run_step(write_raw(table), frequency_threshold=threshold, partition_rows=300)
    raw = reading.raw([table]).categorical
    for column, vocabulary in enumerate(reading.workflow(encoded_set).vocabularies):
        counts = Counter(raw[:, column].tolist())
        counts.pop(-1, None)
        frequent = sorted((-count, value) for value, count in counts.items() if count >= threshold)
        assert vocabulary.tolist() == [value for _, value in frequent]
        ids = reading.encoded(encoded_set.train_uri).ids[:, column]
        rare = [count < threshold for count in map(counts.get, raw[:, column]) if count is not None]
        assert (ids[raw[:, column] != -1] == OOV_ID).tolist() == rare


def test_columns_without_values(write_raw, run_step, raw_table, reading):
    first_half, everything, nothing = np.arange(600) < 300, np.full(600, True), np.full(600, False)
    missing = {  # numbers of missing values in the training rows and in the holdout rows
        ("C4", "I4"): (everything, everything),
        ("C5", "I5"): (first_half, ~first_half),  # no value in one of two partitions
        ("C6", "I6"): (everything, nothing),
        ("C7", "I7"): (nothing, everything),
    }
    tables = [raw_table(600, seed=5), raw_table(600, seed=6)]
    for names, masks in missing.items():
        for name in names:
            tables = [
                reading.replace(t, name, t[name].combine_chunks().fill_null(9).to_numpy(), mask=m)
                for t, m in zip(tables, masks)
            ]
    encoded_set = run_step(write_raw(*tables), partition_rows=300)
    workflow = reading.workflow(encoded_set)
    for uri, table in zip((encoded_set.train_uri, encoded_set.holdout_uri), tables):
        raw, encoded = reading.raw([table]), reading.encoded(uri)
        np.testing.assert_array_equal(encoded.ids, workflow.encode_categorical(raw.categorical))
        np.testing.assert_array_equal(encoded.dense, workflow.encode_dense(raw.dense))
    assert encoded_set.slot_sizes[3] == encoded_set.slot_sizes[5] == FIRST_ID
    assert (reading.encoded(encoded_set.train_uri).ids[:, 3] == MISSING_ID).all()
    assert (reading.encoded(encoded_set.holdout_uri).ids[:, 5] == OOV_ID).all()
    assert (workflow.means[3], workflow.stds[3]) == (0.0, 1.0)


def test_rows_keep_order_of_file_names(write_raw, run_step, raw_table, reading):
    # Sorted by their numbers, part-10 would come after part-9.
    tables = {f"part-{n}.parquet": raw_table(100 + n, seed=n) for n in (9, 10, 1, 100)}
    tables = {
        name: reading.replace(t, "I1", np.arange(t.num_rows) * 1.0) for name, t in tables.items()
    }
    encoded_set = run_step(write_raw(tables), partition_rows=64)
    raw = reading.raw([tables[name] for name in sorted(tables)])
    for uri in (encoded_set.train_uri, encoded_set.holdout_uri):
        dense = reading.encoded(uri).dense
        np.testing.assert_array_equal(dense, reading.workflow(encoded_set).encode_dense(raw.dense))


def test_nothing_that_step_writes_is_pickle(write_raw, run_step, raw_table):
    encoded_set = run_step(write_raw(raw_table(400, seed=8)))
    folder = local_path(encoded_set.workflow_uri).parent
    written = [path for path in folder.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in written}
    assert kinds <= {".parquet", ".json", ".npz", ".txt", ".pbtxt", ".schema", ""}, kinds
    for path in written:
        # Pickles from protocol 2 on begin with \x80 and end with a dot.
        content = path.read_bytes()
        assert not (content.startswith(b"\x80") and content.endswith(b".")), path
        if path.suffix == ".npz":
            np.load(path, allow_pickle=False).close()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    "workflow", [strange_workflow(11), strange_workflow(12, num_keys=3000)], ids=["few", "many"]
)
def test_nvtabular_and_contract_agree_on_rows_that_no_client_should_send(workflow, tmp_path):
    """tests/evergreen/serving/test_graph.py checks the served graph on the same rows."""
    dense, categorical = nasty_rows(workflow, 4096, 5)
    # Values that preprocessing's readers accept. The values are far from the placeholders that the
    # NVTabular engine uses.
    sent = (categorical >= MISSING_CATEGORY) | (categorical < -(2**31))
    categorical = np.where(sent, categorical, 2**32 - 5)
    columns = {LABEL: np.zeros(4096, np.int32), **dict(zip(DENSE, dense.T))}
    columns |= {
        name: pa.array(each, mask=each == MISSING_CATEGORY)
        for name, each in zip(CATEGORICAL, categorical.T)
    }
    encoded = nvtabular_engine.encoder(workflow, scratch=tmp_path / "categories")(
        pa.RecordBatch.from_pydict(columns)
    )
    ids, values = (np.stack([encoded[name] for name in names], 1) for names in (CATEGORICAL, DENSE))
    assert {MISSING_ID, OOV_ID, FIRST_ID} <= set(np.unique(ids))
    assert np.abs(categorical[categorical < 0]).max() > 2**40 < categorical.max()
    np.testing.assert_array_equal(ids, workflow.encode_categorical(categorical))
    np.testing.assert_array_equal(
        values.view(np.int32), workflow.encode_dense(dense).view(np.int32)
    )
