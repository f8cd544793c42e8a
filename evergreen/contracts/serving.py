"""Names, files and tensors of the served models, and the gRPC options for Triton.

Deployment writes the graph and its configuration. The laptop's server loads the graph, and the
inference client calls it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.spec import CANARY_SUFFIX, CANDIDATE_SUFFIX
from evergreen.runtime.errors import ContractError

PYTHON = "python"
"""Triton backend of the laptop's server, which runs `CODE_FILE`."""
CONFIG_FILE = "config.pbtxt"
"""Configuration file of a model, in the model's folder of the repository."""
CODE_FILE = "model.py"
"""Code file of the python backend, in a version's folder."""
MAX_BATCH_ROWS = 4096
"""Maximum number of rows in one request. The client splits a larger request."""


GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    # The proxy from the environment must not be used. Triton runs on this machine or in the same
    # cluster.
    ("grpc.enable_http_proxy", 0),
    # tritonclient drops its defaults if options are given, so they are repeated here.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
"""Options of every gRPC channel to Triton."""


QUEUE_REFUSALS = ("maximum queue size", "Request timeout expired")
"""Messages of Triton for a request that found the queue full or waited too long. Triton sends these
messages with the gRPC status UNAVAILABLE."""


@dataclass(frozen=True)
class ServedNames:
    """Names of one recommender's models in Triton and in its repository.

    Several recommenders may share one model repository, under different names.
    """

    model: str
    """Name of the live version for clients, which is the recommender's own name."""

    @property
    def candidate(self) -> str:
        """Return the model name under which a new version is tested before it goes live.

        Clients never call the candidate.
        """
        return self.model + CANDIDATE_SUFFIX

    @property
    def canary(self) -> str:
        """Return the name of the canary's model on the servers.

        See `evergreen.registry.traffic_plan`. A canary needs its own name, because Triton sends a
        request without a version to the highest loaded version of a name. If the canary had the
        live version's name, it would get all traffic.
        """
        return self.model + CANARY_SUFFIX


class Tensor(NamedTuple):
    """One served tensor: its name, Triton's data type and the width of a row."""

    name: str
    datatype: str
    width: int


COLUMNS = "columns"
"""Name of a parameter in a model's Triton configuration. The value of this parameter is the model's
input columns (`Features.columns`) as JSON."""
DENSE_INPUT = "dense"
"""Name of the tensor of raw numeric features, in their order. NaN = missing."""
CATEGORICAL_INPUT = "categorical"
"""Name of the tensor of raw categorical features, in their order. `features.MISSING_CATEGORY` =
missing."""
INPUT_TYPES = {DENSE_INPUT: "FP32", CATEGORICAL_INPUT: "INT64"}
"""Triton's data type of each input."""
PROBABILITY_OUTPUT = Tensor("probability", "FP32", 1)
"""Probability of a click."""


def input_tensors(features: Features) -> tuple[Tensor, ...]:
    """Return the inputs of a served graph in order.

    If the model has no numeric or no categorical columns, the tensor of that kind is omitted.

    >>> input_tensors(Features(numeric=(), categorical=("item", "shop")))
    (Tensor(name='categorical', datatype='INT64', width=2),)
    """
    widths = {DENSE_INPUT: len(features.numeric), CATEGORICAL_INPUT: len(features.positions.slots)}
    return tuple(Tensor(name, INPUT_TYPES[name], width) for name, width in widths.items() if width)


def named_inputs(dense: NDArray[Any], categorical: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a request by name: numeric features [n, d] and categories [n, c].

    A tensor with no columns is omitted.
    """
    rows = {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical}
    return {name: values for name, values in rows.items() if values.shape[1]}


class ColumnMap:
    """Conversion of rows to the columns of a model.

    Columns are matched by name. If the rows lack a column of the model, the column is filled with
    the missing value. The columns of both are lists of names, as in `Features.columns`.
    """

    def __init__(
        self, rows: Mapping[str, Sequence[str]], model: Mapping[str, Sequence[str]]
    ) -> None:
        self.takes = {kind: tuple(model[kind]) for kind in ("numeric", "categorical")}
        """Columns of the model."""
        self._is_same = self.takes == {kind: tuple(rows[kind]) for kind in self.takes}
        self._taken = {
            # A column that the rows lack gets an index one beyond the last column of the rows.
            kind: np.array(
                [rows[kind].index(n) if n in rows[kind] else len(rows[kind]) for n in names],
                np.int64,
            )
            for kind, names in self.takes.items()
        }

    def rows(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Convert rows to the model's numeric columns [n, d] and categorical columns [n, c].

        Args:
            dense: Numeric columns of the rows.
            categorical: Categorical columns of the rows.
        """
        if self._is_same:
            return dense, categorical
        return (
            _with_columns(dense, self._taken["numeric"], np.float32(np.nan)),
            _with_columns(categorical, self._taken["categorical"], np.int64(MISSING_CATEGORY)),
        )


def _with_columns(values: NDArray[Any], taken: NDArray[np.int64], missing: Any) -> NDArray[Any]:
    more = np.full((len(values), 1), missing, values.dtype)
    return np.ascontiguousarray(np.concatenate([values, more], axis=1)[:, taken])


def versions_of(text: str) -> list[int]:
    """Return the versions that a model configuration serves, ascending.

    Raises:
        ContractError: the configuration names no versions.
    """
    if not (found := re.findall(r"^ +versions: (\d+)$", text, re.MULTILINE)):
        raise ContractError("configuration names no versions, expected at least one")
    return sorted(map(int, found))
