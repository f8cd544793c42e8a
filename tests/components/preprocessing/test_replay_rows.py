"""Old rows on their way to training: encoded as the window's rows are, and without a say in what is fitted."""

import numpy as np

from components.contracts.workflow import OOV_ID
from components.runtime.durable import sha256_tree
from components.storage.uris import local_path


def test_nothing_is_fitted_on_old_rows(write_raw, write_old_rows, run_step, raw_table, reading):
    """A category of old rows alone gets no id, however often it is in them, and no moment moves."""
    old = reading.replace(raw_table(400, seed=8), "C1", np.full(400, 123_456_789))
    old = reading.replace(old, "I1", np.full(400, 9999.0))
    without = run_step(write_raw(raw_table(900, seed=1)))
    raw = write_old_rows(write_raw(raw_table(900, seed=1), name="more"), replay=old, replay_holdout=old)
    with_old = run_step(raw, run="run-2")
    folders = [local_path(encoded.workflow_uri) for encoded in (without, with_old)]
    hashes = [[sha256_tree(path) for path in sorted(folder.glob("*.np[yz]"))] for folder in folders]
    assert hashes[0] == hashes[1]
    workflows = [reading.workflow(encoded) for encoded in (without, with_old)]
    for one, other in zip(*(workflow.vocabularies for workflow in workflows)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(workflows[0].means, workflows[1].means)
    assert (reading.encoded(with_old.replay_uri).ids[:, 0] == OOV_ID).all()
