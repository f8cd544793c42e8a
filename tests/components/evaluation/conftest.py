"""A finished training run on disk. The candidate and the champion have known quality.

Labels are drawn from a planted linear logit over the raw features. A model is a copy of the planted
weights with added noise. The candidate is stored as the weights of a DCN, in which all layers
except a linear output have no effect. The champion is stored as the served graph of a linear
network.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from evergreen.config.model import DcnConfig
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model, RawDataset, Release, TrainingSet
from evergreen.contracts.workflow import FIRST_ID, FeatureWorkflow
from evergreen.networks.files import TABLE, new_model
from evergreen.registry.models import GRAPH_FILE, graph_folder, graph_sha256
from evergreen.runtime.durable import sha256_tree
from evergreen.storage.references import keep
from evergreen.storage.uris import local_path
from testing.networks import vectors_of
from testing.recommenders import SHOP, arrays_of, shop_with
from testing.releases import make_live, release, store_model
from testing.validation_models import make_dataset
from tests.support.planted_rows import training_set_of
from tests.support.workflows import workflow_of

FEATURES = SHOP.features
NUM_DENSE, NUM_VECTORS = len(FEATURES.dense_inputs), len(FEATURES.vector_names)
CONFIG = DcnConfig(
    num_dense=NUM_DENSE,
    num_categorical=NUM_VECTORS,
    embedding_dim=1,
    num_cross_layers=1,
    tower=(2,),
)
BIAS = -1.0
SPREAD = 0.7
"""Standard deviation of the planted weights of categories. For numbers, the deviation is half as
large."""


@dataclass(frozen=True)
class Linear:
    """A linear model: weights of the normalised dense values and of every category."""

    dense: np.ndarray
    categories: tuple[np.ndarray, ...]

    def noisy(self, scale: float, seed: int) -> "Linear":
        """Return the model with noise on its weights.

        The noise's deviation is `scale` times the deviation of the weights.
        """
        random, scale = np.random.default_rng(seed), scale * SPREAD
        return Linear(
            (self.dense + scale / 2 * random.normal(size=NUM_DENSE)).astype(np.float32),
            tuple(
                (w + scale * random.normal(size=len(w))).astype(np.float32) for w in self.categories
            ),
        )


def plant(workflow: FeatureWorkflow) -> Linear:
    random = np.random.default_rng(99)
    return Linear(
        random.normal(0, SPREAD / 2, NUM_DENSE).astype(np.float32),
        tuple(random.normal(0, SPREAD, len(v)).astype(np.float32) for v in workflow.vocabularies),
    )


def fit(dense, categorical) -> FeatureWorkflow:
    logged = np.log1p(np.nan_to_num(dense, nan=0.0))
    means, stds = logged.mean(0).astype(np.float32), logged.std(0).astype(np.float32)
    slots = np.array(FEATURES.positions.slots)
    of_slots = [categorical[:, slots == slot] for slot in range(len(FEATURES.slots))]
    return workflow_of(
        [np.unique(values[values >= 0]) for values in of_slots], means=means, stds=stds
    )


def logits(linear: Linear, workflow: FeatureWorkflow, dense, categorical) -> np.ndarray:
    ids = workflow.encode_categorical(categorical)
    tables = [np.r_[np.zeros(FIRST_ID), weights][:, None] for weights in linear.categories]
    vectors = vectors_of(tables, FEATURES.positions, ids)
    return workflow.encode_dense(dense) @ linear.dense + BIAS + np.sum(vectors, axis=0)[:, 0]


def table_of(linear: Linear) -> np.ndarray:
    """Return a table of vectors of width 1 for the ids."""
    rows = np.concatenate([np.r_[np.zeros(FIRST_ID), weights] for weights in linear.categories])
    return rows[:, None].astype(np.float32)


def write_candidate(folder: Path, linear: Linear) -> None:
    rows = table_of(linear)
    shapes = {
        TABLE: (len(rows), 1),
        "cross_weight": (1, CONFIG.input_width),
        "cross_bias": (1, CONFIG.input_width),
        "tower.0.weight": (2, CONFIG.input_width),
        "tower.0.bias": (2,),
        "final_tower": (1, 2),
        "final_cross": (1, CONFIG.input_width),
        "bias": (1,),
    }
    with new_model(folder, shapes, with_moments=False) as stored:
        stored.weights.table[:] = rows
        stored.weights.dense["final_cross"][0] = np.r_[np.ones(NUM_VECTORS), linear.dense]
        stored.weights.dense["bias"][:] = BIAS


NETWORK = """
<ir_version: 8, opset_import: ["": 17]>
linear (float[rows, 2] dense, float[rows, 5, 1] embeddings) => (float[rows] logit) {
  products = MatMul(dense, weights)
  of_dense = Squeeze(products, last)
  of_vectors = ReduceSum<keepdims = 0>(embeddings, all_but_first)
  both = Add(of_dense, of_vectors)
  logit = Add(both, bias)
}"""


def write_graph(folder: Path, linear: Linear, workflow: FeatureWorkflow) -> None:
    """Write the served graph of the model. The network is not one of the product's networks."""
    from onnx import numpy_helper, parser

    from evergreen.serving.graph import export

    arrays = {
        "weights": linear.dense[:, None],
        "bias": np.array([BIAS], np.float32),
        "last": np.array([1]),
    }
    arrays["all_but_first"] = np.array([1, 2])
    network = parser.parse_model(NETWORK)
    network.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    export.write_graph(folder, workflow, [table_of(linear)], network=network, name="click_model")


@dataclass
class Round:
    """The run's folders, its manifests, and the probabilities that generated its labels.

    The method `flags` returns the step's command line.
    """

    root: Path
    workflow: FeatureWorkflow
    planted: Linear
    dense: np.ndarray
    categorical: np.ndarray
    labels: np.ndarray
    raw: RawDataset
    training_set: TrainingSet
    model: Model
    run: str = "run 1"

    @property
    def store(self) -> Path:
        return self.root / "store"

    def path(self, name: str) -> Path:
        return self.root / "artifacts" / name

    def write(self) -> None:
        training_set = replace(self.training_set, raw_dataset=keep(self.raw, self.path("raw")))
        reference = keep(training_set, self.path("training_set"))
        replace(self.model, training_set=reference).write(self.path("model"))

    def change(self, name: str, **changes) -> None:
        setattr(self, name, replace(getattr(self, name), **changes))
        self.write()

    def flags(self, *, champion: str = "current", **gate) -> list[str]:
        if gate:
            self.change("raw", recommender=shop_with(gate=gate))
        flags = {
            "run": self.run,
            "store": self.store.as_uri(),
            "work": (self.root / "work").as_uri(),
            "champion": champion,
            "model": self.path("model"),
            "output": self.path("verdict"),
            "metrics": self.path("metrics"),
            "roc": self.path("roc"),
            "html": self.path("report.html"),
        }
        return [f"--{name}={value}" for name, value in flags.items()]

    def scores(self, linear: Linear) -> np.ndarray:
        """Compute the holdout rows' probabilities from the model's formula, in float64."""
        return 1 / (1 + np.exp(-logits(linear, self.workflow, self.dense, self.categorical)))

    def add_old_rows(
        self, table, true_model: Linear
    ) -> tuple[np.ndarray, Callable[[Linear], np.ndarray]]:
        """Add old rows to the holdout. The labels of the old rows are drawn from `true_model`.

        Returns:
            Labels of the old rows, and a function that scores these rows with a model.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        dense, categorical = arrays_of(table)

        def scores(linear: Linear) -> np.ndarray:
            return 1 / (1 + np.exp(-logits(linear, self.workflow, dense, categorical)))

        labels = (np.random.default_rng(77).random(len(dense)) < scores(true_model)).astype(
            np.int32
        )
        at = table.column_names.index(raw_rows.LABEL)
        raw, encoded = self.root / "old raw", self.root / "old encoded"
        raw.mkdir()
        pq.write_table(table.set_column(at, raw_rows.LABEL, pa.array(labels)), raw / "0.parquet")
        ids = self.workflow.encode_categorical(categorical)
        write_encoded(encoded, labels, self.workflow.encode_dense(dense), ids)
        self.change("raw", replay_holdout_uri=raw.as_uri(), num_replay_holdout_rows=len(labels))
        self.change(
            "training_set", replay_holdout_uri=encoded.as_uri(), num_replay_holdout_rows=len(labels)
        )
        return labels, scores

    def release_champion(
        self, linear: Linear, model_id: str = "champion-model", version: int = 1
    ) -> Release:
        folder = graph_folder(self.store, version)
        write_graph(folder, linear, self.workflow)
        hashes, graph = {"graph": graph_sha256(folder)}, folder / GRAPH_FILE
        store_model(self.store, model_id)
        made = release(self.store, version, model_id, graph_uri=graph.as_uri(), sha256=hashes)
        make_live(self.store, made)
        self.change("raw", champion_model_id=model_id)
        return made


def write_encoded(folder: Path, labels, dense, ids) -> None:
    """Write HugeCTR's Parquet form in parts whose names do not sort in row order.

    `_file_list.txt` lists the parts in row order.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    bounds = np.linspace(0, len(labels), 12).astype(int)
    names = [f"part_{i}.parquet" for i in range(len(bounds) - 1)]
    for name, start, end in zip(names, bounds, bounds[1:]):
        columns = {raw_rows.LABEL: labels[start:end].astype(np.float32)}
        columns |= {
            c: dense[start:end, i].astype(np.float32) for i, c in enumerate(FEATURES.dense_inputs)
        }
        columns |= {c: ids[start:end, i] for i, c in enumerate(FEATURES.id_names)}
        pq.write_table(pa.table(columns), folder / name)
    (folder / "_file_list.txt").write_text(
        "\n".join([str(len(names)), *(f"/elsewhere/{name}" for name in names)])
    )


@pytest.fixture
def make_round(raw_table, tmp_path):
    """Creates a finished run with `n` holdout rows.

    The candidate is the planted logit plus `noise` on its weights.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def make(
        n: int = 3000, *, noise: float = 0.0, seed: int = 0, labels=None, new_categories=None
    ) -> Round:
        root = tmp_path / "a round"
        table = raw_table(n, seed=seed)
        dense, categorical = arrays_of(table)
        workflow = fit(dense, categorical)
        planted = plant(workflow)
        if labels is None:
            random = np.random.default_rng(seed + 1)
            probabilities = 1 / (1 + np.exp(-logits(planted, workflow, dense, categorical)))
            labels = (random.random(n) < probabilities).astype(np.int32)
        at = table.column_names.index(raw_rows.LABEL)
        table = table.set_column(at, raw_rows.LABEL, pa.array(labels.astype(np.int32)))
        holdout, encoded = root / "raw holdout", root / "encoded"
        holdout.mkdir(parents=True)
        pq.write_table(table.slice(0, n // 3), holdout / "0.parquet", row_group_size=700)
        pq.write_table(table.slice(n // 3), holdout / "1.parquet")
        ids = workflow.encode_categorical(categorical)
        write_encoded(encoded, labels, workflow.encode_dense(dense), ids)

        new = new_categories or [0] * len(FEATURES.slots)
        workflow.save(root / "workflow")
        before = tuple(v[: len(v) - count] for v, count in zip(workflow.vocabularies, new))
        parent = local_path(store_model(root / "store", "parent").uri)
        replace(workflow, vocabularies=before).save(parent / Model.WORKFLOW)

        model_folder = root / "store" / "models" / "candidate"
        write_candidate(model_folder / Model.WEIGHTS, planted.noisy(noise, 5))
        store_model(
            root / "store",
            "candidate",
            config=CONFIG.as_document(),
            slot_sizes=workflow.slot_sizes,
            raw_digest="digest",
            sha256={"weights": sha256_tree(model_folder / Model.WEIGHTS)},
        )
        made = Round(
            root=root,
            workflow=workflow,
            planted=planted,
            dense=dense,
            categorical=categorical,
            labels=labels,
            raw=replace(
                make_dataset(root, 1, digest="digest"),
                holdout_uri=holdout.as_uri(),
                num_holdout_rows=n,
            ),
            training_set=training_set_of(
                encoded,
                n,
                workflow=root / "workflow",
                slot_sizes=workflow.slot_sizes,
                new_categories=new,
                parent_model_uri=parent.as_uri(),
            ),
            model=Model.read(model_folder / Model.MANIFEST),
        )
        made.write()
        return made

    return make
