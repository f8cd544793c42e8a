"""How many requests come when: a recorded trace (CSV), or a synthetic one by name; and the requests drawn from it.

The requests are drawn step by step from the seed alone, so every autoscaler that is tried meets the very same ones.
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

COLUMNS = ("seconds", "requests_per_second", "rows_per_request")
"""Of a trace's file; the last one may be left out."""
DEFAULT_ROWS = 1024
"""Candidates that one request ranks, where the trace does not say."""
MOST_SECONDS = 31 * 86400.0
MOST_OF_STEP = 2e7
"""Requests of one step, which are drawn together: half a gigabyte of numbers."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A rate that is constant within steps."""

    starts: NDArray[np.float64]
    """Seconds at which each step begins, the first at 0; the last entry is the trace's end."""
    rates: NDArray[np.float64]
    """Requests per second, per step."""
    rows: NDArray[np.int64]
    """Rows of each request, per step."""
    name: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return float(self.starts[-1])

    @property
    def num_expected(self) -> float:
        """Requests to expect in all."""
        return float((self.rates * np.diff(self.starts)).sum())

    def requests(self, step: int, seed: int) -> "TraceRequests":
        """The requests of one step: a Poisson process of the step's rate."""
        random = np.random.default_rng([seed, step])
        start, end = self.starts[step], self.starts[step + 1]
        count = random.poisson(self.rates[step] * (end - start))
        return TraceRequests(
            arrivals=np.sort(random.uniform(start, end, count)),
            chances=random.random(count),
            service=random.random(count),
            rows=int(self.rows[step]),
        )


@dataclass(frozen=True, eq=False)
class TraceRequests:
    """Requests in the order of their coming."""

    arrivals: NDArray[np.float64]
    chances: NDArray[np.float64]
    """In [0, 1): which pod a client's choice falls on."""
    service: NDArray[np.float64]
    """In [0, 1): how lucky its service time is."""
    rows: int


def read_trace(path: Path) -> Trace:
    """A recorded trace: CSV with a header, `seconds,requests_per_second[,rows_per_request]`.

    A line's rate holds from its second to the next line's; the last line only ends the trace.

    Raises:
        ContractError: no such file, another header, a line that cannot be, or more than can be simulated.
    """
    try:
        # Spreadsheets put a byte order mark first.
        header, _, body = path.read_text(encoding="utf-8-sig").partition("\n")
        if header.strip() not in (",".join(COLUMNS), ",".join(COLUMNS[:2])):
            raise ContractError(f"{path} begins with {header[:80]!r}, expected {','.join(COLUMNS)}")
        if len(body.split()) < 2:
            raise ContractError(f"{path} holds fewer than two lines, and the last one only ends the trace")
        lines = np.loadtxt(body.splitlines(), delimiter=",", ndmin=2, usecols=range(header.count(",") + 1))
    except OSError as error:
        raise ContractError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ContractError(f"trace {path} is no text, expected CSV") from error
    except ContractError:
        raise
    except ValueError as error:  # names the line below the header
        raise ContractError(f"trace {path}: {error}") from error
    seconds, rates, rows = (*lines.T, np.full(len(lines), DEFAULT_ROWS))[:3]
    if not np.all((rates >= 0) & (rates < 1e6) & (rows >= 1) & (rows <= MAX_BATCH_ROWS)):
        raise ContractError(f"{path}: expected rates of 0 to 1e6 a second, and 1 to {MAX_BATCH_ROWS} rows")
    if seconds[0] != 0 or not np.all(np.diff(seconds) > 0) or seconds[-1] > MOST_SECONDS:
        raise ContractError(f"{path}: seconds are expected to begin at 0 and to rise, to {MOST_SECONDS:g} at most")
    trace = Trace(seconds, rates[:-1], rows[:-1].astype(np.int64), path.name)
    if (most := float((trace.rates * np.diff(trace.starts)).max())) > MOST_OF_STEP:
        raise ContractError(f"{path} has a step of {most:.3g} requests, expected at most {MOST_OF_STEP:g}: divide it")
    return trace


def day(peak: float, seed: int, rows: int) -> Trace:
    """A day by minutes: low at 04:00, high at 16:00, noise of 5 %; at 22:00 three times the rate at once, 20 minutes.

    `peak` is the requests per second in the afternoon.
    """
    minutes = np.arange(1440)
    wave = (1 - np.cos(2 * np.pi * (minutes - 4 * 60) / 1440)) / 2
    rates = peak * (0.15 + 0.85 * wave**1.3) * _noise(1440, seed)
    rates[1320:1340] *= 3
    return _by_minutes(rates, rows, "day")


def spike(peak: float, seed: int, rows: int) -> Trace:
    """Two hours at a third of `peak`, with noise of 5 %; at 0:40 `peak` at once, for 30 minutes."""
    rates = peak / 3 * _noise(120, seed)
    rates[40:70] *= 3
    return _by_minutes(rates, rows, "spike")


SYNTHETIC: dict[str, Callable[[float, int, int], Trace]] = {"day": day, "spike": spike}


def _noise(count: int, seed: int) -> NDArray[np.float64]:
    """Factors around 1: a minute is like the one before it."""
    steps = np.random.default_rng([seed, count]).normal(0, 1, count)
    level, factors = 0.0, []
    for step in steps:
        level = 0.9 * level + math.sqrt(1 - 0.9**2) * float(step)
        factors.append(math.exp(0.05 * level))
    return np.array(factors)


def _by_minutes(rates: NDArray[np.floating[Any]], rows: int, name: str) -> Trace:
    starts = np.arange(len(rates) + 1, dtype=np.float64) * 60
    return Trace(starts, rates.astype(np.float64), np.full(len(rates), rows), name)
