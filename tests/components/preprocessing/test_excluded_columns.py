"""Excluded columns: missing in everything that is learned, whatever the rows hold, and the same in every round."""

from __future__ import annotations

import numpy as np

from components.contracts.workflow import FIRST_ID, MISSING_ID
from components.storage.uris import local_path

EXCLUDED = ["I2", "I13", "C3", "C26"]
DENSE_PLACES, SLOTS = [1, 12], [2, 25]


def test_values_of_excluded_columns_reach_no_encoded_row_and_nothing_else_changes(
    write_raw, run_step, raw_table, reading
):
    train, holdout = raw_table(900, seed=1), raw_table(300, seed=2)
    plain = run_step(write_raw(train, holdout, name="plain"), run="plain")
    without = run_step(reading.change(write_raw(train, holdout), excluded_columns=EXCLUDED), partition_rows=300)
    assert without.excluded_columns == EXCLUDED
    assert reading.workflow(without).excluded == tuple(EXCLUDED)
    assert [without.slot_sizes[slot] for slot in SLOTS] == [FIRST_ID] * 2
    for one, other in ((plain.train_uri, without.train_uri), (plain.holdout_uri, without.holdout_uri)):
        before, now = reading.encoded(one), reading.encoded(other)
        assert (now.ids[:, SLOTS] == MISSING_ID).all()
        assert (now.dense[:, DENSE_PLACES] == now.dense[0, DENSE_PLACES]).all()
        np.testing.assert_array_equal(np.delete(now.ids, SLOTS, 1), np.delete(before.ids, SLOTS, 1))
        np.testing.assert_array_equal(np.delete(now.dense, DENSE_PLACES, 1), np.delete(before.dense, DENSE_PLACES, 1))


def test_a_round_goes_on_with_its_parents_columns_only(write_raw, run_step, raw_table, keep_as_model, reading, capsys):
    rows = [write_raw(raw_table(600, seed=seed), name=f"raw {seed}") for seed in (1, 2, 3)]
    first = run_step(reading.change(rows[0], excluded_columns=EXCLUDED), run="first")
    keep_as_model(local_path(first.workflow_uri), first.slot_sizes, "parent")
    second = run_step(reading.change(rows[1], excluded_columns=EXCLUDED), run="second", parent="parent")
    assert reading.workflow(second).excluded == tuple(EXCLUDED)
    assert [second.slot_sizes[slot] for slot in SLOTS] == [FIRST_ID] * 2
    capsys.readouterr()
    other = reading.change(rows[2], excluded_columns=["I2", "I13", "C3", "C4"])
    run_step(other, run="third", parent="parent", expect=2)
    assert "lack ['C4'] of the parent parent's and add ['C26']" in capsys.readouterr().err
