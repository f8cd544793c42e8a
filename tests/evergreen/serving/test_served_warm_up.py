"""Tests that a version is warm in all batch sizes before Triton sends it requests.

The code of the served model runs in the serving environment, in a process without Triton.
"""

import json
import subprocess

from demo.environments import python_of
from evergreen.contracts.serving import MAX_BATCH_ROWS
from testing.served_names import MODEL_NAME

PROGRAM = """
import json, os, resource, sys, threading, types
import numpy as np

double = types.ModuleType("triton_python_backend_utils")
sys.modules["triton_python_backend_utils"] = double
import onnxruntime

batches, priorities = [], []
class Session(onnxruntime.InferenceSession):
    def run(self, names, inputs):
        batches.append(len(next(iter(inputs.values()))))
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return super().run(names, inputs)
onnxruntime.InferenceSession = Session

sys.path.insert(0, sys.argv[1])
import model

served = model.TritonPythonModel()
served.initialize({"model_config": sys.argv[2]})
warm, own = list(batches), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
golden = np.load(sys.argv[1] + "/golden.npz")
rows = np.resize(np.arange(len(golden["dense"])), int(sys.argv[3]))
inputs = {name: golden[name][rows] for name in ("dense", "categorical")}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
served._session.run(["probability"], inputs)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([warm, own, min(priorities[: len(warm)], default=own), faults]))
"""


def test_golden_rows_in_all_batch_sizes_warm_session_at_low_priority(deployment):
    deployment.release(1)
    version = deployment.repository.objects.root / MODEL_NAME / "1"
    config = {
        "input": [
            {"name": "dense", "data_type": "TYPE_FP32"},
            {"name": "categorical", "data_type": "TYPE_INT64"},
        ],
        "output": [{"name": "probability"}],
    }
    python = python_of("serving")
    command = [str(python), "-c", PROGRAM, str(version), json.dumps(config), str(MAX_BATCH_ROWS)]
    warm, own, niceness, faults = json.loads(subprocess.check_output(command, text=True))
    assert warm == [1, 64, MAX_BATCH_ROWS]
    assert niceness == min(own + 10, 19)
    assert faults < 200, "the first large batch must not allocate memory"
