"""The served model's name, files and tensors, and how Triton is reached.

Joins deployment, which writes the graph and its configuration, to the inference client, which calls it, and to the
laptop's server, which starts with it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.runtime.errors import ContractError

MODEL_NAME = "click_model"
CANDIDATE_NAME = f"{MODEL_NAME}_candidate"
"""A version is rehearsed under this name before the real one is touched; clients never ask for it."""
CANARY_NAME = f"{MODEL_NAME}_canary"
"""A version that takes a share of the traffic (`store.traffic_plan`) answers under this name: Triton gives whoever
names no version the highest one loaded, so beside the live version it would take everything."""
AUTO, FULL, CANARY, SHADOW = ROLLOUTS = ("auto", "full", "canary", "shadow")
"""How an accepted model gets its traffic: all at once, a growing share, or none, its scores only logged. `auto` is
`full` after a pass and where nothing is live yet, and `canary` where the gate could not tell."""
PYTHON = "python"
"""The backend of Triton that the laptop serves with; it runs `CODE_FILE`."""
CONFIG_FILE = "config.pbtxt"
"""A model's configuration, in its folder of the model repository."""
CODE_FILE = "model.py"
"""Code of the python backend, in a version's folder."""
MAX_BATCH_ROWS = 4096
"""Most rows in one request; the client splits what is larger."""


GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    # Triton is on this machine or in this cluster, never beyond the proxy that the environment may name.
    ("grpc.enable_http_proxy", 0),
    # tritonclient's own defaults, which options of ours replace.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
"""Options of every gRPC channel to Triton."""


QUEUE_REFUSALS = ("maximum queue size", "Request timeout expired")
"""Triton's words, in an UNAVAILABLE, for a request that a full queue refused or that waited in it for too long."""


class Tensor(NamedTuple):
    """One served tensor: its name, Triton's data type and the width of a row."""

    name: str
    datatype: str
    width: int


DENSE_INPUT = Tensor("dense", "FP32", NUM_DENSE)
"""Raw I1..I13, NaN = missing."""
CATEGORICAL_INPUT = Tensor("categorical", "INT64", NUM_CATEGORICAL)
"""Raw C1..C26, `criteo.MISSING_CATEGORY` = missing."""
PROBABILITY_OUTPUT = Tensor("probability", "FP32", 1)
"""Probability of a click."""


def versions_of(text: str) -> list[int]:
    """The versions that a written configuration serves, ascending.

    Raises:
        ContractError: a text that names no versions.
    """
    if not (found := re.findall(r"^ +versions: (\d+)$", text, re.MULTILINE)):
        raise ContractError("configuration names no versions, expected at least one")
    return sorted(map(int, found))
