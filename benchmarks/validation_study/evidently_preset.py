"""Evidently as a contestant: `DataDriftPreset` with all its defaults, on the 39 features.

Its defaults, as its documentation gives them (docs.evidentlyai.com/metrics/explainer_drift): with more than 1,000 rows
the Wasserstein distance over the standard deviation for numbers, the Jensen-Shannon distance for categories, each an
alarm from 0.1 on. Categories are handed over as text, missing ones as missing, as a column of hashes is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from evidently import DataDefinition, Dataset, Report
from evidently.presets import DataDriftPreset

from benchmarks.validation_study.answering import answer
from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES


def judge(before: Path, now: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """The features that the preset calls drifted.

    It judges each column by itself, so that those not asked about are left out: of a column with thousands of
    categories it takes seconds.
    """
    names = columns or FEATURES
    told: dict[str, Any] = Report([DataDriftPreset()]).run(_dataset(now, names), _dataset(before, names)).dict()
    return {"Evidently, default preset": drifted_columns(told, names)}


def drifted_columns(report: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The columns of a report as a dict whose value lies on the drifted side of its threshold.

    Raises:
        ValueError: the report does not judge each of `names`.
    """
    found = {}
    for metric in report["metrics"]:
        config = metric["config"]
        if config["type"].endswith("ValueDrift"):
            value, threshold = metric["value"], config["threshold"]
            # A p-value alarms below its threshold, a distance from its threshold on.
            found[config["column"]] = value < threshold if "p_value" in config["method"] else value >= threshold
    if set(found) != set(names):
        raise ValueError(f"Evidently judged {sorted(found)}, expected {sorted(names)}")
    return [name for name in names if found[name]]


def _dataset(folder: Path, names: Sequence[str]) -> Any:
    frame = pd.read_parquet(folder, columns=list(names))
    categories = [name for name in names if name in CATEGORICAL]
    for name in categories:
        # A column with missing values is read as float64, which holds every hash exactly.
        values = frame[name]
        frame[name] = values.astype("Int64").astype("string").astype("object").where(values.notna(), None)
    numbers = [name for name in names if name in DENSE]
    return Dataset.from_pandas(frame, DataDefinition(numerical_columns=numbers, categorical_columns=categories))


if __name__ == "__main__":
    answer(judge)
