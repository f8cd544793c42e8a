"""Encoded rows with a planted click logit, for tables of a given size: in memory, or as a training set on disk.

The table of 1,221,286 rows is that of NVIDIA's DCN sample: its 26 slot sizes are one day of Criteo 1TB after NVTabular.
Ids are drawn with probability about 1 / (id + 1), Zipf with exponent 1, which is what Categorify's order by frequency
leaves of click logs. The true logit is a sum of one weight per id and of the weighted dense values.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.hugectr_folder import write_file_list
from components.contracts.manifests import TrainingSet, ValidationReport
from components.training.rows import Rows

SAMPLE_SLOT_SIZES = [
    203931, 18598, 14092, 7012, 18977, 4, 6385, 1245, 49, 186213, 71328, 67288, 11,
    2168, 7338, 61, 4, 932, 15, 204515, 141526, 199433, 60919, 9137, 71, 34,
]  # fmt: skip
_LARGE_SLOT = 10_000
"""A longer log grows the slots above this size; the others have all their categories already."""
_BIAS = -1.2
_WEIGHT_OF_ID, _WEIGHT_OF_DENSE = 0.3, 0.2
"""Standard deviations; 26 slots and 13 values then let nobody reach more than an AUC of about 0.83."""
_ROW_GROUP_ROWS = 1 << 16


def slot_sizes_for(table_rows: int) -> list[int]:
    """The sample's slot sizes, its large slots scaled so that all together have about `table_rows` rows."""
    large = sum(size for size in SAMPLE_SLOT_SIZES if size > _LARGE_SLOT)
    factor = (table_rows - (sum(SAMPLE_SLOT_SIZES) - large)) / large
    return [round(size * factor) if size > _LARGE_SLOT else size for size in SAMPLE_SLOT_SIZES]


class PlantedLogit:
    """Draws rows whose click probability is known."""

    def __init__(self, slot_sizes: list[int], seed: int = 1) -> None:
        """Plants the weights."""
        random = np.random.default_rng(seed)
        self.slot_sizes = slot_sizes
        self._by_id = [_WEIGHT_OF_ID * random.standard_normal(size, np.float32) for size in slot_sizes]
        self._by_dense = _WEIGHT_OF_DENSE * random.standard_normal(NUM_DENSE, np.float32)

    def draw(self, num_rows: int, seed: int) -> tuple[Rows, NDArray[np.float32]]:
        """`num_rows` rows, and their true logits [n]."""
        random = np.random.default_rng(seed)
        dense = random.standard_normal((num_rows, NUM_DENSE), np.float32)
        ids = np.empty((num_rows, NUM_CATEGORICAL), np.int32)
        logits = dense @ self._by_dense + np.float32(_BIAS)
        for slot, (size, weights) in enumerate(zip(self.slot_sizes, self._by_id)):
            # The inverse of the distribution function log(1 + id) / log(1 + size).
            drawn = np.expm1(random.random(num_rows) * np.log1p(size)).astype(np.int32)
            ids[:, slot] = np.minimum(drawn, size - 1)
            logits += weights[ids[:, slot]]
        labels = (random.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return Rows(labels=labels, dense=dense, ids=ids), logits


def write_parquet(folder: Path, rows: Rows) -> Path:
    """Writes `rows` as preprocessing leaves them: float32 and int64 columns, snappy, one file and its list."""
    folder.mkdir(parents=True)
    columns = {LABEL: rows.labels} | {name: rows.dense[:, i] for i, name in enumerate(DENSE)}
    columns |= {name: rows.ids[:, i].astype(np.int64) for i, name in enumerate(CATEGORICAL)}
    pq.write_table(pa.table(columns), folder / "part_0.parquet", row_group_size=_ROW_GROUP_ROWS)
    write_file_list(folder, ["part_0.parquet"], final=folder)
    return folder


class StepInputs(NamedTuple):
    """Manifests that the training step is started with."""

    training_set: Path
    validation_report: Path


def write_step_inputs(folder: Path, rows: Rows, slot_sizes: list[int]) -> StepInputs:
    """Writes all that `python -m components.training` reads: rows, manifests, and stand-ins for what it only copies."""
    train = write_parquet(folder / "train", rows)
    for name in ("workflow", "statistics"):
        (folder / name).mkdir()
        (folder / name / "stand_in").write_text("copied into the model store, not read\n")
    stand_in = (folder / "statistics" / "stand_in").as_uri()
    inputs = StepInputs(folder / "training_set.json", folder / "validation_report.json")
    TrainingSet(
        train_uri=train.as_uri(),
        holdout_uri=train.as_uri(),
        num_train_rows=len(rows),
        num_holdout_rows=len(rows),
        slot_sizes=slot_sizes,
        new_categories=[0] * NUM_CATEGORICAL,
        workflow_uri=(folder / "workflow").as_uri(),
        raw_digest="planted",
        last_event_time="2026-01-01T00:00:00+00:00",
        parent_model_uri=None,
    ).write(inputs.training_set)
    ValidationReport(
        decision="pass",
        reasons=[],
        findings=[],
        drift=[],
        num_rows=len(rows),
        statistics_uri=stand_in,
        schema_uri=stand_in,
        report_uri=stand_in,
        json_uri=stand_in,
        parent_statistics_uri=None,
        raw_digest="planted",
    ).write(inputs.validation_report)
    return inputs
