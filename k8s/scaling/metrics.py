"""The two metrics that Triton is scaled by, from the counters that Prometheus scrapes from simulated pods.

Queue time per request is the growth of all pods' queue time by the growth of their answered requests, both as `rate`
of PromQL over a minute, with a floor of one request in the minute; pending requests are the sum of the pods' means
over the minute. That is what the shipped queries say: a test holds this file to a real Prometheus that answers them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from k8s.scaling.cluster import Pod
from k8s.scaling.manifests import PENDING_METRIC, QUEUE_METRIC

WINDOW_SECONDS = 60
"""The range of the shipped queries."""
SCRAPE_SECONDS = 15.0
"""Between two scrapes of a pod: the PodMonitor's."""
_LAG_SECONDS = 1.0
"""From a scrape until a query sees its samples."""
_LOWEST_RATE = 1 / WINDOW_SECONDS

PodSamples = Mapping[str, Sequence["Sample"]]
"""Samples by the pod's name, ascending in time."""


class Sample(NamedTuple):
    """What one scrape of a pod found."""

    milliseconds: int
    queue_microseconds: float
    answered: float
    pending: float


def fleet_metrics(samples: PodSamples, now: float) -> dict[str, float | None]:
    """Each metric of all pods together; None where no pod has enough samples in the window.

    `samples` are of every pod that Prometheus has scraped in the window, those that are gone by now included.
    """
    queue = _rates(samples, now, lambda sample: sample.queue_microseconds)
    answered = _rates(samples, now, lambda sample: sample.answered)
    pending = _mean_pending(samples, now)
    return {
        QUEUE_METRIC: sum(queue) / max(sum(answered), _LOWEST_RATE) if queue else None,
        PENDING_METRIC: sum(pending) if pending else None,
    }


def counter_rate(samples: Sequence[tuple[int, float]], first: int, last: int) -> float | None:
    """PromQL's `rate`: a counter's growth per second, extrapolated to the window's ends; None = fewer than two samples.

    As Prometheus 2.42 computes it. Prometheus 3 leaves the window's left end open, which matters only where a sample
    falls on it to the millisecond. `samples` are milliseconds and values within the window from `first` to `last`,
    ascending.

    >>> counter_rate([(0, 0.0), (30_000, 60.0), (60_000, 120.0)], 0, 60_000)
    2.0
    """
    if len(samples) < 2:
        return None
    (start, start_value), (end, end_value) = samples[0], samples[-1]
    # A counter that fell was reset: it counted up to its last value, and then again from 0.
    growth = end_value - start_value + sum(a for (_, a), (_, b) in pairwise(samples) if b < a)
    covered = sampled = (end - start) / 1000
    spacing = sampled / (len(samples) - 1)
    to_start, to_end = (start - first) / 1000, (last - end) / 1000
    if growth > 0 and start_value >= 0:
        # A counter is never below 0, so it cannot be extrapolated to before it was 0.
        to_start = min(to_start, sampled * start_value / growth)
    for gap in (to_start, to_end):
        covered += gap if gap < spacing * 1.1 else spacing / 2
    return growth * covered / sampled / ((last - first) / 1000)


class Scraper:
    """Prometheus' side: when each pod is scraped, and which samples a query sees."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}

    def next_after(self, pod: Pod, now: float) -> float:
        """When the pod is scraped next."""
        first = max(now, pod.serving_at)
        number = math.floor((first - pod.scrape_offset) / SCRAPE_SECONDS)
        while (at := pod.scrape_offset + number * SCRAPE_SECONDS) <= first:
            number += 1
        return at

    def is_due(self, pod: Pod, now: float) -> bool:
        """Whether the pod is scraped now."""
        turns = (now - pod.scrape_offset) / SCRAPE_SECONDS
        return now > pod.serving_at and abs(turns - round(turns)) * SCRAPE_SECONDS < 1e-6

    def scrape(self, pod: Pod, now: float) -> None:
        """Takes the pod's counters; durations are whole microseconds, as Triton's are."""
        counters = pod.queue.counters
        queue = float(round(counters.queue_seconds * 1e6))
        sample = Sample(round(now * 1000), queue, float(counters.answered), float(pod.queue.num_queued))
        self._samples.setdefault(pod.name, []).append(sample)

    def visible(self, now: float) -> dict[str, list[Sample]]:
        """The samples of the window that a query sees now, by pod; older ones are forgotten."""
        oldest = round((now - WINDOW_SECONDS) * 1000)
        for pod, samples in list(self._samples.items()):
            self._samples[pod] = [sample for sample in samples if sample.milliseconds >= oldest]
            if not self._samples[pod]:
                del self._samples[pod]
        newest = (now - _LAG_SECONDS) * 1000
        return {
            pod: [sample for sample in samples if sample.milliseconds <= newest]
            for pod, samples in self._samples.items()
        }


def _rates(samples: PodSamples, now: float, counter: Callable[[Sample], float]) -> list[float]:
    first, last = _window(now)
    rates = (
        counter_rate([(each.milliseconds, counter(each)) for each in _within(found, first, last)], first, last)
        for found in samples.values()
    )
    return [rate for rate in rates if rate is not None]


def _mean_pending(samples: PodSamples, now: float) -> list[float]:
    pending = ([each.pending for each in _within(found, *_window(now))] for found in samples.values())
    return [sum(values) / len(values) for values in pending if values]


def _window(now: float) -> tuple[int, int]:
    last = round(now * 1000)
    return last - WINDOW_SECONDS * 1000, last


def _within(samples: Iterable[Sample], first: int, last: int) -> list[Sample]:
    return [sample for sample in samples if first <= sample.milliseconds <= last]
