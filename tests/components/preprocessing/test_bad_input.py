"""Tests of refused input: the error names the thing, its value and what was expected."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tests.support.workflows import workflow_of


@pytest.fixture
def refuses(run_step, capsys):
    """Runs the step, which must refuse with `message` and publish nothing."""

    def check(raw, message, **options):
        run_step(raw, expect=2, **options)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert message in error
        assert not (run_step.store.parent / "big data" / "run-1" / "preprocessing").exists()
        note = json.loads((run_step.store / "runs" / "run-1" / "preprocessing.json").read_text())
        assert note["state"] == "failed"

    return check


def test_parent_that_is_not_in_store(write_raw, refuses, raw_table):
    refuses(write_raw(raw_table(50)), "parent 'm7' is not in the model registry", parent="m7")


@pytest.mark.parametrize("damage", ["missing", "truncated", "swapped", "other slots"])
def test_corrupt_parent_workflow(write_raw, keep_as_model, refuses, raw_table, tmp_path, damage):
    workflow = workflow_of([np.arange(50)] * 4, frequency_threshold=2)
    workflow.save(tmp_path / "workflow")
    folder = keep_as_model(tmp_path / "workflow", workflow.slot_sizes, "m1")
    raw = write_raw(raw_table(200))
    vocabularies = folder / "workflow" / "vocabularies.npz"
    if damage == "missing":
        vocabularies.unlink()
    elif damage == "truncated":
        vocabularies.write_bytes(vocabularies.read_bytes()[:-100])
    elif damage == "swapped":
        settings = folder / "workflow" / "workflow.json"
        settings.write_text(
            settings.read_text().replace('"frequency_threshold": 2', '"frequency_threshold": 3')
        )
    else:
        manifest = json.loads((folder / "model.json").read_text())
        manifest["slot_sizes"][3] += 1
        del manifest["crc32"]
        (folder / "model.json").write_text(json.dumps(manifest))
    refuses(raw, "slot sizes" if damage == "other slots" else "has sha256", parent="m1")


def with_column(name, values):
    """Return a function that replaces the column `name` of a table by `values`."""
    return lambda table: table.set_column(table.column_names.index(name), name, values)


ROWS = {
    "none": (lambda table: table.slice(0, 0), "has 0 rows"),
    "a column less": (lambda table: table.drop(["seen"]), "column seen"),
    "text among the categories": (
        with_column("shop", pa.array(["68fd1e64"] * 100)),
        "is string, expected int64",
    ),
}


@pytest.mark.parametrize(("change", "message"), ROWS.values(), ids=ROWS.keys())
def test_rows_that_are_not_what_was_agreed_on(write_raw, refuses, raw_table, change, message):
    refuses(write_raw(raw_table(100), change(raw_table(100))), message)


def test_manifests_that_cannot_be_used(write_raw, refuses, raw_table, tmp_path):
    refuses(tmp_path / "nothing.json", "cannot be read")
    raw = write_raw(raw_table(100))
    (tmp_path / "raw" / "holdout" / "part-00000.parquet").unlink()
    refuses(raw, "has no .parquet file")


def test_fewer_rows_than_in_manifest(write_raw, refuses, raw_table, tmp_path):
    raw = write_raw(raw_table(100))
    pq.write_table(raw_table(90), tmp_path / "raw" / "train" / "part-00000.parquet")
    refuses(raw, "has 90 rows, expected the manifest's 100")


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("frequency_threshold", 0, "at least 1"),
        ("partition_rows", 0, "at least 1"),
        ("max_candidates", -1, "at least 0"),
        ("processes", -1, "at least 0"),
        ("negative_rate", 0.0, "more than 0 and at most 1"),
        ("negative_rate", 1.5, "more than 0 and at most 1"),
        ("category_ttl_days", -0.5, "0 (never) or more"),
        ("category_ttl_days", float("inf"), "0 (never) or more"),
        ("category_ttl_days", float("nan"), "0 (never) or more"),
    ],
)
def test_settings_out_of_range(setting, value, expected):
    with raises(ContractError, setting, value, expected):
        PreprocessingSettings(**{setting: value})
