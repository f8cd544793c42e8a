"""Fifty rounds of a world whose categories come and go: ids and state stay as small as the world is.

Preprocessing's vocabularies and the workflow's folder, without NVTabular: a round's rows are counted by hand. How a
table grows with them is `components/training/test_start`'s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.vocabulary_changes import vocabulary_changes
from components.contracts.workflow import FIRST_ID, TOMBSTONE, FeatureWorkflow
from components.preprocessing.parent import ADMISSION_FILE, load_columns, save_columns
from components.preprocessing.settings import PreprocessingSettings
from components.preprocessing.vocabularies import next_column, unseen_column
from tests.support.workflows import workflow_of

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
    """One round's folder, and what it knew."""

    folder: Path
    workflow: FeatureWorkflow


def run_round(parent: Round | None, number: int, rows, folder: Path) -> Round:
    """A folder made from the parent's alone, whose ids go on from the parent's."""
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
        vocabulary_changes(parent.workflow, workflow)  # refuses an id that means another category
    return Round(folder, workflow)


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


def test_the_live_categories_are_those_of_the_last_windows(history):
    rounds, rows = history
    for number, this in enumerate(rounds):
        recent = rows[max(0, number - TTL_ROUNDS) : number + 1]
        for column, vocabulary in enumerate(this.workflow.vocabularies[:CHURNING]):
            # Active for six windows, three sightings in each: known from the second on, until three windows unseen.
            known = {c for c, n in Counter(np.concatenate(rows[: number + 1])[:, column].tolist()).items() if n > 3}
            seen = set(np.concatenate(recent)[:, column].tolist())
            assert set(vocabulary[vocabulary != TOMBSTONE].tolist()) == known & seen


def test_ids_and_state_are_bounded_by_the_worlds_rate(history):
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
        numbers = CHURNING * most_ids + steady * (FIRST_ID + 5) + 3 * CHURNING * most_candidates
        names = 4 * NUM_CATEGORICAL * 400  # the archive's own headers, per array
        assert (this.folder / "workflow" / ADMISSION_FILE).stat().st_size <= 8 * numbers + names
    assert rounds[-1].workflow.slot_sizes[:CHURNING] == rounds[ROUNDS // 2].workflow.slot_sizes[:CHURNING]
    sizes = [sum(path.stat().st_size for path in this.folder.rglob("*") if path.is_file()) for this in rounds]
    assert max(sizes) <= 1.02 * sizes[ROUNDS // 2], "of everything that a round keeps"
