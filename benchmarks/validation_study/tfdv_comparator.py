"""TFDV's drift comparator as a contestant, as its guide shows it: statistics of two frames, one threshold for all.

TFDV's guide ("Get started", Checking data skew and drift) sets an L-infinity of 0.01 for a feature of categories, and
names the Jensen-Shannon divergence for numbers without a number; it is given 0.01 too. The tutorial on Chicago's taxis
takes 0.001 for one feature, which alarms more still. The other setting is 0.3, the threshold that BigQuery's
ML.VALIDATE_DATA_SKEW, which calls TFDV, documents as its default for both kinds.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pandas as pd
import tensorflow_data_validation as tfdv
from tensorflow_metadata.proto.v0 import schema_pb2

from benchmarks.validation_study.answering import answer
from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES

THRESHOLDS = {"TFDV, threshold 0.01": 0.01, "TFDV, threshold 0.3": 0.3}


def judge(before: Path, now: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """The features whose distance is above each of `THRESHOLDS`; a feature without values has none."""
    schema = schema_pb2.Schema()
    least = min(THRESHOLDS.values())
    for name in CATEGORICAL:
        feature = schema.feature.add(name=name, type=schema_pb2.BYTES)
        feature.drift_comparator.infinity_norm.threshold = least
    for name in DENSE:
        feature = schema.feature.add(name=name, type=schema_pb2.FLOAT)
        feature.drift_comparator.jensen_shannon_divergence.threshold = least
    found = tfdv.validate_statistics(_statistics(now), schema, previous_statistics=_statistics(before))
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
def _statistics(folder: Path) -> Any:
    frame = pd.read_parquet(folder, columns=list(FEATURES))
    for name in CATEGORICAL:
        # A column with missing values is read as float64, which holds every hash exactly.
        values = frame[name]
        frame[name] = values.astype("Int64").astype("string").astype("object").where(values.notna(), None)
    return tfdv.generate_statistics_from_dataframe(frame)


if __name__ == "__main__":
    answer(judge)
