"""Tests of the engine's calls to HugeCTR: all settings arrive, and no step is lost."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from components.training.hugectr.embeddings import embeddings_of, smallest_workspace_mb
from components.training.hugectr.engine import HugectrEngine
from components.training.hugectr.files import (
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    export_model,
    import_model,
)
from components.training.hugectr.layers import Blueprint, compiled_model, padded
from components.training.hugectr.nodes import repeat_calls
from components.training.hugectr.staging import write_stage
from components.training.pytorch.engine import PytorchEngine
from components.training.start import write_initial
from evergreen.config.training import SolverSettings, TrainingSettings
from evergreen.networks.files import open_model
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, dcn

CONFIG = dcn(embedding_dim=4, num_cross_layers=2, tower=(16, 8), dropout=0.25)
# All values differ from HugeCTR's defaults and from ours.
SETTINGS = TrainingSettings(
    learning_rate=0.02, beta1=0.8, beta2=0.99, epsilon=1e-5, seed=5, precision="tf32"
)


@pytest.fixture
def rows(planted):
    return planted.encoded(1_280)


@pytest.fixture
def built(double, rows, tmp_path, planted):
    """Builds the test double's model for a network and settings, and returns its arguments."""

    def build(config=CONFIG, settings=SETTINGS):
        folder = tmp_path / f"stage {len(list(tmp_path.iterdir()))}"
        embeddings = embeddings_of(config, planted.slot_sizes, POSITIONS)
        stage = write_stage(
            rows, np.arange(256), embeddings=embeddings, batch_size=64, num_files=2, folder=folder
        )
        blueprint = Blueprint(
            config=config,
            embeddings=embeddings,
            settings=settings,
            num_gpus=2,
            batch_size=64,
            file_list=str(stage.file_list),
        )
        return compiled_model(double, blueprint)

    return build


def test_every_setting_arrives_under_its_name(built, double):
    given = built()._inner._solver
    assert given.vvgpu == [[0, 1]]
    assert (given.lr_policy, given.seed, given.lr) == (double.LrPolicy_t.fixed, 5, 0.02)
    assert (given.enable_tf32_compute, given.i64_input_key, given.repeat_dataset) == (
        True,
        True,
        False,
    )
    assert given.batchsize == 64
    assert not given.use_algorithm_search


class Nodes:
    """MPI's communicator in the node `rank`. Each node is a thread of this process."""

    def __init__(self, rank, said, barrier):
        self._rank, self._said, self.Barrier = rank, said, barrier.wait

    def Get_size(self):
        return 2

    def bcast(self, what):
        if self._rank:
            return self._said.get(timeout=60)
        self._said.put(what)
        return what


def test_two_nodes_train_like_one_node_with_as_many_gpus(
    double, rows, planted, tmp_path, monkeypatch
):
    config, settings = replace(CONFIG, dropout=0.0), replace(SETTINGS, precision="float32")
    write_initial(
        tmp_path / "initial",
        config,
        planted.slot_sizes,
        click_rate=0.3,
        seed=3,
        positions=POSITIONS,
    )
    seen = []

    class Second(double.Model):
        """The model of the second node.

        All nodes write the files together, and this test double leaves that to the first node.
        """

        def __init__(self, solver, *more):
            super().__init__(solver, *more)
            seen.append((solver.vvgpu, more[0].num_workers))

        def train(self):
            seen.append(self._inner._lr)
            return super().train()

        def save_params_to_files(self, prefix, iter):
            seen.append(prefix)

    said, barrier = queue.Queue(), threading.Barrier(2, timeout=60)
    other = SimpleNamespace(**{**vars(double), "Model": Second})
    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(repeat_calls, other, Nodes(1, said, barrier))
        arguments = {"scratch": tmp_path, "positions": POSITIONS}
        many = HugectrEngine(
            config, planted.slot_sizes, settings, nodes=Nodes(0, said, barrier), **arguments
        )
        one = HugectrEngine(config, planted.slot_sizes, settings, num_gpus=2, **arguments)
        for engine, name in ((many, "many"), (one, "one")):
            with closing(engine):
                engine.restore(tmp_path / "initial")
                engine.train(rows, np.arange(640), batch_size=128, seed=0)
                engine.save(tmp_path / name)
        followed.result(timeout=60)
    found, expected = (open_model(tmp_path / name, planted.slot_sizes) for name in ("many", "one"))
    np.testing.assert_allclose(found.weights.table, expected.weights.table, atol=1e-6)
    assert seen[0] == ([[0], [0]], 1)
    assert len([each for each in seen if isinstance(each, float)]) == 640 // 128 + 1
    assert (
        len([each for each in seen if str(each).startswith(str(tmp_path))]) == 2
    )  # one call checks the restore, and one call saves


def test_reader_and_both_optimizers_get_all_settings(built, double, planted):
    model = built()._inner
    assert model._reader_params.slot_size_array == []
    assert model._reader_params.num_workers == 2
    for optimizer in (model._optimizer, model._sparse_optimizer):
        assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.8, 0.99, 1e-5)
        assert optimizer.update_type == double.Update_t.Local


def test_new_batch_size_continues_training_with_or_without_scoring(double, rows, planted, tmp_path):
    config, settings = (
        replace(CONFIG, dropout=0.0),
        replace(SETTINGS, precision="float32", solver=SolverSettings(stage_rows=256)),
    )
    write_initial(
        tmp_path / "initial",
        config,
        planted.slot_sizes,
        click_rate=0.3,
        seed=3,
        positions=POSITIONS,
    )
    hugectr = HugectrEngine(
        config, planted.slot_sizes, settings, positions=POSITIONS, scratch=tmp_path
    )
    with (
        closing(hugectr),
        closing(
            PytorchEngine(config, planted.slot_sizes, settings, device="cpu", positions=POSITIONS)
        ) as pytorch,
    ):
        for engine in (hugectr, pytorch):
            engine.restore(tmp_path / "initial")
            engine.train(rows, np.arange(640), batch_size=128, seed=0)
            engine.train(rows, np.arange(640, 1_280), batch_size=64, seed=0)
        assert hugectr.num_steps == pytorch.num_steps == 15
        np.testing.assert_allclose(hugectr.score(rows), pytorch.score(rows), atol=1e-6)


@pytest.mark.parametrize("rank", [0, 3], ids=["v1", "v2"])
def test_model_exported_and_saved_for_hugectr_in_any_order_loads_again(rank, planted, tmp_path):
    config = replace(CONFIG, projection_dim=rank)
    write_initial(
        tmp_path / "start", config, planted.slot_sizes, click_rate=0.3, seed=3, positions=POSITIONS
    )
    with closing(
        PytorchEngine(
            config, planted.slot_sizes, TrainingSettings(), device="cpu", positions=POSITIONS
        )
    ) as engine:
        engine.restore(tmp_path / "start")
        engine.train(planted.encoded(500), np.arange(500), batch_size=100, seed=0)
        engine.save(tmp_path / "mine")
    mine = open_model(tmp_path / "mine", planted.slot_sizes)
    embeddings = embeddings_of(config, planted.slot_sizes, POSITIONS)
    export_model(mine, config, embeddings, num_gpus=1, folder=tmp_path / "hugectr")
    # After its own training, HugeCTR saves the keys in the order of their first use.
    assert len(embeddings) == 2
    for each in embeddings:
        order = np.random.default_rng(0).permutation(each.num_keys)
        sparse, state = (
            tmp_path / "hugectr" / name.format(each.number)
            for name in (SPARSE_FOLDER, SPARSE_OPTIMIZER_FILE)
        )
        for path, dtype in ((sparse / "key", "<i8"), (sparse / "emb_vector", "<f4")):
            np.fromfile(path, dtype).reshape(each.num_keys, -1)[order].tofile(path)
        moments = np.fromfile(state, "<f4").reshape(2, -1, 4)
        moments[:, : each.num_keys] = moments[:, order]
        moments.tofile(state)
    import_model(
        tmp_path / "hugectr", config, embeddings, num_gpus=1, into=tmp_path / "back", step=mine.step
    )
    back = open_model(tmp_path / "back", planted.slot_sizes)
    assert back.step == mine.step == 5
    for one, other in zip(back.parts, mine.parts):
        np.testing.assert_array_equal(one.table, other.table)
        for name, values in other.dense.items():
            np.testing.assert_array_equal(one.dense[name], values)


def test_dcn_v2_is_padded_to_multiple_of_16_bytes(built, double):
    """cuBLASLt needs the weights of the second cross layer at a multiple of 16 bytes."""
    v2 = replace(CONFIG, projection_dim=3)
    assert v2.input_width % 4 == 2
    model = built(padded(v2))._inner
    assert model._input.dense_dim == v2.num_dense + 2
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        built(v2)
    assert padded(CONFIG) == CONFIG


@pytest.mark.parametrize("name", ["stage_rows", "loss_interval"])
def test_setting_that_hugectr_would_refuse_later_is_refused_by_name(name):
    with raises(ContractError, name, 0, "at least 1"):
        SolverSettings(**{name: 0})


@pytest.mark.parametrize("gpus", [1, 3])
def test_workspace_holds_every_row_of_fullest_gpu(gpus):
    rows = (smallest_workspace_mb(1_221_286, 16, num_gpus=gpus) << 20) // (3 * 4 * 16)
    assert 0 <= rows - -(-1_221_286 // gpus) < 10_000
