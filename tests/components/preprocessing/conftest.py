"""Fixtures for raw folders, in-process runs of the step, and a model registry with a parent."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.preprocessing.__main__ import main
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model, RawDataset, TrainingSet
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.registry.models import model_folder
from evergreen.runtime.durable import sha256_tree
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP, arrays_of
from testing.releases import store_model
from testing.validation_models import make_dataset

FEATURES = SHOP.features


@pytest.fixture
def write_raw(tmp_path):
    """Writes tables as a raw dataset.

    Each part is a dictionary of tables by file name, or one table.
    """

    def write(
        train,
        holdout=None,
        *,
        name="raw",
        row_group_size=300,
        last_event_time="2025-10-10T00:00:00+00:00",
    ):
        parts = {"train": train, "holdout": holdout if holdout is not None else train}
        counts = {}
        for part, tables in parts.items():
            tables = tables if isinstance(tables, dict) else {"part-00000.parquet": tables}
            folder = tmp_path / name / part
            folder.mkdir(parents=True)
            for file, table in tables.items():
                pq.write_table(table, folder / file, row_group_size=row_group_size)
            counts[part] = sum(table.num_rows for table in tables.values())
        dataset = make_dataset(
            tmp_path / name / "train", counts["train"], last_event_time=last_event_time
        )
        held_out = {
            "holdout_uri": (tmp_path / name / "holdout").as_uri(),
            "num_holdout_rows": counts["holdout"],
        }
        manifest = replace(dataset, **held_out)
        path = tmp_path / name / "raw dataset.json"
        manifest.write(path)
        return path

    return write


def with_settings(raw_path, **settings):
    """Change preprocessing settings in the manifest of a raw dataset."""
    described = RawDataset.read(raw_path).recommender
    changed = {"preprocessing": {"frequency_threshold": 2, **settings}}
    change_dataset(raw_path, recommender=replace(described, settings=changed))


def change_dataset(path, **changes):
    """Change fields of the manifest at `path`, and return the path."""
    replace(RawDataset.read(path), **changes).write(path)
    return path


@pytest.fixture
def write_old_rows():
    """Adds old rows to the parts of a raw dataset, and returns the path of its manifest."""

    def write(path, *, share=0.25, **tables):
        changes = {"replay_share": share}
        for part, table in tables.items():
            folder = path.parent / part
            folder.mkdir()
            pq.write_table(table, folder / "part-00000.parquet", row_group_size=200)
            changes |= {f"{part}_uri": folder.as_uri(), f"num_{part}_rows": table.num_rows}
        return change_dataset(path, **changes)

    return write


@pytest.fixture
def run_step(tmp_path):
    """Runs the step's command line with each engine, and asserts that the bytes are equal.

    The registry and the work folder have a space in their names.
    """

    def run(raw_path, *, run="run-1", expect=0, **options):
        by_engine = {}
        for engine in get_args(get_type_hints(PreprocessingSettings)["engine"]):
            training_set = run_once(raw_path, run=run, expect=expect, engine=engine, **options)
            folder = tmp_path / "big data" / run / "preprocessing"
            # The file raw_dataset.json contains the engine's name, so the file is not compared.
            files = [
                path
                for path in folder.rglob("*")
                if path.is_file() and path.name != "raw_dataset.json"
            ]
            by_engine[engine] = {str(path): path.read_bytes() for path in files}
        assert by_engine["numpy"] == by_engine["nvtabular"]
        assert bool(by_engine["numpy"]) == (expect == 0)
        return training_set

    def run_once(raw_path, *, run, expect, parent=None, extra=(), **settings):
        if raw_path.exists():
            with_settings(raw_path, **settings)
        if parent:
            change_dataset(raw_path, parent_model_id=parent)
        output = tmp_path / f"{run}.json"
        code = main(
            [
                *(
                    "--run",
                    run,
                    "--store",
                    str(tmp_path / "the store"),
                    "--work",
                    (tmp_path / "big data").as_uri(),
                ),
                *("--raw-dataset", str(raw_path), "--output", str(output), *extra),
            ]
        )
        assert code == expect
        return TrainingSet.read(output) if code == 0 else None

    run.store = tmp_path / "the store"
    return run


@pytest.fixture
def keep_as_model(run_step):
    """Stores a workflow in the registry like training does, as the workflow of a trained model."""

    def keep(workflow_folder, slot_sizes, model_id):
        folder = model_folder(run_step.store, model_id)
        shutil.copytree(workflow_folder, folder / Model.WORKFLOW)
        hashes = {"workflow": sha256_tree(folder / Model.WORKFLOW)}
        store_model(run_step.store, model_id, slot_sizes=slot_sizes, sha256=hashes)
        return folder

    return keep


def load_workflow(training_set) -> FeatureWorkflow:
    return FeatureWorkflow.load(local_path(training_set.workflow_uri))


def read_raw_arrays(tables) -> SimpleNamespace:
    """Return label, dense values and categories of raw tables."""
    table = pa.concat_tables(tables)
    dense, categorical = arrays_of(table)
    label = table[raw_rows.LABEL].to_numpy()
    return SimpleNamespace(label=label, dense=dense, categorical=categorical)


def count_by_slot(tables) -> list[Counter]:
    """Count the categories of each slot, over all columns and lists that share the slot."""
    counts = [Counter() for _ in FEATURES.slots]
    for slot, values in zip(FEATURES.positions.slots, read_raw_arrays(tables).categorical.T):
        counts[slot].update(values[values != -1].tolist())
    return counts


def read_table(uri) -> pa.Table:
    """Return the encoded rows in the order of the file list."""
    folder = local_path(uri)
    lines = (folder / "_file_list.txt").read_text().splitlines()
    assert int(lines[0]) == len(lines) - 1
    return pa.concat_tables([pq.read_table(Path(line)) for line in lines[1:]])


def read_encoded(uri) -> SimpleNamespace:
    """Return the encoded rows as arrays."""
    table = read_table(uri)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return SimpleNamespace(
        table=table,
        label=columns[raw_rows.LABEL],
        dense=np.stack([columns[name] for name in FEATURES.dense_inputs], 1),
        ids=np.stack([columns[name] for name in FEATURES.id_names], 1),
    )


def replace_column(table, name, values, **options):
    position = table.column_names.index(name)
    array = pa.array(values, **options).cast(table.schema.field(name).type)
    return table.set_column(position, name, array)


@pytest.fixture
def reading():
    """Return functions that read and change encoded rows.

    Test modules cannot import these functions, because tests/components has no packages.
    """
    return SimpleNamespace(
        workflow=load_workflow,
        table=read_table,
        encoded=read_encoded,
        raw=read_raw_arrays,
        counts=count_by_slot,
        replace=replace_column,
        with_settings=with_settings,
        change=change_dataset,
    )
