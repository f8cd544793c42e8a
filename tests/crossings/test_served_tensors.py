"""What deployment configures, what the graph takes, what the client sends: one agreement; a real server holds it."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from components.contracts.criteo import CRITEO
from components.contracts.serving import (
    CATEGORICAL_INPUT,
    DENSE_INPUT,
    MAX_BATCH_ROWS,
    PROBABILITY_OUTPUT,
    input_tensors,
)
from components.storage.uris import local_path
from inference_client.errors import ServerUnavailable
from inference_client.scoring import ClientSettings, ScoringClient
from inference_client.timing import Timing
from pipelines.local.triton import TritonServer
from tests.support.served_names import MODEL_NAME

pytestmark = pytest.mark.timeout(900)

ONNX_TYPES = {"FP32": onnx.TensorProto.FLOAT, "INT64": onnx.TensorProto.INT64}
INPUTS, OUTPUTS = input_tensors(CRITEO), (PROBABILITY_OUTPUT,)


def _agreed(tensors):
    return [(tensor.name, tensor.datatype, [tensor.width]) for tensor in tensors]


@pytest.fixture(scope="module")
def config(chain):
    text = (chain.root / "repository" / MODEL_NAME / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_released_configuration_states_the_agreed_tensors(config):
    def told(tensors):
        return [(t.name, model_config_pb2.DataType.Name(t.data_type).removeprefix("TYPE_"), [*t.dims]) for t in tensors]

    assert config.name == MODEL_NAME
    assert config.max_batch_size == MAX_BATCH_ROWS
    assert told(config.input) == _agreed(INPUTS)
    assert told(config.output) == _agreed(OUTPUTS)


def test_configuration_names_the_newest_version_and_the_one_before_stays_beside_it(config, chain):
    assert list(config.version_policy.specific.versions) == [2]
    for version in (1, 2):
        assert (chain.root / "repository" / MODEL_NAME / str(version) / "model.onnx").exists()


@pytest.mark.parametrize("turn", [0, 1])
def test_released_graph_takes_the_agreed_tensors_at_any_number_of_rows(chain, turn):
    graph = onnx.load(str(local_path(chain.rounds[turn].deployment.graph_uri))).graph
    for values, agreed in ((graph.input, INPUTS), (graph.output, OUTPUTS)):
        told = [(v.name, v.type.tensor_type.elem_type, v.type.tensor_type.shape.dim) for v in values]
        assert [(name, kind) for name, kind, _ in told] == [(t.name, ONNX_TYPES[t.datatype]) for t in agreed]
        for (_, _, dims), tensor in zip(told, agreed):
            assert len(dims) == 2
            assert not dims[0].HasField("dim_value")
            assert dims[1].dim_value == tensor.width


def test_client_sends_the_agreed_tensors():
    sent = []

    class Enough(Exception):
        pass

    async def infer(name, inputs, *, outputs, client_timeout):
        sent.append((name, [(i.name(), i.datatype(), i.shape()) for i in inputs], [o.name() for o in outputs]))
        raise Enough

    async def ask():
        async with ScoringClient("127.0.0.1:1", MODEL_NAME, ClientSettings(safe_to_cancel=True)) as client:
            client.transport._triton.infer = infer
            await client.score(np.zeros((3, 13), np.float32), np.zeros((3, 26), np.int64))

    with pytest.raises(Enough):
        asyncio.run(ask())
    tensors = [(tensor.name, tensor.datatype, [3, tensor.width]) for tensor in INPUTS]
    assert sent == [(MODEL_NAME, tensors, [PROBABILITY_OUTPUT.name])]


@pytest.mark.e2e
def test_real_server_gives_the_client_the_released_graphs_answer_and_its_death_is_told(chain, held_out_rows, tmp_path):
    release = chain.rounds[1].deployment
    dense, categorical, _ = held_out_rows(chain.rounds[1].extraction)
    session = onnxruntime.InferenceSession(str(local_path(release.graph_uri)), providers=["CPUExecutionProvider"])
    feed = {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical}
    expected = session.run([PROBABILITY_OUTPUT.name], feed)[0][:, 0]
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def converse(server):
        async with ScoringClient(
            server.grpc_url, MODEL_NAME, ClientSettings(max_attempts=3), timing=Timing(sleep=sleep)
        ) as client:
            answer = await client.score(dense, categorical)
            alone = await client.score(dense[:1], categorical[:1])
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(ServerUnavailable) as told:
                await client.score(dense[:1], categorical[:1])
            return answer, alone, str(told.value)

    with TritonServer(chain.root / "repository", log=tmp_path / "a log" / "triton.log") as server:
        answer, alone, words = asyncio.run(converse(server))
        assert words.startswith(f"server {server.grpc_url} is unavailable")
    assert answer.model_version == alone.model_version == release.version == 2
    np.testing.assert_allclose(answer.scores, expected, atol=1e-6, rtol=0)
    np.testing.assert_allclose(alone.scores, expected[:1], atol=1e-6, rtol=0)
    assert len(waits) == 2
