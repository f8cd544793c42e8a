"""The frame that rows come in: choosing columns of it copies nothing.

NVTabular chooses columns at every node of a graph. pandas 1.5 joins all columns of a type in one array before it does
(`_consolidate`) and copies the chosen ones out of that, and `reset_index` copies both ways again.
"""

from __future__ import annotations

from typing import Any

import pandas as pd


class LooseFrame(pd.DataFrame):  # type: ignore[misc]
    """A frame whose columns are arrays of their own; `frame[names]` is another frame of the same arrays."""

    @property
    def _constructor(self) -> Any:
        return LooseFrame

    def __getitem__(self, key: Any) -> Any:
        """As pandas has it; a list of names gives views of the columns, in that order."""
        if not isinstance(key, list):
            return super().__getitem__(key)
        take = super().__getitem__
        return LooseFrame({name: take(name).array for name in key}, self.index, copy=False)

    def reset_index(self, *arguments: Any, **options: Any) -> Any:
        """As pandas has it; where the rows are numbered from 0 already and nothing else is asked, without a copy."""
        if not arguments and options == {"drop": True} and self.index.equals(pd.RangeIndex(len(self))):
            return self[list(self.columns)]
        return super().reset_index(*arguments, **options)
