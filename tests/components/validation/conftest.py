"""Fixtures for training rows on disk and in memory, and a registry with a champion."""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.validation.__main__ import main
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.manifests import RawDataset, ValidationReport
from evergreen.registry import models as registry
from evergreen.registry import runs
from evergreen.statistics.profile_counter import ProfileCounter
from testing import recommenders
from testing.validation_models import make_dataset, release_validated


@pytest.fixture(scope="session")
def raw_table(criteo_table):
    """Draws Criteo's rows."""
    return criteo_table


@pytest.fixture
def write_rows(tmp_path):
    """Writes tables as the Parquet files of a training folder and returns the manifest's path."""

    def write(*tables, name="raw"):
        folder = tmp_path / name / "train"
        folder.mkdir(parents=True)
        for i, table in enumerate(tables):
            pq.write_table(table, folder / f"part-{i}.parquet")
        manifest = tmp_path / name / "raw.json"
        make_dataset(
            folder,
            sum(table.num_rows for table in tables),
            recommender=criteo.CRITEO_RECOMMENDER,
        ).write(manifest)
        return manifest

    return write


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "model registry"
    folder.mkdir()
    return folder


@pytest.fixture
def release_model(store):
    """Makes the model `m1` the champion, with the statistics and the schema of a report."""
    return partial(release_validated, store, "m1")


@pytest.fixture
def checked(raw_table):
    """Makes a table of the checked columns and the request ids. Some columns are replaced."""

    def make(n=2000, *, seed=0, **replaced):
        table = raw_table(n, seed=seed).select(
            [raw_rows.LABEL, *criteo.FEATURES, raw_rows.REQUEST_ID]
        )
        for name, column in replaced.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table

    return make


@pytest.fixture
def step(tmp_path, store):
    """Runs the step on a manifest and returns the exit code and the report."""

    def run(manifest, *flags, run="r1", champion="current", **settings):
        output = tmp_path / "out" / f"{run}.json"
        if settings:
            asked = recommenders.criteo_with(validation=settings)
            replace(RawDataset.read(manifest), recommender=asked).write(manifest)
        if live := registry.champion(store, champion):  # The run also continues this model.
            replace(RawDataset.read(manifest), parent_model_id=live.model_id).write(manifest)
        arguments = {
            "run": run,
            "store": store.as_uri(),
            "work": str(tmp_path / "work place"),
            "champion": champion,
        }
        arguments |= {
            "raw-dataset": manifest,
            "output": output,
            "html": tmp_path / "out" / f"{run}.html",
        }
        arguments |= {"valid-dataset": tmp_path / "out" / f"{run}.valid.json"}
        code = main([f"--{name}={value}" for name, value in arguments.items()] + list(flags))
        return code, ValidationReport.read(output) if output.exists() else None

    return run


@pytest.fixture
def notes_of(store):
    """The note that the step left about a run."""

    def read(run):
        (note,) = runs.read_notes(store, run)
        return note

    return read


@pytest.fixture
def in_requests(checked):
    """Groups rows into requests of `size`.

    Rows of a request share the values of the `alike` columns, like rows of one user.
    """

    def make(n, *, seed=0, size=64, alike=("I2", "I5", "C2", "C9", "C13"), **replaced):
        table = checked(n, seed=seed, **replaced)
        first = np.arange(n) // size * size
        for name in alike:
            table = table.set_column(
                table.schema.get_field_index(name), name, table[name].take(pa.array(first))
            )
        ids = pa.array([f"request-{seed}-{i}" for i in range(-(-n // size))])
        column_index = table.schema.get_field_index(raw_rows.REQUEST_ID)
        return table.set_column(
            column_index, raw_rows.REQUEST_ID, ids.take(pa.array(np.arange(n) // size))
        )

    return make


@pytest.fixture
def window_of():
    """Returns the summary of a table's rows."""

    def make(table, digest="", *, batch_rows=65_536, excluded=(), features=criteo.CRITEO):
        counter = ProfileCounter(features, excluded)
        for batch in table.combine_chunks().to_batches(max_chunksize=batch_rows):
            counter.add(batch)
        return counter.profile(digest=digest)

    return make
