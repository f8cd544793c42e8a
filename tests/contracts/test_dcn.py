"""The network's shape: HugeCTR's sample counts, and settings that no network has."""

from __future__ import annotations

import pytest

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import num_dense_parameters
from components.runtime.errors import ContractError

HUGECTR_SAMPLE = DcnConfig(embedding_dim=16, num_cross_layers=6, tower=(1024, 1024), dropout=0.5)


def test_layout_counts_the_parameters_of_hugectrs_dcn_sample():
    assert HUGECTR_SAMPLE.input_width == 429
    assert num_dense_parameters(HUGECTR_SAMPLE) == 1_496_522


def test_layout_alternates_weights_and_biases_in_the_order_of_the_layers():
    config = DcnConfig(embedding_dim=2, num_cross_layers=2, tower=(5, 3))
    assert dense_layout(config) == [
        ("cross.0.weight", (65,)),
        ("cross.0.bias", (65,)),
        ("cross.1.weight", (65,)),
        ("cross.1.bias", (65,)),
        ("tower.0.weight", (65, 5)),
        ("tower.0.bias", (5,)),
        ("tower.1.weight", (5, 3)),
        ("tower.1.bias", (3,)),
        ("final.weight", (68, 1)),
        ("final.bias", (1,)),
    ]


def test_layout_of_dcn_v2_is_u_v_and_bias_of_each_cross_layer():
    config = DcnConfig(embedding_dim=1, num_cross_layers=2, tower=(2,), projection_dim=3)
    assert dense_layout(config) == [
        ("cross.0.u", (39, 3)),
        ("cross.0.v", (3, 39)),
        ("cross.0.bias", (39,)),
        ("cross.1.u", (39, 3)),
        ("cross.1.v", (3, 39)),
        ("cross.1.bias", (39,)),
        ("tower.0.weight", (39, 2)),
        ("tower.0.bias", (2,)),
        ("final.weight", (41, 1)),
        ("final.bias", (1,)),
    ]


def test_settings_survive_their_document():
    v2 = DcnConfig(projection_dim=64)
    for config in (HUGECTR_SAMPLE, v2):
        assert DcnConfig.from_document(config.as_document()) == config


def test_document_from_before_dcn_v2_is_read_as_v1():
    document = HUGECTR_SAMPLE.as_document()
    del document["projection_dim"]
    assert DcnConfig.from_document(document) == HUGECTR_SAMPLE


def test_unknown_and_missing_settings_are_refused_by_name():
    document = HUGECTR_SAMPLE.as_document()
    del document["dropout"]
    with pytest.raises(ContractError, match=r"\['depth', 'dropout'\]"):
        DcnConfig.from_document({**document, "depth": 3})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"embedding_dim": 0}, "embedding_dim is 0, expected at least 1"),
        ({"num_cross_layers": -1}, "num_cross_layers is -1, expected at least 1"),
        ({"tower": ()}, r"tower is \(\)"),
        ({"tower": (8, 0)}, r"tower is \(8, 0\)"),
        ({"dropout": 1.0}, r"dropout is 1.0, expected a share in \[0, 1\)"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"projection_dim": -1}, "projection_dim is -1, expected 0"),
    ],
    ids=str,
)
def test_shape_that_no_network_has_is_refused(changes, said):
    with pytest.raises(ContractError, match=said):
        DcnConfig(**changes)
