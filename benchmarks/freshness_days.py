"""The freshness study's simulated days: every policy's model scores the traffic before it learns from it.

The order is that of production: rows of a quarter of an hour are scored by the model that is live, then join the
policy's window; when a policy's interval is over, it learns from its window and its new model scores what comes after
(progressive validation: no row is scored by a model that has seen it). A round learns as the pipeline's steps do:
vocabularies come from preprocessing's own functions, files from `contracts`, the fit from training; NumPy counts the
categories in place of NVTabular, and there is no model store. Which days and policies is `benchmarks.freshness`'.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, MISSING_CATEGORY
from components.contracts.hugectr_folder import write_file_list
from components.contracts.manifests import Model, TrainingSet
from components.contracts.workflow import FeatureWorkflow
from components.models.configs import NetworkConfig
from components.preprocessing.vocabularies import AdmissionRules, Column, next_column, unseen_column
from components.training.checkpoint import START
from components.training.config import TrainingSettings
from components.training.engine import Engine, make_engine
from components.training.fit import FitJob, fit
from components.training.metrics_sink import MemorySink
from components.training.rows import Rows as EncodedRows
from components.training.start import continue_from
from inference_client.simulation.slow_drift import DriftingWorld, SlowDrift
from inference_client.simulation.world import World, WorldRows

BACKEND = "pytorch"
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
    drift = SlowDrift(seed=seed)
    if is_still:
        drift = replace(drift, columns=(), new_category_columns=())
    return DriftingWorld(world=World.create(seed), drift=drift)


class _Policy:
    """A policy at work: its model, and the rows that it has not learned yet."""

    def __init__(self, learner: Learner, interval: float) -> None:
        self.learner, self._interval, self._due = learner, interval, interval
        self._window: list[WorldRows] = []

    def score(self, rows: WorldRows) -> NDArray[np.float64]:
        """Scores of rows that nobody has learned."""
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
        earlier = joined([rows for _, rows in _traffic(world, days, range(days.earlier_hours))])
        first = Learner(_make_folder(Path(scratch, "first")), learning)
        first.learn(earlier, hour=days.earlier_hours)
        auc = first.early_stopping["auc"]
        say(f"first model: {len(earlier.label):,} rows in {first.seconds:.0f} s, auc {auc:.4f} on the newest of them")
        policies = {
            name: _Policy(first.copy(_make_folder(Path(scratch, name.replace(" ", "-")))), interval)
            for name, interval in days.intervals.items()
        }
        for end, rows in _traffic(world, days, range(days.earlier_hours, days.earlier_hours + days.hours)):
            hour = end - days.earlier_hours
            hours.append(np.full(len(rows.label), int(np.ceil(hour)) - 1))
            labels.append(rows.label)
            scores[BEST].append(rows.probability)
            scores[EXACT].append(exact.probability_of(rows.dense, rows.categorical))
            for name, policy in policies.items():
                scores[name].append(policy.score(rows))
                # Nothing would be scored by what is learned at the very end.
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


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _traffic(world: DriftingWorld, days: Days, hours: range) -> Iterator[tuple[float, WorldRows]]:
    """(End in hours, rows) of each of the world's steps in `hours`; the same for every run of a seed."""
    step = world.drift.step_minutes / 60.0
    count = round(days.rows_per_hour * step)
    for number in range(round(hours.start / step), round(hours.stop / step)):
        random = np.random.default_rng([days.seed, 21, number])
        yield (number + 1) * step, world.at(number * step).draw(count, random)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How every round learns; the same for all policies, so that they differ in when they learn alone."""

    config: NetworkConfig
    first: TrainingSettings
    """Of the fit from scratch."""
    round: TrainingSettings
    """Of the rounds after it."""
    rules: AdmissionRules


def joined(rows: list[WorldRows]) -> WorldRows:
    """Rows one after another."""
    return WorldRows(*(np.concatenate(columns) for columns in zip(*rows)))


class Learner:
    """A model, and the vocabularies that it was trained with."""

    def __init__(self, folder: Path, learning: Learning) -> None:
        """Knows nothing yet; keeps the newest round's files in `folder`."""
        self._folder, self._learning = folder, learning
        self._columns: list[Column] = [unseen_column(np.zeros(0, np.int64)) for _ in CATEGORICAL]
        self._features: FeatureWorkflow | None = None
        self._model: Model | None = None
        self._engine: Engine | None = None
        self.num_rounds = self.num_models = 0
        self.seconds = 0.0
        """Spent in rounds so far: counting, encoding, writing, fitting."""

    def copy(self, folder: Path) -> Learner:
        """Another learner that goes on from here in its own folder, with the same model."""
        other = Learner(folder, self._learning)
        other._columns, other._features, other._model = self._columns, self._features, self._model
        other._engine = self._engine
        return other

    @property
    def early_stopping(self) -> Mapping[str, float | None]:
        """`auc` and `log_loss` of the newest model on the rows that stopped its fit."""
        return self._model.early_stopping if self._model else {}

    def score(self, rows: WorldRows) -> NDArray[np.float32]:
        """Click probabilities [n] of the newest model."""
        assert self._features is not None, "a learner scores once it has learned"
        assert self._engine is not None
        return self._engine.score(_encoded(self._features, rows))

    def learn(self, rows: WorldRows, *, hour: float) -> bool:
        """Whether a round on the rows of a window that ends at `hour`, oldest row first, made another model.

        It makes none where the newest rows of the window prefer the parent; nothing has happened then.
        """
        began = time.perf_counter()
        try:
            return self._round(rows, round(hour * 3600e6))
        finally:
            self.seconds += time.perf_counter() - began
            self.num_rounds += 1

    def _round(self, rows: WorldRows, microseconds: int) -> bool:
        columns = [
            next_column(column, *_counted(rows.categorical[:, i]), now=microseconds, rules=self._learning.rules)
            for i, column in enumerate(self._columns)
        ]
        means, stds = (self._features.means, self._features.stds) if self._features else _moments(rows.dense)
        features = FeatureWorkflow(
            vocabularies=tuple(column.vocabulary for column in columns),
            fill=0.0,
            clip_min=0.0,
            means=means,
            stds=stds,
            frequency_threshold=self._learning.rules.frequency_threshold,
        )
        folder = self._folder / f"round-{self.num_rounds:04d}"
        model, engine = self._fitted(folder, features, rows)
        if self._model is not None and model.optimizer_step == self._model.optimizer_step:
            shutil.rmtree(folder)
            return False
        # The files of the previous round are no longer needed.
        for older in self._folder.iterdir():
            if older != folder:
                shutil.rmtree(older)
        self._columns, self._features, self._model, self._engine = columns, features, model, engine
        self.num_models += 1
        return True

    def _fitted(self, folder: Path, features: FeatureWorkflow, rows: WorldRows) -> tuple[Model, Engine]:
        (folder / Model.WORKFLOW).mkdir(parents=True)
        features.save(folder / Model.WORKFLOW)
        training_set = _training_set(folder, features, rows, parent=self._model)
        checkpoint, config = folder / "checkpoint", self._learning.config
        settings = self._learning.round if self._model else self._learning.first
        start = continue_from(self._model, training_set, config, into=checkpoint / START) if self._model else None
        engine = make_engine(BACKEND, config, features.slot_sizes, settings=settings, scratch=folder / "scratch")
        job = FitJob(
            training_set=training_set, config=config, settings=settings, start=start, checkpoint_path=checkpoint
        )
        result = fit(job, engine, MemorySink())
        result.weights.rename(folder / Model.WEIGHTS)
        shutil.rmtree(checkpoint)
        model = Model(
            model_id=folder.name,
            uri=folder.absolute().as_uri(),
            backend=BACKEND,
            config=config.as_document(),
            slot_sizes=training_set.slot_sizes,
            parent_model_id=self._model.model_id if self._model else None,
            seed=settings.seed,
            num_train_rows=training_set.num_train_rows,
            optimizer_step=result.optimizer_step,
            early_stopping=dict(result.early_stopping),
            last_event_time="",
            raw_digest="",
            sha256={},
            created_at="",
        )
        return model, engine


def _encoded(features: FeatureWorkflow, rows: WorldRows) -> EncodedRows:
    return EncodedRows(
        labels=rows.label.astype(np.float32),
        dense=features.encode_dense(rows.dense),
        ids=features.encode_categorical(rows.categorical).astype(np.int32),
    )


def _counted(raw: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Categories of a column and their counts."""
    seen, counts = np.unique(raw, return_counts=True)
    has_category = seen != MISSING_CATEGORY
    return seen[has_category], counts[has_category].astype(np.int64)


def _moments(dense: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Means and standard deviations of the logged values, as preprocessing fits them in a first round."""
    logged = np.log1p(np.maximum(np.nan_to_num(dense, nan=0.0), 0.0), dtype=np.float64)
    return logged.mean(axis=0).astype(np.float32), logged.std(axis=0, ddof=1).astype(np.float32)


def _training_set(folder: Path, features: FeatureWorkflow, rows: WorldRows, *, parent: Model | None) -> TrainingSet:
    encoded = _encoded(features, rows)
    train = folder / "train"
    train.mkdir()
    columns = {LABEL: encoded.labels}
    columns |= {name: np.ascontiguousarray(encoded.dense[:, i]) for i, name in enumerate(DENSE)}
    columns |= {name: encoded.ids[:, i].astype(np.int64) for i, name in enumerate(CATEGORICAL)}
    pq.write_table(pa.table(columns), train / "part-00000.parquet")
    write_file_list(train, ["part-00000.parquet"], final=train)
    return TrainingSet(
        train_uri=train.absolute().as_uri(),
        holdout_uri=train.absolute().as_uri(),
        num_train_rows=len(encoded),
        num_holdout_rows=0,
        slot_sizes=features.slot_sizes,
        new_categories=[],
        workflow_uri=(folder / Model.WORKFLOW).absolute().as_uri(),
        raw_digest="",
        last_event_time="",
        parent_model_uri=parent.uri if parent else None,
        tombstones=features.tombstones,
    )
