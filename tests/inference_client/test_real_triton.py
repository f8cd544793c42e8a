"""Tests of the client with the real tritonserver for laptops (2.51)."""

import asyncio

import numpy as np
import pytest

from demo.triton import TritonServer
from evergreen.contracts.criteo import CRITEO
from evergreen.serving.repository.triton_config import ServingOptions, triton_config
from inference_client.errors import DeadlineExpired
from inference_client.scoring import ClientSettings, ScoringClient
from testing.served_names import MODEL_NAME

MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            dense = pb_utils.get_input_tensor_by_name(request, "dense").as_numpy()
            # I1 says how long this request takes; I2 is the answer.
            time.sleep(float(dense[0, 0]) if np.isfinite(dense[0, 0]) else 0.0)
            scores = dense[:, 1:2].astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("probability", scores)]))
        return answers
"""


def write_model(repository):
    version = repository / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version / "model.onnx").touch()
    options = ServingOptions(instances=1, max_queued_requests=4)
    (repository / MODEL_NAME / "config.pbtxt").write_text(
        triton_config(MODEL_NAME, options, [1], features=CRITEO)
    )


def rows_taking(seconds, n=1):
    dense = np.zeros((n, 13), np.float32)
    dense[:, 0] = seconds
    dense[:, 1] = np.linspace(0, 1, n)
    return dense, np.zeros((n, 26), np.int64)


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    write_model(root / "repository")
    with TritonServer(root / "repository", log=root / "triton.log") as server:
        yield server


def run_client(server, use_client, **settings):
    async def run():
        async with ScoringClient(server.grpc_url, MODEL_NAME, ClientSettings(**settings)) as client:
            return await use_client(client)

    return asyncio.run(run())


def test_expired_and_cancelled_callers_leave_server_and_its_calls_running(triton):
    """Short gRPC deadlines crash Triton 2.51 (fixed in Triton's pull requests 7840 to 8708)."""
    pid = triton.pid

    async def talk(client):
        expired = 0
        for _ in range(40):
            calls = [client.score(*rows_taking(0.0005), deadline_seconds=0.001) for _ in range(8)]
            callers = [asyncio.create_task(each) for each in calls]
            await asyncio.sleep(0)
            callers[0].cancel()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
            expired += sum(isinstance(outcome, DeadlineExpired) for outcome in outcomes)
        return expired

    assert run_client(triton, talk, max_in_flight=8, max_attempts=1) > 0
    answer = run_client(triton, lambda client: client.score(*rows_taking(0.0, 5)))
    np.testing.assert_array_equal(answer.scores, np.linspace(0, 1, 5, dtype=np.float32))
    assert (triton.pid, triton.alive()) == (pid, True)
