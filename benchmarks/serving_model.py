"""Create the served workflow, models and requests of the serving benchmark.

The workflow is fitted on rows of the demo's simulator. All servers use this workflow, and must
therefore return equal scores. The models have the demo's shape and random weights, because speed
does not depend on training. The expected scores come from NumPy, with `FeatureWorkflow` and the
network as in the papers.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import run_to_end
from benchmarks.initial_model import write_initial_model
from demo.simulation.simulator import SimulatedRows, Simulator, raw_table
from evergreen.config.model import DcnConfig
from evergreen.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER, DENSE
from evergreen.contracts.manifests import Model
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.networks.files import Tensors
from evergreen.registry.models import keep_verdict, model_folder, verdict_paths
from evergreen.runtime.durable import sha256_tree
from inference_client.rows import FeatureRows
from testing import networks
from testing.releases import passing_verdict, store_model
from testing.validation_models import make_dataset

CONFIG = DcnConfig(
    num_dense=len(DENSE),
    num_categorical=len(CATEGORICAL),
    embedding_dim=16,
    num_cross_layers=3,
    tower=(128, 64),
)
SIMULATOR_SEED = 7
NUM_FITTED, NUM_HELD_OUT = 90_000, 2_000
NUM_REQUEST_ROWS = 8_192


def drawn_features(simulator: Simulator, num_rows: int, seed: int) -> FeatureRows:
    """Return the features of `num_rows` random rows. Equal seeds give equal rows.

    Some rows contain categories that do not occur in the rows of the fit.
    """
    drawn = simulator.draw(num_rows, np.random.default_rng(seed))
    return FeatureRows(dense=drawn.dense, categorical=drawn.categorical)


class Models:
    """Models that share one fitted workflow.

    Args:
        folder: Folder for all files of the benchmark. The model registry is in its `store`.
        peers_python: Interpreter with NVTabular.
    """

    def __init__(self, folder: Path, peers_python: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        self._weights: dict[int, Tensors] = {}
        simulator = Simulator.create(SIMULATOR_SEED)
        _write_raw(simulator.draw(NUM_FITTED, np.random.default_rng(1)), folder / "fitted")
        fit = [str(peers_python), "-W", "ignore", "-m", "benchmarks.serving_peers.fit_workflow"]
        run_to_end([*fit, str(folder / "fitted"), str(NUM_FITTED), str(folder)])
        self.workflow = FeatureWorkflow.load(folder / "features")
        self.nvtabular = folder / "nvtabular"
        self.request_rows = drawn_features(simulator, NUM_REQUEST_ROWS, seed=2)
        held_out = simulator.draw(NUM_HELD_OUT, np.random.default_rng(3))
        self._held_out = FeatureRows(dense=held_out.dense, categorical=held_out.categorical)
        _write_raw(held_out, folder / "held out")
        raw_dataset = make_dataset(folder / "fitted", NUM_FITTED, recommender=CRITEO_RECOMMENDER)
        held_out_uri = (folder / "held out").as_uri()
        self._raw_dataset = replace(
            raw_dataset, holdout_uri=held_out_uri, num_holdout_rows=NUM_HELD_OUT
        )

    def weights(self, seed: int) -> Tensors:
        """Return the weights of the model with this seed. The first call writes the weights."""
        if seed not in self._weights:
            folder = self.model_folder(seed) / Model.WEIGHTS
            self._weights[seed] = write_initial_model(
                folder, CONFIG, self.workflow.slot_sizes, seed=seed
            )
        return self._weights[seed]

    def model_folder(self, seed: int) -> Path:
        """Return the registry's folder for the model with this seed."""
        return model_folder(self.store, f"model-{seed}")

    def expected(self, rows: FeatureRows, seed: int) -> NDArray[np.float32]:
        """Return the probabilities [n] that the model with this seed gives to `rows`."""
        weights = self.weights(seed)
        first_rows = np.concatenate([[0], np.cumsum(self.workflow.slot_sizes)[:-1]])
        embeddings = weights.table[self.workflow.encode_categorical(rows.categorical) + first_rows]
        logits = networks.logits(
            CONFIG, weights.dense, self.workflow.encode_dense(rows.dense), embeddings
        )
        return (1 / (1 + np.exp(-logits))).astype(np.float32)

    def verdict(self, seed: int, champion: str | None) -> Path:
        """Write the model with this seed as the steps would, and return deployment's input.

        The steps are training and evaluation.
        """
        model_id, folder = f"model-{seed}", self.model_folder(seed)
        self.weights(seed)
        self.workflow.save(folder / Model.WORKFLOW)
        store_model(
            self.store,
            model_id,
            config=CONFIG.as_document(),
            slot_sizes=self.workflow.slot_sizes,
            recommender=CRITEO_RECOMMENDER,
            sha256={part: sha256_tree(folder / part) for part in (Model.WEIGHTS, Model.WORKFLOW)},
        )
        scores = self.folder / f"scores-{seed}.npz"
        np.savez(scores, candidate=self.expected(self._held_out, seed))
        verdict = passing_verdict(
            model_id, scores, num_rows=NUM_HELD_OUT, champion_model_id=champion
        )
        keep_verdict(self.store, verdict, self._raw_dataset)
        return verdict_paths(self.store, model_id)[0]


def _write_raw(rows: SimulatedRows, folder: Path) -> None:
    """Write rows as one file in the raw schema, with one row per request."""
    num_rows = len(rows.label)
    numbers, zeros = [str(i) for i in range(num_rows)], np.zeros(num_rows)
    folder.mkdir(parents=True)
    pq.write_table(
        raw_table(rows, request_ids=numbers, row=zeros.astype(np.int32), times=zeros),
        folder / "part-0.parquet",
    )
