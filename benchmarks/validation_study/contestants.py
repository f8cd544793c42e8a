"""Who judges the study's windows, and what counts as an alarm. A question is two folders of raw Parquet files.

- `ours`: `validate`, as a run calls it, with default settings and rules. The window before is validated as a first
  round's rows are, and the model folder that this round would have left is the champion. Every finding that is more
  than a note is an alarm of its feature, whatever rule made it.
- `TFDV`: its drift comparator, as its guide shows it: statistics of two frames, one threshold for all. The guide ("Get
  started", Checking data skew and drift) sets an L-infinity of 0.01 for categories and names the Jensen-Shannon
  divergence for numbers without a number, so those get 0.01 too. The other setting, 0.3, is what BigQuery's
  ML.VALIDATE_DATA_SKEW, which calls TFDV, documents as its default for both kinds.

TFDV is imported by the first question, so that the study's plan can be read where TFDV is not installed.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from evergreen.contracts.criteo import CATEGORICAL, DENSE, FEATURES

Judge = Callable[[Path, Path], "dict[str, list[str]]"]
"""(folder before, folder now) -> features that were alarmed, by the name of the contestant's setting.

The folders lie side by side in a folder of the pair's, where a judge may leave files of its own.
"""

OURS, TFDV = "ours", "TFDV"
THRESHOLDS = {"TFDV, threshold 0.01": 0.01, "TFDV, threshold 0.3": 0.3}


def judge_by_ours(before: Path, now: Path) -> dict[str, list[str]]:
    """The features, and `dataset`, with a finding that warns or blocks."""
    findings = _validate_window(now, now.parent / "validation", _champion_of(before)).findings
    return {OURS: sorted({finding["feature"] for finding in findings if finding["severity"] != "info"})}


def _validate_window(rows: Path, folder: Path, model: Path | None) -> Any:
    from components.validation.round import Round, read_champion
    from components.validation.validate import validate
    from evergreen.config.validation import ValidationSettings
    from evergreen.contracts.manifests import Model
    from tests.support.validation_models import make_dataset

    round_ = Round(
        run="study",
        raw=make_dataset(rows, 1, digest=str(rows)),
        folder=folder,
        store=folder.parent / "store",
        rules=ValidationSettings(),
        champion=read_champion(model) if model else None,
        schema_path=model / Model.SCHEMA if model else None,
    )
    return validate(round_).report


@lru_cache(maxsize=1)
def _champion_of(rows: Path) -> Path:
    """The model folder that the rows' first round would have left."""
    from tests.support.validation_models import release_validated

    report = _validate_window(rows, rows.parent / "first validation", None)
    return release_validated(rows.parent / "store", "champion", report)


def judge_by_tfdv(before: Path, now: Path) -> dict[str, list[str]]:
    """The features whose distance is above each of `THRESHOLDS`; a feature without values has none."""
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
    found = tfdv.validate_statistics(_tfdv_statistics(now), schema, previous_statistics=_tfdv_statistics(before))
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
    """The features as a data frame; categories are text, missing ones missing, as a column of hashes is read."""
    import pandas as pd

    frame = pd.read_parquet(folder, columns=list(FEATURES))
    for name in CATEGORICAL:
        # A column with missing values is read as float64, which holds every hash exactly.
        values = frame[name]
        frame[name] = values.astype("Int64").astype("string").astype("object").where(values.notna(), None)
    return frame


JUDGES: dict[str, Judge] = {OURS: judge_by_ours, TFDV: judge_by_tfdv}
