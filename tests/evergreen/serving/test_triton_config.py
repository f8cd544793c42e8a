"""Tests of config.pbtxt, parsed with Triton's own message definition."""

import dataclasses
import json

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from controller.canary.evidence import HISTOGRAM
from evergreen.config.features import Features
from evergreen.contracts.serving import (
    CATEGORICAL_INPUT,
    DENSE_INPUT,
    MAX_BATCH_ROWS,
    PROBABILITY_OUTPUT,
    input_tensors,
    versions_of,
)
from evergreen.runtime.errors import ContractError
from evergreen.serving.repository.triton_config import (
    SERVERS,
    WARMUP_BATCH,
    ServingOptions,
    read_options,
    triton_config,
    warmup_files_of,
)
from testing.recommenders import SHOP
from tests.support.errors import raises

FEATURES = SHOP.features

ROWS = [
    {"dense": "dense-1", "categorical": "categorical-1"},
    {"dense": "dense-2", "categorical": "categorical-1"},
]


def parsed(text):
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("server", ["python", "onnxruntime"])
def test_configuration_agrees_with_contracts(server):
    text = triton_config("click_model", ServingOptions(server=server), [4, 3], features=FEATURES)
    config = parsed(text)
    assert (config.name, config.backend, config.max_batch_size) == (
        "click_model",
        server,
        MAX_BATCH_ROWS,
    )
    tensors = [
        (t.name, model_config_pb2.DataType.Name(t.data_type), list(t.dims))
        for t in (*config.input, *config.output)
    ]
    expected = (*input_tensors(FEATURES), PROBABILITY_OUTPUT)
    assert tensors == [(t.name, f"TYPE_{t.datatype}", [t.width]) for t in expected]
    assert list(config.version_policy.specific.versions) == [3, 4]
    assert versions_of(text) == [3, 4]
    policy = config.dynamic_batching.default_queue_policy
    assert policy.timeout_action == model_config_pb2.ModelQueuePolicy.REJECT
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert not config.response_cache.enable
    assert not config.model_warmup


def test_queue_has_limits_in_images_and_none_on_laptop_whose_triton_stalls():
    limits = {}
    for server in SERVERS:
        text = triton_config("click_model", ServingOptions(server=server), [1], features=FEATURES)
        policy = parsed(text).dynamic_batching.default_queue_policy
        limits[server] = (policy.max_queue_size, policy.default_timeout_microseconds)
        assert not policy.allow_timeout_override, "the override counts as a limit"
    assert limits == {"python": (0, 0), "onnxruntime": (512, 5_000_000)}


def test_images_count_latencies_in_buckets_far_below_tritons_own():
    texts = {
        server: triton_config("click_model", ServingOptions(server=server), [1], features=FEATURES)
        for server in SERVERS
    }
    assert not parsed(texts["python"]).HasField("model_metrics"), "Triton 2.51 refuses the field"
    [control] = parsed(texts["onnxruntime"]).model_metrics.metric_control
    assert control.metric_identifier.family == HISTOGRAM
    bounds = list(control.histogram_options.buckets)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0.5, 1024)
    assert bounds[1:] == [int(bound) for bound in bounds[1:]], "Triton counts whole milliseconds"


def test_recommender_without_numeric_features_requires_only_categories():
    features = Features(numeric=(), categorical=("item", "shop"))
    text = triton_config(
        "shop", ServingOptions(), [1], features=features, warmup=[{"categorical": "categorical-1"}]
    )
    config = parsed(text)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("categorical", [2])]
    assert {name for sample in config.model_warmup for name in sample.inputs} == {"categorical"}


def test_options_become_what_triton_calls_them():
    options = ServingOptions(
        server="onnxruntime",
        instances=3,
        device="gpu",
        response_cache=True,
        max_queued_requests=17,
        queue_timeout_microseconds=250_000,
        max_queue_delay_microseconds=100,
    )
    config = parsed(triton_config("click_model", options, [1], features=FEATURES))
    [group] = config.instance_group
    assert (group.count, group.kind) == (3, model_config_pb2.ModelInstanceGroup.KIND_GPU)
    assert config.response_cache.enable
    policy = config.dynamic_batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (17, 250_000)
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    assert {name: value.string_value for name, value in config.parameters.items()} == {
        "columns": json.dumps(FEATURES.columns),
        "intra_op_thread_count": "1",
        "inter_op_thread_count": "1",
    }


def test_warm_up_is_every_row_and_one_batch():
    config = parsed(
        triton_config("click_model", ServingOptions(), [1], warmup=ROWS, features=FEATURES)
    )
    warmed = [
        (
            sample.batch_size,
            {name: (i.input_data_file, list(i.dims)) for name, i in sample.inputs.items()},
        )
        for sample in config.model_warmup
    ]
    rows = [
        {DENSE_INPUT: (row["dense"], [2]), CATEGORICAL_INPUT: (row["categorical"], [8])}
        for row in (*ROWS, ROWS[0])
    ]
    assert warmed == list(zip([1, 1, WARMUP_BATCH], rows))
    types = [sample.inputs[CATEGORICAL_INPUT].data_type for sample in config.model_warmup]
    assert set(types) == {model_config_pb2.TYPE_INT64}


@pytest.mark.parametrize(
    "options",
    [
        ServingOptions(warmup_rows=2),
        ServingOptions(instances=1, response_cache=True, warmup_rows=2, max_queued_requests=1),
        ServingOptions(
            server="onnxruntime",
            device="gpu",
            instances=4,
            warmup_rows=2,
            queue_timeout_microseconds=1,
            max_queue_delay_microseconds=7,
        ),
    ],
)
def test_options_are_read_back_from_what_was_written(options):
    text = triton_config("click_model", options, [2], warmup=ROWS, features=FEATURES)
    assert read_options(text) == options
    assert warmup_files_of(text) == {"dense-1", "dense-2", "categorical-1"}
    assert warmup_files_of(triton_config("click_model", options, [2], features=FEATURES)) == set()


@pytest.mark.parametrize(
    "text", ["", 'name: "click_model"', 'name: "a"\nversion_policy { latest { num_versions: 2 } }']
)
def test_configuration_that_names_no_versions_is_refused(text):
    with raises(ContractError, "no versions"):
        versions_of(text)


@pytest.mark.parametrize(
    "text", ["", "no such field: 1", 'name: "a"', 'backend: "tensorrt" instance_group { count: 1 }']
)
def test_configuration_that_is_not_ours_is_refused(text):
    with pytest.raises(ContractError):
        read_options(text)


@pytest.mark.parametrize("versions", [[], [0], [-1, 2]])
def test_versions_that_cannot_be_are_refused(versions):
    with raises(ContractError, "versions are"):
        triton_config("click_model", ServingOptions(), versions, features=FEATURES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server", "tensorrt"),
        ("device", "tpu"),
        ("device", "gpu"),
        ("instances", 0),
        ("instances", 65),
    ],
)
def test_options_that_no_server_takes_are_refused_by_name(name, value):
    with pytest.raises(ContractError, match=rf"{name} is {value!r}.*expected"):
        dataclasses.replace(ServingOptions(), **{name: value})
