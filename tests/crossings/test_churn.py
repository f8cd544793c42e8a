"""Fifty rounds of a world whose categories come and go: ids, table and state stay as small as the world is.

Preprocessing's vocabularies, the workflow's folder, training's growth and the served graph, without their libraries: a
round's rows are counted by hand, and a fit is noise on the rows that it met.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from components.contracts.workflow import FIRST_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from components.models.files import TABLE, WEIGHTS_FILE, new_model, open_model
from components.preprocessing.parent import ADMISSION_FILE, load_columns, save_columns
from components.preprocessing.settings import PreprocessingSettings
from components.preprocessing.vocabularies import next_column, unseen_column
from components.runtime.durable import sha256_tree
from components.training.start import ModelLayout, grow
from tests.support.graphs import open_built
from tests.support.networks import shaped
from tests.support.toy_models import ToyModel, toy_model
from tests.support.workflows import workflow_of

DIM = 2
CONFIG = shaped("dcn", {"embedding_dim": DIM}, num_dense=13, num_categorical=NUM_CATEGORICAL)
DAY = 86_400_000_000
ROUNDS = 50
CHURNING = 3
"""Columns of a churning world; the others have a few categories for ever."""
ACTIVE, BORN, RARE = 60, 10, 40
"""Per churning column: categories at a time, new ones per round (as many go), and ones seen once and never again."""
TTL_ROUNDS = 3
THRESHOLD = 4
RULES = PreprocessingSettings(frequency_threshold=THRESHOLD, category_ttl_days=TTL_ROUNDS, max_candidates=10_000)


class World:
    """Raw categories [n, 26] of each round: every active category three times, every rare one once."""

    def __init__(self, seed=0):
        self.names = np.random.default_rng(seed).permutation(2**20)

    def active(self, round_, column):
        return self.names[column * 5000 + round_ * BORN :][:ACTIVE]

    def rows(self, round_):
        random = np.random.default_rng(round_)
        rows = np.full((3 * ACTIVE + RARE, NUM_CATEGORICAL), -1)
        for column in range(NUM_CATEGORICAL):
            if column < CHURNING:
                rare = self.names[500_000 + (column * ROUNDS + round_) * RARE :][:RARE]
                values = np.r_[np.repeat(self.active(round_, column), 3), rare]
            else:
                values = random.integers(0, 5, len(rows))
            rows[:, column] = random.permutation(values)
        return rows


@dataclass
class Round:
    """One round's model folder, and what it knew."""

    folder: Path
    workflow: FeatureWorkflow

    def weights(self):
        return open_model(self.folder / "weights", self.workflow.slot_sizes)


def run_round(parent: Round | None, number: int, rows, folder: Path) -> Round:
    """A model folder made from the parent's folder alone: vocabularies, growth, and noise for a fit."""
    columns = [unseen_column(np.zeros(0, np.int64))] * NUM_CATEGORICAL
    if parent:
        features = FeatureWorkflow.load(parent.folder / "workflow")
        columns = load_columns(parent.folder / "workflow", features)
    counts = [Counter(column[column >= 0].tolist()) for column in rows.T]
    seen = [(np.array(list(c), np.int64), np.array(list(c.values()), np.int64)) for c in counts]
    columns = [next_column(column, *counted, now=number * DAY, rules=RULES) for column, counted in zip(columns, seen)]
    workflow = workflow_of([column.vocabulary for column in columns], frequency_threshold=THRESHOLD)
    workflow.save(folder / "workflow")
    save_columns(columns, folder / "workflow")
    if parent:
        grow(
            parent.weights(), ModelLayout(parent.workflow, CONFIG), ModelLayout(workflow, CONFIG), into=folder / "grown"
        )
    else:
        first = toy_model(workflow, embedding_dim=DIM)
        write(folder / "grown", [(first.table, first.dense)])
    fit(folder, workflow, rows, number)
    return Round(folder, workflow)


def write(folder, parts):
    """A model whose first parts are these; the others are zero."""
    table, dense = parts[0]
    shapes = {TABLE: table.shape, **{name: values.shape for name, values in dense.items()}}
    with new_model(folder, shapes) as stored:
        for tensors, (table, dense) in zip(stored.parts, parts):
            tensors.table[:] = table
            for name, values in dense.items():
                tensors.dense[name][:] = values


def fit(folder, workflow, rows, seed):
    """Noise on the rows that the fit met, and on nothing else, as sparse Adam does."""
    stored = open_model(folder / "grown", workflow.slot_sizes)
    met = np.unique(workflow.encode_categorical(rows) + offsets(workflow))
    random = np.random.default_rng(1000 + seed)
    for tensors in stored.parts:
        tensors.table[met] += random.random((len(met), DIM)).astype(np.float32)
    write(folder / "weights", [(tensors.table, tensors.dense) for tensors in stored.parts])


def network_of(stored):
    return ToyModel(stored.weights.table, stored.weights.dense).network()


def offsets(workflow):
    return np.cumsum([0, *workflow.slot_sizes[:-1]])


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """The rounds and their raw rows."""
    root, world = tmp_path_factory.mktemp("fifty rounds"), World()
    rounds, rows = [], [world.rows(number) for number in range(ROUNDS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)  # waiting for the disk a thousand times is most of the time here
        for number in range(ROUNDS):
            parent = rounds[-1] if rounds else None
            rounds.append(run_round(parent, number, rows[number], root / f"{number:02}"))
    return rounds, rows


def test_an_id_keeps_its_category_as_long_as_that_lives(history):
    rounds, _ = history
    for before, now in zip(rounds, rounds[1:]):
        for old, new in zip(before.workflow.vocabularies, now.workflow.vocabularies):
            kept, lived = new[: len(old)], old != TOMBSTONE
            assert (kept[lived & (kept != TOMBSTONE)] == old[lived & (kept != TOMBSTONE)]).all()


def test_the_live_categories_are_those_of_the_last_windows(history):
    rounds, rows = history
    for number, this in enumerate(rounds):
        recent = rows[max(0, number - TTL_ROUNDS) : number + 1]
        for column, vocabulary in enumerate(this.workflow.vocabularies[:CHURNING]):
            # Active for six windows, three sightings in each: known from the second on, until three windows unseen.
            known = {c for c, n in Counter(np.concatenate(rows[: number + 1])[:, column].tolist()).items() if n > 3}
            seen = set(np.concatenate(recent)[:, column].tolist())
            assert set(vocabulary[vocabulary != TOMBSTONE].tolist()) == known & seen


def test_ids_tables_and_state_are_bounded_by_the_worlds_rate(history):
    rounds, _ = history
    # Alive at once: what is active, and what was born for one window each of the time to live. Between two rounds
    # as many ids more are needed as enter before those that leave are free.
    most_ids = FIRST_ID + ACTIVE + (TTL_ROUNDS + 1) * BORN
    # Waiting: the newest, seen in one window so far; those that only the very first window held; and the rare.
    most_candidates = 2 * BORN + (TTL_ROUNDS + 1) * RARE
    unbounded = FIRST_ID + ACTIVE + (ROUNDS - 2) * BORN
    steady = NUM_CATEGORICAL - CHURNING
    for this in rounds:
        sizes = this.workflow.slot_sizes
        assert max(sizes[:CHURNING]) <= most_ids < unbounded / 4
        columns = load_columns(this.folder / "workflow", this.workflow)
        assert max(len(c.candidates.categories) for c in columns[:CHURNING]) <= most_candidates
        rows = CHURNING * most_ids + steady * (FIRST_ID + 5)
        assert (this.folder / "weights" / WEIGHTS_FILE).stat().st_size <= 4 * DIM * rows + 10_000
        numbers = rows + 3 * CHURNING * most_candidates
        names = 4 * NUM_CATEGORICAL * 400  # the archive's own headers, per array
        assert (this.folder / "workflow" / ADMISSION_FILE).stat().st_size <= 8 * numbers + names
    assert rounds[-1].workflow.slot_sizes[:CHURNING] == rounds[ROUNDS // 2].workflow.slot_sizes[:CHURNING]
    sizes = [sum(path.stat().st_size for path in this.folder.rglob("*") if path.is_file()) for this in rounds]
    assert max(sizes) <= 1.02 * sizes[ROUNDS // 2], "of everything that a round keeps"


def test_every_row_is_carried_started_afresh_or_empty(history):
    rounds, _ = history
    entered = cleared = 0
    for before, now in zip(rounds, rounds[1:]):
        was = before.weights()
        grown = open_model(now.folder / "grown", now.workflow.slot_sizes)
        for column, (old, new) in enumerate(zip(before.workflow.vocabularies, now.workflow.vocabularies)):
            old_at, new_at = offsets(before.workflow)[column], offsets(now.workflow)[column]
            for position, category in enumerate(new.tolist()):
                row, then = new_at + FIRST_ID + position, old[position] if position < len(old) else TOMBSTONE
                moments = np.array([moment.table[row] for moment in grown.moments])
                if category == TOMBSTONE:
                    assert not grown.weights.table[row].any()
                    assert not moments.any()
                    cleared += then != TOMBSTONE
                elif category == then:
                    assert (grown.weights.table[row] == was.weights.table[old_at + FIRST_ID + position]).all()
                    assert (moments == [m.table[old_at + FIRST_ID + position] for m in was.moments]).all()
                else:
                    assert then == TOMBSTONE
                    assert (grown.weights.table[row] == was.weights.table[old_at + OOV_ID]).all()
                    assert not moments.any()
                    entered += 1
    assert entered > (ROUNDS - 5) * CHURNING * BORN
    assert cleared > (ROUNDS - 10) * CHURNING * BORN


def test_ids_are_used_again_and_not_in_the_round_that_freed_them(history):
    rounds, _ = history
    reused = 0
    for before, now in zip(rounds, rounds[1:]):
        for old, new in zip(before.workflow.vocabularies[:CHURNING], now.workflow.vocabularies):
            kept = new[: len(old)]
            reused += ((old == TOMBSTONE) & (kept != TOMBSTONE)).sum()
            if (kept[old == TOMBSTONE] == TOMBSTONE).any():
                assert len(new) == len(old), "an id was appended while another was free"
    assert reused > (ROUNDS - 15) * CHURNING * BORN


@pytest.mark.parametrize("number", [1, 20, 49])
def test_the_served_graph_scores_known_rows_bit_for_bit_alike_directly_after_growth(history, number):
    rounds, _ = history
    before, now = rounds[number - 1], rounds[number]
    grown = open_model(now.folder / "grown", now.workflow.slot_sizes)
    random, columns = np.random.default_rng(number), []
    for old, new in zip(before.workflow.vocabularies, now.workflow.vocabularies):
        lives_on = (old != TOMBSTONE) & (old == new[: len(old)])
        columns.append(random.choice(np.r_[-1, old[lives_on]], 400))
    inputs = {DENSE_INPUT: random.random((400, 13), np.float32), CATEGORICAL_INPUT: np.stack(columns, 1)}
    first, second = (
        open_built(workflow, [stored.weights.table], network_of(stored)).run(None, inputs)[0]
        for workflow, stored in ((before.workflow, before.weights()), (now.workflow, grown))
    )
    assert np.ptp(first) > 0.1
    np.testing.assert_array_equal(first.view(np.int32), second.view(np.int32))


def test_a_category_that_returns_is_counted_again_and_gets_a_fresh_row(history, tmp_path):
    rounds, rows = history
    gone, last = int(World().active(1, 0)[0]), rounds[-1]
    assert gone in rounds[2].workflow.vocabularies[0]
    assert gone not in last.workflow.vocabularies[0]
    for turn, sightings in enumerate((THRESHOLD - 1, 1)):
        back = rows[-1].copy()
        back[:sightings, 0] = gone
        last = run_round(last, ROUNDS + turn, back, tmp_path / str(turn))
        assert (gone in last.workflow.vocabularies[0]) == (turn == 1)
    id_ = FIRST_ID + int(np.flatnonzero(last.workflow.vocabularies[0] == gone)[0])
    grown = open_model(last.folder / "grown", last.workflow.slot_sizes)
    before = Round(tmp_path / "0", FeatureWorkflow.load(tmp_path / "0" / "workflow"))
    np.testing.assert_array_equal(grown.weights.table[id_], before.weights().weights.table[OOV_ID])
    assert not any(moment.table[id_].any() for moment in grown.moments)


def test_going_back_to_an_older_model_is_exact(history, tmp_path):
    rounds, rows = history
    kept = sha256_tree(rounds[30].folder)
    moved = tmp_path / "restored"
    shutil.copytree(rounds[30].folder, moved)
    again = run_round(Round(moved, FeatureWorkflow.load(moved / "workflow")), 31, rows[31], tmp_path / "again")
    assert sha256_tree(again.folder) == sha256_tree(rounds[31].folder)
    assert sha256_tree(rounds[30].folder) == kept
