"""Tests that concern only HugeCTR: staged files, checks, precision, and a fit."""

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from components.training.device_memory import free_memory
from components.training.hugectr.engine import HugectrEngine
from components.training.hugectr.files import DENSE_FILE, SPARSE_FOLDER, SPARSE_OPTIMIZER_FILE
from components.training.start import write_initial
from evergreen.config.model import config_from_document
from evergreen.config.training import SolverSettings, TrainingSettings
from evergreen.contracts.manifests import Model
from evergreen.networks.scoring import load_scorer
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.storage.uris import local_path
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, dcn

CONFIG = dcn(embedding_dim=4, num_cross_layers=2, tower=(16,))
SETTINGS = TrainingSettings(learning_rate=0.01, batch_size=128)


class Spoilt:
    """The double with some of its model's methods replaced."""

    def __init__(self, double, **methods):
        self._double = double
        self.Model = type("Model", (double.Model,), methods)

    def __getattr__(self, name):
        return getattr(self._double, name)


@pytest.fixture
def make_engine(tmp_path, double, planted, monkeypatch):
    """Makes engines over the double, optionally with replaced model methods, and closes them."""
    with ExitStack() as stack:

        def make(config=CONFIG, settings=SETTINGS, methods=None, num_gpus=1, **solver):
            monkeypatch.setitem(
                sys.modules, "hugectr", Spoilt(double, **methods) if methods else double
            )
            engine = HugectrEngine(
                config,
                planted.slot_sizes,
                replace(settings, solver=SolverSettings(**{"stage_rows": 500} | solver)),
                positions=POSITIONS,
                num_gpus=num_gpus,
                scratch=tmp_path / "scratch",
            )
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def rows(planted):
    return planted.encoded(1_500)


@pytest.fixture
def initial(tmp_path, planted):
    write_initial(
        tmp_path / "initial",
        CONFIG,
        planted.slot_sizes,
        click_rate=0.3,
        seed=3,
        positions=POSITIONS,
    )
    return tmp_path / "initial"


@pytest.mark.parametrize(
    ("settings", "num_gpus", "message"),
    [
        (TrainingSettings(precision="bfloat16"), 1, "precision is 'bfloat16'"),
        (TrainingSettings(batch_size=129), 2, "batch_size is 129, expected a multiple of 2 GPUs"),
    ],
    ids=["bfloat16", "batch"],
)
def test_conflicting_settings_are_refused_before_model_is_built(
    settings, num_gpus, message, make_engine
):
    with pytest.raises(ContractError, match=message):
        make_engine(settings=settings, num_gpus=num_gpus)


def test_stages_larger_than_those_reader_was_made_for_get_new_model(make_engine, initial, rows):
    engine, whole = make_engine(stage_rows=1_280), make_engine(stage_rows=1_280)
    for each in (engine, whole):
        each.restore(initial)
    engine.train(rows, np.arange(128), batch_size=128, seed=0)
    engine.train(rows, np.arange(128, 1_408), batch_size=128, seed=0)
    whole.train(rows, np.arange(1_408), batch_size=128, seed=0)
    assert engine.num_steps == whole.num_steps == 11
    np.testing.assert_allclose(engine.score(rows), whole.score(rows), atol=1e-6)


def spoilt_save(double, spoil):
    def save(self, prefix, iter=0):
        answer = double.Model.save_params_to_files(self, prefix, iter)
        spoil(Path(prefix).parent)
        return answer

    return {"save_params_to_files": save}


def change_key(folder):
    keys = np.fromfile(folder / SPARSE_FOLDER.format(0) / "key", "<i8")
    keys[3] = keys[4]
    keys.tofile(folder / SPARSE_FOLDER.format(0) / "key")


def used_tail(folder):
    state = np.fromfile(folder / SPARSE_OPTIMIZER_FILE.format(0), "<f4")
    state[-1] = 1.0
    state.tofile(folder / SPARSE_OPTIMIZER_FILE.format(0))


def cut_vectors(folder):
    path = folder / SPARSE_FOLDER.format(0) / "emb_vector"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_vectors, r"emb_vector has \d+ bytes, expected \d+"),
        (lambda folder: (folder / DENSE_FILE).unlink(), f"{DENSE_FILE} cannot be read"),
        (change_key, "lacks 1 keys and has other keys twice"),
        (used_tail, "has values after row"),
    ],
    ids=["cut", "absent", "a key twice", "moments elsewhere"],
)
def test_what_hugectr_did_not_write_whole_is_no_model(
    spoil, message, double, make_engine, initial, rows, tmp_path
):
    engine = make_engine(methods=spoilt_save(double, spoil), prove_restores=False)
    engine.restore(initial)
    engine.train(rows, np.arange(256), batch_size=128, seed=0)
    with pytest.raises(PermanentError, match=message):
        engine.save(tmp_path / "saved")
    assert not list((tmp_path).glob("saved/*"))


def test_answer_other_than_success_is_error(double, make_engine, initial, rows, tmp_path):
    failing = {"save_params_to_files": lambda self, prefix, iter=0: double.Error_t.OutOfMemory}
    engine = make_engine(methods=failing, prove_restores=False)
    engine.restore(initial)
    engine.train(rows, np.arange(256), batch_size=128, seed=0)
    with raises(PermanentError, "Error_t.OutOfMemory", "Error_t.Success"):
        engine.save(tmp_path / "saved")


@pytest.mark.parametrize(
    "method", ["load_dense_weights", "load_sparse_weights", "load_sparse_optimizer_states"]
)
def test_weights_that_hugectr_did_not_load_are_noticed_before_first_step(
    method, make_engine, initial, rows, tmp_path
):
    engine = make_engine()
    engine.restore(initial)
    engine.train(rows, np.arange(256), batch_size=128, seed=0)
    engine.save(tmp_path / "saved")
    # The double behaves as if HugeCTR had logged an error and continued.
    other = make_engine(methods={method: lambda self, files: None})
    other.restore(tmp_path / "saved")
    with pytest.raises(
        PermanentError, match="changed when HugeCTR loaded and saved them|saved an invalid model"
    ):
        other.train(rows, np.arange(256), batch_size=128, seed=0)


def test_batches_that_hugectr_passes_over_are_noticed(double, make_engine, initial, rows):
    calls = iter([True, False])
    engine = make_engine(methods={"train": lambda self: next(calls) and double.Model.train(self)})
    engine.restore(initial)
    with raises(PermanentError, "1 batches", "expected 3"):
        engine.train(rows, np.arange(3 * 128), batch_size=128, seed=0)


def test_model_without_weights_is_not_trained(make_engine, rows):
    engine = make_engine()
    for call in (
        lambda: engine.train(rows, np.arange(128), batch_size=128, seed=0),
        lambda: engine.score(rows),
    ):
        with raises(PermanentError, "engine has no weights"):
            call()


def test_scratch_is_empty_in_end(make_engine, initial, rows, tmp_path):
    engine = make_engine()
    engine.restore(initial)
    engine.train(rows, np.arange(1_500), batch_size=128, seed=0)
    engine.train(rows, np.arange(1_500), batch_size=64, seed=0)
    engine.score(rows)
    # One stage remains until the model is closed, because the model's readers were created for this
    # stage.
    assert len(list((tmp_path / "scratch").glob("*/rows-*/*"))) == 1
    engine.close()
    assert not list((tmp_path / "scratch").iterdir())


SMI = """#!/bin/sh
test "$1" = --query-gpu=memory.free,memory.total || exit 1
{}
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Makes a program nvidia-smi from shell commands, and puts the program first on PATH."""

    def put(commands):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvidia-smi").write_text(SMI.format(commands))
        (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    return put


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError], ids=["HugeCTR's", "RMM's"])
@pytest.mark.parametrize(
    ("method", "words"),
    [("compile", "cannot build the network"), ("train", "stopped at step 1")],
)
def test_full_gpu_memory_is_failure_that_names_sizes_and_free_memory(
    make_engine, initial, rows, nvidia_smi, kind, method, words
):
    def fail(self, *arguments, **keywords):
        raise kind("out of memory")

    nvidia_smi("echo '1536, 81920'; echo '79872, 81920'")
    engine = make_engine(methods={method: fail})
    engine.restore(initial)
    with raises(
        PermanentError,
        words,
        "batches of 128 rows and workspaces of 1 MiB, 1 MiB per GPU",
        "(free memory: GPU 0: 1.5 GiB of 80.0 GiB, GPU 1: 78.0 GiB of 80.0 GiB): out of memory;",
    ):
        engine.train(rows, np.arange(128), batch_size=128, seed=0)


@pytest.mark.parametrize(
    "commands",
    ["exit 9", "echo '[N/A], [N/A]'", "echo ''", "true"],
    ids=["failure", "MIG slice", "empty line", "no GPU"],
)
def test_free_memory_that_nvidia_smi_does_not_report_is_unknown(nvidia_smi, commands):
    nvidia_smi(commands)
    assert free_memory() == "unknown"


def test_free_memory_without_nvidia_smi_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert free_memory() == "unknown"


def test_loss_of_zero_is_failure(make_engine, initial, rows):
    engine = make_engine(methods={"get_current_loss": lambda self: 0.0})
    engine.restore(initial)
    with pytest.raises(PermanentError, match="loss at step 1 is 0, expected a positive number"):
        engine.train(rows, np.arange(128), batch_size=128, seed=0)


def test_colon_in_path_of_temporary_files_is_refused(planted, double, tmp_path):
    with pytest.raises(ContractError, match="a:b, expected a path without ':'"):
        HugectrEngine(
            CONFIG, planted.slot_sizes, SETTINGS, positions=POSITIONS, scratch=tmp_path / "a:b"
        )


def test_readers_have_started_when_model_ends_even_after_failed_load(
    double, make_engine, initial, rows
):
    import double_fate

    def fail(self, dense_model_file):
        raise RuntimeError("no such file")

    trained, failed = make_engine(), make_engine(methods={"load_dense_weights": fail})
    for engine in (trained, failed):
        engine.restore(initial)
    trained.train(rows, np.arange(256), batch_size=128, seed=0)
    with pytest.raises(PermanentError, match="cannot load"):
        failed.train(rows, np.arange(256), batch_size=128, seed=0)
    trained.close()
    failed.close()
    assert double_fate.deaths == []


def test_one_node_keeps_temporary_files_on_own_disk(
    double, planted, train_run, make_training_set, tmp_path, monkeypatch
):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    used = []
    write = double.Model.save_params_to_files

    def save(self, prefix, iter=0):
        used.append(Path(prefix))
        return write(self, prefix, iter)

    spoilt = Spoilt(double, save_params_to_files=save)
    monkeypatch.setitem(sys.modules, "hugectr", spoilt)
    training_set = make_training_set(*planted.rows(600)[:3])
    train_run(training_set, backend="hugectr", config=CONFIG, settings=SETTINGS)
    assert used
    assert all(tmp_path / "disk" in path.parents for path in used)
    assert not list((tmp_path / "disk").iterdir())
    assert not (tmp_path / "work" / "r" / "training" / "engine").exists()


def test_state_too_large_for_message_between_nodes_is_refused(double, tmp_path):
    config = dcn(embedding_dim=128)
    sizes = [4_000_000] + [2] * 4
    two = SimpleNamespace(Get_size=lambda: 2)
    with pytest.raises(ContractError, match=r"9000008 ids of width 128 on 2 GPUs has 2\d{9} bytes"):
        HugectrEngine(config, [9_000_000, *sizes[1:]], SETTINGS, nodes=two, scratch=tmp_path)
    HugectrEngine(config, sizes, SETTINGS, scratch=tmp_path).close()


@pytest.fixture
def run(train_run, double):
    """Runs a whole training step by one backend and returns the model."""
    settings = TrainingSettings(
        learning_rate=0.005, batch_size=128, min_steps=120, round_rates=(0.2, 1.0)
    )
    options = {"config": CONFIG, "settings": settings}
    return lambda training_set, backend, name: train_run(
        training_set, name=name, backend=backend, **options
    )


def auc(model, rows):
    from sklearn.metrics import roc_auc_score

    folder = local_path(model.uri) / Model.WEIGHTS
    config = config_from_document(model.config)
    scorer = load_scorer(folder, config, model.slot_sizes, positions=POSITIONS)
    return roc_auc_score(rows.labels, scorer.probabilities(rows.dense, rows.ids))


def test_fit_by_hugectr_publishes_model_that_either_backend_continues(
    run, planted, make_training_set
):
    # All parts are whole batches of 32. No engine pads whole batches, so both engines take the same
    # steps.
    first_set = make_training_set(*planted.rows(3_840, 1)[:3], name="first")
    second_set = make_training_set(*planted.rows(3_840, 5)[:3], name="second")
    holdout = planted.encoded(4_000, 9)
    first = run(first_set, "hugectr", "first")
    assert (first.backend, first.parent_model_id) == ("hugectr", None)
    twin = run(first_set, "pytorch", "twin")
    assert first.optimizer_step == twin.optimizer_step
    assert auc(first, holdout) == pytest.approx(auc(twin, holdout), abs=1e-4)
    second_set = replace(second_set, parent_model_uri=first.uri)
    children = [run(second_set, backend, backend) for backend in ("hugectr", "pytorch")]
    scores = [auc(child, holdout) for child in children]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert min(scores) > auc(first, holdout)
    assert {child.parent_model_id for child in children} == {first.model_id}
