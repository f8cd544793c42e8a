"""The simulated days: traffic flows, each policy's model scores it before it learns from it, rounds fall due.

The order is that of production: rows of a quarter of an hour are scored by the model that is live, then join the
policy's window; when a policy's interval is over, it learns from its window and its new model scores what comes after
(progressive validation: no row is scored by a model that has seen it). How a round learns is `rounds`'.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.freshness_study.rounds import Learner, Learning, joined
from inference_client.simulation.slow_drift import DriftingWorld, SlowDrift
from inference_client.simulation.world import World, WorldRows

FROZEN = "frozen"
BEST = "best possible"
EXACT = "exact truth of hour 0"
"""Not a model: the truth of the moment at which the frozen model was trained. What it loses, drift alone takes."""


@dataclass(frozen=True, kw_only=True)
class Days:
    """How long, how much, and who learns when."""

    earlier_hours: int
    """Traffic before hour 0, which trains the first model."""
    hours: int
    """Traffic that is scored."""
    rows_per_hour: int
    intervals: dict[str, float]
    """Per policy, hours between two rounds; infinite = never."""
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """All scored rows, in time order, n of them."""

    hour: NDArray[np.int64]
    """[n], from 0."""
    label: NDArray[np.int32]
    by: dict[str, NDArray[np.float64]]
    """Per policy, and for `BEST` and `EXACT`: scores [n]."""
    num_rounds: dict[str, int]
    """Per policy, after the first fit."""
    num_models: dict[str, int]
    """Of those rounds, the ones that made a model."""
    seconds: dict[str, float]
    """Per policy, in those rounds."""


def drifting_world(seed: int, *, is_still: bool = False) -> DriftingWorld:
    """The study's world; a still one differs in nothing but that nothing moves."""
    standing = {"columns": (), "new_category_columns": ()} if is_still else {}
    return DriftingWorld(world=World.create(seed), drift=SlowDrift(seed=seed, **standing))


class _Policy:
    """One policy under way: its model, and the rows that it has not learnt."""

    def __init__(self, learner: Learner, interval: float) -> None:
        self.learner, self._interval, self._due = learner, interval, interval
        self._window: list[WorldRows] = []

    def score(self, rows: WorldRows) -> NDArray[np.float64]:
        """Scores of rows that nobody has learnt."""
        return self.learner.score(rows).astype(np.float64)

    def take(self, rows: WorldRows, *, hour: float, end: float) -> None:
        """Takes rows that were scored, and learns the window if its round is due at `hour` of the policy's time.

        Rows of a round that made no model stay: the next one tries them again.
        """
        if self._interval == np.inf:
            return
        self._window.append(rows)
        if hour + 1e-9 >= self._due:
            self._due += self._interval
            if self.learner.learn(joined(self._window), hour=end):
                self._window = []


def run_days(
    world: DriftingWorld, days: Days, learning: Learning, *, say: Callable[[str], None] = lambda line: None
) -> Scores:
    """Scores of every policy over the same rows."""
    exact = world.at(days.earlier_hours)
    hours: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int32]] = []
    scores: dict[str, list[NDArray[np.float64]]] = {name: [] for name in (*days.intervals, BEST, EXACT)}
    with tempfile.TemporaryDirectory(prefix="freshness-") as scratch:
        policies = _policies(world, days, learning, Path(scratch), say)
        for end, rows in _traffic(world, days, days.earlier_hours, days.earlier_hours + days.hours):
            hour = end - days.earlier_hours
            hours.append(np.full(len(rows.label), int(np.ceil(hour)) - 1))
            labels.append(rows.label)
            scores[BEST].append(rows.probability)
            scores[EXACT].append(exact.probability_of(rows.dense, rows.categorical))
            for name, policy in policies.items():
                scores[name].append(policy.score(rows))
                # Of what is learnt at the very end nothing would be scored.
                if hour < days.hours:
                    policy.take(rows, hour=hour, end=end)
            if hour % 6 == 0:
                made = [f"{name} {p.learner.num_models} of {p.learner.num_rounds}" for name, p in policies.items()]
                say(f"hour {hour:.0f}; models of rounds: {', '.join(made)}")
    learners = {name: policy.learner for name, policy in policies.items()}
    return Scores(
        hour=np.concatenate(hours),
        label=np.concatenate(labels),
        by={name: np.concatenate(parts) for name, parts in scores.items()},
        num_rounds={name: learner.num_rounds for name, learner in learners.items()},
        num_models={name: learner.num_models for name, learner in learners.items()},
        seconds={name: learner.seconds for name, learner in learners.items()},
    )


def _policies(
    world: DriftingWorld, days: Days, learning: Learning, scratch: Path, say: Callable[[str], None]
) -> dict[str, _Policy]:
    """All policies, each with the first model."""
    first = Learner(_made(scratch / "first"), learning)
    earlier = joined([rows for _, rows in _traffic(world, days, 0, days.earlier_hours)])
    first.learn(earlier, hour=days.earlier_hours)
    auc = first.early_stopping["auc"]
    say(f"first model: {len(earlier.label):,} rows in {first.seconds:.0f} s, auc {auc:.4f} on the newest of them")
    return {
        name: _Policy(first.copy(_made(scratch / name.replace(" ", "-"))), interval)
        for name, interval in days.intervals.items()
    }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _traffic(world: DriftingWorld, days: Days, begin: float, end: float) -> Iterator[tuple[float, WorldRows]]:
    """(End in hours, rows) of each of the world's steps between two hours; the same for every run of a seed."""
    step = world.drift.step_minutes / 60.0
    count = round(days.rows_per_hour * step)
    for number in range(round(begin / step), round(end / step)):
        random = np.random.default_rng([days.seed, 21, number])
        yield (number + 1) * step, world.at(number * step).draw(count, random)
