"""Train a first model with the code of the steps, in this process and without manifests.

Preprocessing's functions compute the vocabularies, `contracts` writes the files, and training's
code fits the model. NumPy counts the categories, as in the step without NVTabular. The model is not
evaluated, so no rows are held out.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.preprocessing.vocabularies import next_column, unseen_column
from components.training.backends import make_engine
from components.training.calibration import corrected
from components.training.fit import FitJob, fit
from components.training.rows import Rows as EncodedRows
from demo.simulation.simulator import SimulatedRows
from evergreen.config.features import MISSING_CATEGORY, NumericOptions
from evergreen.config.model import network_config
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.config.spec import Recommender
from evergreen.config.training import TrainingSettings
from evergreen.contracts.hugectr_folder import write_file_list
from evergreen.contracts.manifests import Model, TrainingSet
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import FeatureWorkflow

_BACKEND = "pytorch"


class FirstModel:
    """Model that was trained on the rows of one window."""

    def __init__(self, rows: SimulatedRows, folder: Path, recommender: Recommender) -> None:
        """Train on the rows with the recommender's features and settings.

        `folder` exists, and receives the model's files.
        """
        self._recommender = recommender
        self._features = _features(rows, recommender)
        config, settings = (
            network_config(recommender),
            recommender.section("training", TrainingSettings),
        )
        (folder / Model.WORKFLOW).mkdir()
        self._features.save(folder / Model.WORKFLOW)
        self._engine = make_engine(
            _BACKEND,
            config,
            self._features.slot_sizes,
            settings=settings,
            scratch=folder / "scratch",
            features=recommender.features,
        )
        job = FitJob(
            training_set=self._training_set(folder, rows),
            config=config,
            settings=settings,
            start=None,
            checkpoint_path=folder / "checkpoint",
        )
        fitted = fit(job, self._engine, emit=lambda _: None)
        self._engine.restore(fitted.weights)
        self._served_shift = fitted.served_shift

    @property
    def slot_sizes(self) -> list[int]:
        """Number of rows of the embedding table, by column."""
        return self._features.slot_sizes

    def encoded(self, rows: SimulatedRows) -> EncodedRows:
        """Return the rows in the encoding of the model."""
        return EncodedRows(
            labels=rows.label.astype(np.float32),
            dense=self._features.encode_dense(rows.dense),
            ids=self._features.encode_categorical(rows.categorical).astype(np.int32),
        )

    def score(self, rows: SimulatedRows) -> NDArray[np.float32]:
        """Return the click probabilities [n].

        The scores use the real values, even if serving replaces all values of a column by one
        value.
        """
        return corrected(self._engine.score(self.encoded(rows)), shift=-self._served_shift)

    def _training_set(self, folder: Path, rows: SimulatedRows) -> TrainingSet:
        encoded, train, features = self.encoded(rows), folder / "train", self._recommender.features
        train.mkdir()
        columns = {LABEL: encoded.labels}
        columns |= {
            name: np.ascontiguousarray(encoded.dense[:, i])
            for i, name in enumerate(features.dense_inputs)
        }
        columns |= {
            name: encoded.ids[:, i].astype(np.int64)
            for i, name in enumerate(features.position_names)
        }
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
            watermark="",
            parent_model_uri=None,
            recommender=self._recommender,
        )


def _features(rows: SimulatedRows, recommender: Recommender) -> FeatureWorkflow:
    """Return the workflow that preprocessing fits in a first run."""
    features, rules = (
        recommender.features,
        recommender.section("preprocessing", PreprocessingSettings),
    )
    nothing, position_slots = (
        unseen_column(np.zeros(0, np.int64)),
        np.array(features.positions.slots),
    )
    columns = [
        next_column(
            nothing, *_counted(rows.categorical[:, position_slots == slot]), now=0, rules=rules
        )
        for slot in range(len(features.slots))
    ]
    unscaled = FeatureWorkflow(
        features=features,
        vocabularies=tuple(column.vocabulary for column in columns),
        means=np.zeros(len(features.numeric), np.float32),
        stds=np.ones(len(features.numeric), np.float32),
        frequency_threshold=rules.frequency_threshold,
    )
    values = unscaled.encode_dense(rows.dense).astype(np.float64)
    scalings = [
        _scaling(values[:, i], features.options_of(name)) for i, name in enumerate(features.numeric)
    ]
    means, stds = np.array(scalings, np.float32).reshape(-1, 2).T
    return replace(unscaled, means=means, stds=np.where(stds == 0, np.float32(1), stds))


def _scaling(values: NDArray[np.float64], options: NumericOptions) -> tuple[float, float]:
    if options.is_standardized:
        return float(values.mean()), float(values.std(ddof=1))
    return (float(values.min()), float(np.ptp(values))) if options.is_minmax else (0.0, 1.0)


def _counted(raw: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the categories of a column and the count of each category."""
    seen, counts = np.unique(raw, return_counts=True)
    has_category = seen != MISSING_CATEGORY
    return seen[has_category], counts[has_category].astype(np.int64)
