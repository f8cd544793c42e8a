"""config.pbtxt, read back with Triton's own message definition."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from components.contracts.errors import ContractError
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, MAX_BATCH_ROWS, PROBABILITY_OUTPUT
from components.deployment.switch import parse_urls
from components.deployment.triton_config import triton_config


@pytest.mark.parametrize("server", ["python", "onnxruntime"])
def test_configuration_says_what_the_contracts_say(server):
    config = text_format.Parse(triton_config("click_model", server, [4, 3]), model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("click_model", server, MAX_BATCH_ROWS)
    tensors = [
        (t.name, model_config_pb2.DataType.Name(t.data_type), list(t.dims)) for t in (*config.input, *config.output)
    ]
    expected = (DENSE_INPUT, CATEGORICAL_INPUT, PROBABILITY_OUTPUT)
    assert tensors == [(t.name, f"TYPE_{t.datatype}", [t.width]) for t in expected]
    assert list(config.version_policy.specific.versions) == [3, 4]
    policy = config.dynamic_batching.default_queue_policy
    assert policy.max_queue_size > 0
    assert policy.default_timeout_microseconds > 0
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU


@pytest.mark.parametrize(
    ("server", "versions", "message"),
    [("tensorrt", [1], "server is 'tensorrt'"), ("python", [], "versions are"), ("python", [0], "versions are")],
)
def test_configurations_that_cannot_be_are_refused(server, versions, message):
    with pytest.raises(ContractError, match=message):
        triton_config("click_model", server, versions)


@pytest.mark.parametrize("text", ["http://a:8001", "a", ":8001", "a:0", "a:port", "a:8001,b"])
def test_addresses_that_are_none_are_refused(text):
    with pytest.raises(ContractError, match=r"triton url is .* expected host:grpc_port"):
        parse_urls(text)
