"""Interface of the encoding engines, which compute the numbers and ids of the encoded rows.

An engine computes on the rows of one partition. Everything else is the same for all engines:
reading, counting, assigning ids, writing, verifying, and dividing the partitions among processes.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from evergreen.config.features import Features
from evergreen.contracts.workflow import FeatureWorkflow

Columns = dict[str, NDArray[Any]]
"""Columns of one partition by name, in file order."""


class EncodingEngine(Protocol):
    """Interface of an engine: a module of this package whose functions return callables.

    Each callable takes a record batch of `raw_partitions.read_partition`. These callables can be
    used in a forked process and sent to a Dask worker.
    """

    def unscaler(self, features: Features, names: tuple[str, ...]) -> Callable[[Any], Columns]:
        """Return the function that computes numeric columns before they are scaled.

        The function returns float32 columns. The options of each feature decide how missing values
        are filled, and whether values are clipped and log-transformed. A column that will be
        bucketed is only clipped, and its missing values are NaN.

        Args:
            features: The recommender's features.
            names: Numeric features to compute, at least one.
        """
        ...

    def encoder(
        self, features: FeatureWorkflow, *, scratch: Path, weighted: bool = False
    ) -> Callable[[Any], Columns]:
        """Return the function that encodes rows exactly as `FeatureWorkflow` does, bit for bit.

        The function returns the label, `Features.dense_inputs`, `Features.id_names` and, if the
        rows have weights, the weight. Ids are int64 and all other columns are float32.

        Args:
            features: The fitted workflow.
            scratch: Folder for files of the engine. The folder does not exist yet, and the engine
                may create it.
            weighted: Whether the rows have weights.
        """
        ...


def engine_of(name: str) -> EncodingEngine:
    """Return the engine with this name, one of `PreprocessingSettings.engine`.

    Only the libraries of this engine are imported.
    """
    return cast(EncodingEngine, import_module(f"components.preprocessing.{name}_engine"))
