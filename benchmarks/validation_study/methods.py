"""Find shifts between the study's windows by our validation and by TFDV.

The input is two folders of raw Parquet files. There are two methods:

- `ours`: the function `validate` as in a run, with default settings and rules. The earlier window
  is validated like the rows of a first run, whose model is then the champion. If any check of a
  feature does not pass, the feature has an alarm.
- `TFDV`: TFDV's drift comparator on the statistics of two data frames, as in TFDV's guide. All
  features have the same threshold. For categories, the guide ("Get started", Checking data skew and
  drift) uses an L-infinity threshold of 0.01. For numbers, TFDV's guide names the Jensen-Shannon
  divergence without a threshold, so this threshold is 0.01 too. The second threshold is 0.3, for
  numbers and for categories. This value is the documented default of BigQuery's
  ML.VALIDATE_DATA_SKEW, which calls TFDV.

TFDV is imported at its first use, so that the plan can be read without TFDV.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from evergreen.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER, DENSE, FEATURES

Method = Callable[[Path, Path], "dict[str, list[str]]"]
"""Function that compares two windows, and returns the features with an alarm by setting of the
method. The arguments are the folders of the earlier and the later window. The two folders have the
same parent folder, and the function may write into it."""

OURS, TFDV = "ours", "TFDV"
THRESHOLDS = {"TFDV, threshold 0.01": 0.01, "TFDV, threshold 0.3": 0.3}


def alarms_by_ours(before: Path, now: Path) -> dict[str, list[str]]:
    """Return the features with a check that did not pass.

    If a check is about the complete window, its feature is `dataset`.
    """
    checks = _validate_window(now, now.parent / "validation", _champion_of(before)).checks
    return {OURS: sorted({check.column for check in checks if not check.passed})}


def _validate_window(rows: Path, folder: Path, model: Path | None) -> Any:
    from components.validation.measure import read_champion
    from components.validation.quarantine import rows_folder
    from components.validation.validate import Inputs, validate
    from evergreen.config.validation import ValidationSettings
    from evergreen.contracts.manifests import Model
    from testing.validation_models import make_dataset

    inputs = Inputs(
        run="study",
        raw=make_dataset(rows, 1, digest=str(rows), recommender=CRITEO_RECOMMENDER),
        folder=folder,
        quarantine=rows_folder(folder.parent / "store", "study"),
        rules=ValidationSettings(),
        champion=read_champion(model) if model else None,
        schema_path=model / Model.SCHEMA if model else None,
    )
    return validate(inputs).report


@lru_cache(maxsize=1)
def _champion_of(rows: Path) -> Path:
    """Return a model folder as a first run on these rows would leave it."""
    from testing.validation_models import release_validated

    report = _validate_window(rows, rows.parent / "first validation", None)
    return release_validated(rows.parent / "store", "champion", report)


def alarms_by_tfdv(before: Path, now: Path) -> dict[str, list[str]]:
    """Return the features with a distance above each of `THRESHOLDS`.

    A feature without values has no distance, and raises no alarm.
    """
    import tensorflow_data_validation as tfdv
    from tensorflow_metadata.proto.v0 import schema_pb2

    schema = schema_pb2.Schema()
    least = min(THRESHOLDS.values())
    for name in CATEGORICAL:
        feature = schema.feature.add(name=name, type=schema_pb2.BYTES)
        feature.drift_comparator.infinity_norm.threshold = least
    for name in DENSE:
        feature = schema.feature.add(name=name, type=schema_pb2.FLOAT)
        feature.drift_comparator.jensen_shannon_divergence.threshold = least
    found = tfdv.validate_statistics(
        _tfdv_statistics(now), schema, previous_statistics=_tfdv_statistics(before)
    )
    distances = {
        info.path.step[0]: measurement.value
        for info in found.drift_skew_info
        for measurement in info.drift_measurements
    }
    return {
        setting: [name for name in FEATURES if distances.get(name, 0.0) > threshold]
        for setting, threshold in THRESHOLDS.items()
    }


@lru_cache(maxsize=4)
def _tfdv_statistics(folder: Path) -> Any:
    import tensorflow_data_validation as tfdv

    return tfdv.generate_statistics_from_dataframe(_read_frame(folder))


def _read_frame(folder: Path) -> Any:
    """Return the features as a data frame, with string categories and missing values."""
    import pandas as pd

    frame = pd.read_parquet(folder, columns=list(FEATURES))
    for name in CATEGORICAL:
        # A column with missing values is read as float64, which represents every hash exactly.
        values = frame[name]
        frame[name] = (
            values.astype("Int64").astype("string").astype("object").where(values.notna(), None)
        )
    return frame


METHODS: dict[str, Method] = {OURS: alarms_by_ours, TFDV: alarms_by_tfdv}
