"""Scraped samples by series, as a Prometheus server holds them: what `promql` reads and the simulation writes.

Times are whole milliseconds, as in Prometheus. Old samples are forgotten, so that a simulated day stays small.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from components.runtime.errors import ContractError

Labels = tuple[tuple[str, str], ...]
"""Names and values, sorted by name; the metric's own name is the label `__name__`."""
NAME = "__name__"


class Sample(NamedTuple):
    """A value at a time; a value of None is Prometheus' staleness marker: from here on the series is absent."""

    milliseconds: int
    value: float | None


def labels_of(name: str, labels: Mapping[str, str]) -> Labels:
    """The identity of a series."""
    return tuple(sorted({NAME: name, **labels}.items()))


class Series:
    """The samples of one series, ascending in time."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.values: list[float | None] = []

    def add(self, milliseconds: int, value: float | None) -> None:
        """Appends a sample.

        Raises:
            ContractError: it is not later than the last one.
        """
        if self.times and milliseconds <= self.times[-1]:
            raise ContractError(f"sample's time is {milliseconds} ms, expected one after {self.times[-1]} ms")
        self.times.append(milliseconds)
        self.values.append(value)

    def between(self, first: int, last: int) -> list[tuple[int, float]]:
        """Samples in [first, last], without staleness markers."""
        at = slice(bisect_left(self.times, first), bisect_right(self.times, last))
        return [(time, value) for time, value in zip(self.times[at], self.values[at]) if value is not None]

    def latest(self, first: int, last: int) -> float | None:
        """The value of the last sample in [first, last]; None if there is none or it is a staleness marker."""
        at = bisect_right(self.times, last) - 1
        return self.values[at] if at >= 0 and self.times[at] >= first else None

    def forget(self, before: int) -> None:
        """Drops the samples before a time."""
        count = bisect_left(self.times, before)
        del self.times[:count], self.values[:count]


class SeriesStore:
    """All series, found by the metric's name."""

    def __init__(self) -> None:
        self.known_from: int | None = None
        """Milliseconds before which samples were forgotten; None = none were."""
        self._by_name: dict[str, dict[Labels, Series]] = {}

    def add(self, labels: Labels, milliseconds: int, value: float | None) -> None:
        """Appends one sample; begins the series if it is new.

        Raises:
            ContractError: the sample is not later than the series' last one.
        """
        name = dict(labels)[NAME]
        of_name = self._by_name.setdefault(name, {})
        if labels not in of_name:
            of_name[labels] = Series()
        of_name[labels].add(milliseconds, value)

    def extend(self, labels: Labels, samples: Iterable[Sample]) -> None:
        """Appends several."""
        for milliseconds, value in samples:
            self.add(labels, milliseconds, value)

    def named(self, name: str | None) -> Iterator[tuple[Labels, Series]]:
        """The series of a metric; of all metrics if None."""
        for each in self._by_name if name is None else (name,):
            yield from self._by_name.get(each, {}).items()

    def forget(self, before: int) -> None:
        """Drops samples before a time, and the series that are empty then."""
        self.known_from = before
        for of_name in self._by_name.values():
            for labels, series in list(of_name.items()):
                series.forget(before)
                if not series.times:
                    del of_name[labels]
