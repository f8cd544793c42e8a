"""What a load found: counts, latencies and rates of the measured part, as JSON or a table. Sending is `load`'s."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Percentiles in milliseconds, interpolated as NumPy does by default; all None where nothing was answered."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    mean: float | None

    @classmethod
    def of(cls, seconds: list[float]) -> Latencies:
        """The percentiles of some times in seconds."""
        if not seconds:
            return cls(p50=None, p95=None, p99=None, max=None, mean=None)
        milliseconds = np.array(seconds) * 1e3
        p50, p95, p99 = (float(p) for p in np.percentile(milliseconds, [50, 95, 99]))
        return cls(p50=p50, p95=p95, p99=p99, max=float(milliseconds.max()), mean=float(milliseconds.mean()))


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What happened to the requests that were due after the warm-up."""

    sent: int
    """Requests sent; each was answered or failed."""
    answered: int
    failed: dict[str, int]
    """Failed requests by the kind of error (its class)."""
    first_errors: dict[str, str]
    """The first message of each kind."""
    unsent: int
    """Open loop: requests that were due and never sent, because `max_in_flight` others were out until the end. Where
    this is not 0 the server was slower than the rate, and latencies are those of the requests that got through."""
    seconds: float
    """From the end of the warm-up to the end of the schedule, or to the last answer where that came later."""
    latency_ms: Latencies
    """Of the answered requests, from the moment that each was *due* to its answer, and not from when it was sent: a
    request that waits behind a slow one counts its wait, as a user would (no coordinated omission). In a closed loop
    a request is due when the one before it ended."""
    service_ms: Latencies
    """Of the answered requests, from sent to answered: what the client's own timer and `max_in_flight` left out."""
    requests_per_second: float | None
    """Answered, by `seconds`."""
    rows_per_second: float | None
    late_share: float | None
    """Share of the sent requests that were sent more than `load.LATE_SECONDS` after they were due; None = none sent."""
    most_behind_ms: float | None
    """How late the latest of them was sent."""
    versions: dict[str, int]
    """Answers by model version."""
    distinct_requests: int
    """Different requests among those sent, which then repeat: what a response cache could answer again."""

    def as_document(self) -> dict[str, Any]:
        """The report for JSON."""
        return asdict(self)


@dataclass
class Tally:
    """Collects what a report is made of."""

    rows_per_request: int
    sent: int = 0
    late: int = 0
    most_behind: float = 0.0
    last_end: float = float("-inf")
    latencies: list[float] = field(default_factory=list)
    service: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)
    versions: Counter[int] = field(default_factory=Counter)

    def count_sent(self, *, behind: float, late_after: float) -> None:
        """Counts a request that was sent `behind` seconds after it was due."""
        self.sent += 1
        self.late += behind > late_after
        self.most_behind = max(self.most_behind, behind)

    def count_answer(self, *, due: float, sent: float, now: float, version: int) -> None:
        """Counts an answer that came at `now`."""
        self.latencies.append(now - due)
        self.service.append(now - sent)
        self.versions[version] += 1
        self.last_end = max(self.last_end, now)

    def count_failure(self, error: Exception, now: float) -> None:
        """Counts a request that failed at `now`."""
        kind = type(error).__name__
        self.failed[kind] += 1
        self.first_errors.setdefault(kind, str(error))
        self.last_end = max(self.last_end, now)

    def report(self, *, start: float, end: float, unsent: int, distinct_requests: int) -> LoadReport:
        """The report of what was due from `start` to `end`."""
        seconds = max(end, self.last_end) - start
        answered = len(self.latencies)
        rate = answered / seconds if seconds > 0 else None
        return LoadReport(
            sent=self.sent,
            answered=answered,
            failed=dict(sorted(self.failed.items())),
            first_errors=self.first_errors,
            unsent=unsent,
            seconds=seconds,
            latency_ms=Latencies.of(self.latencies),
            service_ms=Latencies.of(self.service),
            requests_per_second=rate,
            rows_per_second=None if rate is None else rate * self.rows_per_request,
            late_share=self.late / self.sent if self.sent else None,
            most_behind_ms=self.most_behind * 1e3 if self.sent else None,
            versions={str(version): count for version, count in sorted(self.versions.items())},
            distinct_requests=distinct_requests,
        )
