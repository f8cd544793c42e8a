"""One exam for every engine: PyTorch's, and HugeCTR's over the double of `hugectr` (tests/hugectr_double).

Truths are the world's planted logit, NumPy in float64, and the other engine. What is HugeCTR's alone is in
`test_hugectr_engine`.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import (
    DENSE_FILE,
    DENSE_OPTIMIZER_FILE,
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    read_model,
)
from components.runtime.errors import ContractError
from components.training.config import TrainingSettings
from components.training.initial import write_initial
from components.training.rows import Rows

V1 = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8))
V2 = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8), projection_dim=3)
SETTINGS = TrainingSettings(learning_rate=0.01, batch_size=128)
ENGINES = ("pytorch", "hugectr", "hugectr on two GPUs")
both_networks = pytest.mark.parametrize("config", [V1, V2], ids=["v1", "v2"])


def engine_of(name, config, slot_sizes, settings, scratch):
    if name == "pytorch":
        from components.training.pytorch.engine import PytorchEngine

        return PytorchEngine(config, slot_sizes, settings, device="cpu")
    from components.training.hugectr.engine import HugectrEngine
    from components.training.hugectr.settings import SolverSettings

    gpus = (0, 1) if "two" in name else (0,)
    # Small, so that the few rows here make several stages and evaluations.
    solver = SolverSettings(vvgpu=(gpus,), stage_rows=2000, batchsize_eval=512, loss_interval=7)
    return HugectrEngine(
        config, slot_sizes, settings, solver, scratch=scratch, gpu_memory=lambda devices: [80_000] * len(devices)
    )


@pytest.fixture
def make_engine(tmp_path, double, world):
    """Makes engines by name, HugeCTR's over the double; closes them."""
    with ExitStack() as stack:

        def make(name, config=V1, slot_sizes=world.slot_sizes, settings=SETTINGS):
            return stack.enter_context(closing(engine_of(name, config, slot_sizes, settings, tmp_path / "scratch")))

        yield make


@pytest.fixture
def initial(tmp_path, world):
    """Folder of fresh weights."""

    def make(config=V1):
        folder = tmp_path / f"initial {config.projection_dim}"
        if not folder.exists():
            write_initial(folder, config, world.slot_sizes, click_rate=0.3, seed=3)
        return folder

    return make


def rows_of(world, n, seed):
    labels, dense, ids, logit = world.rows(n, seed)
    return Rows(labels=labels, dense=dense, ids=ids.astype(np.int32)), logit


def shuffled(n, seed=0):
    return np.random.default_rng(seed).permutation(n)


def learnt(engine, start, rows, num_steps=0, order=None, batch_size=128):
    engine.restore(start, num_steps)
    engine.learn(rows, shuffled(len(rows)) if order is None else order, batch_size, 1)
    return engine


def float64_scores(folder, config, slot_sizes, rows):
    """The network by its definition, layer by layer."""
    weights = read_model(folder, config, list(slot_sizes))
    dense = {name: value.astype(np.float64) for name, value in weights.dense.items()}
    vectors, offset = [], 0
    for slot, size in enumerate(slot_sizes):
        ids = rows.ids[:, slot]
        known = (ids >= 0) & (ids < size)
        vectors.append(np.where(known[:, None], weights.embeddings[offset + np.where(known, ids, 0)], 0.0))
        offset += size
    x0 = np.concatenate([*vectors, rows.dense], axis=1)
    x = x0
    for i in range(config.num_cross_layers):
        if config.projection_dim:
            product = x @ dense[f"cross.{i}.u"] @ dense[f"cross.{i}.v"]
            x = x0 * (product + dense[f"cross.{i}.bias"]) + x
        else:
            x = x0 * (x @ dense[f"cross.{i}.weight"])[:, None] + x + dense[f"cross.{i}.bias"]
    h = x0
    for i in range(len(config.tower)):
        h = np.maximum(h @ dense[f"tower.{i}.weight"] + dense[f"tower.{i}.bias"], 0)
    logit = np.concatenate([h, x], axis=1) @ dense["final.weight"][:, 0] + dense["final.bias"][0]
    return 1 / (1 + np.exp(-logit))


@both_networks
@pytest.mark.parametrize("name", ENGINES)
def test_learns_the_planted_signal(name, config, make_engine, initial, world):
    rows, _ = rows_of(world, 20_000, 1)
    judging, logit = rows_of(world, 8_000, 2)
    engine = make_engine(name, config)
    engine.restore(initial(config), 0)
    before = roc_auc_score(judging.labels, engine.score(judging))
    losses = [engine.learn(rows, shuffled(20_000, epoch), 128, epoch).mean_loss for epoch in range(2)]
    bound = roc_auc_score(judging.labels, logit)
    after = roc_auc_score(judging.labels, engine.score(judging))
    assert before < 0.7 < bound - 0.03 < after < bound + 0.005
    assert losses[1] < losses[0]
    assert engine.num_steps == 2 * 157


@both_networks
@pytest.mark.parametrize("name", ENGINES)
def test_restores_a_checkpoint_to_identical_scores(name, config, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 3_000, 1)
    first = learnt(make_engine(name, config), initial(config), rows)
    scores = first.score(rows)
    first.save(tmp_path / "checkpoint")
    second = make_engine(name, config)
    second.restore(tmp_path / "checkpoint", first.num_steps)
    assert second.num_steps == first.num_steps == 24
    np.testing.assert_array_equal(second.score(rows), scores)
    second.save(tmp_path / "again")
    for path in sorted((tmp_path / "checkpoint").rglob("*.model")):
        copy = tmp_path / "again" / path.relative_to(tmp_path / "checkpoint")
        assert path.is_dir() or path.read_bytes() == copy.read_bytes()


@both_networks
@pytest.mark.parametrize("name", ENGINES)
def test_continues_a_checkpoint_as_if_it_had_not_been_interrupted(name, config, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 4_000, 1)
    order = shuffled(4_000)
    # Whole batches first: an engine may fill up the last one of a call.
    first, rest = order[: 128 * 15], order[128 * 15 :]
    unbroken = learnt(make_engine(name, config), initial(config), rows, order=first)
    unbroken.learn(rows, rest, 128, 1)
    broken = learnt(make_engine(name, config), initial(config), rows, order=first)
    broken.save(tmp_path / "checkpoint")
    continued = learnt(make_engine(name, config), tmp_path / "checkpoint", rows, num_steps=15, order=rest)
    assert continued.num_steps == unbroken.num_steps
    np.testing.assert_allclose(continued.score(rows), unbroken.score(rows), atol=1e-6)


@both_networks
@pytest.mark.parametrize(
    ("name", "other"),
    [("pytorch", "hugectr"), ("hugectr", "pytorch"), ("hugectr on two GPUs", "hugectr")],
    ids=["pytorch to hugectr", "hugectr to pytorch", "two GPUs to one"],
)
def test_a_model_of_one_engine_continues_in_the_other_and_scores_equal(
    name, other, config, make_engine, initial, world, tmp_path
):
    rows, _ = rows_of(world, 128 * 40, 1)
    mine = learnt(make_engine(name, config), initial(config), rows)
    mine.save(tmp_path / "parent")
    its = make_engine(other, config)
    its.restore(tmp_path / "parent", mine.num_steps)
    np.testing.assert_allclose(its.score(rows), mine.score(rows), atol=1e-6)
    for engine in (mine, its):
        engine.learn(rows, shuffled(len(rows), 5), 128, 2)
    assert its.num_steps == mine.num_steps == 80
    np.testing.assert_allclose(its.score(rows), mine.score(rows), atol=1e-6)
    its.save(tmp_path / "child")
    mine.save(tmp_path / "own child")
    one, another = (
        read_model(tmp_path / folder, config, world.slot_sizes, optimizer=True) for folder in ("child", "own child")
    )
    for left, right in zip(
        one.embedding_moments + one.dense_moments, another.embedding_moments + another.dense_moments
    ):
        np.testing.assert_allclose(left, right, atol=1e-6)


@both_networks
@pytest.mark.parametrize("name", ENGINES)
def test_saves_what_deployment_serves(name, config, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 2_000, 1)
    engine = learnt(make_engine(name, config), initial(config), rows)
    engine.save(tmp_path / "saved")
    keys = np.fromfile(tmp_path / "saved" / SPARSE_FOLDER / "key", dtype="<i8")
    np.testing.assert_array_equal(keys, np.arange(sum(world.slot_sizes)))
    expected = float64_scores(tmp_path / "saved", config, world.slot_sizes, rows)
    np.testing.assert_allclose(engine.score(rows), expected, atol=1e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_dropout_changes_what_is_learnt_and_not_how_it_is_scored(name, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 2_560, 1)
    scores = []
    for number, rate in enumerate((0.0, 0.5)):
        config = replace(V1, dropout=rate)
        engine = learnt(make_engine(name, config), initial(), rows)
        engine.save(tmp_path / f"{number}")
        scores.append(engine.score(rows))
        expected = float64_scores(tmp_path / f"{number}", config, world.slot_sizes, rows)
        np.testing.assert_allclose(scores[-1], expected, atol=1e-6)
    assert 0.005 < np.abs(scores[1] - scores[0]).mean() < 0.2


@pytest.mark.parametrize("name", ENGINES)
def test_says_that_it_scores_cheaply_where_a_score_after_learning_writes_no_table(
    name, make_engine, initial, world, tmp_path
):
    def tables():
        return {path.stat().st_ino for path in (tmp_path / "scratch").rglob("emb_vector")}

    rows, _ = rows_of(world, 500, 1)
    engine = learnt(make_engine(name), initial(), rows)
    before = tables()
    engine.score(rows)
    assert engine.scores_cheaply is (tables() == before)


@pytest.mark.parametrize("name", ENGINES)
def test_an_id_outside_its_slot_has_a_zero_vector(name, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 300, 1)
    engine = learnt(make_engine(name), initial(), rows)
    engine.save(tmp_path / "saved")
    rows.ids[::2, 3] = world.slot_sizes[3]
    rows.ids[::3, 25] = 2**31 - 1
    rows.ids[::5, 0] = -1
    scores = engine.score(rows)
    np.testing.assert_allclose(scores, float64_scores(tmp_path / "saved", V1, world.slot_sizes, rows), atol=1e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_rows_of_the_table_that_no_batch_touched_keep_their_bits(name, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 3_000, 1)
    parent = learnt(make_engine(name), initial(), rows)
    parent.save(tmp_path / "before")
    order = np.array([5, 17, 40])
    learnt(make_engine(name), tmp_path / "before", rows, num_steps=24, order=order, batch_size=4).save(
        tmp_path / "after"
    )
    before, after = (
        read_model(tmp_path / folder, V1, world.slot_sizes, optimizer=True) for folder in ("before", "after")
    )
    offsets = np.cumsum(world.slot_sizes) - world.slot_sizes
    touched = np.zeros(sum(world.slot_sizes), bool)
    touched[rows.ids[order] + offsets] = True
    for old, new in zip((before.embeddings, *before.embedding_moments), (after.embeddings, *after.embedding_moments)):
        np.testing.assert_array_equal(new[~touched], old[~touched])
        assert (new[touched] != old[touched]).any(axis=1).all()


@pytest.mark.parametrize("name", ENGINES)
def test_the_rows_of_an_incomplete_last_batch_are_learnt(name, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 1_000, 1)
    engine = learnt(make_engine(name), initial(), rows, order=np.arange(129))
    assert engine.num_steps == 2
    engine.save(tmp_path / "after")
    before, after = (read_model(folder, V1, world.slot_sizes).embeddings for folder in (initial(), tmp_path / "after"))
    offsets = np.cumsum(world.slot_sizes) - world.slot_sizes
    own = (offsets + rows.ids[128])[(rows.ids[:128] != rows.ids[128]).all(axis=0)]
    assert len(own), "row 128 has categories that no row of the first batch has"
    assert (before[own] != after[own]).all()


@pytest.mark.parametrize("name", ENGINES)
def test_a_loss_that_is_no_number_is_told_with_its_batches(name, make_engine, initial, world):
    rows, _ = rows_of(world, 4_000, 1)
    rows.dense[128 * 9 + 5] = np.inf
    engine = make_engine(name)
    engine.restore(initial(), 0)
    learnt = engine.learn(rows, np.arange(4_000), 128, 1)
    assert not np.isfinite(learnt.mean_loss)
    assert 9 in learnt.bad_batches
    assert len(learnt.bad_batches) <= 7


@pytest.mark.parametrize("name", ENGINES)
def test_a_folder_without_optimizer_state_starts_from_zero_moments(name, make_engine, initial, world, tmp_path):
    rows, _ = rows_of(world, 128 * 20, 1)
    learnt(make_engine(name), initial(), rows).save(tmp_path / "whole")
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "whole", plain)
    (plain / DENSE_OPTIMIZER_FILE).unlink()
    (plain / SPARSE_OPTIMIZER_FILE).unlink()
    engine = learnt(make_engine(name), plain, rows, num_steps=20, order=np.arange(128))
    engine.save(tmp_path / "after")
    m, v = read_model(tmp_path / "after", V1, world.slot_sizes, optimizer=True).dense_moments
    # One step from zero: m = (1 - b1) g and v = (1 - b2) g^2.
    np.testing.assert_allclose(v, m**2 / (1 - SETTINGS.beta1) ** 2 * (1 - SETTINGS.beta2), rtol=1e-4, atol=1e-12)


def truncated(path, cut=4):
    path.write_bytes(path.read_bytes()[:-cut])


def oversized(path):
    path.write_bytes(path.read_bytes() + bytes(4))


def twice(path):
    keys = np.fromfile(path, dtype="<i8")
    keys[1] = keys[0]
    keys.tofile(path)


DAMAGES = {
    "no dense file": (DENSE_FILE, Path.unlink),
    "truncated dense file": (DENSE_FILE, truncated),
    "oversized dense file": (DENSE_FILE, oversized),
    "truncated dense optimizer": (DENSE_OPTIMIZER_FILE, truncated),
    "oversized dense optimizer": (DENSE_OPTIMIZER_FILE, oversized),
    "no keys": (f"{SPARSE_FOLDER}/key", Path.unlink),
    "truncated keys": (f"{SPARSE_FOLDER}/key", lambda path: truncated(path, 8)),
    "a key twice": (f"{SPARSE_FOLDER}/key", twice),
    "truncated vectors": (f"{SPARSE_FOLDER}/emb_vector", truncated),
    "oversized vectors": (f"{SPARSE_FOLDER}/emb_vector", oversized),
    "truncated optimizer": (SPARSE_OPTIMIZER_FILE, truncated),
}


@pytest.fixture
def saved(make_engine, initial, world, tmp_path):
    """A folder with all files, of v1."""
    rows, _ = rows_of(world, 500, 1)
    learnt(make_engine("pytorch"), initial(), rows).save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ENGINES[:2])
def test_a_damaged_file_is_refused_by_name(name, damage, make_engine, saved):
    file, spoil = DAMAGES[damage]
    spoil(saved / file)
    with pytest.raises(ContractError, match=Path(file).name if "key" not in damage else SPARSE_FOLDER):
        make_engine(name).restore(saved, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": V2}, DENSE_FILE),
        ({"config": DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 9))}, DENSE_FILE),
        ({"config": DcnConfig(embedding_dim=8, num_cross_layers=2, tower=(16, 8))}, "emb_vector"),
        ({"slot_sizes": [5] * 26}, "key"),
        ({"slot_sizes": [5] * 25}, "25 slot sizes, expected 26"),
        ({"slot_sizes": [5] * 25 + [0]}, "slot size of C26 is 0"),
    ],
    ids=["other projection", "other tower", "other width", "smaller slots", "too few slots", "empty slot"],
)
@pytest.mark.parametrize("name", ENGINES[:2])
def test_a_model_of_another_network_is_refused(name, changed, message, make_engine, saved):
    with pytest.raises(ContractError, match=message):
        make_engine(name, **changed).restore(saved, 0)
