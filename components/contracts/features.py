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
        ContractError: there is no feature, a name is there twice, or a name is none: empty, with a slash or a character
            that is not printable, or with a space at its begin or end.

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
        if not self.names:
            raise ContractError("there are no features, expected one or more names")
        if wrong := [name for name in self.names if not _is_name(name)]:
            raise ContractError(
                f"features are named {wrong}, expected printable characters without a slash, and no space at either end"
            )
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ContractError(f"features {twice} are there twice, expected each once")

    @property
    def names(self) -> tuple[str, ...]:
        """All features, numeric ones first."""
        return self.numeric + self.categorical

    def expect_same(self, before: Features, *, parent: str) -> None:
        """Refuses these as the features of a round that continues a model of the features `before`.

        Raises:
            ContractError: they differ in names, kinds or order; says in what, and how the parent is named.
        """
        if self == before:
            return
        moved = [name for name in self.names if name in before.names]
        other_kind = [name for name in moved if (name in self.numeric) != (name in before.numeric)]
        differences = {
            "lack": [name for name in before.names if name not in self.names],
            "add": [name for name in self.names if name not in before.names],
            "change the kind of": other_kind,
        }
        said = [f"{verb} {names}" for verb, names in differences.items() if names] or ["have another order"]
        raise ContractError(
            f"features of this run {' and '.join(said)}, expected those of the parent {parent}, "
            f"{list(before.numeric)} and {list(before.categorical)}; train from scratch with parent=none"
        )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and name.strip() == name != "" and "/" not in name
