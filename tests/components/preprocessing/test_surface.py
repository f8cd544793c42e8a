"""The step's outward surface: its flags, its KFP component as KFP runs it, and how light both are to import."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from components.contracts.criteo import CATEGORICAL
from components.contracts.manifests import TrainingSet

REPOSITORY = Path(__file__).resolve().parents[3]
COMPONENT = REPOSITORY / "components" / "preprocessing" / "component.py"


@pytest.fixture
def run_component(tmp_path):
    """Runs the component as its container does: KFP's executor on the function's source, inputs and outputs as JSON."""
    source = COMPONENT.read_text()
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    module = tmp_path / "ephemeral_component.py"
    module.write_text("\n".join(["from kfp import dsl", "from kfp.dsl import *", "", *lines, ""]))

    def artifact(name, kind, path):
        return {"artifacts": [{"name": name, "uri": str(path), "type": {"schemaTitle": f"system.{kind}"}}]}

    def run(raw_path, **parameters):
        outputs = {
            "training_set": artifact("training_set", "Dataset", tmp_path / "out" / "training_set"),
            "metrics": artifact("metrics", "Metrics", tmp_path / "out" / "metrics"),
        }
        executor_input = {
            "inputs": {
                "parameterValues": parameters,
                "artifacts": {"raw_dataset": artifact("raw_dataset", "Dataset", raw_path)},
            },
            "outputs": {"artifacts": outputs, "outputFile": str(tmp_path / "executor_output.json")},
        }
        command = [sys.executable, "-m", "kfp.dsl.executor_main", "--function_to_execute", function.name]
        command += ["--component_module_path", str(module), "--executor_input", json.dumps(executor_input)]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "_KFP_RUNTIME": "true"}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_component_writes_the_manifest_and_metrics(run_component, write_raw, raw_table, reading, tmp_path):
    table = raw_table(200)
    raw = write_raw(table)
    reading.asked(raw, frequency_threshold=3, category_ttl_days=30.0)
    ran = run_component(
        raw,
        run="run-1",
        store=str(tmp_path / "store"),
        work=str(tmp_path / "work"),
        dask_scheduler="",
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr
    training_set = TrainingSet.read(tmp_path / "out" / "training_set")
    rare = [Counter(filter(None, column.to_pylist())) for column in table.select(CATEGORICAL).columns]
    num_rare = sum(count < 3 for counts in rare for count in counts.values())
    output = json.loads((tmp_path / "executor_output.json").read_text())
    assert output["artifacts"]["metrics"]["artifacts"][0]["metadata"] == {
        "train_rows": 200,
        "holdout_rows": 200,
        "ids": sum(training_set.slot_sizes),
        "new_categories": sum(training_set.new_categories),
        "reused_ids": 0,
        "evicted": 0,
        "tombstones": 0,
        "candidates": num_rare,
    }
