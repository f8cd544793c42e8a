"""How long an instance of the model is taken by one batch: measured times with their provenance, from a JSON file.

`benchmarks/service_times.py` measures and writes such files. Times of a GPU were never measured in this project.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.runtime.errors import ContractError

SHIPPED = Path(__file__).with_name("measured_service_times")
"""Measured files that come with the project, by the network that was served; the shipped target is `demo`'s."""


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds that a batch takes, by its rows, and how they spread."""

    rows: tuple[int, ...]
    """Ascending."""
    medians: tuple[float, ...]
    """Seconds at each of `rows`; linear between them, and beyond them by the last slope."""
    quantiles: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0))
    """(probability, multiple of the median), ascending; linear between them."""
    what: str = ""
    """What was measured, on what, when."""

    def __post_init__(self) -> None:
        """Refuses times that cannot be."""
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:]))
        if not self.rows or self.rows[0] < 1 or not rising or len(self.rows) != len(self.medians):
            raise ContractError(
                f"rows of the service times are {self.rows}, expected rising ones from 1, each with one"
            )
        if not all(math.isfinite(each) and each > 0 for each in self.medians):
            raise ContractError(f"service times are {self.medians} s, expected more than 0")
        chances, multiples = zip(*self.quantiles)
        if chances[0] != 0 or chances[-1] != 1 or list(chances) != sorted(set(chances)):
            raise ContractError(f"quantiles are at {chances}, expected 0 to 1, rising")
        if multiples[0] <= 0 or list(multiples) != sorted(multiples):
            raise ContractError(f"quantiles are {multiples} times the median, expected more than 0, not falling")

    def of_rows(self, rows: int) -> float:
        """The median seconds of a batch of so many rows."""
        if rows not in self._known:
            self._known[rows] = self._interpolated(rows)
        return self._known[rows]

    def multiples(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Multiples of the median at probabilities in [0, 1)."""
        at, values = zip(*self.quantiles)
        return np.asarray(np.interp(chances, at, values), np.float64)

    @cached_property
    def mean_multiple(self) -> float:
        """The mean of the multiples."""
        at, values = (np.array(each) for each in zip(*self.quantiles))
        return float((np.diff(at) * (values[1:] + values[:-1]) / 2).sum())

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}

    def _interpolated(self, rows: int) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.medians[0]
        high = min(max(bisect.bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (a, b), (at_a, at_b) = self.rows[high - 1 : high + 1], self.medians[high - 1 : high + 1]
        return max(at_a + (at_b - at_a) * (rows - a) / (b - a), min(at_a, at_b))


def shipped_or_file(text: str) -> Path:
    """The file that `text` means: that of a shipped network by its name, or else a path."""
    shipped = SHIPPED / f"{text}-cpu.json"
    return shipped if shipped.is_file() else Path(text)


def read_service_times(path: Path) -> ServiceTimes:
    """The times of a file that `benchmarks/service_times.py` wrote.

    Raises:
        ContractError: no such file, or one of another form.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        measured = document["service_times"]
        spread = _spread([each["seconds"] for each in measured])
        where = f"{document['what']}; measured {document['measured_at']}"
        return ServiceTimes(
            tuple(int(each["rows"]) for each in measured),
            tuple(float(each["seconds"]["0.5"]) for each in measured),
            spread,
            where,
        )
    except OSError as error:
        raise ContractError(f"service times {path} cannot be read: {error.strerror}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(
            f"{path} is no file of service times ({error!r}); benchmarks.service_times writes them"
        ) from error


def _spread(measured: list[dict[str, float]]) -> tuple[tuple[float, float], ...]:
    """Quantiles as multiples of the median: of each probability the median over the numbers of rows.

    One number of rows may have met other work on the machine; several rarely do all.
    """
    chances = sorted(measured[0], key=float)
    return tuple(
        (float(chance), float(np.median([each[chance] / each["0.5"] for each in measured]))) for chance in chances
    )
