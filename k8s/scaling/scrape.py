"""What Prometheus scrapes from a pod: Triton's metrics by their names, labels and units, from the simulated counters.

A scrape's samples are seen by queries a little later; a pod that is gone leaves staleness markers, as for a real
target that disappears.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from components.contracts.serving import MODEL_NAME
from k8s.scaling.cluster import Pod
from k8s.scaling.series import Labels, SeriesStore, labels_of
from k8s.scaling.shipped_query import NAMESPACE

_MICROSECONDS = 1e6


class Scraper:
    """Prometheus' side of the scrapes.

    Args:
        store: Where samples go.
        seconds: Between two scrapes of a pod.
        lag: Seconds from a scrape to its samples' being seen.
    """

    def __init__(self, store: SeriesStore, seconds: float, lag: float) -> None:
        self._store, self._seconds, self._lag = store, seconds, lag
        self._unseen: list[tuple[float, Labels, float | None]] = []
        self._labels: dict[str, dict[tuple[str, ...], Labels]] = {}

    def next_after(self, pod: Pod, now: float) -> float:
        """When the pod is scraped next."""
        first = max(now, pod.serving_at)
        number = math.floor((first - pod.scrape_offset) / self._seconds)
        while (at := pod.scrape_offset + number * self._seconds) <= first:
            number += 1
        return at

    def is_due(self, pod: Pod, now: float) -> bool:
        """Whether the pod is scraped now."""
        turns = (now - pod.scrape_offset) / self._seconds
        return now > pod.serving_at and abs(turns - round(turns)) * self._seconds < 1e-6

    def scrape(self, pod: Pod, now: float) -> None:
        """Takes the pod's counters."""
        known = self._labels.setdefault(pod.name, {})
        for name, value, more in _metrics(pod):
            key = (name, *more)
            if key not in known:
                known[key] = _labels(name, pod.name, more)
            self._unseen.append((now, known[key], value))

    def end(self, pod: Pod, now: float) -> None:
        """The pod is gone; the markers come after a scrape of the same moment."""
        self._unseen += [(now + 1e-3, labels, None) for labels in self._labels.pop(pod.name, {}).values()]

    def show(self, now: float) -> None:
        """Gives queries the samples that are old enough to be seen."""
        later = []
        for at, labels, value in self._unseen:
            if at + self._lag <= now:
                self._store.add(labels, round(at * 1000), value)
            else:
                later.append((at, labels, value))
        self._unseen = later


def _labels(name: str, pod: str, more: tuple[str, ...]) -> Labels:
    labels = {"namespace": NAMESPACE, "pod": pod, "model": MODEL_NAME, "version": "1"}
    return labels_of(name, labels | ({"reason": more[0]} if more else {}))


def _metrics(pod: Pod) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """Name, value and reason of each metric; durations are whole microseconds, as Triton's are."""
    counters = pod.queue.counters
    queue, compute = (float(round(each * _MICROSECONDS)) for each in (counters.queue_seconds, counters.compute_seconds))
    yield "nv_inference_request_success", counters.answered, ()
    yield "nv_inference_request_failure", counters.refused + counters.timed_out, ("REJECTED",)
    yield "nv_inference_count", counters.rows, ()
    yield "nv_inference_exec_count", counters.batches, ()
    yield "nv_inference_request_duration_us", queue + compute, ()
    yield "nv_inference_queue_duration_us", queue, ()
    yield "nv_inference_compute_infer_duration_us", compute, ()
    yield "nv_inference_pending_request_count", pod.queue.num_queued, ()
