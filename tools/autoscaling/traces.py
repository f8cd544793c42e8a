"""Read or generate a trace of request rates, and draw requests from it.

A trace is a CSV file, or a synthetic trace with a name. Requests are drawn per step from the seed
alone, so that every autoscaler gets the same requests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.serving import MAX_BATCH_ROWS
from evergreen.runtime.errors import ContractError

_COLUMNS = ("seconds", "requests_per_second", "rows_per_request")
"""Columns of a trace's file. The column `rows_per_request` is optional."""
DEFAULT_ROWS = 1024
"""Default number of rows in a request (candidates to rank), if the trace has no column for it."""
_MAX_SECONDS = 31 * 86400.0
_MAX_REQUESTS_OF_STEP = 2e7
"""Maximum number of requests in one step of a trace. All requests of a step are drawn at once. The
maximum number of requests takes half a gigabyte of memory."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A request rate that is constant within steps."""

    starts: NDArray[np.float64]
    """Start of each step in seconds, the first at 0. The last value is the end of the trace."""
    rates: NDArray[np.float64]
    """Requests per second, per step."""
    rows: NDArray[np.int64]
    """Number of rows in each request, for each step."""
    name: str = ""

    @property
    def seconds(self) -> float:
        """Length of the trace in seconds."""
        return float(self.starts[-1])

    @property
    def num_expected(self) -> float:
        """Expected total number of requests."""
        return float((self.rates * np.diff(self.starts)).sum())

    def requests(self, step: int, seed: int) -> "TraceRequests":
        """Draw the arrivals of one step from a Poisson process with the step's rate."""
        random = np.random.default_rng([seed, step])
        start, end = self.starts[step], self.starts[step + 1]
        count = random.poisson(self.rates[step] * (end - start))
        return TraceRequests(
            arrivals=np.sort(random.uniform(start, end, count)),
            uniforms=random.random(count),
            service=random.random(count),
            rows=int(self.rows[step]),
        )


@dataclass(frozen=True, eq=False)
class TraceRequests:
    """Requests in the order of their arrival."""

    arrivals: NDArray[np.float64]
    uniforms: NDArray[np.float64]
    """Random numbers in [0, 1), one for each request, that select its pod."""
    service: NDArray[np.float64]
    """Numbers in [0, 1) that select the quantile of each service time."""
    rows: int


def read_trace(path: Path) -> Trace:
    """Read a recorded trace.

    The file is CSV with the header `seconds,requests_per_second[,rows_per_request]`. The rate of a
    line applies until the next line. The last line only marks the end of the trace.

    Raises:
        ContractError: the file cannot be read, has another header or an invalid line, or is too
            large to simulate.
    """
    try:
        # Spreadsheets start a file with a byte order mark.
        header, _, body = path.read_text(encoding="utf-8-sig").partition("\n")
        if header.strip() not in (",".join(_COLUMNS), ",".join(_COLUMNS[:2])):
            raise ContractError(
                f"{path} begins with {header[:80]!r}, expected {','.join(_COLUMNS)}"
            )
        if len(body.split()) < 2:
            raise ContractError(
                f"{path} has fewer than two lines, expected at least two, because the last line "
                "contains only the end time"
            )
        lines = np.loadtxt(
            body.splitlines(), delimiter=",", ndmin=2, usecols=range(header.count(",") + 1)
        )
    except OSError as error:
        raise ContractError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ContractError(f"trace {path} is not text, expected CSV") from error
    except ContractError:
        raise
    except ValueError as error:  # NumPy's line numbers start after the header
        raise ContractError(f"trace {path}: {error}") from error
    seconds, rates, rows = (*lines.T, np.full(len(lines), DEFAULT_ROWS))[:3]
    if not np.all((rates >= 0) & (rates < 1e6) & (rows >= 1) & (rows <= MAX_BATCH_ROWS)):
        raise ContractError(
            f"{path}: expected rates of 0 to 1e6 a second, and 1 to {MAX_BATCH_ROWS} rows"
        )
    if seconds[0] != 0 or not np.all(np.diff(seconds) > 0) or seconds[-1] > _MAX_SECONDS:
        raise ContractError(
            f"{path} has wrong seconds, expected seconds that begin at 0 and rise to at most "
            f"{_MAX_SECONDS:g}"
        )
    trace = Trace(seconds, rates[:-1], rows[:-1].astype(np.int64), path.name)
    if (largest := float((trace.rates * np.diff(trace.starts)).max())) > _MAX_REQUESTS_OF_STEP:
        raise ContractError(
            f"{path} has a step of {largest:.3g} requests, "
            f"expected at most {_MAX_REQUESTS_OF_STEP:g}: split it"
        )
    return trace


def day(peak: float, seed: int, rows: int) -> Trace:
    """Return a trace of one day, with one rate per minute and 5 % noise.

    The rate has its minimum at 04:00 and its maximum at 16:00. At 22:00, the rate triples for 20
    minutes.

    Args:
        peak: Requests per second at the maximum.
        seed: Seed of the noise.
        rows: Rows of each request.
    """
    minutes = np.arange(1440)
    wave = (1 - np.cos(2 * np.pi * (minutes - 4 * 60) / 1440)) / 2
    rates = peak * (0.15 + 0.85 * wave**1.3) * _noise(1440, seed)
    rates[1320:1340] *= 3
    return _by_minutes(rates, rows, "day")


def spike(peak: float, seed: int, rows: int) -> Trace:
    """Return a trace of two hours with a constant rate, 5 % noise and one spike.

    The constant rate is a third of `peak`. At 0:40, the rate rises to `peak` for 30 minutes.
    """
    rates = peak / 3 * _noise(120, seed)
    rates[40:70] *= 3
    return _by_minutes(rates, rows, "spike")


SYNTHETIC: dict[str, Callable[[float, int, int], Trace]] = {"day": day, "spike": spike}


def _noise(count: int, seed: int) -> NDArray[np.float64]:
    """Return factors around 1 with a strong correlation between neighbouring minutes."""
    steps = np.random.default_rng([seed, count]).normal(0, 1, count)
    level, factors = 0.0, []
    for step in steps:
        level = 0.9 * level + math.sqrt(1 - 0.9**2) * float(step)
        factors.append(math.exp(0.05 * level))
    return np.array(factors)


def _by_minutes(rates: NDArray[np.floating[Any]], rows: int, name: str) -> Trace:
    starts = np.arange(len(rates) + 1, dtype=np.float64) * 60
    return Trace(starts, rates.astype(np.float64), np.full(len(rates), rows), name)
