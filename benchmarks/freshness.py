"""What fresh models gain in a drifting world: `make benchmark-freshness`.

Simulated traffic over two days after a first model; policies differ in when they retrain and in nothing else. Prints
the mean AUC gain over the frozen model, beside the gains that Monolith's authors published; `--output docs` writes the
figures and the chart there. docs/freshness.md says what was chosen, and when; the world is
`inference_client.simulation.slow_drift`'s.

The order is that of production: rows of a quarter of an hour are scored by the model that is live, then join the
policy's window; when a policy's interval is over, it learns from its window and its new model scores what comes after
(progressive validation: no row is scored by a model that has seen it). A round learns as the pipeline's steps do:
vocabularies come from preprocessing's own functions, files from `contracts`, the fit from training; NumPy counts the
categories in place of NVTabular, and there is no model store.

Gains are in AUC points: 1 point = 0.01 of AUC. Each is the mean over hours of the difference within an hour, since
rows of different hours were scored by different models. Its interval is DeLong's: hours hold different rows, so the
variances of the hours' paired differences add up. It says how sure these rows make us of these models' difference in
this world; another seed is another world.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.charts.line_chart import HEIGHT, WIDTH, Line, line_chart
from components.contracts.criteo import CATEGORICAL, CRITEO, DENSE, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.features import MISSING_CATEGORY
from components.contracts.hugectr_folder import write_file_list
from components.contracts.manifests import Model, TrainingSet
from components.contracts.metrics import Z_95, auc_difference, normalized_entropy, roc_auc
from components.contracts.raw_rows import LABEL
from components.contracts.workflow import FeatureWorkflow
from components.models import share_cores
from components.models.configs import DcnConfig
from components.preprocessing.settings import PreprocessingSettings
from components.preprocessing.vocabularies import Column, next_column, unseen_column
from components.training.checkpoint import START
from components.training.config import TrainingSettings
from components.training.engine import Engine, make_engine
from components.training.fit import FitJob, fit
from components.training.rows import Rows as EncodedRows
from components.training.start import continue_from
from inference_client.simulation.slow_drift import DriftingWorld, SlowDrift
from inference_client.simulation.world import World, WorldRows

BACKEND = "pytorch"
FROZEN = "frozen"
CONTROL = "every 5 h"
"""The policy that also runs in a world where nothing moves: what it gains there comes from more rows."""
BEST = "best possible"
EXACT = "exact truth of hour 0"
"""Not a model: the truth of the moment at which the frozen model was trained. What it loses, drift alone takes."""
POLICIES = {FROZEN: math.inf, CONTROL: 5.0, "every 1 h": 1.0, "every 30 min": 0.5}
"""Hours between two rounds."""
PUBLISHED = {"every 5 h": 0.24, "every 1 h": 0.34, "every 30 min": 0.37}
"""Monolith (Liu et al. 2022, arXiv 2209.07663), table 2: mean AUC of DeepFM on Criteo's rows, trained on from batch
training with parameters synchronised at this interval, minus that of batch training alone; in AUC points."""
COLORS = ("#dc2626", "#d97706", "#2563eb", "#059669", "#777")
SMOOTHED_HOURS = 3
"""Hours whose mean is drawn: a single hour's clicks make a policy's AUC uncertain by a tenth of a point."""


@dataclass(frozen=True, kw_only=True)
class Days:
    """How long, how much, and who learns when."""

    hours: int
    """Traffic before hour 0, which trains the first model, and as long after it, which is scored."""
    rows_per_hour: int
    intervals: dict[str, float]
    """Per policy, hours between two rounds, a multiple of the world's steps; infinite = never."""
    seed: int


CONFIG = DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL)
RULES = PreprocessingSettings(frequency_threshold=5)


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


class Learner:
    """A model, and the vocabularies that it was trained with."""

    def __init__(self, scratch: Path, settings: TrainingSettings | None = None) -> None:
        """Knows nothing yet; keeps the newest round's files in a folder of its own below `scratch`."""
        self._scratch = scratch
        self._settings = settings or TrainingSettings()
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._columns: list[Column] = [unseen_column(np.zeros(0, np.int64)) for _ in CATEGORICAL]
        self._features: FeatureWorkflow | None = None
        self._model: Model | None = None
        self._engine: Engine | None = None
        self.num_rounds = 0

    def copy(self) -> Learner:
        """Another learner that goes on from here in its own folder, with the same model."""
        other = copy.copy(self)
        other._folder = Path(tempfile.mkdtemp(dir=self._scratch))
        other.num_rounds = 0
        return other

    @property
    def slot_sizes(self) -> list[int]:
        """Rows of the table, by column."""
        assert self._features is not None, "a learner has a table once it has learned"
        return self._features.slot_sizes

    def encoded(self, rows: WorldRows) -> EncodedRows:
        """The rows as the newest model takes them."""
        assert self._features is not None, "a learner encodes once it has learned"
        return _encoded(self._features, rows)

    def score(self, rows: WorldRows) -> NDArray[np.float32]:
        """Click probabilities [n] of the newest model."""
        assert self._engine is not None, "a learner scores once it has learned"
        return self._engine.score(self.encoded(rows))

    def learn(self, rows: WorldRows, *, hour: float) -> None:
        """Makes another model by a round on the rows of a window that ends at `hour`, oldest row first."""
        now = round(hour * 3600e6)
        columns = [
            next_column(column, *_counted(rows.categorical[:, i]), now=now, rules=RULES)
            for i, column in enumerate(self._columns)
        ]
        means, stds = (self._features.means, self._features.stds) if self._features else _moments(rows.dense)
        features = FeatureWorkflow(
            features=CRITEO,
            vocabularies=tuple(column.vocabulary for column in columns),
            fill=0.0,
            clip_min=0.0,
            means=means,
            stds=stds,
            frequency_threshold=RULES.frequency_threshold,
        )
        folder = self._folder / f"round-{self.num_rounds:04d}"
        self.num_rounds += 1
        model, engine = self._fitted(folder, features, rows)
        for older in self._folder.iterdir():
            if older != folder:
                shutil.rmtree(older)
        self._columns = columns
        self._features = features
        self._model = model
        self._engine = engine

    def _fitted(self, folder: Path, features: FeatureWorkflow, rows: WorldRows) -> tuple[Model, Engine]:
        (folder / Model.WORKFLOW).mkdir(parents=True)
        features.save(folder / Model.WORKFLOW)
        training_set = _training_set(folder, features, rows, parent=self._model)
        checkpoint = folder / "checkpoint"
        settings = self._settings
        start = continue_from(self._model, training_set, CONFIG, into=checkpoint / START) if self._model else None
        engine = make_engine(BACKEND, CONFIG, features.slot_sizes, settings=settings, scratch=folder / "scratch")
        job = FitJob(
            training_set=training_set, config=CONFIG, settings=settings, start=start, checkpoint_path=checkpoint
        )
        result = fit(job, engine, emit=lambda _: None)
        result.weights.rename(folder / Model.WEIGHTS)
        engine.restore(folder / Model.WEIGHTS)
        shutil.rmtree(checkpoint)
        model = Model(
            model_id=folder.name,
            uri=folder.absolute().as_uri(),
            backend=BACKEND,
            config=CONFIG.as_document(),
            slot_sizes=training_set.slot_sizes,
            parent_model_id=self._model.model_id if self._model else None,
            seed=settings.seed,
            num_train_rows=training_set.num_train_rows,
            optimizer_step=result.optimizer_step,
            progressive=dict(result.progressive),
            last_event_time="",
            last_learned_time="",
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
        last_learned_time="",
        parent_model_uri=parent.uri if parent else None,
        tombstones=features.tombstones,
    )


def drifting_world(seed: int, *, is_still: bool = False) -> DriftingWorld:
    """The study's world; a still one differs in nothing but that nothing moves."""
    drift = SlowDrift(seed=seed)
    if is_still:
        drift = replace(drift, columns=(), new_category_columns=())
    return DriftingWorld(world=World.create(seed), drift=drift)


def _traffic(world: DriftingWorld, days: Days, hours: range) -> Iterator[tuple[float, WorldRows]]:
    """(End in hours, rows) of each of the world's steps in `hours`; the same for every run of a seed."""
    step = world.drift.step_minutes / 60.0
    count = round(days.rows_per_hour * step)
    for number in range(round(hours.start / step), round(hours.stop / step)):
        random = np.random.default_rng([days.seed, 21, number])
        yield (number + 1) * step, world.at(number * step).draw(count, random)


def _joined(rows: list[WorldRows]) -> WorldRows:
    return WorldRows(*(np.concatenate(columns) for columns in zip(*rows)))


def run_days(world: DriftingWorld, days: Days) -> Scores:
    """Scores of every policy over the same rows."""
    exact = world.at(days.hours)
    hours: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int32]] = []
    scores: dict[str, list[NDArray[np.float64]]] = {name: [] for name in (*days.intervals, BEST, EXACT)}
    windows: dict[str, list[WorldRows]] = {name: [] for name in days.intervals}
    with tempfile.TemporaryDirectory(prefix="freshness-") as scratch:
        first = Learner(Path(scratch))
        first.learn(_joined([rows for _, rows in _traffic(world, days, range(days.hours))]), hour=days.hours)
        print("the first model has learned", flush=True)
        learners = {name: first.copy() for name in days.intervals}
        for end, rows in _traffic(world, days, range(days.hours, 2 * days.hours)):
            hour = end - days.hours
            hours.append(np.full(len(rows.label), math.ceil(hour) - 1))
            labels.append(rows.label)
            scores[BEST].append(rows.probability)
            scores[EXACT].append(exact.probability_of(rows.dense, rows.categorical))
            for name, learner in learners.items():
                scores[name].append(learner.score(rows).astype(np.float64))
                if days.intervals[name] < math.inf:
                    windows[name].append(rows)
                # Nothing would be scored by what is learned at the very end.
                is_due = hour % days.intervals[name] == 0 and hour < days.hours
                if is_due:
                    learner.learn(_joined(windows[name]), hour=end)
                    windows[name] = []
            if hour % 6 == 0:
                made = [f"{name} {each.num_rounds}" for name, each in learners.items()]
                print(f"hour {hour:.0f}; rounds: {', '.join(made)}", flush=True)
    return Scores(
        hour=np.concatenate(hours),
        label=np.concatenate(labels),
        by={name: np.concatenate(parts) for name, parts in scores.items()},
        num_rounds={name: learner.num_rounds for name, learner in learners.items()},
    )


def figures(scores: Scores) -> dict[str, Any]:
    """All figures of one run as JSON-ready values."""
    names = [*scores.num_rounds]
    hourly = {
        name: [roc_auc(scores.label[rows], by[rows]) for rows in _rows_by_hour(scores)]
        for name, by in scores.by.items()
    }
    return {
        "rows": len(scores.label),
        "clicks": int(scores.label.sum()),
        "hourly_auc": hourly,
        "mean_auc": {name: float(np.mean(np.array(aucs, float))) for name, aucs in hourly.items()},
        "gain_over_frozen": {name: gain(scores, name, FROZEN) for name in names if name != FROZEN},
        "gain_over_slower": {
            name: gain(scores, name, slower) for slower, name in zip(names, names[1:]) if slower != FROZEN
        },
        "below_best": {name: gain(scores, BEST, name) for name in scores.by if name != BEST},
        "normalized_entropy": {name: normalized_entropy(scores.label, by) for name, by in scores.by.items()},
        "rounds": scores.num_rounds,
    }


def gain(scores: Scores, name: str, reference: str) -> dict[str, float]:
    """Mean over hours of AUC(name) - AUC(reference) in points, with its 95 % interval."""
    differences, variances = [], []
    for rows in _rows_by_hour(scores):
        # The world draws every row for itself.
        groups = range(rows.start, rows.stop)
        found = auc_difference(scores.label[rows], scores.by[name][rows], scores.by[reference][rows], groups=groups)
        assert found is not None, "an hour has clicks and other rows"
        differences.append(found.auc)
        variances.append(found.standard_error**2)
    mean, error = 100.0 * np.mean(differences), 100.0 * np.sqrt(np.sum(variances)) / len(variances)
    return {"points": float(mean), "low": float(mean - Z_95 * error), "high": float(mean + Z_95 * error)}


def _rows_by_hour(scores: Scores) -> list[slice]:
    """The rows of each hour; they lie in time order."""
    edges = np.searchsorted(scores.hour, np.arange(scores.hour[-1] + 2)).tolist()
    return [slice(start, end) for start, end in zip(edges, edges[1:])]


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    study, control = result["study"], result["control"]
    lines = [
        f"{study['rows']:,} rows scored, {study['clicks']:,} clicks; gains in AUC points (0.01), mean over "
        f"{len(study['hourly_auc'][FROZEN])} hours [95 %]",
        f"{'retrained':<14}{'mean AUC':>9}{'gain over frozen':>28}{'Monolith':>10}{'below best':>12}{'rounds':>8}",
    ]
    for name in study["rounds"]:
        gained = _interval(study["gain_over_frozen"][name]) if name != FROZEN else ""
        published = f"{PUBLISHED[name]:+.2f}" if name in PUBLISHED else ""
        below = study["below_best"][name]["points"]
        lines.append(
            f"{name:<14}{study['mean_auc'][name]:>9.4f}{gained:>28}{published:>10}{below:>12.2f}"
            f"{study['rounds'][name]:>8}"
        )
    for name, found in study["gain_over_slower"].items():
        lines.append(f"{name} over the next slower: {_interval(found)}")
    entropy = study["normalized_entropy"]
    return "\n".join(
        [
            *lines,
            f"exact truth, as old as the frozen model: {study['below_best'][EXACT]['points']:.2f} below best; "
            f"normalized entropy {100 * (entropy[EXACT] / entropy[BEST] - 1):+.2f} %",
            f"nothing moves, {CONTROL}: {_interval(control['gain_over_frozen'][CONTROL])} over frozen",
        ]
    )


def _interval(found: dict[str, float]) -> str:
    return f"{found['points']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def chart(result: dict[str, Any]) -> str:
    """An SVG file of AUC points to the best possible by hour, from the study's JSON document."""
    hourly = result["study"]["hourly_auc"]
    lines = []
    for color, name in zip(COLORS, [*result["study"]["rounds"], EXACT]):
        points = 100.0 * (np.array(hourly[name]) - np.array(hourly[BEST]))
        # Hours at the ends have fewer neighbours.
        sums, counts = (np.convolve(each, np.ones(SMOOTHED_HOURS), "same") for each in (points, np.ones(len(points))))
        lines.append(Line(label=name, color=color, x=[*np.arange(0.5, len(points))], y=(sums / counts).tolist()))
    title = f"AUC points to the best possible, mean of {SMOOTHED_HOURS} hours"
    drawn = line_chart(lines, y_label=title, x_unit="h")
    body = drawn[drawn.index("<svg") : drawn.index("</svg>")].partition(">")[2]
    legend = "".join(
        f'<text x="{120 + 150 * place}" y="14" style="fill:{line.color}">{line.label}</text>'
        for place, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>text{{font:12px sans-serif;'
        f'fill:#333}}.grid{{stroke:#e5e5e5}}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f"{body}{legend}</svg>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; 0 = done, whatever the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.freshness",
        description="AUC gained by retraining every 5 h, 1 h and 30 min of simulated traffic, over a frozen model.",
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, fewer rows: whether it runs")
    parser.add_argument("--seed", type=int, default=1, help="of the world, its drift and its traffic (default: 1)")
    parser.add_argument("--output", type=Path, help="folder for freshness.json and freshness.svg, such as docs")
    flags = parser.parse_args(argv)
    share_cores()  # torch is imported when the first engine is made
    hours, rows = (8, 20_000) if flags.quick else (48, 40_000)
    days = Days(hours=hours, rows_per_hour=rows, intervals=POLICIES, seed=flags.seed)
    study = figures(run_days(drifting_world(flags.seed), days))
    print("control: the same days in a world where nothing moves", flush=True)
    still = replace(days, intervals={name: POLICIES[name] for name in (FROZEN, CONTROL)})
    control = figures(run_days(drifting_world(flags.seed, is_still=True), still))
    result = {"seed": days.seed, "rows_per_hour": days.rows_per_hour, "study": study, "control": control}
    print(table(result))
    if flags.output is not None:
        flags.output.mkdir(parents=True, exist_ok=True)
        (flags.output / "freshness.json").write_text(json.dumps(result, indent=1) + "\n")
        (flags.output / "freshness.svg").write_text(chart(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
