"""A step broken off at a bad moment, or on a full disk, leaves nothing that the next try takes for whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from components.runtime.durable import sha256_tree
from components.runtime.errors import PermanentError, Preempted
from components.runtime.exit_codes import ExitCode
from components.storage.uris import local_path
from components.store.runs import read_notes
from components.training import publish, step
from components.training.checkpoint import CheckpointFolder
from components.training.config import TrainingSettings
from components.training.preemption import stop_on_sigterm
from components.training.step import TrainingRun, forget_checkpoint, train
from tests.support.training_world import dcn

REPOSITORY = Path(__file__).resolve().parents[3]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def run(tmp_path, training_set, validation_report):
    """Trains; gives the model."""

    def go(seed=1, **keywords):
        asked = TrainingRun(
            run="r",
            store=tmp_path / "store",
            work=tmp_path / "work",
            parent="none",
            backend="pytorch",
            config=dcn(embedding_dim=4, num_cross_layers=1, tower=(8,)),
            settings=TrainingSettings(max_epochs=1, seed=seed),
        )
        now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
        return train(asked, training_set, validation_report, clock=lambda: now, **keywords)[0]

    return go


@pytest.fixture
def training_set(world, make_training_set):
    return make_training_set(*world.rows(600)[:3])


@pytest.fixture
def folder(tmp_path):
    """The run's folder for training."""
    return tmp_path / "work" / "r" / "training"


@pytest.fixture
def killed_removing(monkeypatch):
    """Lets the process die while it removes a folder of that name, some files of which are gone."""
    real = shutil.rmtree

    def arm(name):
        def rmtree(path, *arguments, **keywords):
            if Path(path).name == name:
                for file in Path(path).rglob("weights.safetensors"):
                    file.unlink()
                monkeypatch.setattr(shutil, "rmtree", real)
                raise Killed
            real(path, *arguments, **keywords)

        monkeypatch.setattr(shutil, "rmtree", rmtree)

    return arm


def test_weights_half_gone_to_a_store_on_another_disk_are_not_published(run, folder, tmp_path, monkeypatch):
    whole = run()
    shutil.rmtree(tmp_path / "store")
    forget_checkpoint(tmp_path / "work", "r")
    rename, rmtree = os.rename, shutil.rmtree

    def across_disks(source, target, **keywords):
        if str(source).startswith(str(folder)) and str(target).startswith(str(tmp_path / "store")):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target, **keywords)

    def killed(path, *arguments, **keywords):
        if folder in Path(path).parents and (Path(path) / "weights.safetensors").exists():
            (Path(path) / "weights.safetensors").unlink()
            raise Killed
        rmtree(path, *arguments, **keywords)

    monkeypatch.setattr(os, "rename", across_disks)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        run()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    again = run()
    assert again.sha256 == whole.sha256
    assert sha256_tree(local_path(again.uri) / "weights") == whole.sha256["weights"]
    assert [p.name for p in (tmp_path / "store" / "models").iterdir()] == [whole.model_id]


def test_a_run_killed_while_it_forgets_its_checkpoint_is_made_again(run, tmp_path, killed_removing):
    first = run()
    killed_removing("checkpoint")
    with pytest.raises(Killed):
        forget_checkpoint(tmp_path / "work", "r")
    assert run() == first


def test_a_run_killed_while_it_drops_another_settings_files_can_go_back_to_those(run, tmp_path, killed_removing):
    first = run(seed=1)
    killed_removing("training")
    with pytest.raises(Killed):
        run(seed=2)
    assert run(seed=1) == first


def test_files_of_other_settings_that_cannot_be_removed_stop_the_run(run, folder, monkeypatch):
    run(seed=1)
    rmtree = shutil.rmtree

    def refused(path, ignore_errors=False, **keywords):
        if Path(path) != folder:
            rmtree(path, ignore_errors=ignore_errors, **keywords)
        elif not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(PermissionError):
        run(seed=2)


def test_what_a_killed_engine_left_in_its_scratch_is_gone_before_the_next_begins(run, folder, monkeypatch):
    (folder / "engine" / "hugectr-old").mkdir(parents=True)
    run()
    (folder / "engine" / "hugectr-old").mkdir(parents=True)
    made, make_engine = [], step.make_engine

    def looked(*arguments, scratch, **keywords):
        made.append(scratch.exists())
        return make_engine(*arguments, scratch=scratch, **keywords)

    monkeypatch.setattr(step, "make_engine", looked)
    run()
    assert made == [False]


def test_an_engine_is_closed_and_its_scratch_removed_where_a_fit_fails(run, folder, monkeypatch):
    closed, make_engine = [], step.make_engine

    def made(*arguments, scratch, **keywords):
        scratch.mkdir(parents=True)
        engine = make_engine(*arguments, scratch=scratch, **keywords)
        monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
        return engine

    def failed(*arguments, **keywords):
        raise PermanentError("loss is not finite")

    monkeypatch.setattr(step, "make_engine", made)
    monkeypatch.setattr(step, "fit", failed)
    with pytest.raises(PermanentError, match="not finite"):
        run()
    assert len(closed) == 1
    assert not (folder / "engine").exists()


def test_sigterm_while_the_model_is_published_leaves_none_and_the_retry_publishes_the_same(run, tmp_path, monkeypatch):
    whole = run()
    shutil.rmtree(tmp_path / "store")
    forget_checkpoint(tmp_path / "work", "r")
    copy_parts = publish._copy_parts

    def asked_to_end(*arguments):
        copy_parts(*arguments)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(publish, "_copy_parts", asked_to_end)
    with pytest.raises(Preempted), stop_on_sigterm() as stop:
        run(stop=stop)
    assert not list((tmp_path / "store" / "models").iterdir())
    monkeypatch.setattr(publish, "_copy_parts", copy_parts)
    assert run() == whole


def test_a_half_save_goes_when_its_fit_goes_on_and_not_only_when_there_is_room_to_save_again(run, folder):
    run()
    (folder / "checkpoint" / f".weights-00-000001-000000000.{'0' * 32}").mkdir()
    assert CheckpointFolder(folder / "checkpoint").load() is not None
    assert not [p for p in (folder / "checkpoint").iterdir() if p.name.startswith(".")]


def test_a_left_over_file_that_cannot_be_removed_does_not_end_a_fit(run, folder, monkeypatch):
    """NFS keeps an unlinked file that is still open, as `.nfs` and a number, and refuses to remove it."""
    run()
    stuck = folder / "checkpoint" / ".nfs0000001"
    stuck.write_bytes(b"")
    unlink = Path.unlink

    def busy(path, **keywords):
        if path.name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, **keywords)

    monkeypatch.setattr(Path, "unlink", busy)
    checkpoints = CheckpointFolder(folder / "checkpoint")
    checkpoints.save(checkpoints.load())
    assert stuck.exists()


COMPONENT = """
import signal
from components.training.pytorch.engine import PytorchEngine

learn = PytorchEngine.learn

def stopped(*arguments, **keywords):
    for _ in range(2):  # whoever sends it may do so twice
        signal.raise_signal(signal.SIGTERM)
    return learn(*arguments, **keywords)

PytorchEngine.learn = stopped
"""


@pytest.fixture
def component(tmp_path, training_set, validation_report):
    """Runs the KFP component as its container does: kfp's executor on the function's source."""
    source = (REPOSITORY / "components/training/component.py").read_text()
    function = source[source.index("def training(") :]
    training_set.write(tmp_path / "training_set")
    validation_report.write(tmp_path / "validation_report")

    def artifacts(**kinds):
        return {
            name: {"artifacts": [{"name": name, "type": {"schemaTitle": kind}, "uri": str(tmp_path / name)}]}
            for name, kind in kinds.items()
        }

    parameters = {
        **{"run": "r", "store": str(tmp_path / "store"), "work": str(tmp_path / "work"), "parent": "none"},
        **{
            "backend": "pytorch",
            "network": "dcn",
            "learning_rate": 0.01,
            "batch_size": 64,
            "max_epochs": 1,
            "embedding_dim": 4,
        },
        **{"num_cross_layers": 1, "tower": "8", "dropout": 0.0, "projection_dim": 0, "seed": 1},
        **{"precision": "float32", "checkpoint_minutes": 5.0, "solver": ""},
    }
    executor_input = {
        "inputs": {
            "parameterValues": parameters,
            "artifacts": artifacts(training_set="system.Dataset", validation_report="system.Artifact"),
        },
        "outputs": {
            "artifacts": artifacts(model="system.Model", metrics="system.Metrics"),
            "outputFile": str(tmp_path / "executor_output.json"),
        },
    }

    def go(first=""):
        program = tmp_path / "ephemeral_component.py"
        program.write_text(f"from kfp import dsl\nfrom kfp.dsl import *\n{first}\n{function}")
        command = [sys.executable, "-m", "kfp.dsl.executor_main", "--component_module_path", str(program)]
        command += ["--executor_input", json.dumps(executor_input), "--function_to_execute", "training"]
        environment = os.environ | {"_KFP_RUNTIME": "true", "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return go


def test_the_component_ends_with_75_at_sigterm_and_its_retry_with_a_model(component, tmp_path):
    ended = component(COMPONENT)
    assert ended.returncode == ExitCode.PREEMPTED, ended.stderr
    assert read_notes(tmp_path / "store", "r")[0].state == "preempted"
    assert not (tmp_path / "model").exists()
    ended = component()
    assert ended.returncode == 0, ended.stderr
    assert "checkpoint found" in ended.stdout
    metrics = json.loads((tmp_path / "executor_output.json").read_text())["artifacts"]["metrics"]["artifacts"][0]
    assert metrics["metadata"]["train_rows"] == 600
    assert np.isfinite(metrics["metadata"]["stopping_log_loss"])
