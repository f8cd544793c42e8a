"""Tests that the server responds to many concurrent clients without pauses."""

import asyncio
import time

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from demo.triton import TritonServer
from evergreen.contracts.serving import GRPC_OPTIONS, input_tensors
from evergreen.serving.repository.triton_config import ServingOptions
from testing.recommenders import SHOP
from testing.served_names import MODEL_NAME
from tests.support.triton import write_model

SECONDS = 90.0
"""Duration of the load. In 90 s, a queue with limits and two instances stalls several times."""
TICK_SECONDS = 0.5
"""A stall ends with the next tick of the batcher's timer."""
TYPES = {"FP32": np.float32, "INT64": np.int64}


def request():
    """Return a serialized request of one row."""
    message = service_pb2.ModelInferRequest(model_name=MODEL_NAME)
    for tensor in input_tensors(SHOP.features):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1, tensor.width])
        message.raw_input_contents.append(np.zeros(tensor.width, TYPES[tensor.datatype]).tobytes())
    return message.SerializeToString()


async def stalls_of_callers(url, num_callers, seconds):
    """Call the server in a closed loop, and return the numbers of stalls and of requests.

    During a stall, no answer arrives, so every caller waits for one tick of the timer. A busy
    machine can pause this process too. A pause counts as a stall only if it is as long as a tick.
    """
    content, pauses, num_answered = request(), 0, 0
    end = last = time.monotonic() + seconds
    async with grpc.aio.insecure_channel(url, options=list(GRPC_OPTIONS)) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def call_on():
            nonlocal pauses, num_answered, last
            while (now := time.monotonic()) < end:
                await infer(content)
                num_answered += 1
                began, last = max(now, last), time.monotonic()
                pauses += TICK_SECONDS - 0.02 < last - began < TICK_SECONDS + 0.05

        last = time.monotonic()
        await asyncio.gather(*(call_on() for _ in range(num_callers)))
    return pauses, num_answered


@pytest.mark.slow
@pytest.mark.parametrize("num_callers", [8, 64])
def test_no_caller_waits_for_tick_of_batchers_timer(tmp_path, num_callers):
    write_model(tmp_path / "repository", options=ServingOptions())
    with TritonServer(tmp_path / "repository", log=tmp_path / "triton.log") as server:
        stalls, answered = asyncio.run(stalls_of_callers(server.grpc_url, num_callers, SECONDS))
    assert answered > 50_000
    assert stalls == 0, f"{stalls} stalls in {answered:,} requests of {num_callers} callers"
