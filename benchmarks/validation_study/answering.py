"""A contestant's side of the pipe: one question per line of standard input, one answer per line of standard output.

`python -m benchmarks.validation_study.answering NAME`, in the environment that the contestant needs; each imports its
libraries when it is first asked. A question names two folders of raw Parquet files, the window before and the window
now, and the columns asked about; an answer says which features were alarmed, by each of the contestant's settings, and
how long it took. The asking side is `plan`.

- `ours`: `validate`, as a run calls it, with default settings and rules. The window before is validated as a first
  round's rows are, and what that leaves behind, laid out as training lays it into the model, is the champion. Every
  finding that is more than a note is an alarm of its feature, whatever rule made it.
- `TFDV`: its drift comparator, as its guide shows it: statistics of two frames, one threshold for all. The guide ("Get
  started", Checking data skew and drift) sets an L-infinity of 0.01 for categories and names the Jensen-Shannon
  divergence for numbers without a number, so those get 0.01 too. The other setting, 0.3, is what BigQuery's
  ML.VALIDATE_DATA_SKEW, which calls TFDV, documents as its default for both kinds.
- `Evidently`: `DataDriftPreset` with all its defaults (docs.evidentlyai.com/metrics/explainer_drift): with more than
  1,000 rows the Wasserstein distance over the standard deviation for numbers, the Jensen-Shannon distance for
  categories, each an alarm from 0.1 on. It judges column by column, so columns not asked about are left out: a column
  with thousands of categories takes it seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES

Judge = Callable[[Path, Path, "tuple[str, ...]"], "dict[str, list[str]]"]
"""(folder before, folder now, columns; empty = all) -> features that were alarmed, by the name of the setting."""

THRESHOLDS = {"TFDV, threshold 0.01": 0.01, "TFDV, threshold 0.3": 0.3}
_SCRATCH = Path(tempfile.gettempdir()) / f"evergreen-study-{os.getpid()}"


def answer(judge: Judge) -> None:
    """Answers until the input ends."""
    # What a library prints must not stand between the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        began = time.perf_counter()
        alarms = judge(Path(question["before"]), Path(question["now"]), tuple(question["columns"]))
        print(json.dumps({"alarms": alarms, "seconds": time.perf_counter() - began}), file=replies, flush=True)


def judge_by_ours(before: Path, now: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """The features, and `dataset`, with a finding that warns or blocks."""
    findings = _validate_window(now, _SCRATCH / "now", _champion_of(before)).findings
    return {"ours": sorted({finding["feature"] for finding in findings if finding["severity"] != "info"})}


def _validate_window(rows: Path, folder: Path, model: Path | None) -> Any:
    from components.contracts.manifests import Model
    from components.validation.inputs import ValidationRound, read_champion
    from components.validation.rules import RuleSet
    from components.validation.validate import validate

    round_ = ValidationRound(
        run="study",
        raw=_make_manifest(rows),
        folder=folder,
        store=_SCRATCH / "store",
        rules=RuleSet(),
        champion=read_champion(model) if model else None,
        schema_path=model / Model.SCHEMA if model else None,
    )
    return validate(round_).report


@lru_cache(maxsize=1)
def _champion_of(rows: Path) -> Path:
    """The model folder that the rows' first round would have left."""
    from components.contracts.manifests import Model
    from components.storage.uris import local_path

    model = _SCRATCH / "model"
    shutil.rmtree(model, ignore_errors=True)
    report = _validate_window(rows, _SCRATCH / "before", None)
    parts = {
        Model.STATISTICS: report.statistics_uri,
        Model.SCHEMA: report.schema_uri,
        Model.WINDOWS: report.windows_uri,
    }
    for part, uri in parts.items():
        (model / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local_path(uri), model / part)
    return model


def _make_manifest(rows: Path) -> Any:
    """The manifest of a window whose rows are all training rows; validation reads no more of it."""
    from components.contracts.manifests import RawDataset

    return RawDataset(
        source_uri=rows.as_uri(),
        window_start=None,
        window_end=None,
        first_event_time="2025-10-09T00:00:00+00:00",
        last_event_time="2025-10-10T00:00:00+00:00",
        train_uri=rows.as_uri(),
        holdout_uri=rows.as_uri(),
        num_train_rows=1,
        num_holdout_rows=0,
        num_malformed=0,
        malformed_uri=None,
        num_duplicates=0,
        digest=str(rows),
    )


def judge_by_tfdv(before: Path, now: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
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

    return tfdv.generate_statistics_from_dataframe(_read_frame(folder, FEATURES))


def _read_frame(folder: Path, names: Sequence[str]) -> Any:
    """The columns as a data frame; categories are text, missing ones missing, as a column of hashes is read."""
    import pandas as pd

    frame = pd.read_parquet(folder, columns=list(names))
    for name in names:
        if name in CATEGORICAL:
            # A column with missing values is read as float64, which holds every hash exactly.
            values = frame[name]
            frame[name] = values.astype("Int64").astype("string").astype("object").where(values.notna(), None)
    return frame


def judge_by_evidently(before: Path, now: Path, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """The features that the preset calls drifted."""
    from evidently import DataDefinition, Dataset, Report
    from evidently.presets import DataDriftPreset

    names = columns or FEATURES
    kinds = DataDefinition(
        numerical_columns=[name for name in names if name in DENSE],
        categorical_columns=[name for name in names if name in CATEGORICAL],
    )
    sides = [Dataset.from_pandas(_read_frame(folder, names), kinds) for folder in (now, before)]
    return {"Evidently, default preset": drifted_columns(Report([DataDriftPreset()]).run(*sides).dict(), names)}


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


JUDGES: dict[str, Judge] = {"ours": judge_by_ours, "TFDV": judge_by_tfdv, "Evidently": judge_by_evidently}

if __name__ == "__main__":
    try:
        answer(JUDGES[sys.argv[1]])
    finally:
        shutil.rmtree(_SCRATCH, ignore_errors=True)
