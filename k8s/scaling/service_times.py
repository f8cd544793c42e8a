"""How long an instance of the model is taken by one batch: measured times with their provenance, from a JSON file.

`benchmarks/service_times.py` measures and writes such files. Times of a GPU were never measured in this project.
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

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
    """Seconds at each of `rows`; linear between them, and beyond them by the last slope, which falls nowhere."""
    quantiles: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0))
    """(probability, multiple of the median), ascending; linear between them."""
    what: str = ""
    """What was measured, on what, when."""

    @cache  # noqa: B019 - one set of times lives as long as the command
    def of_rows(self, rows: int) -> float:
        """The median seconds of a batch of so many rows."""
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.medians[-1] - self.medians[-2]) / (self.rows[-1] - self.rows[-2])
            return self.medians[-1] + max(slope, 0.0) * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.medians))

    def multiples(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Multiples of the median at probabilities in [0, 1)."""
        at, values = zip(*self.quantiles)
        return np.asarray(np.interp(chances, at, values), np.float64)

    @cached_property
    def mean_multiple(self) -> float:
        """The mean of the multiples."""
        at, values = (np.array(each) for each in zip(*self.quantiles))
        return float((np.diff(at) * (values[1:] + values[:-1]) / 2).sum())


def shipped_or_file(text: str) -> Path:
    """The file that `text` means: that of a shipped network by its name, or else a path."""
    shipped = SHIPPED / f"{text}-cpu.json"
    return shipped if shipped.is_file() else Path(text)


def read_service_times(path: Path) -> ServiceTimes:
    """The times of a file that `benchmarks/service_times.py` wrote.

    The spread is, for each probability, the median over the numbers of rows: one number of rows may have met other
    work on the machine; several rarely do all.

    Raises:
        ContractError: no such file, or one of another form.
    """
    try:
        document = json.loads(path.read_bytes())
        measured = [each["seconds"] for each in document["service_times"]]
        return ServiceTimes(
            tuple(int(each["rows"]) for each in document["service_times"]),
            tuple(float(each["0.5"]) for each in measured),
            tuple(
                (float(chance), float(np.median([each[chance] / each["0.5"] for each in measured])))
                for chance in sorted(measured[0], key=float)
            ),
            f"{document['what']}; measured {document['measured_at']}",
        )
    except OSError as error:
        raise ContractError(f"service times {path} cannot be read: {error.strerror}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ContractError(
            f"{path} is no file of service times ({error!r}); benchmarks.service_times writes them"
        ) from error
