"""Raw datasets and a model store's releases, for the tests of validation."""

from __future__ import annotations

import shutil
from pathlib import Path

from components.contracts.manifests import Model, RawDataset, Release, ValidationReport
from components.storage.uris import local_path
from components.store import promotion_journal

TIME = "2026-01-02T00:00:00Z"


def make_dataset(
    folder: Path,
    num_rows: int,
    *,
    digest: str = "d" * 64,
    first_event_time: str = "2026-01-01T00:00:00Z",
    last_event_time: str = TIME,
) -> RawDataset:
    """The manifest of the training rows in `folder`; none is held out."""
    return RawDataset(
        source_uri="file:///lake",
        window_start=None,
        window_end=None,
        first_event_time=first_event_time,
        last_event_time=last_event_time,
        train_uri=folder.as_uri(),
        holdout_uri=folder.as_uri(),
        num_train_rows=num_rows,
        num_holdout_rows=0,
        num_malformed=0,
        malformed_uri=None,
        num_duplicates=0,
        digest=digest,
    )


def release_validated(store: Path, model_id: str, report: ValidationReport, *, raw_digest: str = "d" * 64) -> Path:
    """Makes a model with the statistics, schema and windows of `report` the champion; returns its folder."""
    folder = store / "models" / model_id
    parts = [(Model.STATISTICS, report.statistics_uri), (Model.SCHEMA, report.schema_uri)]
    parts += [(Model.WINDOWS, report.windows_uri)] if report.windows_uri else []
    for part, uri in parts:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(local_path(uri), folder / part)
    version = len(promotion_journal.read_journal(store)) + 1
    manifest = store / "releases" / f"{version}.json"
    common = {"version": version, "previous_version": None, "model_id": model_id, "model_uri": folder.as_uri()}
    common |= {"trigger_id": None, "reason": "test"}
    Release(
        model_name="click_model",
        graph_uri="file:///repository",
        sha256={},
        raw_digest=raw_digest,
        parity_max_abs_diff=0.0,
        parity_rows=1,
        repository_uri="file:///repository",
        published_at=TIME,
        **common,
    ).write(manifest)
    promotion = promotion_journal.Promotion(
        time=TIME, action=promotion_journal.RELEASE, release_uri=manifest.as_uri(), **common
    )
    promotion_journal.append_promotion(store, promotion)
    return folder
