"""The engines of preprocessing: what computes a round's numbers and ids, and what each promises.

An engine computes on the rows of one partition. All else is the same for every engine: reading, counting, which
categories have an id, writing, proof, and who does which partition.
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
    """A module of this room; its functions' results take record batches of `raw_partitions.read_partition`.

    Results may be forked, and sent to a Dask worker.
    """

    def unscaler(self, features: Features, names: tuple[str, ...]) -> Callable[[Any], Columns]:
        """What gives the numeric columns `names`, at least one, before they are scaled: float32.

        That is filled, clipped and logged; columns to be bucketed are clipped alone, and NaN where they are missing.
        """
        ...

    def encoder(self, features: FeatureWorkflow, *, scratch: Path, weighted: bool = False) -> Callable[[Any], Columns]:
        """What encodes rows as `features` says, bit for bit as its own arithmetic.

        The columns are the label, `Features.dense_inputs`, `Features.id_names` and the weight of `weighted` rows:
        float32, ids int64. Files that the engine needs lie below `scratch`, which is not there yet and may be created.
        """
        ...


def engine_of(name: str) -> EncodingEngine:
    """The engine `name`, one of `PreprocessingSettings.engine`; only its own libraries are imported."""
    return cast(EncodingEngine, import_module(f"components.preprocessing.{name}_engine"))
