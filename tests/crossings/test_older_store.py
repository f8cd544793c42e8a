"""A store that an older Evergreen wrote goes on: no tombstones, no counts of categories, no DCN v2, no graph JSON.

Nor did it say which days a model learnt from, of which columns and thinned how, or count its rows for the monitor.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from components.contracts.manifests import Model
from components.contracts.workflow import FeatureWorkflow
from components.runtime.durable import sha256_tree
from components.storage.uris import local_path
from components.store import promotion_journal

pytestmark = pytest.mark.timeout(900)

WEIGHTS = {
    "dcn_dense_0.model",
    "dcn_opt_dense_0.model",
    "dcn0_sparse_0.model/key",
    "dcn0_sparse_0.model/emb_vector",
    "dcn0_opt_sparse_0.model",
}
"""All files that it wrote of a model's weights."""


JOURNAL_FIELDS = (
    "time", "action", "version", "previous_version", "model_id", "model_uri", "release_uri", "trigger_id", "reason",
)  # fmt: skip
"""All that a line of the journal held."""


def age(folder):
    """Puts a model's folder into the forms of that time."""
    weights, workflow = folder / Model.WEIGHTS, folder / Model.WORKFLOW
    for path in weights.rglob("*"):
        if path.is_file() and str(path.relative_to(weights)) not in WEIGHTS:
            path.unlink()
    assert {str(p.relative_to(weights)) for p in weights.rglob("*") if p.is_file()} == WEIGHTS
    (workflow / "admission.npz").unlink()
    settings = json.loads((workflow / "workflow.json").read_text())
    del settings["excluded"]
    for newer in (Model.REFERENCE, Model.WINDOWS):
        (folder / newer).unlink(missing_ok=True)
    (workflow / "workflow.json").write_text(json.dumps({**settings, "format_version": 1}))
    manifest = json.loads((folder / Model.MANIFEST).read_text())
    del manifest["config"]["projection_dim"]
    for newer in ("negative_rate", "excluded_columns", "days", "files"):
        del manifest[newer]
    for part in (Model.WEIGHTS, Model.WORKFLOW, "statistics"):
        manifest["sha256"][part] = sha256_tree(folder / part)
    (folder / Model.MANIFEST).write_text(json.dumps(manifest))


def age_release(root):
    """Puts the first release into the form of that time: its graph lies in Triton's repository, and nowhere else."""
    served, release = root / "repository" / "click_model" / "1", root / "store" / "releases" / "1.json"
    (served / "version.json").unlink()
    for newer in ("graphs", "verdicts"):
        shutil.rmtree(root / "store" / newer)
    (root / "store" / "serving.json").unlink()
    manifest = json.loads(release.read_text())
    del manifest["sha256"]["data"], manifest["parent_model_id"]
    release.write_text(json.dumps({**manifest, "graph_uri": (served / "model.onnx").as_uri()}))


@pytest.fixture(scope="module")
def after(chain, tmp_path_factory):
    """A chain whose store holds the first round's model in old forms, and the round that follows it."""
    aged = chain.copied_to(tmp_path_factory.mktemp("an older store"), vocabularies={"category_ttl_days": 2.5})
    journal = aged.root / "store" / "journal.jsonl"
    first, newer = chain.rounds[0].training, chain.rounds[1].training
    released = next(line for line in map(json.loads, journal.read_text().splitlines()) if line["action"] == "release")
    journal.write_text(json.dumps({name: released[name] for name in JOURNAL_FIELDS}) + "\n")
    shutil.rmtree(aged.root / "store" / "models" / newer.model_id)
    (aged.root / "store" / "releases" / "2.json").unlink()
    age(aged.root / "store" / "models" / first.model_id)
    age_release(aged.root)
    aged.turn("round-2", validation_report=chain.rounds[1].paths["validation"])
    return aged


def test_a_round_continues_the_model_of_an_older_store(chain, after):
    first, this = chain.rounds[0].training, after.rounds[-1]
    assert this.training.parent_model_id == first.model_id
    assert this.training.optimizer_step > first.optimizer_step
    assert local_path(this.training.uri).is_relative_to(after.root)
    before, now = (FeatureWorkflow.load(local_path(m.uri) / Model.WORKFLOW) for m in (first, this.training))
    for old, new in zip(before.vocabularies, now.vocabularies):
        np.testing.assert_array_equal(new[: len(old)], old)  # all seen at the watermark: none is too old yet
    np.testing.assert_array_equal(before.means, now.means)
    assert sum(this.preprocessing.new_categories) > 0


def test_its_release_is_the_champion_and_what_is_released_after_it(chain, after):
    first, this = chain.rounds[0].training, after.rounds[-1]
    assert this.evaluation.champion_model_id == first.model_id
    assert this.evaluation.old_distribution["champion"]["auc"] > 0.5
    assert this.deployment.previous_version == 1
    assert this.deployment.parity_max_abs_diff <= 1e-5
    assert promotion_journal.current(after.root / "store").model_id == this.training.model_id
    assert (after.root / "store" / "graphs" / "1" / "golden.npz").exists(), "a rollback can bring it back"
