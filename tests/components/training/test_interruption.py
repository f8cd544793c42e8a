"""Tests of interrupted steps and a full disk: no partial file is used later."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from components.training import step
from components.training.checkpoint import CheckpointFolder
from components.training.preemption import stop_on_sigterm
from components.training.step import remove_checkpoint
from evergreen.config.training import TrainingSettings
from evergreen.runtime.durable import sha256_tree
from evergreen.runtime.errors import PermanentError, Preempted
from evergreen.storage.uris import local_path
from tests.support.crashes import Killed
from tests.support.errors import raises
from tests.support.planted_rows import dcn


@pytest.fixture
def run(train_run, training_set):
    """Trains and returns the model."""
    config = dcn(embedding_dim=4, num_cross_layers=1, tower=(8,))
    return lambda seed=1, **how: train_run(
        training_set, config=config, settings=TrainingSettings(seed=seed), **how
    )


@pytest.fixture
def training_set(planted, make_training_set):
    return make_training_set(*planted.rows(600)[:3])


@pytest.fixture
def folder(tmp_path):
    """The run's folder for training."""
    return tmp_path / "work" / "r" / "training"


@pytest.fixture
def killed_removing(monkeypatch):
    """Kills the process while the process removes a folder with a given name."""
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


def test_weights_half_gone_to_store_on_another_disk_are_not_published(
    run, folder, tmp_path, monkeypatch
):
    whole = run()
    shutil.rmtree(tmp_path / "store")
    remove_checkpoint(tmp_path / "work", "r")
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


def test_run_killed_while_it_forgets_its_checkpoint_is_made_again(run, tmp_path, killed_removing):
    first = run()
    killed_removing("checkpoint")
    with pytest.raises(Killed):
        remove_checkpoint(tmp_path / "work", "r")
    assert run() == first


def test_run_killed_while_dropping_other_settings_files_can_resume_those(
    run, tmp_path, killed_removing
):
    first = run(seed=1)
    killed_removing("training")
    with pytest.raises(Killed):
        run(seed=2)
    assert run(seed=1) == first


def test_engine_is_closed_and_its_scratch_removed_where_fit_fails(run, folder, monkeypatch):
    closed, make_engine = [], step.make_engine

    def made(*arguments, scratch, **keywords):
        scratch.mkdir(parents=True)
        engine = make_engine(*arguments, scratch=scratch, **keywords)
        monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
        return engine

    def failed(*arguments, **keywords):
        raise PermanentError("loss is not finite")

    (folder / "engine" / "left by a killed try").mkdir(parents=True)

    monkeypatch.setattr(step, "make_engine", made)
    monkeypatch.setattr(step, "fit", failed)
    with raises(PermanentError, "not finite"):
        run()
    assert len(closed) == 1
    assert not (folder / "engine").exists()


def test_sigterm_during_publish_leaves_no_model_and_retry_publishes_same(
    run, tmp_path, monkeypatch
):
    whole = run()
    shutil.rmtree(tmp_path / "store")
    remove_checkpoint(tmp_path / "work", "r")
    copy_parts = step._copy_parts

    def asked_to_end(*arguments):
        copy_parts(*arguments)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(step, "_copy_parts", asked_to_end)
    with pytest.raises(Preempted), stop_on_sigterm() as stop:
        run(stop=stop)
    assert not list((tmp_path / "store" / "models").iterdir())
    monkeypatch.setattr(step, "_copy_parts", copy_parts)
    assert run() == whole


def test_left_over_file_that_cannot_be_removed_does_not_end_fit(run, folder, monkeypatch):
    """NFS renames an unlinked open file to `.nfs` and a number, and refuses to remove it."""
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
