"""Tests of the training step, from its flags to a model in the registry."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np
import pytest

from components.training.backends import make_engine
from components.training.hugectr.guard import GUARDED
from components.training.step import TrainingRun, train
from evergreen.config.model import config_from_document
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import Model, TrainingSet
from evergreen.contracts.workflow import TOMBSTONE, FeatureWorkflow
from evergreen.networks.scoring import load_scorer
from evergreen.registry.runs import read_notes
from evergreen.runtime.durable import sha256_tree
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.exit_codes import ExitCode
from evergreen.runtime.flags import run_flags
from evergreen.storage.references import keep, read_reference
from evergreen.storage.uris import local_path
from testing.recommenders import shop_with
from tests.support.errors import raises
from tests.support.planted_rows import FEATURES, POSITIONS, dcn
from tests.support.planted_rows import STEP_MODEL as MODEL


@pytest.fixture
def training_set(planted, make_training_set):
    return make_training_set(*planted.rows(2_000)[:3])


def test_model_folder_holds_all_that_next_steps_need(step, training_set, tmp_path, planted):
    code, model, metrics = step(training_set)
    assert code == 0
    folder = local_path(model.uri)
    assert folder.parent == tmp_path / "a store" / "models"
    assert replace(model, training_set=None) == Model.read(folder / Model.MANIFEST), (
        "the registry outlives the rows"
    )
    learned = read_reference(model.training_set, TrainingSet, source="the model")
    assert (learned.train_uri, learned.raw_digest) == (
        training_set.train_uri,
        training_set.raw_digest,
    )
    assert model.model_id.endswith(model.sha256["weights"][:8])
    for part in ("weights", "workflow", "statistics"):
        assert model.sha256[part] == sha256_tree(folder / part)
    assert (folder / Model.STATISTICS).read_bytes() == b"statistics"
    assert (folder / Model.SCHEMA).read_text() == "schema"
    assert (folder / Model.REFERENCE).read_text() == "reference"
    assert FeatureWorkflow.load(folder / Model.WORKFLOW).slot_sizes == training_set.slot_sizes
    assert model.last_event_time == training_set.last_event_time
    assert model.watermark == training_set.watermark
    assert model.window_start == training_set.window_start
    config = config_from_document(model.config)
    scorer = load_scorer(folder / Model.WEIGHTS, config, model.slot_sizes, positions=POSITIONS)
    _, dense, ids, _ = planted.rows(10)
    assert np.isfinite(scorer.probabilities(dense, ids)).all()
    assert metrics["progressive_log_loss"] == model.progressive["log_loss"]
    assert all(np.isfinite(v) for v in metrics.values())
    lines = (tmp_path / "a work" / "r1" / "training" / "metrics.jsonl").read_text().splitlines()
    assert {"step", "log_loss", "auc"} <= json.loads(lines[0]).keys()
    assert {"step", "pass", "training_loss", "rows_per_second"} <= json.loads(lines[-1]).keys()
    (note,) = read_notes(tmp_path / "a store", "r1")
    assert (note.state, note.facts["model"]) == ("done", model.model_id)


def test_retry_publishes_same_model_and_mends_corrupt_one(step, training_set):
    _, first, _ = step(training_set)
    _, second, _ = step(training_set)
    assert second == first
    folder = local_path(first.uri)
    (folder / "weights" / "weights.safetensors").write_bytes(b"torn")
    left_over = folder.with_name(f".{first.model_id}.{'0123abcd' * 4}")
    (left_over / "weights").mkdir(parents=True)  # A killed attempt left this file.
    assert step(training_set)[1] == first
    assert sha256_tree(folder / "weights") == first.sha256["weights"]
    assert [p.name for p in folder.parent.iterdir()] == [first.model_id]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"kind": "dlrm"}, "backend": "hugectr"}, "network is 'dlrm', expected dcn"),
        (
            {"training": {"precision": "float8"}},
            "precision is 'float8', expected one of float32, tf32, bfloat16",
        ),
        ({"backend": "xgboost"}, "backend is 'xgboost', expected one of pytorch, hugectr"),
        (
            {"backend": "hugectr", "weight": "w"},
            "data.weight is 'w', expected none: backend hugectr",
        ),
        ({"model": {"tower": "12x8"}}, "model.tower is '12x8', expected array"),
        ({"training": {"batch_size": 0}}, "batch_size is 0, expected at least 1"),
        ({"training": {"learning_rate": 0}}, "learning_rate is 0.0, expected a positive number"),
        ({"training_set": "/nowhere.json"}, "nowhere.json"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_misuse_ends_with_2_and_one_line(
    step, training_set, capsys, tmp_path, monkeypatch, changed, message
):
    monkeypatch.setitem(sys.modules, "hugectr", None)  # Other tests replace the module by a double.
    monkeypatch.setenv(GUARDED, "1")  # by default, HugeCTR's step runs in another process
    assert step(training_set, **changed)[0] == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert message in line
    assert read_notes(tmp_path / "a store", "r1")[0].state == "failed"
    assert not list((tmp_path / "a store").glob("models/*"))


def test_loss_that_is_not_finite_is_failure_and_no_bad_input(
    step, planted, make_training_set, capsys
):
    labels, dense, ids, _ = planted.rows(1_000)
    dense[123] = 3e38
    assert step(make_training_set(labels, dense, ids))[0] == ExitCode.FAILED
    assert "error: loss is not finite in pass 1" in capsys.readouterr().err


def test_full_gpu_memory_is_failure_that_names_sizes(step, training_set, capsys, monkeypatch):
    import torch

    from components.training.pytorch.engine import PytorchEngine

    def fail(self, batch):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(PytorchEngine, "_step", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 29, 80 << 30))
    assert step(training_set)[0] == ExitCode.FAILED
    text = capsys.readouterr().err
    assert "error: the GPU has too little memory: 1.5 of 80.0 GiB are free" in text
    assert f"({sum(training_set.slot_sizes):,} x 4) with Adam's moments need 0.0 GiB" in text
    assert "batches of 256 rows" in text
    assert text.rstrip().endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_missing_validation_artefact_leaves_no_model(training_set, validation_report, tmp_path):
    local_path(validation_report.schema_uri).unlink()
    training_run = TrainingRun(
        run="r",
        store=tmp_path / "store",
        work=tmp_path / "work",
        backend="pytorch",
        config=dcn(embedding_dim=4, num_cross_layers=1, tower=(8,)),
        settings=TrainingSettings(),
    )
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    with raises(ContractError, "schema.pbtxt", "absent"):
        train(training_run, training_set, validation_report, clock=lambda: now)
    assert not list((tmp_path / "store" / "models").iterdir())
    local_path(validation_report.schema_uri).write_text("schema")
    model, result = train(
        training_run,
        training_set,
        validation_report,
        clock=lambda: pytest.fail("a retry has no new time"),
    )
    assert model.model_id.startswith("20260102T030405Z-")
    # The epochs come from the checkpoint. Only the final stage is fitted again.
    assert result.optimizer_step == model.optimizer_step


WATCH_TORCH = """
import importlib.abc, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch is loaded with", os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
from components.training.__main__ import main
main(sys.argv[1:])
"""


def test_waiting_threads_sleep_because_policy_is_set_before_torch_loads(
    training_set, validation_report, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    recommender = shop_with(model=MODEL, training={"batch_size": 256})
    report = keep(validation_report, tmp_path / "report.json")
    replace(training_set, recommender=recommender, validation_report=report).write(
        tmp_path / "set.json"
    )
    files = {"training_set": tmp_path / "set.json"}
    folders = {
        "run": "r",
        "store": tmp_path / "store",
        "work": tmp_path / "work",
        "output": tmp_path / "model.json",
    }
    command = [sys.executable, "-c", WATCH_TORCH, *run_flags(**files, **folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["torch is loaded with passive"], done.stderr


def test_hugectr_without_its_library_says_so(planted, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hugectr", None)
    with raises(PermanentError, "hugectr"):
        make_engine(
            "hugectr",
            dcn(),
            planted.slot_sizes,
            settings=TrainingSettings(),
            scratch=tmp_path,
            features=FEATURES,
        )


def evicted(training_set):
    """Return the same rows with the workflow of a run in which a category was evicted.

    The id of this category becomes a tombstone.
    """
    folder = local_path(training_set.workflow_uri)
    workflow = FeatureWorkflow.load(folder)
    vocabularies = [v.copy() for v in workflow.vocabularies]
    vocabularies[3][-1] = TOMBSTONE
    replace(workflow, vocabularies=tuple(vocabularies)).save(folder)
    return training_set


@pytest.mark.parametrize(
    "changed",
    [
        lambda t: (replace(t, replay_share=0.2), {}),
        lambda t: (replace(t, negative_rate=0.5), {}),
        lambda t: (replace(t, raw_digest="of other new or replayed rows"), {}),
        lambda t: (evicted(t), {}),
        lambda t: (t, {"training": {"seed": 5}}),
        lambda t: (t, {"model": {**MODEL, "projection_dim": 2}}),
    ],
    ids=["share", "negative rate", "rows", "tombstones", "seed", "network"],
)
def test_what_decides_weights_starts_afresh_where_it_changed(step, training_set, changed):
    _, first, _ = step(training_set)
    other, flags = changed(training_set)
    code, second, _ = step(other, **flags)
    assert code == 0
    assert second.created_at != first.created_at


def test_nothing_of_finished_run_stays_but_its_numbers(step, training_set, tmp_path):
    step(training_set)
    folder = tmp_path / "a work" / "r1" / "training"
    assert sorted(p.name for p in folder.iterdir()) == [
        "attempt.json",
        "metrics.jsonl",
        "training_set.json",
    ]
