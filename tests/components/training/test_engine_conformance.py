"""One conformance suite for every engine and network.

The engines are PyTorch's, TorchRec's in several processes, and HugeCTR's DCN over the test double
of `hugectr`. Expected values come from the planted logit, from the networks' formulas in float64
(`testing.networks`), and from the other engine. `test_hugectr_engine` has the tests that concern
only HugeCTR.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from components.training.backends import make_engine as make_any_engine
from components.training.start import write_initial
from evergreen.config.features import Features, ListOptions
from evergreen.config.training import SolverSettings, TrainingSettings
from evergreen.networks.files import OPTIMIZER_FILE, open_model, slot_offsets, tables_of
from evergreen.runtime.errors import ContractError
from testing import networks
from testing.networks import shaped
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, WIDTHS, dcn

SHAPE = {"embedding_dim": 4, "tower": (16, 8)}
V1, V2 = dcn(**SHAPE, num_cross_layers=2), dcn(**SHAPE, num_cross_layers=2, projection_dim=3)
DEEPFM, DLRM = (shaped(name, SHAPE, **WIDTHS) for name in ("deepfm", "dlrm"))
WIDE = replace(V1, widths=(8, 3, 4, 4, 8))
"""The columns `item` and `seen` share vectors. The other columns have vectors of other widths."""
SETTINGS = TrainingSettings(learning_rate=0.01, batch_size=128)
CANDIDATES = {
    "pytorch dcn v1": ("pytorch", V1),
    "pytorch dcn v2": ("pytorch", V2),
    "pytorch dcn of three widths": ("pytorch", WIDE),
    "pytorch deepfm": ("pytorch", DEEPFM),
    "pytorch dlrm": ("pytorch", DLRM),
    "hugectr dcn v1": ("hugectr", V1),
    "hugectr dcn v2": ("hugectr", V2),
    "hugectr dcn of three widths": ("hugectr", WIDE),
    "hugectr dcn v1 on two GPUs": ("two GPUs", V1),
    "torchrec dcn v2 in one process": ("torchrec 1", V2),
    "torchrec deepfm in two": ("torchrec 2", DEEPFM),
    "torchrec dlrm in two": ("torchrec 2", DLRM),
    "torchrec dcn of three widths in two": ("torchrec 2", WIDE),
    "torchrec dcn v1 in two, tables by columns": (
        "torchrec 2 by columns",
        replace(V1, embedding_dim=8),
    ),
    "torchrec dcn v1 in four": ("torchrec 4", V1),
}
needs_torchrec = pytest.mark.skipif(
    not find_spec("torchrec"), reason="the environment has no torchrec"
)
marks = dict.fromkeys(("torchrec 4", "torchrec 2 by columns"), (needs_torchrec, pytest.mark.slow))


def marked(*case):
    """Return the case as a pytest parameter.

    The first value of the case is an engine. The parameter gets the pytest marks of this engine.
    """
    own = marks.get(case[0], needs_torchrec if "torchrec" in case[0] else ())
    return pytest.param(*case, marks=own)


everyone = pytest.mark.parametrize(
    ("name", "config"), [marked(*case) for case in CANDIDATES.values()], ids=CANDIDATES
)
engines = pytest.mark.parametrize(
    "name",
    [
        marked(name)
        for name in ("pytorch", "hugectr", "two GPUs", "torchrec 1", "torchrec 2", "torchrec 4")
    ],
)


def engine_of(name, config, slot_sizes, *, settings, scratch, positions, workers):
    if "torchrec" in name:
        workers.be(int(name.split()[1]))
        from components.training.torchrec.engine import COLUMN_WISE, TABLE_WISE, TorchrecEngine

        sharding = [COLUMN_WISE] if "columns" in name else [TABLE_WISE, COLUMN_WISE]
        return TorchrecEngine(config, slot_sizes, settings, positions=positions, sharding=sharding)
    if name == "pytorch":
        from components.training.pytorch.engine import PytorchEngine

        return PytorchEngine(config, slot_sizes, settings, device="cpu", positions=positions)
    from components.training.hugectr.engine import HugectrEngine

    # The stages are small, so that these few rows fill several stages.
    settings = replace(settings, solver=SolverSettings(stage_rows=2000, loss_interval=7))
    num_gpus = 2 if "two" in name else 1
    return HugectrEngine(
        config, slot_sizes, settings, num_gpus=num_gpus, scratch=scratch, positions=positions
    )


@pytest.fixture
def make_engine(tmp_path, double, planted, workers):
    """Makes engines by name, and closes them at the end. HugeCTR is replaced by its test double."""
    with ExitStack() as stack:

        def make(name, config=V1, slot_sizes=planted.slot_sizes, positions=POSITIONS):
            own = {
                "settings": SETTINGS,
                "scratch": tmp_path / "scratch",
                "positions": positions,
                "workers": workers,
            }
            return stack.enter_context(closing(engine_of(name, config, slot_sizes, **own)))

        yield make


@pytest.fixture
def initial(tmp_path, planted):
    """Folder of fresh weights."""

    def make(config=V1):
        folder = tmp_path / f"initial {hash(config)}"
        if not folder.exists():
            write_initial(
                folder, config, planted.slot_sizes, click_rate=0.3, seed=3, positions=POSITIONS
            )
        return folder

    return make


def shuffled(n, seed=0):
    return np.random.default_rng(seed).permutation(n)


def trained(engine, start, rows, order=None, batch_size=128):
    engine.restore(start)
    engine.train(
        rows, shuffled(len(rows)) if order is None else order, batch_size=batch_size, seed=1
    )
    return engine


def float64_scores(folder, config, slot_sizes, rows):
    """Compute scores from the saved weights by the network's definition.

    An id outside its slot has a zero vector.
    """
    weights, sizes = (
        open_model(folder, slot_sizes).weights,
        np.array(slot_sizes)[list(POSITIONS.slots)],
    )
    tables = weights.slots(slot_sizes, tables_of(POSITIONS, config.widths))
    with_zero = [np.vstack([table, np.zeros_like(table[:1])]) for table in tables]
    ids = np.where((rows.ids >= 0) & (rows.ids < sizes), rows.ids, sizes)
    vectors = networks.vectors_of(with_zero, POSITIONS, ids)
    of_network = np.concatenate(vectors, axis=1)[:, None] if config.widths else np.stack(vectors, 1)
    return 1 / (1 + np.exp(-networks.logits(config, weights.dense, rows.dense, of_network)))


def keys_of(ids, slot_sizes):
    """Return the table rows of the ids, without the empty positions of lists."""
    return (ids + slot_offsets(slot_sizes)[list(POSITIONS.slots)])[ids != 0]


def tables(folder, slot_sizes):
    return [tensors.table for tensors in open_model(folder, slot_sizes).parts]


@everyone
def test_training_finds_planted_signal(name, config, make_engine, initial, planted):
    rows, holdout = planted.encoded(20_000), planted.encoded(8_000, 2)
    engine = make_engine(name, config)
    engine.restore(initial(config))
    before = roc_auc_score(holdout.labels, engine.score(holdout))
    losses = [
        engine.train(rows, shuffled(20_000, epoch), batch_size=128, seed=epoch)
        for epoch in range(2)
    ]
    bound = roc_auc_score(holdout.labels, planted.rows(8_000, 2)[3])
    after = roc_auc_score(holdout.labels, engine.score(holdout))
    assert before < 0.7 < bound - 0.06 < after < bound + 0.005
    assert losses[1] < losses[0]
    assert engine.num_steps == 2 * 157


@everyone
def test_checkpoint_restores_identical_scores_and_continues_identically(
    name, config, make_engine, initial, planted, tmp_path
):
    rows, order = planted.encoded(4_000), shuffled(4_000)
    # The rows fill whole batches, because an engine may pad the last batch of a call.
    first, rest = order[: 128 * 15], order[128 * 15 :]
    unbroken = trained(make_engine(name, config), initial(config), rows, order=first)
    unbroken.save(tmp_path / "checkpoint")
    scores = unbroken.score(rows)
    unbroken.train(rows, rest, batch_size=128, seed=1)
    continued = make_engine(name, config)
    continued.restore(tmp_path / "checkpoint")
    assert continued.num_steps == 15
    np.testing.assert_array_equal(continued.score(rows), scores)
    continued.train(rows, rest, batch_size=128, seed=1)
    assert continued.num_steps == unbroken.num_steps
    np.testing.assert_allclose(continued.score(rows), unbroken.score(rows), atol=1e-6)


@pytest.mark.parametrize("config", [V1, V2, WIDE], ids=["v1", "v2", "three widths"])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("pytorch", "hugectr"),
        ("hugectr", "pytorch"),
        ("two GPUs", "hugectr"),
        marked("torchrec 1", "hugectr"),
        marked("torchrec 2", "pytorch"),
        marked("torchrec 4", "pytorch"),
    ],
)
def test_model_of_one_engine_continues_in_other_and_scores_equal(
    name, other, config, make_engine, initial, planted, tmp_path
):
    rows = planted.encoded(128 * 40)
    mine = trained(make_engine(name, config), initial(config), rows)
    mine.save(tmp_path / "parent")
    its = make_engine(other, config)
    its.restore(tmp_path / "parent")
    np.testing.assert_allclose(its.score(rows), mine.score(rows), atol=1e-6)
    for engine in (mine, its):
        engine.train(rows, shuffled(len(rows), 5), batch_size=128, seed=2)
    assert its.num_steps == mine.num_steps == 80
    np.testing.assert_allclose(its.score(rows), mine.score(rows), atol=1e-6)
    its.save(tmp_path / "child")
    mine.save(tmp_path / "own child")
    one, another = (
        open_model(tmp_path / folder, planted.slot_sizes) for folder in ("child", "own child")
    )
    for left, right in zip(one.parts, another.parts):
        for table, its_table in zip(left.tables, right.tables, strict=True):
            np.testing.assert_allclose(table, its_table, atol=1e-5)
        for parameter, values in left.dense.items():
            np.testing.assert_allclose(values, right.dense[parameter], atol=1e-5)


@everyone
def test_saves_what_it_scores_and_id_outside_its_slot_has_zero_vector(
    name, config, make_engine, initial, planted, tmp_path
):
    rows = planted.encoded(500)
    engine = trained(make_engine(name, config), initial(config), rows)
    engine.save(tmp_path / "saved")
    rows.ids[::2, 1] = planted.slot_sizes[1]
    rows.ids[::3, 2] = 2**31 - 1
    rows.ids[::5, 0] = -1
    expected = float64_scores(tmp_path / "saved", config, planted.slot_sizes, rows)
    np.testing.assert_allclose(engine.score(rows), expected, atol=1e-6)


@engines
def test_rows_of_table_that_no_batch_touched_keep_their_bits(
    name, make_engine, initial, planted, tmp_path
):
    rows = planted.encoded(3_000)
    trained(make_engine(name), initial(), rows).save(tmp_path / "before")
    order = np.array([5, 17, 40])
    trained(make_engine(name), tmp_path / "before", rows, order=order, batch_size=4).save(
        tmp_path / "after"
    )
    touched = np.zeros(sum(planted.slot_sizes), bool)
    touched[keys_of(rows.ids[order], planted.slot_sizes)] = True
    for old, new in zip(
        *(tables(tmp_path / folder, planted.slot_sizes) for folder in ("before", "after"))
    ):
        np.testing.assert_array_equal(new[~touched], old[~touched])
        assert (new[touched] != old[touched]).any(axis=1).all()


@engines
def test_rows_of_incomplete_last_batch_are_used(name, make_engine, initial, planted, tmp_path):
    rows = planted.encoded(1_000)
    engine = trained(make_engine(name), initial(), rows, order=np.arange(129))
    assert engine.num_steps == 2
    engine.save(tmp_path / "after")
    before, after = (
        tables(folder, planted.slot_sizes)[0] for folder in (initial(), tmp_path / "after")
    )
    own = np.setdiff1d(
        keys_of(rows.ids[128], planted.slot_sizes), keys_of(rows.ids[:128], planted.slot_sizes)
    )
    assert len(own), "row 128 has categories that no row of the first batch has"
    assert (before[own] != after[own]).all()


@engines
def test_non_finite_loss_is_returned_and_leaves_restored_weights_clean(
    name, make_engine, initial, planted
):
    rows, valid = planted.encoded(4_000), planted.encoded(128 * 10, 2)
    rows.dense[128 * 9 + 5] = np.inf
    engine = make_engine(name)
    engine.restore(initial())
    assert not np.isfinite(engine.train(rows, np.arange(4_000), batch_size=128, seed=1))
    again, fresh = trained(engine, initial(), valid), trained(make_engine(name), initial(), valid)
    assert again.num_steps == fresh.num_steps == 10
    # With more than two workers, an engine's first steps determine how gradients are split and
    # summed.
    np.testing.assert_allclose(
        again.score(valid), fresh.score(valid), rtol=0, atol=1e-6 if "4" in name else 0
    )


@engines
def test_folder_without_optimizer_state_starts_from_zero_moments(
    name, make_engine, initial, planted, tmp_path
):
    rows = planted.encoded(128 * 20)
    trained(make_engine(name), initial(), rows).save(tmp_path / "plain")
    (tmp_path / "plain" / OPTIMIZER_FILE).unlink()
    engine = trained(make_engine(name), tmp_path / "plain", rows, order=np.arange(128))
    engine.save(tmp_path / "after")
    first, second = open_model(tmp_path / "after", planted.slot_sizes).moments
    # One step from zero: m = (1 - b1) g and v = (1 - b2) g^2.
    for parameter, m in first.dense.items():
        expected = m**2 / (1 - SETTINGS.beta1) ** 2 * (1 - SETTINGS.beta2)
        np.testing.assert_allclose(second.dense[parameter], expected, rtol=1e-4, atol=1e-12)


def test_without_numeric_columns_both_engines_train_alike(make_engine, planted, tmp_path):
    config = shaped("dcn", {**SHAPE, "num_cross_layers": 2}, num_dense=0, num_categorical=5)
    write_initial(
        tmp_path / "initial",
        config,
        planted.slot_sizes,
        click_rate=0.3,
        seed=3,
        positions=POSITIONS,
    )
    rows = replace(planted.encoded(128 * 20), dense=np.zeros((128 * 20, 0), np.float32))
    mine, its = (
        trained(make_engine(name, config), tmp_path / "initial", rows)
        for name in ("pytorch", "hugectr")
    )
    assert mine.num_steps == its.num_steps == 20
    assert mine.score(rows).std() > 0.01
    np.testing.assert_allclose(its.score(rows), mine.score(rows), atol=1e-6)


@pytest.mark.parametrize("name", [marked(f"torchrec {size}") for size in (1, 2, 4)], scope="module")
def test_weighted_rows_train_as_in_pytorch_and_no_weight_takes_no_step(
    name, make_engine, initial, planted
):
    rows, random = planted.encoded(128 * 10), np.random.default_rng(4)
    rows = replace(rows, weights=random.integers(0, 4, len(rows)).astype(np.float32))
    rows.weights[128 * 3 : 128 * 5] = 0
    mine, reference = (
        trained(make_engine(each), initial(), rows, order=np.arange(len(rows)))
        for each in (name, "pytorch")
    )
    assert mine.num_steps == reference.num_steps == 8
    np.testing.assert_allclose(mine.score(rows), reference.score(rows), atol=1e-6)


def test_table_whose_lists_are_pooled_in_two_ways_fails_only_in_hugectr(tmp_path, double):
    options = {
        "last": ListOptions(max=3, table="item", pool="sum"),
        "seen": ListOptions(max=2, table="item"),
    }
    features = Features(
        numeric=(), categorical=("item",), lists=("last", "seen"), list_options=options
    )
    config = replace(V1, num_dense=0, num_categorical=3)
    arguments = {"settings": SETTINGS, "scratch": tmp_path, "features": features}
    make_any_engine("pytorch", config, [5], **arguments).close()
    with raises(ContractError, "item", "sum (last)", "mean (seen)"):
        make_any_engine("hugectr", config, [5], **arguments)
    options["seen"] = ListOptions(max=2)
    one_way = replace(features, list_options=options)
    make_any_engine("hugectr", config, [5, 5], **arguments | {"features": one_way}).close()


def test_networks_that_no_engine_supports_are_refused(tmp_path):
    for backend, config, sizes, message in (
        ("pytorch", V1, [5] * 4, "expected 5 sizes, each at least 1"),
        ("pytorch", V1, [5] * 4 + [0], "expected 5 sizes, each at least 1"),
        ("hugectr", DLRM, [5] * 5, "network is 'dlrm', expected dcn"),
        (
            "hugectr",
            shaped("dcn", SHAPE, num_dense=3, num_categorical=0),
            [],
            "num_categorical is 0, expected at least 1",
        ),
    ):
        with pytest.raises(ContractError, match=message):
            make_any_engine(backend, config, sizes, settings=SETTINGS, scratch=tmp_path)
