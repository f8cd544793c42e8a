"""Tests that compare both engines' output with the contract, float64 NumPy and manual counts."""

import numpy as np
import pyarrow as pa
import pytest

from components.preprocessing import nvtabular_engine
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID, PADDING_ID
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP
from tests.support.nasty_rows import nasty_rows, strange_workflow

FEATURES = SHOP.features


def test_nvtabular_and_contract_agree_to_last_bit(write_raw, run_step, raw_table, reading):
    train, holdout = raw_table(1500, seed=1), raw_table(900, seed=2)
    large = np.full(900, 2**32 - 1)
    large[::2] = 2**31 + 1
    holdout = reading.replace(holdout, "user", large, mask=np.arange(900) % 7 == 0)
    holdout = reading.replace(
        holdout, "age", np.linspace(-3, 2**31, 900), mask=np.arange(900) % 5 == 0
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
        assert {MISSING_ID, PADDING_ID} <= set(np.unique(encoded.ids))
    assert (reading.encoded(encoded_set.holdout_uri).ids == OOV_ID).any()


@pytest.mark.parametrize("threshold", [1, 10])
def test_categories_below_threshold_are_out_of_vocabulary(
    write_raw, run_step, raw_table, threshold, reading
):
    table = raw_table(600, seed=4)
    # The category 77 is in the vocabulary of items, although only lists have it.
    table = reading.replace(table, "seen", [[77]] * 12 + table["seen"].to_pylist()[12:])
    encoded_set = run_step(write_raw(table), frequency_threshold=threshold, partition_rows=300)
    raw, slots = reading.raw([table]).categorical, FEATURES.positions.slots
    counts = reading.counts([table])
    for each, vocabulary in zip(counts, reading.workflow(encoded_set).vocabularies, strict=True):
        frequent = sorted((-count, value) for value, count in each.items() if count >= threshold)
        assert vocabulary.tolist() == [value for _, value in frequent]
    for slot, values, ids in zip(slots, raw.T, reading.encoded(encoded_set.train_uri).ids.T):
        rare = [counts[slot][value] < threshold for value in values[values != -1].tolist()]
        assert (ids[values != -1] == OOV_ID).tolist() == rare


FIRST_HALF = np.arange(600) < 300
EVERYTHING, NOTHING = np.full(600, True), np.full(600, False)


@pytest.mark.parametrize(
    "masks",
    [
        (EVERYTHING, EVERYTHING),
        (FIRST_HALF, ~FIRST_HALF),
        (EVERYTHING, NOTHING),
        (NOTHING, EVERYTHING),
    ],
    ids=["in all rows", "in one partition", "in training rows", "in holdout rows"],
)
def test_columns_without_values(write_raw, run_step, raw_table, reading, masks):
    """The masks select the missing values, in the training rows and in the holdout rows."""
    defaults = {"age": 9.0, "shop": 9, "genres": [9]}
    tables = []
    for seed, mask in zip((5, 6), masks):
        table = raw_table(600, seed=seed)
        for name, default in defaults.items():
            values = [default if value is None else value for value in table[name].to_pylist()]
            missing = [None if is_missing else v for v, is_missing in zip(values, mask)]
            table = reading.replace(table, name, missing)
        tables.append(table)
    encoded_set = run_step(write_raw(*tables), partition_rows=300)
    workflow = reading.workflow(encoded_set)
    for uri, table in zip((encoded_set.train_uri, encoded_set.holdout_uri), tables):
        raw, encoded = reading.raw([table]), reading.encoded(uri)
        np.testing.assert_array_equal(encoded.ids, workflow.encode_categorical(raw.categorical))
        np.testing.assert_array_equal(encoded.dense, workflow.encode_dense(raw.dense))
    if masks[0].all():
        assert [encoded_set.slot_sizes[slot] for slot in (1, 3)] == [FIRST_ID] * 2
        assert (reading.encoded(encoded_set.train_uri).ids[:, 1] == MISSING_ID).all()
        assert (workflow.means[1], workflow.stds[1]) == (0.0, 1.0)
    if masks[0].all() and not masks[1].any():
        assert (reading.encoded(encoded_set.holdout_uri).ids[:, [1, 3]] == OOV_ID).all()


def test_rows_keep_order_of_file_names(write_raw, run_step, raw_table, reading):
    # Sorted by their numbers, part-10 would come after part-9.
    tables = {f"part-{n}.parquet": raw_table(100 + n, seed=n) for n in (9, 10, 1, 100)}
    tables = {
        name: reading.replace(t, "price", np.arange(t.num_rows) * 1.0) for name, t in tables.items()
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
    features = workflow.features
    columns = {LABEL: np.zeros(4096, np.int32), **dict(zip(features.numeric, dense.T))}
    columns |= {
        name: pa.array(each, mask=each == MISSING_CATEGORY)
        for name, each in zip(features.categorical, categorical.T)
    }
    for name, (start, stop, _) in zip(features.lists, features.positions.lists):
        # A list has no gaps, so its missing elements are moved to its end.
        elements = categorical[:, start:stop]
        order = np.argsort(elements == MISSING_CATEGORY, axis=1, kind="stable")
        categorical[:, start:stop] = elements = np.take_along_axis(elements, order, 1)
        lists = [[each for each in row if each != MISSING_CATEGORY] for row in elements.tolist()]
        columns[name] = pa.array(lists, pa.list_(pa.int64()))
    encoded = nvtabular_engine.encoder(workflow, scratch=tmp_path / "categories")(
        pa.RecordBatch.from_pydict(columns)
    )
    ids, values = (
        np.stack([encoded[name] for name in names], 1)
        for names in (features.position_names, features.numeric)
    )
    assert {MISSING_ID, OOV_ID, FIRST_ID} <= set(np.unique(ids))
    assert np.abs(categorical[categorical < 0]).max() > 2**40 < categorical.max()
    np.testing.assert_array_equal(ids, workflow.encode_categorical(categorical))
    np.testing.assert_array_equal(
        values.view(np.int32), workflow.encode_dense(dense).view(np.int32)
    )
