"""Raw datasets, and releases in a model registry, for the tests of validation."""

import shutil
from pathlib import Path

from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import Model, RawDataset, ValidationReport
from evergreen.registry.promotion_journal import read_journal
from evergreen.runtime.durable import sha256_tree
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP
from testing.releases import make_live, release, store_model

TIME = "2026-01-02T00:00:00Z"


def make_dataset(
    folder: Path,
    num_rows: int,
    *,
    digest: str = "d" * 64,
    first_event_time: str = "2026-01-01T00:00:00Z",
    last_event_time: str = TIME,
    recommender: Recommender = SHOP,
) -> RawDataset:
    """Return the manifest of the training rows in `folder`. The manifest names no holdout rows."""
    return RawDataset(
        source_uri="file:///lake",
        window_start=None,
        window_end=None,
        first_event_time=first_event_time,
        last_event_time=last_event_time,
        watermark=last_event_time,
        train_uri=folder.as_uri(),
        holdout_uri=folder.as_uri(),
        num_train_rows=num_rows,
        num_holdout_rows=0,
        num_malformed=0,
        malformed_uri=None,
        num_duplicates=0,
        digest=digest,
        recommender=recommender,
    )


def release_validated(
    store: Path, model_id: str, report: ValidationReport, *, raw_digest: str = "d" * 64
) -> Path:
    """Make a model the champion, with the statistics, schema and windows of `report`.

    Returns: The folder of the model.
    """
    folder = store / "models" / model_id
    parts = [(Model.STATISTICS, report.statistics_uri), (Model.SCHEMA, report.schema_uri)]
    parts += [(Model.WINDOWS, report.windows_uri)] if report.windows_uri else []
    for part, uri in parts:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(local_path(uri), folder / part)
    store_model(store, model_id, sha256={"statistics": sha256_tree(folder / "statistics")})
    version = len(read_journal(store)) + 1
    make_live(store, release(store, version, model_id, raw_digest=raw_digest))
    return folder
