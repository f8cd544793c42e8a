"""Tests of several runs of the real step: what a parent determines, and what a run may add."""

import json
from collections import Counter

import numpy as np
import pytest

from evergreen.contracts.workflow import FIRST_ID, OOV_ID, TOMBSTONE
from evergreen.runtime.durable import sha256_tree
from evergreen.storage.uris import local_path


def test_ids_survive_rounds_in_which_categories_vanish_and_return(
    write_raw, run_step, keep_as_model, raw_table, reading
):
    windows = [[10, 20, 2**32 - 5], [20, 2**31 + 7, 99], [10, 99, 5, 2**32 - 5]]
    parent, ids, before, frequencies = None, {}, None, Counter()
    for number, values in enumerate(windows):
        column = np.random.default_rng(number).choice(values, 400)
        # Category 777 occurs once per run, and its count reaches the threshold after two runs.
        column[0] = 777
        table = reading.replace(raw_table(400, seed=number), "shop", column)
        encoded_set = run_step(
            write_raw(table, name=f"raw {number}"), run=f"run-{number}", parent=parent
        )
        vocabulary = reading.workflow(encoded_set).vocabularies[1].tolist()
        now = {value: FIRST_ID + position for position, value in enumerate(vocabulary)}
        assert {value: now[value] for value in ids} == ids
        assert (777 in now) == (number > 0)
        encoded = reading.encoded(encoded_set.train_uri).ids[:, 1]
        np.testing.assert_array_equal(
            encoded, [now.get(value, OOV_ID) for value in column.tolist()]
        )
        frequencies.update(column.tolist())
        new = {value for value in set(column.tolist()) - set(ids) if frequencies[value] >= 2}
        assert encoded_set.new_categories[1] == len(new)
        assert vocabulary[len(ids) :] == sorted(new, key=lambda value: (-frequencies[value], value))
        keep_as_model(
            local_path(encoded_set.workflow_uri), encoded_set.slot_sizes, f"model-{number}"
        )
        parent, ids = f"model-{number}", now
        if before is not None:
            workflow = reading.workflow(encoded_set)
            np.testing.assert_array_equal(workflow.means, before.means)
            np.testing.assert_array_equal(workflow.stds, before.stds)
        before = reading.workflow(encoded_set)


DAYS = ("2025-10-10T00:00:00+00:00", "2025-10-12T00:00:00+00:00", "2025-10-12T06:00:00+00:00")
IN_SHOP = ([10, 20, 30, 10, 20, 30, 7], [20, 20, 7], [30, 30, 30, 40, 40, 50])
"""First values of the column `shop`, for each run. All later values are missing."""


@pytest.fixture
def play(write_raw, run_step, keep_as_model, raw_table, reading):
    """Runs one of three rounds with the model `parent` as parent.

    The workflow is stored in the registry as the workflow of the model `keep`.
    """

    def play(number, parent, *, run=None, keep=None):
        values = np.zeros(300)
        values[: len(IN_SHOP[number])] = IN_SHOP[number]
        table = reading.replace(
            raw_table(300, seed=number), "shop", values, mask=np.arange(300) >= len(IN_SHOP[number])
        )
        users = table["user"].to_pylist()
        users[0] = 4_000_000_000 + number  # The category occurs once and has no id.
        table = reading.replace(table, "user", users)
        run = run or f"run-{number}"
        raw = write_raw(table, name=f"raw of {run}", last_event_time=DAYS[number])
        encoded_set = run_step(raw, run=run, parent=parent, category_ttl_days=1)
        if keep:
            keep_as_model(local_path(encoded_set.workflow_uri), encoded_set.slot_sizes, keep)
        return encoded_set, reading.raw([table]).categorical

    return play


def test_nvtabular_encodes_as_contract_while_category_ids_are_reused(play, run_step, reading):
    rounds = [play(0, None, keep="m0"), play(1, "m0", keep="m1"), play(2, "m1")]
    workflows = [reading.workflow(encoded_set) for encoded_set, _ in rounds]
    assert [w.vocabularies[1].tolist() for w in workflows] == [
        [10, 20, 30],
        [TOMBSTONE, 20, TOMBSTONE, 7],  # category 7 occurs once in each of the first two rounds
        [30, 20, 40, 7],
    ]
    for (encoded_set, categorical), workflow in zip(rounds, workflows):
        ids = reading.encoded(encoded_set.train_uri).ids
        np.testing.assert_array_equal(ids, workflow.encode_categorical(categorical))
        assert encoded_set.tombstones == workflow.tombstones
        assert encoded_set.slot_sizes == workflow.slot_sizes
    assert [encoded_set.new_categories[1] for encoded_set, _ in rounds] == [3, 1, 2]
    assert [encoded_set.tombstones[1] for encoded_set, _ in rounds] == [0, 2, 0]
    for before, after, (encoded_set, _), run in zip(
        workflows, workflows[1:], rounds[1:], ("run-1", "run-2")
    ):
        note = json.loads((run_step.store / "runs" / run / "preprocessing.json").read_text())[
            "facts"
        ]
        both = [(b, a[: len(b)]) for b, a in zip(before.vocabularies, after.vocabularies)]
        assert note["evicted"] == sum(
            int(((b != TOMBSTONE) & (a == TOMBSTONE)).sum()) for b, a in both
        )
        assert note["reused_ids"] == sum(
            int(((b == TOMBSTONE) & (a != TOMBSTONE)).sum()) for b, a in both
        )
        assert note["tombstones"] == sum(encoded_set.tombstones)
        assert note["new_categories"] == sum(encoded_set.new_categories)
        assert note["candidates"] > 0
    assert note["reused_ids"] > 0


def test_holdout_rows_teach_nothing(write_raw, run_step, raw_table, reading):
    train = raw_table(400, seed=1)
    holdout = reading.replace(raw_table(300, seed=2), "user", np.full(300, 123_456))
    encoded_set = run_step(write_raw(train, holdout))
    assert 123_456 not in reading.raw([train]).categorical[:, 2]
    assert (reading.encoded(encoded_set.holdout_uri).ids[:, 2] == OOV_ID).all()


def test_retry_replaces_what_first_try_left(write_raw, run_step, raw_table, tmp_path, reading):
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


EXCLUDED = ["age", "user", "genres"]
SLOTS = [2, 3]


def test_round_goes_on_with_its_parents_columns_only(
    write_raw, run_step, raw_table, keep_as_model, reading, capsys
):
    rows = [write_raw(raw_table(600, seed=seed), name=f"raw {seed}") for seed in (1, 2, 3)]
    first = run_step(reading.change(rows[0], excluded_columns=EXCLUDED), run="first")
    keep_as_model(local_path(first.workflow_uri), first.slot_sizes, "parent")
    second = run_step(
        reading.change(rows[1], excluded_columns=EXCLUDED), run="second", parent="parent"
    )
    assert reading.workflow(second).excluded == tuple(EXCLUDED)
    assert [second.slot_sizes[slot] for slot in SLOTS] == [FIRST_ID] * 2
    capsys.readouterr()
    other = reading.change(rows[2], excluded_columns=["age", "user", "shop"])
    run_step(other, run="third", parent="parent", expect=2)
    assert (
        "['age', 'shop', 'user'], expected the columns that its parent parent excludes: ['age', "
        "'genres', 'user']" in capsys.readouterr().err
    )


def test_nothing_is_fitted_on_old_rows(write_raw, write_old_rows, run_step, raw_table, reading):
    """Old rows add no category to the vocabularies and change no mean."""
    old = reading.replace(raw_table(400, seed=8), "item", np.full(400, 123_456_789))
    old = reading.replace(old, "price", np.full(400, 9999.0))
    without = run_step(write_raw(raw_table(900, seed=1)))
    raw = write_old_rows(
        write_raw(raw_table(900, seed=1), name="more"), replay=old, replay_holdout=old
    )
    with_old = run_step(raw, run="run-2")
    folders = [local_path(encoded.workflow_uri) for encoded in (without, with_old)]
    hashes = [[sha256_tree(path) for path in sorted(folder.glob("*.np[yz]"))] for folder in folders]
    assert hashes[0] == hashes[1]
    workflows = [reading.workflow(encoded) for encoded in (without, with_old)]
    for one, other in zip(*(workflow.vocabularies for workflow in workflows)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(workflows[0].means, workflows[1].means)
    assert (reading.encoded(with_old.replay_uri).ids[:, 0] == OOV_ID).all()
