"""Several rounds through the real step: what a parent fixes, and what a round may add."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.uris import local_path
from components.contracts.workflow import FIRST_ID, OOV_ID


def test_ids_survive_rounds_in_which_categories_vanish_and_return(
    write_raw, run_step, keep_as_model, raw_table, reading
):
    windows = [[10, 20, 2**32 - 5], [20, 2**31 + 7, 99], [10, 99, 5, 2**32 - 5]]
    parent, ids, before = "none", {}, None
    for number, values in enumerate(windows):
        column = np.random.default_rng(number).choice(values, 400)
        column[0] = 777  # seen once a round: stays out, however many rounds it comes back in
        table = reading.replace(raw_table(400, seed=number), "C2", column)
        encoded_set = run_step(write_raw(table, name=f"raw {number}"), run=f"run-{number}", parent=parent)
        vocabulary = reading.workflow(encoded_set).vocabularies[1].tolist()
        now = {value: FIRST_ID + position for position, value in enumerate(vocabulary)}
        assert {value: now[value] for value in ids} == ids
        assert 777 not in now
        encoded = reading.encoded(encoded_set.train_uri).ids[:, 1]
        np.testing.assert_array_equal(encoded, [now.get(value, OOV_ID) for value in column.tolist()])
        new = set(values) - set(ids)
        assert encoded_set.new_categories[1] == len(new)
        counts = Counter(column.tolist())
        assert vocabulary[len(ids) :] == sorted(new, key=lambda value: (-counts[value], value))
        keep_as_model(local_path(encoded_set.workflow_uri), encoded_set.slot_sizes, f"model-{number}")
        parent, ids = f"model-{number}", now
        if before is not None:
            workflow = reading.workflow(encoded_set)
            np.testing.assert_array_equal(workflow.means, before.means)
            np.testing.assert_array_equal(workflow.stds, before.stds)
        before = reading.workflow(encoded_set)


def test_first_round_counts_every_category_as_new(write_raw, run_step, raw_table, reading):
    encoded_set = run_step(write_raw(raw_table(500)), parent="current")
    assert encoded_set.parent_model_uri is None
    assert encoded_set.slot_sizes == reading.workflow(encoded_set).slot_sizes
    assert encoded_set.new_categories == [size - FIRST_ID for size in encoded_set.slot_sizes]


def test_a_round_without_news_only_encodes(write_raw, run_step, keep_as_model, raw_table, reading):
    raw = write_raw(raw_table(500))
    first = run_step(raw, run="run-1")
    folder = keep_as_model(local_path(first.workflow_uri), first.slot_sizes, "m1")
    second = run_step(raw, run="run-2", parent="m1")
    assert second.new_categories == [0] * NUM_CATEGORICAL
    assert second.parent_model_uri == folder.as_uri()
    assert reading.encoded(first.train_uri).table.equals(reading.encoded(second.train_uri).table)


def test_holdout_rows_teach_nothing(write_raw, run_step, raw_table, reading):
    train = raw_table(400, seed=1)
    holdout = reading.replace(raw_table(300, seed=2), "C5", np.full(300, 123_456))
    encoded_set = run_step(write_raw(train, holdout))
    assert 123_456 not in reading.raw([train]).categorical[:, 4]
    assert (reading.encoded(encoded_set.holdout_uri).ids[:, 4] == OOV_ID).all()


def test_a_retry_replaces_what_the_first_try_left(write_raw, run_step, raw_table, tmp_path, reading):
    left = tmp_path / "big data" / "run-1" / "preprocessing" / "train" / "part-00007.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a file")
    left.parents[1].with_name(f".preprocessing.{'0123abcd' * 4}").mkdir()
    again = run_step(write_raw(raw_table(200, seed=2)))
    assert len(reading.encoded(again.train_uri).label) == 200
    assert not left.exists()
    step_folder = local_path(again.train_uri).parent
    assert [path.name for path in step_folder.parent.iterdir()] == ["preprocessing"]
    note = json.loads((run_step.store / "runs" / "run-1" / "preprocessing.json").read_text())
    assert note["state"] == "done"
    assert note["facts"]["ids"] == sum(again.slot_sizes)
