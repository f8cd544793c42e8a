"""Training rows on disk and in memory, and a model store with a champion trained on given rows."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, promotion_journal
from components.contracts.manifests import Model, RawDataset, Release


@pytest.fixture
def write_rows(tmp_path):
    """Writes tables as the Parquet files of a training folder and gives the manifest's path."""

    def write(*tables, name="raw"):
        folder = tmp_path / name / "train"
        folder.mkdir(parents=True)
        for i, table in enumerate(tables):
            pq.write_table(table, folder / f"part-{i}.parquet")
        manifest = tmp_path / name / "raw.json"
        RawDataset(
            source_uri="file:///lake",
            window_start=None,
            window_end=None,
            first_event_time="2026-01-01T00:00:00Z",
            last_event_time="2026-01-02T00:00:00Z",
            train_uri=folder.as_uri(),
            holdout_uri=folder.as_uri(),
            num_train_rows=sum(table.num_rows for table in tables),
            num_holdout_rows=0,
            num_set_aside=0,
            set_aside_uri=None,
            num_duplicates=0,
            digest="d" * 64,
        ).write(manifest)
        return manifest

    return write


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "model store"
    folder.mkdir()
    return folder


@pytest.fixture
def release_model(store):
    """Makes a model, whose statistics and schema a validation report names, the champion."""

    def release(report):
        model = store / "models" / "m1"
        for part, uri in ((Model.STATISTICS, report.statistics_uri), (Model.SCHEMA, report.schema_uri)):
            (model / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(uri.removeprefix("file://").replace("%20", " "), model / part)
        manifest = store / "releases" / "1.json"
        Release(
            model_name="click_model",
            version=1,
            previous_version=None,
            model_id="m1",
            model_uri=model.as_uri(),
            graph_uri="file:///repository",
            sha256={},
            raw_digest="d" * 64,
            parity_max_abs_diff=0.0,
            parity_rows=1,
            repository_uri="file:///repository",
            trigger_id=None,
            reason="test",
            published_at="2026-01-02T00:00:00Z",
        ).write(manifest)
        promotion = promotion_journal.Promotion(
            time="2026-01-02T00:00:00Z",
            action=promotion_journal.RELEASE,
            version=1,
            previous_version=None,
            model_id="m1",
            model_uri=model.as_uri(),
            release_uri=manifest.as_uri(),
            trigger_id=None,
            reason="test",
        )
        promotion_journal.append_promotion(store, promotion)
        return model

    return release


@pytest.fixture
def judged(raw_table):
    """The judged columns of `n` rows, with some columns replaced."""

    def make(n=2000, *, seed=0, **replaced):
        table = raw_table(n, seed=seed).select([criteo.LABEL, *criteo.FEATURES])
        for name, column in replaced.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table

    return make
