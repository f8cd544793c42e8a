"""The features of a recommender's rows: which columns there are, in which order, and how a missing value looks.

Joins all rooms: features are dynamic, each recommender names its own. The columns that every raw row has beside them
are `contracts.raw_rows`'. In files a missing value is null. Tensors and log records have no null: there a missing
numeric value is NaN and a missing category is `MISSING_CATEGORY`.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.runtime.errors import ContractError

MISSING_CATEGORY = -1
"""A missing category in an int64 tensor; no category has this value."""
MAX_CATEGORY = 2**32 - 1
"""Largest category."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The feature columns of one recommender, in the order of files and tensors.

    Raises:
        ContractError: there is no feature, a name is empty, or a name is there twice.

    >>> Features(numeric=("price",), categorical=("item", "shop")).names
    ('price', 'item', 'shop')
    """

    numeric: tuple[str, ...]
    """Columns of numbers: float32 in files, one column each of the tensor `dense`."""
    categorical: tuple[str, ...]
    """Columns of categories: int64 from 0 to `MAX_CATEGORY` in files, one column each of the tensor `categorical`."""

    def __post_init__(self) -> None:
        """Refuses columns that could not be told apart; makes tuples of the lists that JSON holds."""
        object.__setattr__(self, "numeric", tuple(self.numeric))
        object.__setattr__(self, "categorical", tuple(self.categorical))
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ContractError(f"features are {list(self.names)}, expected one or more names")
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ContractError(f"features {twice} are there twice, expected each once")

    @property
    def names(self) -> tuple[str, ...]:
        """All features, numeric ones first."""
        return self.numeric + self.categorical
