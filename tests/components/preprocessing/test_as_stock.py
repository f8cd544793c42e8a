"""Compares the step with a stock NVTabular script, and checks that the comparison can fail."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.same_encoding import Different, expect_same
from components.preprocessing.__main__ import main
from evergreen.contracts.manifests import RawDataset
from testing.recommenders import criteo_with

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A window of rows, and the output of the stock NVTabular script for this window."""
    from benchmarks.raw_windows import write_window

    folder = tmp_path_factory.mktemp("window")
    raw = write_window(folder / "raw", 20_000, seed=11, group_rows=4000)
    command = [
        sys.executable,
        "-m",
        "benchmarks.stock_nvtabular",
        str(raw.parent),
        str(folder / "stock"),
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return raw, folder / "stock"


@pytest.fixture(scope="module")
def encoded(window, tmp_path_factory):
    """The project's preprocessing of `window`, in five partitions by two processes."""
    folder = tmp_path_factory.mktemp("ours")
    flags = [f"--raw-dataset={window[0]}", f"--output={folder / 'out.json'}"]
    flags += [f"--store={folder / 'store'}", f"--work={folder}", "--run=r"]
    recommender = criteo_with(
        preprocessing={"partition_rows": 4000, "processes": 2, "frequency_threshold": 2}
    )
    replace(RawDataset.read(window[0]), recommender=recommender).write(window[0])
    assert main(flags) == 0
    return folder / "r" / "preprocessing"


def test_first_run_equals_script_but_for_order_of_equal_frequencies(window, encoded):
    assert expect_same(window[1], encoded) == 20_000


def change(folder, part, name, make):
    path = sorted((folder / part).glob("*.parquet"))[-1]
    table = pq.read_table(path)
    values = make(table[name].to_numpy().copy())
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values)), path)


def swap(one, other):
    return lambda ids: np.where(ids == one, other, np.where(ids == other, one, ids))


@pytest.mark.parametrize(
    ("part", "name", "make", "message"),
    [
        ("holdout", "I4", lambda v: v + np.float32(3e-6), "holdout, I4: values differ"),
        ("holdout", "C3", swap(3, 4), "C3: the ids of the two"),
        ("holdout", "C9", lambda ids: np.where(ids == 5, 2, ids), "C9: the ids of the two"),
    ],
)
def test_comparison_finds_what_differs(window, encoded, tmp_path, part, name, make, message):
    shutil.copytree(encoded, tmp_path / "changed")
    change(tmp_path / "changed", part, name, make)
    with pytest.raises(Different, match=message):
        expect_same(window[1], tmp_path / "changed")
