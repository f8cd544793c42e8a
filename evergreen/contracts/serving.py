"""The served models' names, files and tensors, and how Triton is reached.

Joins deployment, which writes the graph and its configuration, to the inference client, which calls it, and to the
laptop's server, which starts with it.
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


@dataclass(frozen=True)
class ServedNames:
    """What the models of one recommender are called in Triton and in its repository, which several may share."""

    model: str
    """The live version's: the recommender's own name, by which clients ask."""

    @property
    def candidate(self) -> str:
        """A version is rehearsed under this name before the live one's is touched; clients never ask for it."""
        return self.model + CANDIDATE_SUFFIX

    @property
    def canary(self) -> str:
        """A version that takes a share of the traffic (`registry.traffic_plan`) answers under this name.

        Triton gives whoever names no version the highest one loaded: beside the live one it would take everything.
        """
        return self.model + CANARY_SUFFIX


class Tensor(NamedTuple):
    """One served tensor: its name, Triton's data type and the width of a row."""

    name: str
    datatype: str
    width: int


COLUMNS = "columns"
"""Parameter of a model's configuration in Triton: the columns that it takes (`Features.columns`), as JSON."""
DENSE_INPUT = "dense"
"""Name of the tensor of raw numeric features, in their order; NaN = missing."""
CATEGORICAL_INPUT = "categorical"
"""Name of the tensor of raw categorical features, in their order; `features.MISSING_CATEGORY` = missing."""
INPUT_TYPES = {DENSE_INPUT: "FP32", CATEGORICAL_INPUT: "INT64"}
"""Triton's data type of each input."""
PROBABILITY_OUTPUT = Tensor("probability", "FP32", 1)
"""Probability of a click."""


def input_tensors(features: Features) -> tuple[Tensor, ...]:
    """What a served graph takes, in this order; of a kind of feature that there is none of, there is no tensor.

    >>> input_tensors(Features(numeric=(), categorical=("item", "shop")))
    (Tensor(name='categorical', datatype='INT64', width=2),)
    """
    widths = {DENSE_INPUT: len(features.numeric), CATEGORICAL_INPUT: len(features.places.slots)}
    return tuple(Tensor(name, INPUT_TYPES[name], width) for name, width in widths.items() if width)


def named_inputs(dense: NDArray[Any], categorical: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The tensors of a request for these rows, [n, d] and [n, c], by name; one without columns is left out."""
    rows = {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical}
    return {name: values for name, values in rows.items() if values.shape[1]}


class ColumnMap:
    """Rows for one model from rows of other columns: by name, and what the model takes and the rows lack is missing.

    Both are given by their columns, see `Features.columns`.
    """

    def __init__(self, rows: Mapping[str, Sequence[str]], model: Mapping[str, Sequence[str]]) -> None:
        self.takes = {kind: tuple(model[kind]) for kind in ("numeric", "categorical")}
        """The columns that the model takes."""
        self._is_same = self.takes == {kind: tuple(rows[kind]) for kind in self.takes}
        self._taken = {
            # Behind the last column where the rows lack the name.
            kind: np.array([rows[kind].index(n) if n in rows[kind] else len(rows[kind]) for n in names], np.int64)
            for kind, names in self.takes.items()
        }

    def rows(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The model's [n, d] and [n, c] from [n, d] and [n, c] of the rows."""
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
    """The versions that a written configuration serves, ascending.

    Raises:
        ContractError: a text that names no versions.
    """
    if not (found := re.findall(r"^ +versions: (\d+)$", text, re.MULTILINE)):
        raise ContractError("configuration names no versions, expected at least one")
    return sorted(map(int, found))
