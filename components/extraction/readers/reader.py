"""What every form of click log promises its reader's callers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from components.extraction.set_aside import SetAside


class Reader(Protocol):
    """One file of click logs."""

    @property
    def path(self) -> Path:
        """The file."""

    def batches(self, set_aside: SetAside) -> Iterator[Any]:
        """Record batches in the raw schema, in file order; memory is bounded by a batch, not by the file.

        Columns that the form does not have (request id, event time ...) are null. Malformed rows go to `set_aside`,
        and every row read is counted there.

        Raises:
            ContractError: the file is damaged, or too many of its rows are malformed.
        """
