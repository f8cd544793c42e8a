"""Tests of the step's flags and of its KFP component, and of the few libraries that they import."""

from evergreen.contracts.manifests import TrainingSet
from evergreen.registry.runs import read_notes
from tests.support.kfp_components import run_component


def test_component_writes_manifest_and_notes_its_counts(write_raw, raw_table, reading, tmp_path):
    table = raw_table(200)
    raw = write_raw(table)
    reading.with_settings(raw, frequency_threshold=3, category_ttl_days=30.0)
    raw.rename(tmp_path / "raw_dataset")
    parameters = {"run": "run-1", "store": str(tmp_path / "store"), "work": str(tmp_path / "work")}
    ran, output = run_component(
        "preprocessing",
        tmp_path,
        {**parameters, "dask_scheduler": ""},
        inputs={"raw_dataset": "Dataset"},
        outputs={"training_set": "Dataset"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr
    training_set = TrainingSet.read(tmp_path / "training_set")
    num_rare = sum(count < 3 for counts in reading.counts([table]) for count in counts.values())
    assert output["artifacts"].keys() == {"training_set"}
    (note,) = read_notes(tmp_path / "store", "run-1")
    assert note.facts == {
        "train_rows": 200,
        "holdout_rows": 200,
        "ids": sum(training_set.slot_sizes),
        "new_categories": sum(training_set.new_categories),
        "reused_ids": 0,
        "evicted": 0,
        "tombstones": 0,
        "candidates": num_rare,
    }
