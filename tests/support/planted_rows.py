"""Small training data with a planted logit, in HugeCTR's Parquet form."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.training.rows import Rows
from evergreen.config.model import DcnConfig
from evergreen.contracts.manifests import TrainingSet
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import FIRST_ID
from testing.networks import vectors_of
from testing.recommenders import SHOP
from tests.support.workflows import workflow_of

FEATURES, POSITIONS = SHOP.features, SHOP.features.id_positions
WIDTHS = {"num_dense": len(FEATURES.dense_inputs), "num_categorical": len(FEATURES.vector_names)}
SLOT_SIZES = [40, 20, 60, 15]
"""Numbers of ids of item, shop, user and genres."""
STEP_MODEL = {"embedding_dim": 4, "num_cross_layers": 1, "tower": [8]}
"""Section `model` of a recommender that trains quickly."""


class PlantedRows:
    """Simulator of rows with a known (planted) click logit.

    The logit is a sum with one weight for each id and one weight for each dense value.
    """

    def __init__(self, slot_sizes=SLOT_SIZES, seed=0, strength=1.3):
        self.slot_sizes = list(slot_sizes)
        random = np.random.default_rng(seed)
        self.by_id = [random.normal(0, strength, size) for size in slot_sizes]
        self.by_dense = random.normal(0, 0.5, WIDTHS["num_dense"])

    def drifted(self, slots, seed=9):
        """Return the same simulator with the weights of some slots permuted."""
        other = PlantedRows(self.slot_sizes)
        other.by_dense, other.by_id = self.by_dense, list(self.by_id)
        random = np.random.default_rng(seed)
        for slot in slots:
            other.by_id[slot] = random.permutation(self.by_id[slot])
        return other

    def logit(self, dense, ids):
        """Return the planted logit of rows. The weights of a list's ids are pooled."""
        weights = vectors_of([each[:, None] for each in self.by_id], POSITIONS, ids)
        return -1.2 + dense @ self.by_dense + np.sum(weights, axis=0)[:, 0]

    def rows(self, n, seed=1):
        """Return labels, dense values, ids and the planted logit of `n` rows."""
        random = np.random.default_rng(seed)
        dense = random.normal(size=(n, WIDTHS["num_dense"])).astype(np.float32)
        sizes = np.array(self.slot_sizes)[list(POSITIONS.slots)]
        drawn = random.random((n, len(sizes))) ** 2 * (sizes - 1)
        ids = 1 + np.minimum(drawn.astype(np.int64), sizes - 2)
        for start, stop, _ in POSITIONS.lists:
            lengths = random.integers(0, stop - start + 1, (n, 1))
            ids[:, start:stop][np.arange(stop - start) >= lengths] = 0
        logit = self.logit(dense, ids)
        labels = (random.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        return labels, dense, ids, logit

    def encoded(self, n, seed=1):
        """Return `n` rows in the form in which training reads them."""
        labels, dense, ids, _ = self.rows(n, seed)
        return Rows(labels=labels, dense=dense, ids=ids.astype(np.int32))


def write_folder(folder: Path, labels, dense, ids, num_files=2) -> Path:
    """Write rows in HugeCTR's Parquet form."""
    folder.mkdir(parents=True)
    columns = [(LABEL, labels, pa.float32())]
    columns += [(n, each, pa.float32()) for n, each in zip(FEATURES.dense_inputs, dense.T)]
    columns += [(n, each, pa.int64()) for n, each in zip(FEATURES.id_names, ids.T)]
    table = pa.table({name: pa.array(values, kind) for name, values, kind in columns})
    bounds = np.linspace(0, len(labels), num_files + 1).astype(int)
    # For example, part_10 sorts before part_9. Readers must follow the order of the list and not
    # the order of the names.
    names = [f"part_{i + 9}.parquet" for i in range(num_files)]
    for name, start, stop in zip(names, bounds, bounds[1:]):
        pq.write_table(table.slice(start, stop - start), folder / name, row_group_size=5000)
    lines = [str(num_files), *(f"/elsewhere/{name}" for name in names)]
    (folder / "_file_list.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_workflow(folder: Path, slot_sizes, start=0) -> Path:
    """Write a feature workflow whose vocabularies have these sizes.

    A larger vocabulary contains the keys of a smaller vocabulary.
    """
    workflow_of(
        [start + 10_000 * c + np.arange(s - FIRST_ID) for c, s in enumerate(slot_sizes)]
    ).save(folder)
    return folder


def training_set_of(folder: Path, num_rows: int, *, workflow: Path, **changes) -> TrainingSet:
    """Return a manifest whose training rows and holdout rows are the encoded rows in `folder`."""
    values = {
        "train_uri": folder.as_uri(),
        "holdout_uri": folder.as_uri(),
        "num_train_rows": num_rows,
        "num_holdout_rows": num_rows,
        "new_categories": [0] * len(FEATURES.slots),
        "workflow_uri": workflow.as_uri(),
        "raw_digest": "digest",
        "last_event_time": "2026-01-02T03:04:05+00:00",
        "parent_model_uri": None,
        "watermark": "2026-01-02T03:04:04+00:00",
        "recommender": SHOP,
    }
    return TrainingSet(**{**values, **changes})


def training_sets(root: Path):
    """Return `make`, which writes rows, workflow and manifest below `root`.

    `make` returns a TrainingSet.
    """

    def make(labels, dense, ids, slot_sizes=SLOT_SIZES, name="set", workflow_start=0, num_files=2):
        folder = root / "work with space" / name
        train = write_folder(folder / "train", labels, dense, ids, num_files)
        workflow, sizes = (
            write_workflow(folder / "workflow", slot_sizes, workflow_start),
            list(slot_sizes),
        )
        digest = f"digest of {name}"
        return training_set_of(
            train, len(labels), workflow=workflow, slot_sizes=sizes, raw_digest=digest
        )

    return make


def fit_by_pytorch(
    training_set: TrainingSet, config, settings, path: Path, *, start=None, emit=None, **keywords
):
    """Run a fit on the CPU with checkpoints in `path`, and return its result."""
    from components.training.fit import FitJob, fit
    from components.training.pytorch.engine import PytorchEngine

    job = FitJob(
        training_set=training_set,
        config=config,
        settings=settings,
        start=start,
        checkpoint_path=path,
    )
    positions = training_set.recommender.features.id_positions
    engine = PytorchEngine(
        config, training_set.slot_sizes, settings, device="cpu", positions=positions
    )
    return fit(job, engine, emit=emit or (lambda _: None), **keywords)


def dcn(**settings):
    """Return a DCN for the planted rows."""
    return DcnConfig(**WIDTHS, **settings)
