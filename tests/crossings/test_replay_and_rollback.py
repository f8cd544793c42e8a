"""Tests of rehearsal rows from the lake to the verdict, and of a run after a rollback."""

import numpy as np
import pytest

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.manifests import Model
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.storage.uris import local_path
from tests.support.lakes import table_in

pytestmark = pytest.mark.timeout(900)


def _ids(table):
    return np.stack([table[name].to_numpy() for name in criteo.CATEGORICAL], axis=1)


def _raw_categories(table):
    return np.stack(
        [table[name].fill_null(MISSING_CATEGORY).to_numpy() for name in criteo.CATEGORICAL], axis=1
    )


def test_replayed_rows_come_from_lake_and_are_encoded_like_new_rows(chain):
    second = chain.rounds[1]
    raw, encoded = second.extraction, second.preprocessing
    workflow = FeatureWorkflow.load(local_path(encoded.workflow_uri))
    assert encoded.replay_share == raw.replay_share == 0.25
    for name in ("replay", "replay_holdout"):
        old, rows = table_in(getattr(raw, f"{name}_uri")), table_in(getattr(encoded, f"{name}_uri"))
        count = getattr(raw, f"num_{name}_rows")
        assert count == getattr(encoded, f"num_{name}_rows") == old.num_rows == rows.num_rows > 0
        assert (
            max(old[raw_rows.EVENT_TIME].to_pylist()).isoformat()
            <= chain.rounds[0].extraction.watermark
        )
        np.testing.assert_array_equal(_ids(rows), workflow.encode_categorical(_raw_categories(old)))
        np.testing.assert_array_equal(
            rows[raw_rows.LABEL].to_numpy(), old[raw_rows.LABEL].to_numpy()
        )


@pytest.fixture(scope="module")
def again(chain, tmp_path_factory):
    """A copy of the chain in which version 1 was restored and the second round was repeated."""
    back = chain.copied_to(tmp_path_factory.mktemp("gone back"))
    back.go_back(1)
    this = back.turn_to_training(
        "round-2-again", validation_report=chain.rounds[1].paths["validation"]
    )
    this.store = back.root / "store"
    return this


def test_round_after_rollback_continues_model_that_is_live_again(chain, again):
    first = chain.rounds[0].training.model_id
    assert again.training.parent_model_id == first
    assert local_path(again.preprocessing.parent_model_uri) == again.store / "models" / first
    assert again.extraction.window_start == chain.rounds[1].extraction.window_start


def test_same_round_after_rollback_gives_same_model_to_last_bit(chain, again):
    """Weights, optimizer state and vocabulary equal those of the first model.

    A run that started from another model would give other weights.
    """
    second = chain.rounds[1]
    assert again.extraction.digest == second.extraction.digest
    # The compared files are vocabularies, moments and category counts for the next run. NVTabular's
    # copy of the workflow is in a sub-folder, which is not compared.
    workflows = [local_path(this.training.uri) / Model.WORKFLOW for this in (second, again)]
    files = [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for folder in workflows
    ]
    assert files[0] == files[1]
    assert len(files[0]) > 1
    folders = [local_path(this.training.uri) / Model.WEIGHTS for this in (second, again)]
    names = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in folders
    ]
    assert names[0] == names[1]
    assert any("opt" in name for name in names[0]), "the weights must include the optimizer's state"
    assert again.training.sha256[Model.WEIGHTS] == second.training.sha256[Model.WEIGHTS]
    assert again.training.optimizer_step == second.training.optimizer_step
    assert again.training.sha256[Model.WEIGHTS] != chain.rounds[0].training.sha256[Model.WEIGHTS]
