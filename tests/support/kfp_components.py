"""Runs a component as its container does: KFP's executor with inputs and outputs as JSON."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testing.paths import REPOSITORY

LOCAL_RUN = {"run_resource": "evergreen-retraining-x7k2p", "run_id": ""}
"""Local values for the parameters that KFP passes to every step, except the run's name."""


def run_component(
    step: str,
    folder: Path,
    parameters: Mapping[str, Any],
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """Run the component of `step`.

    Args:
        step: Package of the component. The component's function has the same name as the package.
        folder: Folder for the artifacts, each under its own name, and for the executor's files.
        parameters: Parameters of the function that override `LOCAL_RUN`.
        inputs: Kind of each input artifact, such as `Dataset`.
        outputs: Kind of each output artifact.

    Returns:
        The finished process, and the outputs that KFP recorded. The outputs are None if the process
        failed.
    """
    source = (REPOSITORY / "components" / step / "component.py").read_text()
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    program, recorded = folder / "ephemeral_component.py", folder / "executor_output.json"
    program.write_text("\n".join(["from kfp import dsl", "from kfp.dsl import *", "", *lines, ""]))

    def artifacts(kinds: Mapping[str, str]) -> dict[str, Any]:
        made = {
            n: {"name": n, "uri": str(folder / n), "type": {"schemaTitle": f"system.{k}"}}
            for n, k in kinds.items()
        }
        return {name: {"artifacts": [artifact]} for name, artifact in made.items()}

    executor_input = {
        "inputs": {"parameterValues": {**LOCAL_RUN, **parameters}, "artifacts": artifacts(inputs)},
        "outputs": {
            "parameters": {"Output": {"outputFile": str(folder / "Output")}},
            "artifacts": artifacts(outputs),
            "outputFile": str(recorded),
        },
    }
    command = [
        sys.executable,
        "-m",
        "kfp.dsl.executor_main",
        "--function_to_execute",
        function.name,
    ]
    command += [
        "--component_module_path",
        str(program),
        "--executor_input",
        json.dumps(executor_input),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "_KFP_RUNTIME": "true"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done, json.loads(recorded.read_text()) if recorded.exists() else None
