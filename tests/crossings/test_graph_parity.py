"""The served graph against its two oracles: NVTabular's encoding, and the network's module computed in float64.

Each oracle runs in its own environment, on rows that no client should send. The graph's encoded values must equal
NVTabular's bit by bit, its probabilities the module's to within `TOLERANCES`. Covers every kind of vocabulary and every
network.

The fresh weights are scaled until the dense values of plain rows move the logits by a standard deviation of at most 1,
as in a trained model. The encoded values reach 40 standard deviations here; with fresh weights the cross layers would
make logits of thousands, of which float32 keeps too few digits to compare.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from components.contracts.features import MISSING_CATEGORY
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from components.deployment.graph.encoding import DENSE
from components.deployment.graph.export import read_network, write_graph
from components.deployment.graph.parity import open_graph
from components.models.configs import DcnConfig, DeepFmConfig, DlrmConfig
from components.models.files import NETWORK_FILE, open_model
from components.store.models import GRAPH_FILE
from tests.support.graphs import with_inner_values
from tests.support.nasty_rows import nasty_rows, strange_workflow
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.timeout(900)

ROWS = 4096
WORKFLOWS = {"strange vocabularies": strange_workflow(11), "other moments": strange_workflow(12, num_keys=3000)}
WIDTHS = {"num_dense": 13, "num_categorical": 26, "embedding_dim": 8, "tower": (32, 16)}
NETWORKS = {
    "dcn v1": DcnConfig(**WIDTHS, num_cross_layers=3),
    "dcn v2": DcnConfig(**WIDTHS, num_cross_layers=2, projection_dim=9),
    "deepfm": DeepFmConfig(**WIDTHS),
    "dlrm": DlrmConfig(**WIDTHS),
}
TOLERANCES = {"deepfm": 2e-6}
"""Largest differences of a probability, 1e-6 where nothing is given. DeepFM's sum over pairs is the difference of two
float32 sums, half the square of the sum and half the sum of squares, which lose a digit to each other where one
encoded value is far larger than the others: 1.4e-6 was measured."""

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

SCORE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from components.models.configs import config_from_document
from components.models.files import NETWORK_FILE, slot_offsets
from components.models.network import export_onnx
from components.models.scoring import load_network
from components.training.start import write_initial

folder, encoded = Path(sys.argv[1]), Path(sys.argv[2])
asked = json.loads((folder / "network.json").read_text())
config, slot_sizes = config_from_document(asked["config"]), asked["slot_sizes"]
write_initial(folder, config, slot_sizes, click_rate=0.3, seed=1)
network, table = load_network(folder, config, slot_sizes)
with np.load(encoded) as rows:
    dense, ids = torch.from_numpy(rows["dense"]), torch.from_numpy(rows["ids"])
embeddings = table[ids + torch.from_numpy(slot_offsets(slot_sizes))]
plain = (dense.abs() < 50).all(dim=1)
with torch.no_grad():
    def moved_by_dense_values():
        logits = network(dense[plain], embeddings[plain])
        return logits - network(torch.zeros_like(dense[plain]), embeddings[plain])

    while moved_by_dense_values().std() > 1:
        for parameter in network.parameters():
            parameter *= 0.9
    (folder / NETWORK_FILE).write_bytes(export_onnx(network, config))
    exact = torch.sigmoid(network.double()(dense.double(), embeddings.double()))
np.save(folder / "scores.npy", exact.numpy())
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


@pytest.fixture(scope="module", params=list(NETWORKS))
def scored(request, encoded, tmp_path_factory, run_beside):
    """The folder of a model of that network, its float64 probabilities of NVTabular's rows, and the tolerance."""
    config, folder = NETWORKS[request.param], tmp_path_factory.mktemp("model")
    asked = {"config": config.as_document(), "slot_sizes": encoded.workflow.slot_sizes}
    (folder / "network.json").write_text(json.dumps(asked))
    run_beside("training", SCORE, folder, encoded.file)
    return folder, np.load(folder / "scores.npy"), TOLERANCES.get(request.param, 1e-6)


def _inside(graph, names):
    """Runs the graph with `names` of its inner values as outputs before the probability."""
    session = open_graph(with_inner_values(graph, names))
    return lambda rows: session.run(
        [*names, "probability"], {DENSE_INPUT: rows.dense, CATEGORICAL_INPUT: rows.categorical}
    )


def test_graph_repeats_nvtabular_bit_by_bit_and_the_float64_module_to_a_millionth(encoded, scored, tmp_path):
    folder, expected, tolerance = scored
    table = open_model(folder, encoded.workflow.slot_sizes).weights.table
    write_graph(tmp_path, encoded.workflow, table, network=read_network(folder / NETWORK_FILE), name="any")
    dense, rows, scores = _inside(tmp_path / GRAPH_FILE, [DENSE, "table_rows"])(encoded)
    with np.load(encoded.file) as by_nvtabular:
        offsets = np.cumsum([0, *encoded.workflow.slot_sizes[:-1]])
        np.testing.assert_array_equal(rows - offsets, by_nvtabular["ids"])
        np.testing.assert_array_equal(dense.view(np.int32), by_nvtabular["dense"].view(np.int32))
    served = open_graph(tmp_path / GRAPH_FILE).run(
        None, {DENSE_INPUT: encoded.dense, CATEGORICAL_INPUT: encoded.categorical}
    )[0]
    np.testing.assert_array_equal(served.view(np.int32), scores.view(np.int32))
    # Dense values near float32's largest give larger logits, whose float32 sums are further from the float64 ones.
    plain = (np.abs(np.nan_to_num(encoded.dense)) <= 2**31).all(axis=1)
    assert plain.sum() > ROWS / 10
    assert expected[plain].std() > 0.05
    np.testing.assert_allclose(scores[plain, 0], expected[plain], rtol=0, atol=tolerance)
    np.testing.assert_allclose(scores[:, 0], expected, rtol=0, atol=5e-5)


def test_the_rows_hold_every_kind_of_value(encoded):
    with np.load(encoded.file) as by_nvtabular:
        ids = by_nvtabular["ids"]
    assert {1, 2, 3} <= set(np.unique(ids))
    assert (encoded.categorical > 2**40).any()
    assert (encoded.categorical < -(2**40)).any()
    assert np.isnan(encoded.dense).any()
    assert (encoded.dense < -1e38).any()
    assert (encoded.dense > 1e38).any()
