"""Excluded columns: missing in everything that is learned, whatever the rows hold, and the same in every round."""

from components.contracts.workflow import FIRST_ID
from components.storage.uris import local_path

EXCLUDED = ["I2", "I13", "C3", "C26"]
SLOTS = [2, 25]


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
