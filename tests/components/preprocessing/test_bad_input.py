"""What the step refuses, and that it says which thing, which value and what it expected."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing.settings import PreprocessingSettings
from components.runtime.errors import ContractError


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


def test_a_parent_that_is_not_in_the_store(write_raw, refuses, raw_table):
    refuses(write_raw(raw_table(50)), "parent 'm7' is not in the model store", parent="m7")


@pytest.mark.parametrize("damage", ["missing", "truncated", "swapped", "other slots"])
def test_a_damaged_parent_workflow(write_raw, keep_as_model, refuses, raw_table, tmp_path, damage):
    workflow = FeatureWorkflow(
        vocabularies=tuple(np.arange(50) for _ in range(NUM_CATEGORICAL)),
        fill=0.0,
        clip_min=0.0,
        means=np.zeros(NUM_DENSE, np.float32),
        stds=np.ones(NUM_DENSE, np.float32),
        frequency_threshold=2,
    )
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
        settings.write_text(settings.read_text().replace('"fill": 0.0', '"fill": 1.0'))
    else:
        manifest = json.loads((folder / "model.json").read_text())
        manifest["slot_sizes"][4] += 1
        (folder / "model.json").write_text(json.dumps(manifest))
    messages = {"swapped": "has sha256", "other slots": "slot sizes"}
    refuses(raw, messages.get(damage, "cannot be read"), parent="m1")


def test_fewer_rows_than_the_manifest_says(write_raw, refuses, raw_table, tmp_path):
    raw = write_raw(raw_table(100))
    pq.write_table(raw_table(90), tmp_path / "raw" / "train" / "part-00000.parquet")
    refuses(raw, "has 90 rows, expected the manifest's 100")


def test_no_rows_at_all(write_raw, refuses, raw_table):
    refuses(write_raw(raw_table(100), raw_table(0)), "has 0 rows")


def test_an_empty_folder(write_raw, refuses, raw_table, tmp_path):
    raw = write_raw(raw_table(100))
    (tmp_path / "raw" / "holdout" / "part-00000.parquet").unlink()
    refuses(raw, "has no .parquet file")


def test_a_truncated_file(write_raw, refuses, raw_table, tmp_path):
    raw = write_raw(raw_table(100))
    path = tmp_path / "raw" / "train" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    refuses(raw, "cannot be read as Parquet")


def test_a_file_whose_footer_is_whole_and_whose_pages_are_not(write_raw, refuses, raw_table, tmp_path):
    raw = write_raw(raw_table(100))
    path = tmp_path / "raw" / "train" / "part-00000.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])
    refuses(raw, "part-00000.parquet cannot be read as Parquet")


def test_an_absent_column(write_raw, refuses, raw_table):
    refuses(write_raw(raw_table(100).drop(["C26"])), "column C26")


def test_a_column_of_another_type(write_raw, refuses, raw_table):
    table = raw_table(100)
    strings = table.set_column(table.column_names.index("C8"), "C8", pa.array(["68fd1e64"] * 100))
    refuses(write_raw(strings), "is string, expected int64")


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_category_that_no_hash_has(write_raw, refuses, raw_table, value, reading):
    refuses(write_raw(reading.replace(raw_table(100), "C2", np.full(100, value))), f"from {value} to {value}")


def test_an_infinite_integer(write_raw, refuses, raw_table, reading):
    refuses(write_raw(reading.replace(raw_table(100), "I3", np.full(100, np.inf))), "I3")


def test_a_missing_label(write_raw, refuses, raw_table, reading):
    table = reading.replace(raw_table(100), "label", np.zeros(100), mask=np.arange(100) == 5)
    refuses(write_raw(table), "1 nulls")


def test_a_raw_manifest_that_is_not_there(refuses, tmp_path):
    refuses(tmp_path / "nothing.json", "cannot be read")


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("frequency_threshold", 0, "at least 1"),
        ("partition_rows", 0, "at least 1"),
        ("max_candidates", -1, "at least 0"),
        ("processes", -1, "at least 0"),
        ("category_ttl_days", -0.5, "0 .never. or more"),
        ("category_ttl_days", float("inf"), "0 .never. or more"),
        ("category_ttl_days", float("nan"), "0 .never. or more"),
    ],
)
def test_settings_out_of_range(setting, value, expected):
    with pytest.raises(ContractError, match=f"{setting} is {value}, expected {expected}"):
        PreprocessingSettings(**{setting: value})


def test_a_window_without_a_time(write_raw, refuses, raw_table):
    refuses(write_raw(raw_table(100), last_event_time="once"), "last_event_time of the raw dataset is 'once'")
