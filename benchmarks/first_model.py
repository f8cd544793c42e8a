"""A first model of some rows, learned as the steps learn one, in this process and without manifests between.

Vocabularies come from preprocessing's own functions, files from `contracts`, the fit from training; NumPy counts the
categories in place of NVTabular. Nothing is held out and nothing is judged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, CRITEO, CRITEO_RECOMMENDER, DENSE, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.features import MISSING_CATEGORY
from components.contracts.hugectr_folder import write_file_list
from components.contracts.manifests import Model, TrainingSet
from components.contracts.raw_rows import LABEL
from components.contracts.workflow import FeatureWorkflow
from components.models.configs import DcnConfig
from components.preprocessing.settings import PreprocessingSettings
from components.preprocessing.vocabularies import next_column, unseen_column
from components.training.config import TrainingSettings
from components.training.engine import make_engine
from components.training.fit import FitJob, fit
from components.training.rows import Rows as EncodedRows
from inference_client.simulation.world import WorldRows

CONFIG = DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL)
_BACKEND = "pytorch"
_RULES = PreprocessingSettings()


class FirstModel:
    """A model that has learned the rows of one window."""

    def __init__(self, rows: WorldRows, folder: Path, settings: TrainingSettings) -> None:
        """Learns the rows; `folder` exists and takes its files."""
        self._features = _features(rows)
        (folder / Model.WORKFLOW).mkdir()
        self._features.save(folder / Model.WORKFLOW)
        self._engine = make_engine(
            _BACKEND, CONFIG, self._features.slot_sizes, settings=settings, scratch=folder / "scratch"
        )
        job = FitJob(
            training_set=self._training_set(folder, rows),
            config=CONFIG,
            settings=settings,
            start=None,
            checkpoint_path=folder / "checkpoint",
        )
        self._engine.restore(fit(job, self._engine, emit=lambda _: None).weights)

    @property
    def slot_sizes(self) -> list[int]:
        """Rows of the table, by column."""
        return self._features.slot_sizes

    def encoded(self, rows: WorldRows) -> EncodedRows:
        """The rows as the model takes them."""
        return EncodedRows(
            labels=rows.label.astype(np.float32),
            dense=self._features.encode_dense(rows.dense),
            ids=self._features.encode_categorical(rows.categorical).astype(np.int32),
        )

    def score(self, rows: WorldRows) -> NDArray[np.float32]:
        """Click probabilities [n]."""
        return self._engine.score(self.encoded(rows))

    def _training_set(self, folder: Path, rows: WorldRows) -> TrainingSet:
        encoded, train = self.encoded(rows), folder / "train"
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
            slot_sizes=self.slot_sizes,
            new_categories=[],
            workflow_uri=(folder / Model.WORKFLOW).absolute().as_uri(),
            raw_digest="",
            last_event_time="",
            last_learned_time="",
            parent_model_uri=None,
            recommender=CRITEO_RECOMMENDER,
        )


def _features(rows: WorldRows) -> FeatureWorkflow:
    """What preprocessing would fit in a first round."""
    nothing = unseen_column(np.zeros(0, np.int64))
    columns = [next_column(nothing, *_counted(raw), now=0, rules=_RULES) for raw in rows.categorical.T]
    logged = np.log1p(np.maximum(np.nan_to_num(rows.dense, nan=0.0), 0.0), dtype=np.float64)
    return FeatureWorkflow(
        features=CRITEO,
        vocabularies=tuple(column.vocabulary for column in columns),
        means=logged.mean(axis=0).astype(np.float32),
        stds=logged.std(axis=0, ddof=1).astype(np.float32),
        frequency_threshold=_RULES.frequency_threshold,
    )


def _counted(raw: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Categories of a column and their counts."""
    seen, counts = np.unique(raw, return_counts=True)
    has_category = seen != MISSING_CATEGORY
    return seen[has_category], counts[has_category].astype(np.int64)
