"""Tests of a fit with PyTorch: the loss falls, results are reproducible, and kills are survived."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.training.pytorch.engine import PytorchEngine
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import Model
from evergreen.networks.scoring import load_scorer
from evergreen.registry.runs import read_notes
from evergreen.runtime.exit_codes import ExitCode
from evergreen.runtime.flags import run_flags
from evergreen.statistics.metrics import roc_auc
from evergreen.storage.references import keep
from testing.networks import shaped
from testing.paths import REPOSITORY
from testing.recommenders import shop_with
from testing.warm import Warm
from tests.support.planted_rows import (
    POSITIONS,
    WIDTHS,
    PlantedRows,
    dcn,
    fit_by_pytorch,
    training_sets,
)

SEGMENT_ROWS = 1024
"""Number of rows in a small pass, which can still be interrupted at several positions."""

CONFIG = dcn(embedding_dim=8, num_cross_layers=2, tower=(32,))
FAST = TrainingSettings(batch_size=512)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(
        PytorchEngine, "segment_batches", lambda self, batch_size: SEGMENT_ROWS // batch_size
    )


def fits(root):
    """Return `go`, which runs a fit on the CPU with its checkpoint below `root`.

    `go` returns the result and the emitted lines.
    """
    count = iter(range(1000))

    def go(training_set, settings=FAST, start=None, config=CONFIG, path=None, **keywords):
        lines, path = [], path or root / f"checkpoint {next(count)}"
        return fit_by_pytorch(
            training_set, config, settings, path, start=start, emit=lines.append, **keywords
        ), lines

    return go


@pytest.fixture
def run(tmp_path):
    return fits(tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A fit on 40,000 rows, whose labels are drawn from a known logit.

    The rows are enough to approximate this logit. Later runs continue this fit.
    """
    root = tmp_path_factory.mktemp("first")
    return fits(root)(training_sets(root)(*PlantedRows().rows(40_000, seed=1)[:3]))[0]


def scores(result, slot_sizes, dense, ids, config=CONFIG):
    scorer = load_scorer(result.weights, config, slot_sizes, positions=POSITIONS)
    return scorer.probabilities(dense, ids)


def test_training_finds_signal_and_next_run_regains_most_of_drift(
    planted, first, make_training_set, run
):
    labels, dense, ids, logit = planted.rows(8_000, seed=2)
    first_auc = roc_auc(labels, scores(first, planted.slot_sizes, dense, ids))
    assert first_auc > roc_auc(labels, logit) - 0.02

    # In the newest third of the new window, the ids have other meanings than before.
    drifted = planted.drifted([1, 2])
    window = [
        np.concatenate(p)
        for p in zip(planted.rows(16_000, seed=3)[:3], drifted.rows(8_000, seed=4)[:3])
    ]
    second, _ = run(make_training_set(*window, name="second"), start=first.weights)
    labels, dense, ids, _ = drifted.rows(8_000, seed=5)
    lost = first_auc - roc_auc(labels, scores(first, planted.slot_sizes, dense, ids))
    regained = roc_auc(labels, scores(second, planted.slot_sizes, dense, ids)) - (first_auc - lost)
    assert lost > 0.08
    assert regained > 0.6 * lost


@pytest.mark.parametrize(("network", "least"), [("deepfm", 0.77), ("dlrm", 0.71)])
def test_first_model_of_few_rows_is_no_noise_with_multiplied_vectors(
    planted, make_training_set, run, network, least
):
    config = shaped(network, {}, **WIDTHS)
    result, _ = run(
        make_training_set(*planted.rows(3_000, seed=1)[:3]), TrainingSettings(), config=config
    )
    labels, dense, ids, _ = planted.rows(8_000, seed=9)
    assert roc_auc(labels, scores(result, planted.slot_sizes, dense, ids, config)) > least


def test_round_in_unchanged_data_is_no_worse_than_its_parent(
    planted, first, make_training_set, run
):
    second, _ = run(
        make_training_set(*planted.rows(10_000, seed=3)[:3], name="second"), start=first.weights
    )
    labels, dense, ids, _ = planted.rows(8_000, seed=2)
    before, after = (
        roc_auc(labels, scores(r, planted.slot_sizes, dense, ids)) for r in (first, second)
    )
    assert after > before - 0.003
    assert second.optimizer_step >= first.optimizer_step


MODEL = {"embedding_dim": 4, "num_cross_layers": 2, "tower": [8], "dropout": 0.2}


@pytest.fixture
def command(tmp_path, planted, make_training_set, validation_report):
    """Makes the step's command line for a run.

    The settings of section `training` may be changed.
    """
    report = keep(validation_report, tmp_path / "report.json")
    training_set = replace(make_training_set(*planted.rows(5_000)[:3]), validation_report=report)

    def make(run, **training):
        replace(training_set, recommender=shop_with(model=MODEL, training=training)).write(
            tmp_path / "set.json"
        )
        files = {"training_set": tmp_path / "set.json"}
        folders = {"run": run, "store": tmp_path / run / "store", "work": tmp_path / "work"}
        return run_flags(**files, **folders, output=tmp_path / run / "model.json")

    return make


def weights_hash(tmp_path, run):
    return Model.read(tmp_path / run / "model.json").sha256["weights"]


SHORT = f"""
import sys
from components.training.pytorch import engine as pytorch_engine
from components.training.__main__ import main

pytorch_engine.PytorchEngine.segment_batches = lambda self, batch_size: {SEGMENT_ROWS} // batch_size
"""

STEP = f"{SHORT}raise SystemExit(main(sys.argv[1:]))"

KILLED = f"""{SHORT}
import contextlib, os, signal
from evergreen.runtime import durable
from components.training import fit

fit._Fit._is_save_due = property(lambda self: True)  # whatever the clock says
place, left = sys.argv[1], int(sys.argv[2])

def counted(function, name_of):
    def call(*arguments, **keywords):
        global left
        done = function(*arguments, **keywords)
        left -= place in name_of(arguments)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return call

@contextlib.contextmanager
def half_written(*arguments, new_model=pytorch_engine.new_model, **keywords):
    with new_model(*arguments, **keywords) as stored:
        counted(lambda: None, lambda _: "new_model")()
        yield stored

pytorch_engine.new_model = half_written
pytorch_engine.PytorchEngine.train = counted(pytorch_engine.PytorchEngine.train, lambda _: "train")
durable.os.replace = counted(os.replace, lambda arguments: os.path.basename(arguments[1]))
durable.os.rename = counted(os.rename, lambda arguments: os.path.basename(arguments[1]))
raise SystemExit(main(sys.argv[3:]))
"""

KILLED_AT = {
    "after a segment, before its save": ("train", 2),
    "in the middle of a save": ("new_model", 3),
    "between the weights and the file that names them": ("weights-", 2),
    "after the weights were taken to the store": ("model.json", 1),
}


@pytest.fixture(scope="module")
def run_apart():
    """Runs a program in a fork of a process with torch, and returns exit code and output."""
    with Warm(
        Path(sys.executable), "import components.training.pytorch.engine, components.training.step"
    ) as warm:
        yield lambda program, *arguments: warm.run(
            program, arguments, variables=dict(os.environ), folder=REPOSITORY
        )


def test_killed_again_and_again_it_ends_with_weights_of_undisturbed_run(
    command, run_apart, tmp_path
):
    code, said = run_apart(STEP, *command("undisturbed"))
    assert code == 0, said
    flags = command("killed")
    for described, (step_name, times) in KILLED_AT.items():
        code, said = run_apart(KILLED, step_name, str(times), *flags)
        assert code == -signal.SIGKILL, f"{described}: {said}"
    assert not (tmp_path / "killed" / "model.json").exists()
    code, said = run_apart(STEP, *flags)
    assert code == 0, said
    assert weights_hash(tmp_path, "killed") == weights_hash(tmp_path, "undisturbed")
    (model,) = (tmp_path / "killed" / "store" / "models").iterdir()
    assert model.name == Model.read(tmp_path / "killed" / "model.json").model_id


def test_sigterm_saves_and_exits_for_retry_that_ends_with_same_weights(
    command, run_apart, tmp_path
):
    run = [sys.executable, "-c", STEP, *command("stopped")]
    with subprocess.Popen(run, stderr=subprocess.PIPE, text=True) as process:
        said = ""
        for line in process.stderr:
            said += line
            if "fit starts" in line:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == ExitCode.PREEMPTED == os.EX_TEMPFAIL, said
    assert "preempted: stopped on request: saved in pass 1, batch " in said
    (note,) = read_notes(tmp_path / "stopped" / "store", "stopped")
    assert note.state == "preempted"
    assert note.reason.startswith("stopped on request: saved in pass 1")
    progress = json.loads(
        (tmp_path / "work" / "stopped" / "training" / "checkpoint" / "progress.json").read_text()
    )
    assert progress["now"]["batches"] > 0
    assert not (tmp_path / "stopped" / "store" / "models").exists()

    for name in ("stopped", "undisturbed"):
        code, said = run_apart(STEP, *command(name))
        assert code == 0, said
    assert weights_hash(tmp_path, "stopped") == weights_hash(tmp_path, "undisturbed")
    (note,) = read_notes(tmp_path / "stopped" / "store", "stopped")
    assert note.state == "done"
