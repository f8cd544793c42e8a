"""What a run of preprocessing may choose. Where its rows come from and go to is the command line's."""

from __future__ import annotations

from dataclasses import dataclass

from components.contracts.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class PreprocessingSettings:
    """Choices of one run.

    Raises:
        ContractError: a number is out of its range.
    """

    frequency_threshold: int = 2
    """Sightings that a category needs in this round's training rows to get an id of its own; at least 1."""
    partition_rows: int = 250_000
    """Rows that are in memory at a time, and per output file; a larger Parquet row group stays whole."""
    dask_scheduler: str = ""
    """Address of a running Dask scheduler; empty = this process."""

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        for name in ("frequency_threshold", "partition_rows"):
            value = getattr(self, name)
            if value < 1:
                raise ContractError(f"{name} is {value}, expected at least 1")
