"""The served graph's encoding against NVTabular's, bit by bit, on rows that no client should send.

NVTabular runs in its own environment. Covers every kind of vocabulary; what the networks make of encoded values is
tests/components/models' subject.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from components.contracts.features import MISSING_CATEGORY
from components.deployment.graph.encoding import DENSE
from tests.support.graphs import open_built, run_graph
from tests.support.nasty_rows import nasty_rows, strange_workflow
from tests.support.paths import REPOSITORY
from tests.support.toy_models import toy_model

pytestmark = pytest.mark.timeout(900)

ROWS = 4096
WORKFLOWS = {"strange vocabularies": strange_workflow(11), "other moments": strange_workflow(12, num_keys=3000)}

ENCODE = """
import sys
from pathlib import Path
import numpy as np, nvtabular, pandas
from components.contracts.criteo import CATEGORICAL, CRITEO, DENSE
from components.contracts.raw_rows import LABEL
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing.feature_graph import explicit_workflow
from components.preprocessing.raw_partitions import read_types

folder = Path(sys.argv[1])
with np.load(folder / "rows.npz") as rows:
    columns = {**dict(zip(DENSE, rows["dense"].T)), **dict(zip(CATEGORICAL, rows["categorical"].T))}
frame = pandas.DataFrame({LABEL: 0, **columns}).astype(read_types(CRITEO))
frame[list(CATEGORICAL)] = frame[list(CATEGORICAL)].replace(-1, float("nan"))
dataset = nvtabular.Dataset(frame, cpu=True)
workflow = explicit_workflow(FeatureWorkflow.load(folder), folder / "categories")
encoded = workflow.transform(dataset).compute()
dense, ids = encoded[list(DENSE)].to_numpy(), encoded[list(CATEGORICAL)].to_numpy()
assert dense.dtype == np.float32, dense.dtype
np.savez(folder / "encoded.npz", dense=dense, ids=ids)
"""


@dataclass
class Encoded:
    """Raw rows and what NVTabular made of them."""

    workflow: object
    file: Path
    dense: np.ndarray
    categorical: np.ndarray


@pytest.fixture(scope="module")
def run_beside(warm):
    """Runs a program with the libraries of a step's environment."""

    def run(step, program, *arguments):
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        where = {"variables": variables, "folder": REPOSITORY}
        code, said = warm.of(step, variables).run(program, [str(each) for each in arguments], **where)
        assert code == 0, said[-4000:]

    return run


def _sent_past_the_checks(categorical):
    """Whether a raw value is one that preprocessing's readers let through, or far from any stand-in of NVTabular's."""
    return (categorical >= MISSING_CATEGORY) | (categorical < -(2**31))


@pytest.fixture(scope="module", params=list(WORKFLOWS))
def encoded(request, tmp_path_factory, run_beside):
    folder = tmp_path_factory.mktemp("nvtabular")
    workflow = WORKFLOWS[request.param]
    workflow.save(folder)
    dense, categorical = nasty_rows(workflow, ROWS, 5)
    categorical = np.where(_sent_past_the_checks(categorical), categorical, 2**32 - 5)
    np.savez(folder / "rows.npz", dense=dense, categorical=categorical)
    run_beside("preprocessing", ENCODE, folder)
    return Encoded(workflow, folder / "encoded.npz", dense, categorical)


def test_graph_repeats_nvtabular_bit_by_bit(encoded):
    toy = toy_model(encoded.workflow)
    names = [DENSE, "table_rows"]
    session = open_built(encoded.workflow, toy.table, toy.network(), names=names)
    dense, rows = run_graph(session, encoded.dense, encoded.categorical, names)
    with np.load(encoded.file) as by_nvtabular:
        offsets = np.cumsum([0, *encoded.workflow.slot_sizes[:-1]])
        np.testing.assert_array_equal(rows - offsets, by_nvtabular["ids"])
        np.testing.assert_array_equal(dense.view(np.int32), by_nvtabular["dense"].view(np.int32))


def test_the_rows_hold_every_kind_of_value(encoded):
    with np.load(encoded.file) as by_nvtabular:
        ids = by_nvtabular["ids"]
    assert {1, 2, 3} <= set(np.unique(ids))
    assert (encoded.categorical > 2**40).any()
    assert (encoded.categorical < -(2**40)).any()
    assert np.isnan(encoded.dense).any()
    assert (encoded.dense < -1e38).any()
    assert (encoded.dense > 1e38).any()
