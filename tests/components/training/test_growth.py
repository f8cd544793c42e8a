"""A grown table, row by row, against a dict of what each category had; and what a network says of it."""

from __future__ import annotations

import errno
import os
import tracemalloc

import numpy as np
import pytest

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import (
    SPARSE_FOLDER,
    SPARSE_OPTIMIZER_FILE,
    ModelWeights,
    num_dense_parameters,
    open_model,
    read_model,
    write_model,
)
from components.contracts.workflow import TOMBSTONE, FeatureWorkflow
from components.dcn.network import load_network, predict
from components.runtime.errors import ContractError, PermanentError
from components.training import growth
from components.training.growth import RowPlan, grow

CONFIG = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(8,))
DIM = CONFIG.embedding_dim


def workflow_of(vocabularies):
    return FeatureWorkflow(
        vocabularies=tuple(np.array(v, np.int64) for v in vocabularies),
        fill=0.0,
        clip_min=0.0,
        means=np.zeros(13, np.float32),
        stds=np.ones(13, np.float32),
        frequency_threshold=1,
    )


def churned(seed):
    """Vocabularies of a round and of the one after it: some leave, some tombstones are given out, some are appended."""
    random = np.random.default_rng(seed)
    before, now = [], []
    for column in range(26):
        size, more = int(random.integers(0, 40)), int(random.integers(0, 9))
        values = random.choice(2**32, size=2 * size + more, replace=False)
        old, fresh, appended = values[:size].copy(), values[size : 2 * size], values[2 * size :]
        old[random.random(size) < 0.3] = TOMBSTONE
        new, chance = old.copy(), random.random(size)
        new[(old != TOMBSTONE) & (chance < 0.2)] = TOMBSTONE
        new[(old == TOMBSTONE) & (chance < 0.5)] = fresh[(old == TOMBSTONE) & (chance < 0.5)]
        before.append(old)
        now.append(np.r_[new, appended] if column % 5 else new)
    return workflow_of(before), workflow_of(now)


def random_weights(workflow, seed=0, *, config=CONFIG, moments=True):
    random = np.random.default_rng(seed)
    shape, size = (sum(workflow.slot_sizes), config.embedding_dim), num_dense_parameters(config)
    return ModelWeights(
        dense={name: random.normal(0, 0.3, shape_).astype(np.float32) for name, shape_ in dense_layout(config)},
        embeddings=random.normal(0, 0.3, shape).astype(np.float32),
        dense_moments=tuple(random.random((2, size)).astype(np.float32)) if moments else None,
        embedding_moments=tuple(random.random((2, *shape)).astype(np.float32)) if moments else None,
    )


def write_in_order(folder, weights, keys, config=CONFIG):
    """The model's files with these keys in this order, as HugeCTR writes them in that of its hash table."""
    write_model(folder, config, weights)
    keys.astype("<i8").tofile(folder / SPARSE_FOLDER / "key")
    weights.embeddings[keys].astype("<f4").tofile(folder / SPARSE_FOLDER / "emb_vector")
    if weights.embedding_moments:
        np.stack([m[keys] for m in weights.embedding_moments]).astype("<f4").tofile(folder / SPARSE_OPTIMIZER_FILE)


def grown(folder, before, now, config=CONFIG):
    stored = open_model(folder, config, before.slot_sizes)
    (folder.parent / "grown").mkdir()
    grow(stored, RowPlan.between(before, now), folder.parent / "grown")
    return read_model(folder.parent / "grown", config, now.slot_sizes, optimizer=True)


def expected_tables(weights, before, now, stored_keys):
    """Vectors, m and v of now, by a loop over ids."""
    kept = [weights.embeddings, *weights.embedding_moments]
    tables, old_at = [[], [], []], 0
    for old, new in zip(before.vocabularies, now.vocabularies):
        rows_of = {c: old_at + 3 + i for i, c in enumerate(old.tolist()) if c != TOMBSTONE}
        oov = old_at + 2
        sources = [old_at, old_at + 1, oov]
        for category in new.tolist():
            sources.append(None if category == TOMBSTONE else rows_of.get(category, (oov,)))
        for source in sources:
            is_new = isinstance(source, tuple)
            row = source[0] if is_new else source
            nothing = np.zeros(weights.embeddings.shape[1], np.float32)
            for number, table in enumerate(kept):
                absent = row is None or row not in stored_keys or (is_new and number > 0)
                tables[number].append(nothing if absent else table[row])
        old_at += 3 + len(old)
    return [np.stack(table) for table in tables]


ORDERS = {
    "ascending": lambda rows, random: np.arange(rows),
    "some absent": lambda rows, random: np.flatnonzero(random.random(rows) < 0.6),
    "hash order": lambda rows, random: random.permutation(rows),
    "hash order, some absent": lambda rows, random: random.permutation(rows)[: rows // 2],
    "none at all": lambda rows, random: np.zeros(0, np.int64),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 10_000])
def test_rows_go_where_their_categories_are_and_the_rest_starts_afresh(tmp_path, monkeypatch, order, rows_per_chunk):
    monkeypatch.setattr(growth, "ROWS_PER_CHUNK", rows_per_chunk)
    for seed in range(1 if rows_per_chunk == 1 else 4):
        before, now = churned(seed)
        weights = random_weights(before, seed)
        keys = ORDERS[order](sum(before.slot_sizes), np.random.default_rng(seed))
        folder = tmp_path / str(seed) / "parent"
        write_in_order(folder, weights, keys)
        after = grown(folder, before, now)
        for found, expected in zip(
            (after.embeddings, *after.embedding_moments), expected_tables(weights, before, now, set(keys.tolist()))
        ):
            np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
        for name, value in weights.dense.items():
            np.testing.assert_array_equal(after.dense[name].view(np.int32), value.view(np.int32))
        for found, kept in zip(after.dense_moments, weights.dense_moments):
            np.testing.assert_array_equal(found, kept)
        assert sorted(path.name for path in (folder.parent / "grown").iterdir()) == sorted(
            p.name for p in folder.iterdir()
        )


@pytest.mark.parametrize("order", ["ascending", "hash order"])
def test_rows_of_old_ids_are_scored_bit_for_bit_as_before_directly_after_growth(tmp_path, order):
    before, now = churned(11)
    weights = random_weights(before)
    write_in_order(tmp_path / "parent", weights, ORDERS[order](sum(before.slot_sizes), np.random.default_rng(0)))
    grown(tmp_path / "parent", before, now)
    random = np.random.default_rng(5)
    alive = [
        np.r_[0, 1, 2, 3 + np.flatnonzero((old != TOMBSTONE) & (new[: len(old)] == old))]
        for old, new in zip(before.vocabularies, now.vocabularies)
    ]
    ids = np.stack([random.choice(column, 300) for column in alive], axis=1)
    assert (ids > 2).mean() > 0.5
    dense = random.normal(size=(300, 13)).astype(np.float32)
    scores = [
        predict(load_network(tmp_path / folder, CONFIG, workflow.slot_sizes), dense, ids)
        for folder, workflow in (("parent", before), ("grown", now))
    ]
    np.testing.assert_array_equal(scores[0].view(np.int32), scores[1].view(np.int32))


def test_a_new_category_is_scored_as_it_was_out_of_vocabulary(tmp_path):
    before = workflow_of([[10, TOMBSTONE, 30]] + [[5]] * 25)
    now = workflow_of([[10, 20, 30, 40]] + [[5]] * 25)
    write_model(tmp_path / "parent", CONFIG, random_weights(before))
    grown(tmp_path / "parent", before, now)
    raw = np.array([[20] + [5] * 25, [40] + [5] * 25])
    dense = np.zeros((2, 13), np.float32)
    first, second = (
        predict(load_network(tmp_path / folder, CONFIG, w.slot_sizes), dense, w.encode_categorical(raw))
        for folder, w in (("parent", before), ("grown", now))
    )
    np.testing.assert_array_equal(first, second)


def test_a_parent_without_moments_grows_without_them(tmp_path):
    before, now = churned(3)
    write_model(tmp_path / "parent", CONFIG, random_weights(before, moments=False))
    after = grown(tmp_path / "parent", before, now)
    assert after.embedding_moments is None
    assert after.dense_moments is None


def test_a_disk_without_room_for_the_tables_is_an_error_and_no_bus_error(tmp_path, monkeypatch):
    before, now = churned(3)
    num_rows = sum(before.slot_sizes)
    write_in_order(tmp_path / "parent", random_weights(before), np.arange(num_rows)[::-1])

    def full(descriptor, offset, length):
        assert (offset, length) == (0, 4 * num_rows * DIM)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PermanentError, match=f"cannot have {4 * num_rows * DIM} bytes: No space left on device"):
        grown(tmp_path / "parent", before, now)
    assert not [path for path in (tmp_path / "grown").rglob("*") if path.is_file()]


@pytest.mark.parametrize("order", ["ascending", "hash order"])
def test_no_table_is_held_in_memory(tmp_path, monkeypatch, order):
    monkeypatch.setattr(growth, "ROWS_PER_CHUNK", 4096)
    config = DcnConfig(embedding_dim=16, num_cross_layers=1, tower=(8,))
    before = workflow_of([np.arange(8_000)] * 26)
    now = workflow_of([np.arange(8_500)] * 26)
    weights = random_weights(before, config=config)
    table_bytes = 3 * weights.embeddings.nbytes
    keys = ORDERS[order](sum(before.slot_sizes), np.random.default_rng(0))
    write_in_order(tmp_path / "parent", weights, keys, config)
    del weights
    plan = RowPlan.between(before, now)
    (tmp_path / "grown").mkdir()
    tracemalloc.start()
    try:
        grow(open_model(tmp_path / "parent", config, before.slot_sizes), plan, tmp_path / "grown")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * table_bytes


def test_one_category_in_anothers_place_is_refused():
    before = workflow_of([[10, 20]] + [[5]] * 25)
    with pytest.raises(ContractError, match="id 4 of C1 means category 21 and meant 20 before"):
        RowPlan.between(before, workflow_of([[10, 21]] + [[5]] * 25))
