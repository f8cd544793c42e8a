"""Tests of the PyTorch engine beyond the conformance suite: Adam, equal bits, memory and GPU."""

import tracemalloc
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.training import torch_parts
from components.training.pytorch.engine import PytorchEngine, gpu_hints
from components.training.rows import Rows
from components.training.start import write_initial
from components.training.torch_parts import assemble
from evergreen.config.features import FeaturePositions, PooledPositions
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import open_model, slot_offsets
from evergreen.networks.network import build_network, load_dense
from evergreen.networks.scoring import load_scorer
from evergreen.runtime.errors import ContractError
from testing.networks import shaped
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, WIDTHS, dcn
from tests.support.simulated_gpu import simulate_gpu, simulated_gpu

SETTINGS = TrainingSettings(learning_rate=0.01)
SHAPE = {"embedding_dim": 4, "tower": (16, 8)}
CONFIG, DROPPING = dcn(**SHAPE, num_cross_layers=2), dcn(**SHAPE, num_cross_layers=2, dropout=0.5)
CONFIGS = {
    "dcn v1": CONFIG,
    "dcn v2": dcn(**SHAPE, num_cross_layers=2, projection_dim=3),
    **{name: shaped(name, SHAPE, **WIDTHS) for name in ("deepfm", "dlrm")},
}
every_network = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture
def rows(planted):
    return planted.encoded(1_000)


@pytest.fixture
def trained(tmp_path, planted, rows):
    """Trains fresh weights on the rows.

    Returns the saved model, the training rows and the scores.
    """
    count = iter(range(100))

    def run(config=CONFIG, settings=SETTINGS, seed=0, batch_size=64, device="cpu"):
        start, end = tmp_path / f"start {hash(config)}", tmp_path / f"end {next(count)}"
        if not start.exists():
            write_initial(
                start, config, planted.slot_sizes, click_rate=0.3, seed=0, positions=POSITIONS
            )
        with closing(
            PytorchEngine(config, planted.slot_sizes, settings, device=device, positions=POSITIONS)
        ) as engine:
            engine.restore(start)
            seen = engine.train(rows, np.arange(len(rows)), batch_size=batch_size, seed=seed)
            engine.save(end)
            scores = engine.score(rows)
        return open_model(end, planted.slot_sizes), seen, scores

    return run


def assert_same_bits(one, other):
    for mine, its in zip(one.parts, other.parts):
        np.testing.assert_array_equal(mine.table, its.table)
        for name, values in mine.dense.items():
            np.testing.assert_array_equal(values, its.dense[name])


def test_tables_of_other_widths_are_refused_even_if_total_width_matches(tmp_path, planted):
    write_initial(tmp_path, CONFIG, planted.slot_sizes, click_rate=0.3, seed=0, positions=POSITIONS)
    dim = CONFIG.embedding_dim
    other = replace(CONFIG, widths=(dim - 1, dim + 1, dim + 1, dim, dim - 1))
    shapes = r"have shapes \[\(\d+, \d+\)\], expected \[\(\d+, \d+\), \("
    with (
        closing(PytorchEngine(other, planted.slot_sizes, SETTINGS, positions=POSITIONS)) as engine,
        pytest.raises(ContractError, match=shapes),
    ):
        engine.restore(tmp_path)
    with raises(ContractError, f"width {dim}", f"expected {dim - 1}, {dim}, {dim + 1}"):
        load_scorer(tmp_path, other, planted.slot_sizes, positions=POSITIONS)


def pooled(vectors, ids):
    """Sum or average the vectors of each list over its filled positions."""
    filled = torch.from_numpy(ids != 0)[:, :, None]
    found = [vectors[:, : POSITIONS.lists[0].start]]
    for start, stop, pool in POSITIONS.lists:
        total = (vectors * filled)[:, start:stop].sum(1, keepdim=True)
        counts = filled[:, start:stop].sum(1, keepdim=True).clip(1)
        found.append(total / counts if pool == "mean" else total)
    return torch.cat(found, dim=1)


@every_network
def test_steps_are_adams_in_float64(trained, rows, planted, tmp_path, config):
    model, seen, _ = trained(config)
    start = open_model(tmp_path / f"start {hash(config)}", planted.slot_sizes).weights
    network = build_network(config)
    load_dense(network, start.dense)
    network.double()
    names = [name for name, _ in network.named_parameters()]
    moving = [*(p.data.numpy() for p in network.parameters()), start.table.astype(np.float64)]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in moving]
    losses = []
    for t, at in enumerate(range(0, len(rows), 64), start=1):
        batch = rows[at : at + 64]
        keys = batch.ids + slot_offsets(planted.slot_sizes)[list(POSITIONS.slots)]
        vectors = torch.from_numpy(moving[-1][keys]).requires_grad_()
        logits = network(torch.from_numpy(batch.dense).double(), pooled(vectors, batch.ids))
        labels = torch.from_numpy(batch.labels).double()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        to_vectors, *to_dense = torch.autograd.grad(loss, [vectors, *network.parameters()])
        losses.append(loss.item())
        to_table = np.zeros_like(moving[-1])
        np.add.at(to_table, keys.ravel(), to_vectors.numpy().reshape(keys.size, -1))
        touched = np.isin(np.arange(len(to_table)), keys[batch.ids != 0])[:, None]
        for w, g, (m, v) in zip(moving, [*(g.numpy() for g in to_dense), to_table], moments):
            moves = touched if w is moving[-1] else np.True_
            m[:] = np.where(moves, 0.9 * m + 0.1 * g, m)
            v[:] = np.where(moves, 0.999 * v + 0.001 * g * g, v)
            change = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
            w[:] = np.where(moves, w - change, w)
    assert seen == pytest.approx(np.mean(losses), rel=1e-5)
    # Adam moves a weight by the learning rate even if the gradient is little more than a rounding
    # error.
    np.testing.assert_allclose(model.weights.table, moving[-1], atol=2e-3)
    assert np.abs(model.weights.table - moving[-1]).mean() < 1e-5
    for name, expected in zip(names, moving):
        assert np.abs(model.weights.dense[name] - expected).mean() < 2e-4, name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@every_network
def test_equal_input_gives_equal_bits(trained, precision, config):
    settings = TrainingSettings(learning_rate=0.01, precision=precision)
    (one, seen, scores), (other, seen_again, scores_again) = (
        trained(config, settings) for _ in range(2)
    )
    assert_same_bits(one, other)
    assert seen == seen_again
    np.testing.assert_array_equal(scores, scores_again)


@every_network
def test_bfloat16_products_train_like_float32(trained, config):
    losses = [trained(config, TrainingSettings(precision=p))[1] for p in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_seed_decides_dropout_and_nothing_without_dropout(trained):
    one, other = (
        trained(DROPPING, seed=seed)[0].weights.dense["tower.0.weight"] for seed in (1, 2)
    )
    assert (one != other).any()
    assert_same_bits(trained(seed=1)[0], trained(seed=2)[0])


def test_torchs_own_random_numbers_stay_callers(trained):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    trained(DROPPING)
    assert torch.equal(torch.rand(3), expected)


def test_restoring_and_saving_hold_no_second_table(tmp_path):
    sizes = [100_000] * 5
    write_initial(tmp_path / "start", CONFIG, sizes, click_rate=0.3, seed=0)
    with closing(PytorchEngine(CONFIG, sizes, SETTINGS, device="cpu")) as engine:
        tracemalloc.start()
        try:
            engine.restore(tmp_path / "start")
            engine.save(tmp_path / "end")
            engine.restore(tmp_path / "end")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 0.7 * sum(sizes) * 4 * 4


class _CalledOperators(TorchDispatchMode):
    """Names of the operators that torch calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


@every_network
def test_step_moves_no_scalars_between_host_and_device(planted, rows, config):
    """`lift_fresh` makes a tensor from a Python number and copies it to the GPU, which blocks.

    The other two operators read a tensor's value or copy the tensor to another device.
    """
    with closing(
        PytorchEngine(config, planted.slot_sizes, SETTINGS, device="cpu", positions=POSITIONS)
    ) as engine:
        batch = assemble(rows, np.arange(64), engine._positions)
        with _CalledOperators() as called:
            engine._step(batch)
    assert "_fused_adam_" in called.names
    assert not {"lift_fresh", "_local_scalar_dense", "_to_copy"} & set(called.names)


def test_lookups_move_no_scalars_and_wait_for_list_positions_and_distinct_rows(
    planted, rows, monkeypatch
):
    monkeypatch.setattr(torch_parts, "_sorted", lambda keys: keys.sort(stable=True))
    ids = torch.from_numpy(rows.ids[:64])
    with (
        closing(
            PytorchEngine(CONFIG, planted.slot_sizes, SETTINGS, device="cpu", positions=POSITIONS)
        ) as engine,
        _CalledOperators() as called,
    ):
        engine._positions[0].lookups(ids)
    waits = {"lift_fresh", "_local_scalar_dense", "nonzero"}
    assert [name for name in called.names if name in waits] == ["nonzero"] * 2


def test_gpu_hints_name_batch_size_and_tf32_only_where_setting_limits():
    defaults = TrainingSettings()
    of_batch, of_precision = gpu_hints(defaults, defaults.batch_size)
    assert "batch_size is 2048" in of_batch
    assert "16384" in of_batch
    assert "tf32" in of_precision
    assert gpu_hints(defaults, 500) == [of_precision], "the short window limits the batch"
    large = TrainingSettings(batch_size=65_536, precision="tf32")
    assert gpu_hints(large, 65_536) == []


def test_call_gets_second_or_so_of_rows_whatever_batch(planted):
    with closing(
        PytorchEngine(CONFIG, planted.slot_sizes, SETTINGS, device="cpu", positions=POSITIONS)
    ) as engine:
        assert [engine.segment_batches(size) for size in (32, 2048, 10**6)] == [1024, 16, 1]


LISTS = FeaturePositions(
    (0, 1, 1, 1, 2, 2), (PooledPositions(1, 4, "mean"), PooledPositions(4, 6, "sum"))
)


def test_lists_and_weights_train_on_gpu_as_on_cpu(monkeypatch, tmp_path):
    """The simulated GPU computes as the CPU does, and rejects tensors of the CPU."""
    simulate_gpu(monkeypatch, torch_parts)
    sizes, random = [9, 7, 12], np.random.default_rng(0)
    config = replace(CONFIG, num_dense=2, num_categorical=3)
    rows = Rows(
        labels=(random.random(200) < 0.4).astype(np.float32),
        dense=random.normal(size=(200, 2)).astype(np.float32),
        ids=(random.random((200, 6)) * np.take(sizes, LISTS.slots)).astype(np.int32),
        weights=random.random(200).astype(np.float32),
    )
    write_initial(tmp_path / "start", config, sizes, click_rate=0.3, seed=0, positions=LISTS)
    scores, models = {}, {}
    for device in ("cpu", "cuda"):
        with (
            simulated_gpu(),
            closing(
                PytorchEngine(config, sizes, SETTINGS, device=device, positions=LISTS)
            ) as engine,
        ):
            engine.restore(tmp_path / "start")
            engine.train(rows, np.arange(200), batch_size=64, seed=0)
            engine.save(tmp_path / device)
            scores[device] = engine.score(rows)
        models[device] = open_model(tmp_path / device, sizes)
    np.testing.assert_allclose(scores["cuda"], scores["cpu"], atol=1.2e-7)
    for mine, its in zip(models["cuda"].parts, models["cpu"].parts):
        np.testing.assert_allclose(mine.table, its.table, atol=1.2e-7)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@every_network
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_gpu_trains_like_cpu(trained, config, precision, device):
    model, seen, scores = trained(
        config, TrainingSettings(learning_rate=0.003, precision=precision), device=device
    )
    expected, its, its_scores = trained(config, TrainingSettings(learning_rate=0.003))
    assert seen == pytest.approx(its, rel=1e-3 if precision == "float32" else 0.02)
    if precision == "float32":
        np.testing.assert_allclose(scores, its_scores, atol=5e-3)
        np.testing.assert_allclose(model.weights.table, expected.weights.table, atol=0.01)
