"""What NVTabular writes, against the contract's arithmetic, NumPy in float64, and counts made by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import nvtabular as nvt
import pandas as pd
import pytest
from conftest import load_workflow, read_encoded, read_raw_arrays, replace_column

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL
from components.contracts.uris import local_path
from components.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID


def test_nvtabular_and_the_contract_agree_to_the_last_bit(write_raw, run_step, raw_table):
    train, holdout = raw_table(3000, seed=1), raw_table(900, seed=2)
    large = np.full(900, 2**32 - 1)
    large[::2] = 2**31 + 1
    holdout = replace_column(holdout, "C3", large, mask=np.arange(900) % 7 == 0)
    holdout = replace_column(holdout, "I2", np.linspace(-3, 2**31, 900), mask=np.arange(900) % 5 == 0)
    encoded_set = run_step(write_raw(train, holdout), extra=("--partition-rows", "700"))
    workflow = load_workflow(encoded_set)
    for uri, table in ((encoded_set.train_uri, train), (encoded_set.holdout_uri, holdout)):
        raw, encoded = read_raw_arrays([table]), read_encoded(uri)
        np.testing.assert_array_equal(encoded.ids, workflow.encode_categorical(raw.categorical))
        np.testing.assert_array_equal(
            encoded.dense.view(np.int32), workflow.encode_dense(raw.dense).view(np.int32)
        )
        np.testing.assert_array_equal(encoded.label, raw.label.astype(np.float32))
        assert (encoded.ids == MISSING_ID).any()
    assert (read_encoded(encoded_set.holdout_uri).ids == OOV_ID).any()


def test_categories_above_two_to_the_31_are_told_apart(write_raw, run_step, raw_table):
    values = np.array([2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32 - 2])
    table = replace_column(raw_table(500), "C1", np.repeat(values, 100), mask=np.arange(500) == 3)
    encoded_set = run_step(write_raw(table))
    assert sorted(load_workflow(encoded_set).vocabularies[0]) == sorted(values)
    assert len(np.unique(read_encoded(encoded_set.train_uri).ids[4:, 0])) == 5


def test_moments_are_those_of_float64(write_raw, run_step, raw_table):
    table = raw_table(2000, seed=3)
    workflow = load_workflow(run_step(write_raw(table), extra=("--partition-rows", "300")))
    logged = np.log1p(np.maximum(np.nan_to_num(read_raw_arrays([table]).dense.astype(np.float64)), 0))
    np.testing.assert_allclose(workflow.means, logged.mean(0), rtol=1e-6)
    np.testing.assert_allclose(workflow.stds, logged.std(0, ddof=1), rtol=1e-6)


@pytest.mark.parametrize("threshold", [1, 2, 25])
def test_categories_below_the_threshold_are_out_of_vocabulary(write_raw, run_step, raw_table, threshold):
    table = raw_table(1500, seed=4)
    encoded_set = run_step(write_raw(table), frequency_threshold=threshold, extra=("--partition-rows", "300"))
    raw = read_raw_arrays([table]).categorical
    for column, vocabulary in enumerate(load_workflow(encoded_set).vocabularies):
        counts = Counter(raw[:, column].tolist())
        counts.pop(-1, None)
        frequent = sorted((-count, value) for value, count in counts.items() if count >= threshold)
        assert vocabulary.tolist() == [value for _, value in frequent]
        ids = read_encoded(encoded_set.train_uri).ids[:, column]
        rare = [count < threshold for count in map(counts.get, raw[:, column]) if count is not None]
        assert (ids[raw[:, column] != -1] == OOV_ID).tolist() == rare


@pytest.mark.parametrize("where", ["everywhere", "in one partition", "in training only", "in holdout only"])
def test_all_null_columns(write_raw, run_step, raw_table, where):
    train, holdout = raw_table(600, seed=5), raw_table(600, seed=6)
    masks = {
        "everywhere": (np.full(600, True), np.full(600, True)),
        "in one partition": (np.arange(600) < 300, np.arange(600) >= 300),
        "in training only": (np.full(600, True), np.full(600, False)),
        "in holdout only": (np.full(600, False), np.full(600, True)),
    }[where]
    tables = []
    for table, mask in zip((train, holdout), masks):
        for name in ("C4", "I5"):
            values = read_raw_arrays([table])
            column = values.categorical[:, 3] if name == "C4" else values.dense[:, 4]
            table = replace_column(table, name, np.abs(np.nan_to_num(column)), mask=mask)
        tables.append(table)
    encoded_set = run_step(write_raw(*tables), extra=("--partition-rows", "300"))
    workflow = load_workflow(encoded_set)
    for uri, table in zip((encoded_set.train_uri, encoded_set.holdout_uri), tables):
        raw, encoded = read_raw_arrays([table]), read_encoded(uri)
        np.testing.assert_array_equal(encoded.ids, workflow.encode_categorical(raw.categorical))
        np.testing.assert_array_equal(encoded.dense, workflow.encode_dense(raw.dense))
    if masks[0].all():
        assert encoded_set.slot_sizes[3] == FIRST_ID
        assert (read_encoded(encoded_set.train_uri).ids[:, 3] == MISSING_ID).all()
        assert (workflow.means[4], workflow.stds[4]) == (0.0, 1.0)


def test_constant_column_has_std_one(write_raw, run_step, raw_table):
    table = replace_column(raw_table(3000), "I7", np.full(3000, 7.0))
    encoded_set = run_step(write_raw(table), extra=("--partition-rows", "300"))
    assert load_workflow(encoded_set).stds[6] == 1.0
    np.testing.assert_allclose(read_encoded(encoded_set.train_uri).dense[:, 6], 0, atol=1e-6)


def test_column_of_rare_values_has_an_empty_vocabulary(write_raw, run_step, raw_table):
    table = replace_column(raw_table(400), "C9", np.arange(400) + 2**31, mask=np.arange(400) % 10 == 0)
    encoded_set = run_step(write_raw(table))
    assert encoded_set.slot_sizes[8] == FIRST_ID
    expected = np.where(np.arange(400) % 10 == 0, MISSING_ID, OOV_ID)
    np.testing.assert_array_equal(read_encoded(encoded_set.train_uri).ids[:, 8], expected)


def test_rows_keep_the_order_of_file_names(write_raw, run_step, raw_table):
    # Sorted by the numbers in them, part-10 would come after part-9.
    tables = {f"part-{n}.parquet": raw_table(100 + n, seed=n) for n in (9, 10, 1, 100)}
    tables = {name: replace_column(t, "I1", np.arange(t.num_rows) * 1.0) for name, t in tables.items()}
    encoded_set = run_step(write_raw(tables), extra=("--partition-rows", "64"))
    raw = read_raw_arrays([tables[name] for name in sorted(tables)])
    for uri in (encoded_set.train_uri, encoded_set.holdout_uri):
        dense = read_encoded(uri).dense
        np.testing.assert_array_equal(dense, load_workflow(encoded_set).encode_dense(raw.dense))


def test_the_saved_nvtabular_workflow_gives_the_same_rows(write_raw, run_step, raw_table):
    table = raw_table(400, seed=8)
    encoded_set = run_step(write_raw(table))
    workflow = nvt.Workflow.load(local_path(encoded_set.workflow_uri) / "nvtabular")
    frame = table.select([LABEL, *DENSE, *CATEGORICAL]).to_pandas()
    again = workflow.transform(nvt.Dataset(frame, cpu=True)).compute()
    encoded = read_encoded(encoded_set.train_uri)
    np.testing.assert_array_equal(again[list(CATEGORICAL)].to_numpy(), encoded.ids)
    np.testing.assert_array_equal(again[list(DENSE)].to_numpy(dtype=np.float32), encoded.dense)
    assert isinstance(again, pd.DataFrame)


def test_a_dask_scheduler_gives_the_same_files(write_raw, run_step, raw_table):
    distributed = pytest.importorskip("distributed")
    raw = write_raw(raw_table(600, seed=9))
    alone = run_step(raw, run="alone", extra=("--partition-rows", "300"))
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
    ) as cluster:
        options = ("--partition-rows", "300", "--dask-scheduler", cluster.scheduler_address)
        together = run_step(raw, run="together", extra=options)
    for part in ("train_uri", "holdout_uri"):
        assert read_encoded(getattr(alone, part)).table.equals(read_encoded(getattr(together, part)).table)
