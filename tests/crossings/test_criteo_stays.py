"""Tests that Criteo's rows give exactly the recorded rows, weights, graph and scores.

`golden/criteo.json` contains SHA-256 digests of two runs. Revision a983fef, which had fixed
features, computed the digests. Update `golden/criteo.json` only when results are supposed to
change. The latest digests are in `build/tests/criteo.json`. Metadata entries are ignored. Rows and
vocabularies are equal on every machine. The arithmetic on weights differs between processors and
between library versions.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.storage.uris import local_path
from testing.paths import REPOSITORY
from tests.support.lakes import table_in

pytestmark = pytest.mark.timeout(300)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "criteo.json").read_text())
PROCESSOR = """
import json, sys, numpy, torch
found = {"cpu": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__, "numpy": numpy.__version__}
open(sys.argv[1], "w").write(json.dumps(found))
"""  # noqa: E501


@pytest.fixture(scope="module")
def found(chain, held_out_rows, tmp_path_factory):
    """Digests of the current code on this machine, in the form of the golden file."""
    turns = [(f"round {number}", turn) for number, turn in enumerate(chain.rounds, 1)]
    document = {
        "everywhere": {name: _rows(turn) for name, turn in turns},
        "on": _machine(chain, tmp_path_factory.mktemp("machine") / "found.json"),
        "there": {name: _arithmetic(turn, held_out_rows) for name, turn in turns},
    }
    path = REPOSITORY / "build" / "tests" / "criteo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    return document


def test_rows_and_vocabularies_of_criteo_do_not_change(found):
    assert found["everywhere"] == GOLDEN["everywhere"]


def test_weights_graph_and_scores_of_criteo_do_not_change(found):
    if found["on"] != GOLDEN["on"]:
        pytest.skip(
            f"recorded on {GOLDEN['on']}, and this is {found['on']}: the last bits of weights may "
            "differ"
        )
    assert found["there"] == GOLDEN["there"]


def _machine(chain, path):
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    code, output = chain.warm.of("training", variables).run(
        PROCESSOR, [str(path)], variables=variables, folder=path.parent
    )
    assert code == 0, output
    vendor = next(
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("vendor_id")
    )
    versions = {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    return {"vendor": vendor.split()[-1], **json.loads(path.read_text()), **versions}


def _rows(turn):
    raw, encoded = turn.extraction, turn.preprocessing
    workflow = FeatureWorkflow.load(local_path(encoded.workflow_uri))
    found = {
        "vocabularies": _digest(*workflow.vocabularies),
        "dense": _digest(workflow.means, workflow.stds),
    }
    for part in ("train_uri", "holdout_uri", "replay_uri", "replay_holdout_uri"):
        if getattr(encoded, part) is not None:
            table = table_in(getattr(encoded, part))
            found[f"encoded {part}"] = _digest(
                *(table[name].to_numpy() for name in table.column_names)
            )
            features = table_in(getattr(raw, part)).select(table.column_names)
            found[f"raw {part}"] = hashlib.sha256(
                json.dumps(features.to_pydict()).encode()
            ).hexdigest()
    return found


def _arithmetic(turn, held_out_rows):
    weights, graph = (
        local_path(turn.training.uri) / "weights",
        local_path(turn.deployment.graph_uri),
    )
    files = {
        "weights": weights / "weights.safetensors",
        "optimizer": weights / "optimizer.safetensors",
    }
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    found |= {"network": _graph(weights / "network.onnx"), "served graph": _graph(graph)}
    found["served tables"] = hashlib.sha256(graph.with_name("model.data").read_bytes()).hexdigest()
    with np.load(local_path(turn.evaluation.scores_uri)) as scores:
        found["scores"] = _digest(scores["candidate"])
    dense, categorical, _ = held_out_rows(turn.extraction)
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    inputs = {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical}
    return {**found, "served scores": _digest(*session.run([PROBABILITY_OUTPUT.name], inputs))}


def _graph(path):
    model = onnx.load(str(path), load_external_data=False)
    del model.metadata_props[:]
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _digest(*arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return found.hexdigest()
