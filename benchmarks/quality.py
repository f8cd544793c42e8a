"""Compare the quality of our first model with that of peers, all trained on the same few rows.

Run by `make benchmark-quality`. Windows have 2,000, 5,000 and 20,000 rows. The rows come from the
demo's simulator, a long-tailed simulator, and the shop in `examples/shop` (strings, user ids,
lists). With `--data`, there are also rows from a Criteo file. Our training step with its defaults,
DeepCTR-Torch's DCN and LightGBM train on each window. All three models are evaluated on the same
evaluation rows. Our model uses preprocessing's vocabularies and training's `fit`, with the settings
of the recommender's file. Each figure is a mean over seeds, with minimum and maximum. A seed draws
new rows and initial weights. The Bayes-optimal AUC is the AUC of the true click probabilities.

The choice of variants favours both peers. DeepCTR-Torch runs one, two and three passes, with our
batch size. LightGBM builds 25, 50, 100 and 200 trees. All other settings of LightGBM are its
defaults. For each peer, only the variant with the lowest log loss on the evaluation rows is
reported. The training times of the other variants do not count. DeepCTR-Torch gets the encoded
rows. LightGBM gets the raw numbers with their gaps, the ids as categories, and for each list the
counts of its ids.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import benchmark_parser, documented
from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES, PlantedLogit
from benchmarks.first_model import FirstModel
from benchmarks.peers import DeepCtr
from benchmarks.spread import Figure, Spread, spread
from components.training.rows import Rows
from demo.environments import REPOSITORY
from demo.simulation.simulator import SimulatedRows, Simulator
from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.model import DcnConfig, network_config
from evergreen.config.spec import Recommender
from evergreen.config.training import TrainingSettings
from evergreen.contracts.criteo import CRITEO_RECOMMENDER, NUM_CATEGORICAL, NUM_DENSE
from evergreen.contracts.raw_rows import category_matrix, feature_matrix
from evergreen.contracts.workflow import PADDING_ID
from evergreen.rows.raw_schema import categories, in_lists
from evergreen.statistics.metrics import (
    Z_95,
    auc_difference,
    calibration,
    log_loss,
    roc_auc,
    row_log_losses,
)
from examples.shop.simulator import draw

OURS, DEEPCTR, LIGHTGBM = "evergreen", "DeepCTR-Torch", "LightGBM"
SIZES = (2_000, 5_000, 20_000)
HOLDOUT_ROWS = 50_000
PASSES, TREES = (1, 2, 3), (25, 50, 100, 200)
_DENSE_MEAN = 4.0
"""Mean of the long-tailed simulator's dense values on a logarithmic scale, large enough to avoid
negative values."""


class Split(NamedTuple):
    """Training rows and evaluation rows of a recommender's features."""

    window: SimulatedRows
    holdout: SimulatedRows
    recommender: Recommender = CRITEO_RECOMMENDER


class TrainedScores(NamedTuple):
    """Scores of a model on the evaluation rows, and the cost of its training."""

    scores: NDArray[np.float64]
    seconds: float


def demo_simulator(num_rows: int, seed: int) -> Split:
    """Return rows of the demo's simulator with this seed."""
    simulator, random = Simulator.create(seed), np.random.default_rng([seed, 31])
    return Split(simulator.draw(num_rows, random), simulator.draw(HOLDOUT_ROWS, random))


def long_tail(num_rows: int, seed: int) -> Split:
    """Return rows with ids from a Zipf distribution over 1.2 million ids.

    Each id has its own weight.
    """
    planted = PlantedLogit(SAMPLE_SLOT_SIZES, seed)

    def drawn(count: int, part: int) -> SimulatedRows:
        rows, logits = planted.draw(count, 10 * seed + part)
        dense = np.expm1(np.maximum(rows.dense + _DENSE_MEAN, 0))
        probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return SimulatedRows(
            dense, rows.ids.astype(np.int64), probability, rows.labels.astype(np.int32)
        )

    return Split(drawn(num_rows, 1), drawn(HOLDOUT_ROWS, 2))


def shop(num_rows: int, seed: int) -> Split:
    """Return the first pages of the shop's log for training, and the next pages for evaluation."""
    from evergreen.recommender_file.form import (
        read_recommender,
    )  # imports the YAML reader, which only the shop needs

    recommender = read_recommender(REPOSITORY / "examples/shop/recommender.yaml")
    table, probability = draw(num_rows + HOLDOUT_ROWS, seed)
    (log,) = table.combine_chunks().to_batches()
    features = recommender.features
    for name in (*features.categorical, *features.lists):
        values = log.column(name)
        of_rows = in_lists(values, categories) if name in features.lists else categories(values)
        log = log.set_column(log.schema.get_field_index(name), name, of_rows)
    dense = feature_matrix(log, features.numeric, "float32", missing=np.nan)
    label = log.column(recommender.data.label).to_numpy(zero_copy_only=False).astype(np.int32)
    rows = SimulatedRows(dense, category_matrix(log, features), probability, label)
    train_features, holdout = (
        SimulatedRows(*(column[of] for column in rows))
        for of in (slice(num_rows), slice(num_rows, None))
    )
    return Split(train_features, holdout, recommender)


def criteo_file(path: Path) -> SimulatedRows:
    """Return the rows of a tab-separated Criteo file without header.

    The true probabilities of the rows are unknown.
    """
    fields = [line.rstrip("\n").split("\t") for line in path.open()]
    dense = [
        [float(value) if value else np.nan for value in row[1 : 1 + NUM_DENSE]] for row in fields
    ]
    ids = [
        [int(value, 16) if value else MISSING_CATEGORY for value in row[-NUM_CATEGORICAL:]]
        for row in fields
    ]
    label = np.array([int(row[0]) for row in fields], np.int32)
    return SimulatedRows(
        np.array(dense, np.float32), np.array(ids, np.int64), np.full(len(label), np.nan), label
    )


def folds(rows: SimulatedRows, num_folds: int) -> Iterator[Split]:
    """Yield splits of a cross-validation with random folds."""
    fold = np.random.default_rng(0).integers(num_folds, size=len(rows.label))
    for number in range(num_folds):
        yield Split(
            *(
                SimulatedRows(*(column[chosen] for column in rows))
                for chosen in (fold != number, fold == number)
            )
        )


def train_all(split: Split, seed: int) -> dict[str, TrainedScores]:
    """Return the scores of the evaluation rows by model."""
    torch.manual_seed(seed)
    recommender = split.recommender.with_settings({"training.seed": seed})
    with tempfile.TemporaryDirectory(prefix="quality-") as scratch:
        began = time.perf_counter()
        ours = FirstModel(split.window, Path(scratch), recommender)
        seconds = time.perf_counter() - began
        window, holdout = ours.encoded(split.window), ours.encoded(split.holdout)
        found = {OURS: TrainedScores(ours.score(split.holdout).astype(np.float64), seconds)}
        sizes = ours.slot_sizes
    labels, features = split.holdout.label, recommender.features
    found[DEEPCTR] = _best(labels, _deepctr(recommender, sizes, window, holdout=holdout))
    parts = ((split.window, window), (split.holdout, holdout))
    tables = [lightgbm_table(raw, rows, features, sizes=sizes) for raw, rows in parts]
    found[LIGHTGBM] = _best(
        labels, _lightgbm(*tables, split.window.label, features=features, seed=seed)
    )
    return found


def _deepctr(
    recommender: Recommender, sizes: list[int], window: Rows, *, holdout: Rows
) -> Iterator[TrainedScores]:
    """Yield the scores of DeepCTR-Torch's DCN after each pass.

    DCN v1 is always included, and DCN v2 is included if our network is a v2.
    """
    settings, config = (
        recommender.section("training", TrainingSettings),
        network_config(recommender),
    )
    assert isinstance(config, DcnConfig)
    batch_size = min(
        settings.batch_size, max(settings.min_batch_size, len(window) // settings.min_steps)
    )
    for rank in {0, config.projection_dim}:
        config = replace(config, projection_dim=rank)
        peer, seconds = DeepCtr(config, sizes, batch_size, features=recommender.features), 0.0
        prepared = peer.prepare(window)
        for _ in PASSES:
            began = time.perf_counter()
            peer.train(prepared)
            seconds += time.perf_counter() - began
            yield TrainedScores(peer.score(holdout).astype(np.float64), seconds)


def lightgbm_table(raw: SimulatedRows, rows: Rows, features: Features, *, sizes: list[int]) -> Any:
    """Return a table with the numeric columns, the categories, and the counts of list ids."""
    from scipy.sparse import csr_matrix, hstack

    plain = np.hstack([raw.dense, rows.ids[:, : len(features.categorical)]])
    if not features.lists:
        return plain
    parts = [csr_matrix(plain)]
    for positions in features.positions.lists:
        ids = rows.ids[:, positions.start : positions.stop]
        row, element = np.nonzero(ids != PADDING_ID)
        size = sizes[features.positions.slots[positions.start]]
        parts.append(
            csr_matrix((np.ones(len(row), np.float32), (row, ids[row, element])), (len(ids), size))
        )
    return hstack(parts, "csr")


def _lightgbm(
    train_features: Any, holdout: Any, label: NDArray[np.int32], *, features: Features, seed: int
) -> Iterator[TrainedScores]:
    """Yield the scores of LightGBM for each number of trees."""
    import lightgbm

    parameters = {"objective": "binary", "seed": seed, "num_threads": 1, "verbose": -1}
    first = len(features.numeric)
    for number in TREES:
        data = lightgbm.Dataset(
            train_features,
            label,
            categorical_feature=[*range(first, first + len(features.categorical))],
        )
        began = time.perf_counter()
        booster = lightgbm.train(parameters, data, number)
        yield TrainedScores(
            np.asarray(booster.predict(holdout, num_threads=1)), time.perf_counter() - began
        )


def _best(labels: NDArray[np.int32], found: Iterator[TrainedScores]) -> TrainedScores:
    return min(found, key=lambda each: log_loss(labels, each.scores) or 0.0)


def figures(splits: Sequence[Split], found: Sequence[dict[str, TrainedScores]]) -> dict[str, Any]:
    """Return JSON-ready figures of each model and of the differences, over seeds or folds.

    The differences from each peer have 95 % intervals.
    """
    labels = [split.holdout.label for split in splits]
    document: dict[str, Any] = {"models": {}, "differences": {}}
    for name in (OURS, DEEPCTR, LIGHTGBM):
        of: dict[str, Callable[[NDArray[np.int32], TrainedScores], float | None]] = {
            "auc": lambda label, each: roc_auc(label, each.scores),
            "log_loss": lambda label, each: log_loss(label, each.scores),
            "mean_over_rate": lambda label, each: calibration(label, each.scores),
            "seconds": lambda _, each: each.seconds,
        }
        values = {
            key: [of[key](label, each[name]) for label, each in zip(labels, found)] for key in of
        }
        document["models"][name] = {
            key: {"mean": float(np.mean(each)), **spread(each)._asdict()}
            for key, each in values.items()
        }
    if not any(np.isnan(split.holdout.probability).any() for split in splits):
        best = [roc_auc(split.holdout.label, split.holdout.probability) or 0.0 for split in splits]
        short = [
            most - (roc_auc(label, each[OURS].scores) or 0.0)
            for most, label, each in zip(best, labels, found)
        ]
        document["best_possible"] = {"auc": spread(best), "auc_short_of_it": spread(short)}
    for name in (DEEPCTR, LIGHTGBM):
        aucs, losses = [], []
        for label, each in zip(labels, found):
            auc = auc_difference(
                label, each[OURS].scores, each[name].scores, groups=np.arange(len(label))
            )
            assert auc is not None, "the holdout rows hold both classes"
            aucs.append((auc.auc, auc.standard_error))
            rows = row_log_losses(label, each[OURS].scores) - row_log_losses(
                label, each[name].scores
            )
            losses.append((float(rows.mean()), float(rows.std()) / len(rows) ** 0.5))
        document["differences"][name] = {"auc": _interval(aucs), "log_loss": _interval(losses)}
    return document


def _interval(found: list[tuple[float, float]]) -> dict[str, float]:
    """Return the mean of differences with standard errors, and its 95 % interval.

    One standard error is computed from the evaluation rows, and another standard error from the
    differences between seeds. The interval uses the larger standard error.
    """
    differences, errors = np.array(found).T
    by_rows = float(np.sqrt((errors**2).sum())) / len(errors)
    by_seeds = float(differences.std(ddof=1)) / len(errors) ** 0.5 if len(errors) > 1 else 0.0
    mean, error = float(differences.mean()), Z_95 * max(by_rows, by_seeds)
    return {"mean": mean, "low": mean - error, "high": mean + error}


def print_case(name: str, result: dict[str, Any]) -> None:
    """Print the table of one data set and size."""
    print(
        f"\n{name}\n  "
        f"{'':<14}{'AUC':>8}{'log loss':>10}{'mean prediction over rate':>32}{'seconds':>9}"
    )
    for model, values in result["models"].items():
        ratio = values["mean_over_rate"]
        shown = f"{ratio['mean']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f})"
        print(
            "  "
            f"{model:<14}{values['auc']['mean']:>8.4f}{values['log_loss']['mean']:>10.4f}{shown:>32}"
            f"{values['seconds']['mean']:>9.2f}"
        )
    if best := result.get("best_possible"):
        print(
            f"  best possible AUC {best['auc'].shown('.4f')}, ours "
            f"{best['auc_short_of_it'].shown('.4f')} less"
        )
    for peer, of in result["differences"].items():
        texts = [
            f"{key} {of[key]['mean']:+.4f} [{of[key]['low']:+.4f}, {of[key]['high']:+.4f}]"
            for key in of
        ]
        is_behind = of["auc"]["high"] < 0 or of["log_loss"]["low"] > 0
        print(f"  less {peer}: {', '.join(texts)}{' BEHIND' if is_behind else ''}", flush=True)


def figures_of(name: str, result: dict[str, Any]) -> list[Figure]:
    """Return the figures of one data set and size: differences with intervals, and seconds."""
    rows = []
    for peer, of in result["differences"].items():
        parts = {key: Spread(each["mean"], each["low"], each["high"]) for key, each in of.items()}
        rows.append(Figure(f"{name}, AUC more than the peer's [95 %]", parts["auc"], "", peer))
        rows.append(
            Figure(f"{name}, log loss more than the peer's [95 %]", parts["log_loss"], "", peer)
        )
    seconds = result["models"][OURS]["seconds"]
    return [
        *rows,
        Figure(f"{name}, trained in", Spread(*(seconds[key] for key in Spread._fields)), "s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, and return 0."""
    parser = benchmark_parser(
        "quality", __doc__, quick="a minute: 2,000 rows and one seed, to test that it runs"
    )
    parser.add_argument(
        "--data", help="file of Criteo rows, tab-separated without header, evaluated in five folds"
    )
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    seeds = range(1, 2 if flags.quick else 4)
    cases: dict[str, Callable[[], list[Split]]] = {
        f"{simulator.__name__}, {size:,} rows": lambda simulator=simulator, size=size: [
            simulator(size, seed) for seed in seeds
        ]
        for simulator in (demo_simulator, long_tail, shop)
        for size in (SIZES[:1] if flags.quick else SIZES)
    }
    if flags.data is not None:
        rows = criteo_file(Path(flags.data))
        cases[f"Criteo's rows, four fifths of {len(rows.label):,}"] = lambda: list(folds(rows, 5))
    with documented(flags) as document:
        results = document["results"] = {}
        for name, make in cases.items():
            splits = make()
            found = [train_all(split, seed) for seed, split in enumerate(splits, start=1)]
            results[name] = figures(splits, found)
            print_case(name, results[name])
            document["figures"] += figures_of(name, results[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
