"""Tests of a fit's start: fresh weights, or a parent's table adapted to new vocabularies."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import logit

from components.training.start import ModelLayout, continue_from, grow, write_initial
from evergreen.config.features import Features, ListOptions, NumericOptions
from evergreen.contracts.workflow import FIRST_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from evergreen.networks import files
from evergreen.networks.files import add_to_bias, new_model, open_model
from evergreen.networks.scoring import Scorer, load_network, load_scorer, pooled, side_by_side
from evergreen.runtime.durable import sha256_tree
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from testing.networks import shaped
from testing.releases import store_model
from tests.support.errors import raises
from tests.support.planted_rows import POSITIONS, WIDTHS, dcn
from tests.support.workflows import workflow_of

CONFIG = dcn(embedding_dim=4, num_cross_layers=2, tower=(8,))
NETWORKS = {
    "dcn": CONFIG,
    **{
        name: shaped(name, {"embedding_dim": 4, "tower": (8,)}, **WIDTHS)
        for name in ("deepfm", "dlrm")
    },
    "dcn of two widths": dcn(widths=(4, 8, 4, 8, 4), num_cross_layers=2, tower=(8,)),
}
SIZES = [1, 2, 3, 50, 600, 1150]


@pytest.mark.parametrize(("network", "share"), [("dcn", 1), ("deepfm", 0.1), ("dlrm", 0.1)])
def test_fresh_table_is_uniform_within_one_over_root_of_its_size(tmp_path, network, share):
    config = shaped(network, {"embedding_dim": 16}, num_dense=2, num_categorical=len(SIZES))
    write_initial(tmp_path, config, SIZES, click_rate=0.25, seed=0)
    stored, at = open_model(tmp_path, SIZES), 0
    for size in SIZES:
        values, bound = stored.weights.table[at : at + size].astype(np.float64), share * size**-0.5
        assert np.abs(values).max() <= bound, size
        assert np.abs(values).max() > bound * (1 - 20 / values.size), size
        assert values.std() == pytest.approx(bound / 3**0.5, rel=4 / values.size**0.5), size
        at += size
    assert stored.weights.dense["bias"][0] == pytest.approx(np.log(0.25 / 0.75))
    assert (stored.moments, stored.step) == (None, 0)


def test_seeds_decide_fresh_weights_and_chunks_do_not(tmp_path, monkeypatch):
    def drawn(name, seed):
        config = replace(CONFIG, num_categorical=len(SIZES))
        write_initial(tmp_path / name, config, SIZES, click_rate=0.25, seed=seed)
        return sha256_tree(tmp_path / name)

    first, other = drawn("first", 0), drawn("other", 1)
    monkeypatch.setattr(files, "ROWS_PER_CHUNK", 37)
    assert drawn("again", 0) == first != other


def churned(seed):
    """Return the vocabularies of two successive runs.

    Some categories are removed, some ids are reused, and some ids are appended.
    """
    random = np.random.default_rng(seed)
    before, now = [], []
    for column in range(4):
        size, more = int(random.integers(3, 90)), int(random.integers(0, 9))
        values = random.choice(2**32, size=2 * size + more, replace=False)
        old, fresh, appended = values[:size].copy(), values[size : 2 * size], values[2 * size :]
        old[random.random(size) < 0.3] = TOMBSTONE
        new, chance = old.copy(), random.random(size)
        new[(old != TOMBSTONE) & (chance < 0.2)] = TOMBSTONE
        new[(old == TOMBSTONE) & (chance < 0.5)] = fresh[(old == TOMBSTONE) & (chance < 0.5)]
        before.append(old)
        now.append(np.r_[new, appended] if column else new)
    return workflow_of(before), workflow_of(now)


def write_random(
    folder, slot_sizes, *, config=CONFIG, seed=0, with_moments=True, step=77, positions=POSITIONS
):
    """Write a model with random weights for slots of the sizes `slot_sizes`."""
    write_initial(
        folder / "shapes", config, slot_sizes, click_rate=0.3, seed=seed, positions=positions
    )
    shapes, random = open_model(folder / "shapes", slot_sizes).shapes, np.random.default_rng(seed)
    with new_model(folder / "weights", shapes, step=step, with_moments=with_moments) as stored:
        for tensors in stored.parts:
            for values in (*tensors.tables, *tensors.dense.values()):
                values[:] = np.abs(random.normal(0, 0.3, values.shape))
    return folder / "weights"


def grown(folder, before, now, config=CONFIG):
    old, new = (ModelLayout(workflow, config) for workflow in (before, now))
    grow(open_model(folder, before.slot_sizes), old, new, into=folder.parent / "grown")
    return open_model(folder.parent / "grown", now.slot_sizes)


def expected_tables(stored, before, now):
    """Return the new vectors, m and v, by a loop over ids."""
    tables, old_at = [[], [], []], 0
    for old, new in zip(before.vocabularies, now.vocabularies):
        rows_of = {c: old_at + FIRST_ID + i for i, c in enumerate(old.tolist()) if c != TOMBSTONE}
        for number, table in enumerate(part.table for part in stored.parts):
            nothing = np.zeros(table.shape[1], np.float32)
            fresh = table[old_at + OOV_ID] if number == 0 else nothing
            tables[number] += list(table[old_at : old_at + FIRST_ID])
            for category in new.tolist():
                known = table[rows_of[category]] if category in rows_of else fresh
                tables[number].append(nothing if category == TOMBSTONE else known)
        old_at += FIRST_ID + len(old)
    return [np.stack(table) for table in tables]


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 10_000])
def test_rows_move_to_their_categories_and_rest_starts_afresh(
    tmp_path, monkeypatch, rows_per_chunk
):
    monkeypatch.setattr(files, "ROWS_PER_CHUNK", rows_per_chunk)
    for seed in range(3):
        before, now = churned(seed)
        folder = write_random(tmp_path / str(seed), before.slot_sizes, seed=seed)
        stored, after = open_model(folder, before.slot_sizes), grown(folder, before, now)
        assert after.step == stored.step == 77
        for found, expected in zip(after.parts, expected_tables(stored, before, now)):
            np.testing.assert_array_equal(found.table.view(np.int32), expected.view(np.int32))
        for found, stored_part in zip(after.parts, stored.parts):
            for name, values in stored_part.dense.items():
                np.testing.assert_array_equal(found.dense[name], values)


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_rows_of_old_ids_score_bit_for_bit_equal_directly_after_growth(tmp_path, config):
    before, now = churned(11)
    folder = write_random(tmp_path, before.slot_sizes, config=config)
    grown(folder, before, now, config)
    random = np.random.default_rng(5)
    alive = [
        np.r_[0, 1, 2, 3 + np.flatnonzero((old != TOMBSTONE) & (new[: len(old)] == old))]
        for old, new in zip(before.vocabularies, now.vocabularies)
    ]
    ids = np.stack([random.choice(alive[slot], 300) for slot in POSITIONS.slots], axis=1)
    assert (ids > 2).mean() > 0.5
    dense = random.normal(size=(300, 2)).astype(np.float32)
    scores = [
        load_scorer(
            folder_of_model, config, workflow.slot_sizes, positions=POSITIONS
        ).probabilities(dense, ids)
        for folder_of_model, workflow in ((folder, before), (tmp_path / "grown", now))
    ]
    np.testing.assert_array_equal(scores[0].view(np.int32), scores[1].view(np.int32))


def test_parent_without_moments_grows_without_them(tmp_path):
    before, now = churned(3)
    assert (
        grown(write_random(tmp_path, before.slot_sizes, with_moments=False), before, now).moments
        is None
    )


def test_neither_drawing_nor_growing_holds_table_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROWS_PER_CHUNK", 4096)
    config = dcn(embedding_dim=16, num_cross_layers=1, tower=(8,))
    before, now = (workflow_of([np.arange(size)] * 4) for size in (52_000, 55_000))
    folder = write_random(tmp_path, before.slot_sizes, config=config)
    tracemalloc.start()
    try:
        write_initial(
            tmp_path / "fresh",
            config,
            before.slot_sizes,
            click_rate=0.5,
            seed=0,
            positions=POSITIONS,
        )
        grown(folder, before, now, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * 3 * 4 * 16 * sum(before.slot_sizes)


BEFORE = [6, 9, 12, 15]
NOW = [size + i % 4 for i, size in enumerate(BEFORE)]


@pytest.fixture
def parent(tmp_path, make_training_set, planted):
    """A stored parent, and a training set whose vocabularies continue from it."""
    write_random(tmp_path / "parent", BEFORE)
    old = make_training_set(*planted.rows(20)[:3], name="old", slot_sizes=BEFORE)
    new = make_training_set(*planted.rows(20)[:3], name="new", slot_sizes=NOW)
    local_path(old.workflow_uri).rename(tmp_path / "parent" / "workflow")
    stated = {
        "uri": (tmp_path / "parent").as_uri(),
        "config": CONFIG.as_document(),
        "slot_sizes": BEFORE,
    }
    return store_model(
        tmp_path / "store", "p", optimizer_step=77, raw_digest=old.raw_digest, **stated
    ), new


@pytest.fixture
def into(tmp_path):
    return tmp_path / "run" / "start"


def change_vocabulary(training_set, column, id_, value):
    """Change one category of the training set's workflow, and save the workflow."""
    folder = local_path(training_set.workflow_uri)
    workflow = FeatureWorkflow.load(folder)
    vocabularies = [v.copy() for v in workflow.vocabularies]
    vocabularies[column][id_ - FIRST_ID] = value
    replace(workflow, vocabularies=tuple(vocabularies)).save(folder)


def test_parent_gives_weights_moments_and_step_count_and_stays_as_it_was(parent, into, tmp_path):
    before = sha256_tree(tmp_path / "parent")
    assert continue_from(*parent, CONFIG, into=into) == into
    first, started = sha256_tree(into), open_model(into, NOW)
    assert started.step == 77
    expected = expected_tables(
        open_model(tmp_path / "parent" / "weights", BEFORE),
        FeatureWorkflow.load(tmp_path / "parent" / "workflow"),
        FeatureWorkflow.load(local_path(parent[1].workflow_uri)),
    )
    for tensors, table in zip(started.parts, expected):
        np.testing.assert_array_equal(tensors.table, table)
    assert sha256_tree(tmp_path / "parent") == before
    continue_from(*parent, CONFIG, into=into)
    assert sha256_tree(into) == first


def test_another_network_is_refused_naming_both(parent, into):
    for config, message in (
        (
            replace(CONFIG, tower=(9,)),
            r"has {'tower': \[9\]}, expected .* p's {'tower': \[8\]}; .* parent=none",
        ),
        (NETWORKS["dlrm"], "has {'network': 'dlrm'}, expected the parent p's {'network': 'dcn'}"),
    ):
        with pytest.raises(ContractError, match=message):
            continue_from(*parent, config, into=into)


def test_slots_that_do_not_continue_parents_are_refused(parent, into):
    model, training_set = parent
    shrunken = [5 if slot == 1 else size for slot, size in enumerate(NOW)]
    for sizes, message in (
        (shrunken, "slot size of shop is 5 in the training set and 9 in the parent p"),
        ([size + 1 for size in NOW], "workflow in .* has slot sizes"),
    ):
        with pytest.raises(ContractError, match=message):
            continue_from(model, replace(training_set, slot_sizes=sizes), CONFIG, into=into)


def test_ids_that_mean_other_categories_are_refused_and_nothing_is_left(
    parent, planted, make_training_set, into
):
    model, training_set = parent
    other = make_training_set(*planted.rows(20)[:3], name="other", slot_sizes=NOW, workflow_start=1)
    with raises(ContractError, "parent p", "id 3 of item"):
        continue_from(model, other, CONFIG, into=into)
    change_vocabulary(training_set, 2, 5, 4_000_000_000)
    with raises(ContractError, "id 5 of user", 4000000000, 20002):
        continue_from(model, training_set, CONFIG, into=into)
    assert not into.exists()


ITEM, TAGS = ListOptions(max=3, table="item"), ListOptions(max=2, pool="sum")
FEW = Features(
    numeric=("age", "price"),
    categorical=("item", "shop"),
    lists=("last",),
    numeric_options={"price": NumericOptions(indicator=True)},
    list_options={"last": ITEM},
)
MORE = Features(
    numeric=("rate", "price", "stay", "age"),
    categorical=("user", "item", "shop"),
    lists=("tags", "last"),
    numeric_options={
        **{name: NumericOptions(indicator=True) for name in ("rate", "price")},
        "stay": NumericOptions(transform=("quantile_buckets(4)",)),
    },
    list_options={"last": ITEM, "tags": TAGS},
)


def layout_of(name, features, *, more=False, **shape):
    """Return a layout whose slots have as many categories as their names have letters.

    With `more`, each slot has three further categories.
    """
    vocabularies = tuple(
        np.arange(4 if n in features.bucketed else len(n) + 3 * more) for n in features.slots
    )
    boundaries = dict.fromkeys(features.bucketed, np.arange(1, 4, dtype=np.float32))
    workflow = workflow_of(vocabularies, features, boundaries=boundaries)
    vectors, dense = len(features.vector_names), len(features.dense_inputs)
    if "widths" in shape:
        shape = shape | {
            "widths": tuple(
                3 if each in ("item", "last", "user") else 5 for each in features.vector_names
            )
        }
    config = shaped(
        name,
        {"embedding_dim": 4, "tower": (8, 5), **shape},
        num_dense=dense,
        num_categorical=vectors,
    )
    return ModelLayout(workflow, config)


def rows_of(features, rows):
    """Return the network's inputs: dense [n, d] and ids [n, positions].

    `rows` contains an array for each column.
    """
    return (
        np.stack([rows[name] for name in features.dense_inputs], 1).astype(np.float32),
        np.stack([rows[name] for name in features.id_names], 1).astype(np.int64),
    )


def scores(folder, layout, rows):
    scorer = load_scorer(
        folder,
        layout.network,
        layout.workflow.slot_sizes,
        positions=layout.workflow.features.id_positions,
    )
    return scorer.probabilities(*rows_of(layout.workflow.features, rows))


def fit_twice(folder, layout, rows):
    """Take two steps of plain gradient descent on the weights in `folder`, with all labels 0."""
    features = layout.workflow.features
    network, values = load_network(folder, layout.network, layout.workflow.slot_sizes)
    dense, ids = map(torch.from_numpy, rows_of(features, rows))
    offsets = [torch.from_numpy(each.offsets(layout.workflow.slot_sizes)) for each in layout.tables]
    for each in values:
        each.requires_grad_()
    for _ in range(2):
        found = []
        for of, value, offset in zip(layout.tables, values, offsets):
            here = ids[:, list(of.columns)]
            found.append(
                pooled(torch.nn.functional.embedding(here + offset, value), here != 0, of.positions)
            )
        vectors = side_by_side(found, layout.tables)
        torch.nn.functional.softplus(network(dense, vectors)).mean().backward()
        with torch.no_grad():
            for each in (*values, *network.parameters()):
                each -= 0.1 * each.grad
                each.grad = None
    return Scorer(
        network,
        [each.detach() for each in values],
        layout.tables,
        slot_sizes=layout.workflow.slot_sizes,
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dcn", {}),
        ("dcn", {"widths": True}),
        ("dcn", {"projection_dim": 2}),
        ("deepfm", {}),
        ("dlrm", {}),
    ],
    ids=str,
)
def test_added_columns_change_no_score_train_and_leave_without_trace(name, shape, tmp_path):
    before, now, after = (
        layout_of(name, *each, more=more, **shape)
        for *each, more in ((FEW, 0), (MORE, 1), (FEW, 1))
    )
    random = np.random.default_rng(1)
    names = (*MORE.dense_inputs, *MORE.id_names)
    rows = {
        each: random.normal(size=50) if each in MORE.dense_inputs else random.integers(0, 6, 50)
        for each in names
    }
    other = rows | {
        each: np.roll(rows[each], 1)
        for each in ("user", "rate", "rate/missing", "tags/0", "tags/1")
    }
    first = write_random(
        tmp_path, before.workflow.slot_sizes, config=before.network, positions=FEW.id_positions
    )
    add_to_bias(first, -float(np.median(logit(scores(first, before, rows)))))
    stored, more, few = (
        open_model(first, before.workflow.slot_sizes),
        tmp_path / "more",
        tmp_path / "few",
    )
    grow(stored, before, now, into=more, seed=3)
    for each in (rows, other):
        np.testing.assert_allclose(
            scores(more, now, each), scores(first, before, rows), rtol=0, atol=2e-6
        )
    grown = open_model(more, now.workflow.slot_sizes)
    user = slice(0, now.workflow.slot_sizes[0])
    assert [np.ptp(part.tables[0][user]) > 0 for part in grown.parts] == [
        name != "deepfm",
        False,
        False,
    ]
    assert grown.step == stored.step

    grow(grown, now, after, into=few)
    for part, of_before in zip(
        open_model(few, after.workflow.slot_sizes).parts, stored.parts, strict=True
    ):
        assert part.dense.keys() == of_before.dense.keys()
        for each, values in of_before.dense.items():
            np.testing.assert_array_equal(part.dense[each], values)

    fitted = fit_twice(more, now, rows)
    found = [fitted.probabilities(*rows_of(MORE, each)) for each in (rows, other)]
    assert np.abs(found[0] - found[1]).max() > 1e-5


def test_new_list_of_known_vectors_is_refused_if_no_weight_can_hide_it(tmp_path):
    without = replace(FEW, lists=(), list_options={})
    before, now = layout_of("deepfm", without), layout_of("deepfm", FEW)
    stored = open_model(
        write_random(
            tmp_path,
            before.workflow.slot_sizes,
            config=before.network,
            positions=without.id_positions,
        ),
        before.workflow.slot_sizes,
    )
    with raises(ContractError, "last", "new", "item", "parent=none"):
        grow(stored, before, now, into=tmp_path / "now")


@pytest.mark.parametrize("name", ["means", "stds"])
def test_other_transforms_of_dense_columns_are_refused(parent, into, name):
    model, training_set = parent
    folder = local_path(training_set.workflow_uri)
    replace(FeatureWorkflow.load(folder), **{name: np.full(2, 0.5, np.float32)}).save(folder)
    with raises(ContractError, "parent p", name):
        continue_from(model, training_set, CONFIG, into=into)
    assert not into.exists()


@pytest.mark.parametrize("part", ["weights", "workflow"])
def test_parent_of_which_one_bit_was_flipped_is_refused_by_folder_of_file(
    parent, into, tmp_path, part
):
    model, training_set = parent
    folder = tmp_path / "parent" / part
    model = replace(
        model,
        sha256={name: sha256_tree(tmp_path / "parent" / name) for name in ("weights", "workflow")},
    )
    path = max(folder.iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)
    with raises(ContractError, f"parent/{part}", path.name, "manifest"):
        continue_from(model, training_set, CONFIG, into=into)
    assert not into.exists()
