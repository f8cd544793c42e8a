"""What is served: a workflow fitted on drawn rows, models of the demo's shape with seeded weights, and rows to ask for.

The weights are fresh: speed does not depend on what they learned. The workflow is fitted for real, so that the
reference's design and ours must answer alike. The expected scores are NumPy's, from `FeatureWorkflow` and the
network as the papers state it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.initial_model import write_initial_model
from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, MISSING_CATEGORY, RAW_TYPES
from components.contracts.manifests import Model, ModelQuality, RawDataset, Verdict
from components.contracts.workflow import FeatureWorkflow
from components.models.configs import DcnConfig
from components.models.files import Tensors
from components.runtime.durable import sha256_tree
from components.store.models import model_folder
from inference_client.rows import FeatureRows

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = DcnConfig(
    num_dense=len(DENSE), num_categorical=len(CATEGORICAL), embedding_dim=16, num_cross_layers=3, tower=(128, 64)
)
TABLE_ROWS = 260_000
NUM_FITTED, NUM_HELD_OUT = 90_000, 2_000
NUM_ASKED = 8_192
_NEVER = "2026-01-01T00:00:00+00:00"


class DrawnLog:
    """A click log whose columns have 3 to about 80,000 categories, popular ones first; seeded."""

    def __init__(self, seed: int = 0) -> None:
        sizes = np.geomspace(3, 47_000, len(CATEGORICAL))
        self.cardinalities = (sizes * (TABLE_ROWS / sizes.sum())).astype(int).clip(3, NUM_FITTED)
        random = np.random.default_rng(seed)
        self._keys = [random.choice(2**31, size, replace=False).astype(np.int64) for size in self.cardinalities]

    def draw(self, n: int, seed: int) -> FeatureRows:
        """`n` rows: Zipf's popularity with exponent 1, 3 % missing, 2 % of categories never seen in fitting."""
        random = np.random.default_rng(seed)
        categorical = np.empty((n, len(CATEGORICAL)), np.int64)
        for column, keys in enumerate(self._keys):
            ranks = np.floor(len(keys) ** random.random(n)).astype(int) - 1
            categorical[:, column] = keys[ranks.clip(0, len(keys) - 1)]
        categorical[random.random(categorical.shape) < 0.02] = 2**32 - 1
        categorical[random.random(categorical.shape) < 0.03] = MISSING_CATEGORY
        dense = np.floor(random.lognormal(1.5, 1.2, (n, len(DENSE)))).astype(np.float32)
        dense[random.random(dense.shape) < 0.03] = np.nan
        return FeatureRows(dense=dense, categorical=categorical)

    def draw_all(self) -> FeatureRows:
        """`NUM_FITTED` rows in which every category appears."""
        rows = self.draw(NUM_FITTED, seed=1)
        for column, keys in enumerate(self._keys):
            rows.categorical[:, column] = np.resize(keys, NUM_FITTED)
        return rows


def write_raw(rows: FeatureRows, path: Path) -> None:
    """Writes rows as `contracts.criteo` describes them."""
    columns = {LABEL: pa.array(np.zeros(len(rows.dense), np.int32))}
    columns |= {n: pa.array(rows.dense[:, i], mask=np.isnan(rows.dense[:, i])) for i, n in enumerate(DENSE)}
    for i, name in enumerate(CATEGORICAL):
        values = rows.categorical[:, i]
        columns[name] = pa.array(values, mask=values == MISSING_CATEGORY)
    path.parent.mkdir(parents=True, exist_ok=True)
    assert list(columns) == list(RAW_TYPES)[: len(columns)]
    pq.write_table(pa.table(columns), path)


class Models:
    """One fitted workflow, and any number of models on it.

    Args:
        folder: Where everything is written; the model store lies in `store` below it.
        peers_python: Interpreter that has NVTabular.
    """

    def __init__(self, folder: Path, peers_python: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        self._weights: dict[int, Tensors] = {}
        log = DrawnLog()
        write_raw(log.draw_all(), folder / "fitted" / "part-0.parquet")
        fit = [str(peers_python), "-W", "ignore", "-m", "benchmarks.serving_peers.fit_workflow"]
        subprocess.run([*fit, str(folder / "fitted"), str(NUM_FITTED), str(folder)], cwd=REPOSITORY, check=True)
        self.workflow = FeatureWorkflow.load(folder / "features")
        self.nvtabular = folder / "nvtabular"
        self.asked = log.draw(NUM_ASKED, seed=2)
        self._held_out = log.draw(NUM_HELD_OUT, seed=3)
        write_raw(self._held_out, folder / "held out" / "part-0.parquet")

    def weights(self, seed: int) -> Tensors:
        """Weights of the model of `seed`, which is written by the first call."""
        if seed not in self._weights:
            folder = self.model_folder(seed) / Model.WEIGHTS
            self._weights[seed] = write_initial_model(folder, CONFIG, self.workflow.slot_sizes, seed=seed)
        return self._weights[seed]

    def model_folder(self, seed: int) -> Path:
        """Where the model of `seed` lies in the store."""
        return model_folder(self.store, f"model-{seed}")

    def expected(self, rows: FeatureRows, seed: int) -> NDArray[np.float32]:
        """Probabilities [n] of `rows` by the model of `seed`."""
        ids, dense = self.workflow.encode_categorical(rows.categorical), self.workflow.encode_dense(rows.dense)
        return network_scores(self.weights(seed), self.workflow.slot_sizes, ids=ids, dense=dense)

    def manifests(self, seed: int, champion: str | None) -> dict[str, Path]:
        """Writes the model of `seed` as training and evaluation would; the files that deployment is given."""
        model_id = f"model-{seed}"
        folder = self.model_folder(seed)
        self.weights(seed)
        self.workflow.save(folder / Model.WORKFLOW)
        scores = self.folder / f"scores-{seed}.npz"
        np.savez(scores, candidate=self.expected(self._held_out, seed))
        held_out = (self.folder / "held out").as_uri()
        documents = {
            "model": Model(
                model_id=model_id, uri=folder.as_uri(), backend="pytorch", config=CONFIG.as_document(),
                slot_sizes=self.workflow.slot_sizes, parent_model_id=None, seed=seed, num_train_rows=NUM_FITTED,
                optimizer_step=1, early_stopping={"auc": None, "log_loss": None}, last_event_time=_NEVER,
                raw_digest="drawn", created_at=_NEVER,
                sha256={part: sha256_tree(folder / part) for part in (Model.WEIGHTS, Model.WORKFLOW)},
            ),
            "raw-dataset": RawDataset(
                source_uri=held_out, window_start=None, window_end=None, first_event_time=_NEVER,
                last_event_time=_NEVER, train_uri=(self.folder / "fitted").as_uri(), holdout_uri=held_out,
                num_train_rows=NUM_FITTED, num_holdout_rows=NUM_HELD_OUT, num_malformed=0, malformed_uri=None,
                num_duplicates=0, digest="drawn",
            ),
            "verdict": Verdict(
                candidate_model_id=model_id, champion_model_id=champion, decision="pass", accepted=True,
                reason="benchmark", num_rows=NUM_HELD_OUT, num_clicks=1, candidate=ModelQuality(), champion=None,
                difference=None, rows_needed=None, scores_uri=scores.as_uri(),
            ),
        }  # fmt: skip
        documents["model"].write(folder / Model.MANIFEST)
        paths = {name: self.folder / f"{name}-{seed}.json" for name in documents}
        for name, document in documents.items():
            document.write(paths[name])
        return paths


def network_scores(
    weights: Tensors, slot_sizes: list[int], *, ids: NDArray[np.int64], dense: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Probabilities [n] of DCN v1 on encoded rows, in float64."""
    p = {name: value.astype(np.float64) for name, value in weights.dense.items()}
    offsets = np.concatenate([[0], np.cumsum(slot_sizes)[:-1]])
    x0 = np.concatenate([weights.table[ids + offsets].reshape(len(ids), -1), dense], axis=1).astype(np.float64)
    cross, deep = x0, x0
    for weight, bias in zip(p["cross_weight"], p["cross_bias"]):
        cross = x0 * (cross @ weight)[:, None] + bias + cross
    for i in range(len(CONFIG.tower)):
        deep = np.maximum(deep @ p[f"tower.{3 * i}.weight"].T + p[f"tower.{3 * i}.bias"], 0)
    logit = deep @ p["final_tower"][0] + cross @ p["final_cross"][0] + p["bias"]
    return (1 / (1 + np.exp(-logit))).astype(np.float32)
