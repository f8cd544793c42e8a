"""From latencies to figures; arithmetic only. Which figures should be what is `serving_targets`'.

A percentile is taken within a round and then the median over rounds, with the least and the most beside it; a ratio is
taken between contestants of the same round, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving_load import Answers
from benchmarks.spread import Spread, spread


def percentile_ms(latencies: NDArray[np.float64], percent: float) -> float | None:
    """The smallest latency, in milliseconds, that at least `percent` of all do not exceed; None of none."""
    if not len(latencies):
        return None
    return 1e3 * float(np.percentile(latencies, percent, method="inverted_cdf"))


def summary(answers: Answers, batch: int) -> dict[str, Any]:
    """One run: milliseconds at three percentiles, their mean, rows per second, and how many failed."""
    count = len(answers.latencies)
    return {
        **{f"p{percent}_ms": percentile_ms(answers.latencies, percent) for percent in (50, 95, 99)},
        "mean_ms": 1e3 * float(answers.latencies.mean()) if count else None,
        "rows_per_second": batch * count / answers.seconds,
        "num_answered": count,
        "num_failed": answers.num_failed,
        "errors": list(answers.errors),
    }


def over_rounds(rounds: Sequence[dict[str, Any]], figure: str) -> Spread:
    """The spread of one figure of `summary`, over the rounds that have it."""
    return spread([one[figure] for one in rounds if one[figure] is not None])


def faster(ours: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]]) -> Spread:
    """How many times lower our median latency is, round by round."""
    return spread([theirs["p50_ms"] / mine["p50_ms"] for mine, theirs in zip(ours, peer)])


def beyond_compute(
    ours: Sequence[dict[str, Any]], compute: Sequence[dict[str, Any]], floor: Sequence[dict[str, Any]]
) -> Spread:
    """Our p99 less the model's own, as a multiple of the floor's p99, round by round."""
    return spread([(a["p99_ms"] - b["p99_ms"]) / c["p99_ms"] for a, b, c in zip(ours, compute, floor)])


def share_of(ours: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> Spread:
    """Our rows per second as a share of those of ONNX Runtime alone, round by round."""
    return spread([a["rows_per_second"] / b["rows_per_second"] for a, b in zip(ours, alone)])


def within(answers: Answers, begin: float, end: float) -> NDArray[np.float64]:
    """Latencies of the requests that were due in [begin, end)."""
    return answers.latencies[(answers.asked >= begin) & (answers.asked < end)]


def server_split(before: dict[str, int], after: dict[str, int], mean_ms: float) -> dict[str, float] | None:
    """Where a request's mean time went, in milliseconds, from two readings of the server's own counters.

    `client and network` is what remains of `mean_ms`, the client's mean. None where nothing was answered between them.
    """
    moved = {name: after[name] - before[name] for name in after}
    count = moved.pop("count")
    if not count:
        return None
    parts = {name: nanoseconds / count / 1e6 for name, nanoseconds in moved.items()}
    total = parts.pop("request")
    parts["front end"] = total - sum(parts.values())
    return {**parts, "client and network": mean_ms - total}


def release_figures(
    answers: Answers, *, window: tuple[float, float], run: tuple[float, float], batch: int
) -> dict[str, Any]:
    """How requests fared in the window from a release's announcement to its record, and just as long before it began.

    Args:
        answers: Of a load that went on all the time; all times are on its clock.
        window: From before the first byte is staged until every server has switched.
        run: The release's process, from start to end: it builds and proves the graph before the window.
        batch: Rows per request.
    """
    length = window[1] - window[0]
    parts = {
        "window": within(answers, *window),
        "before": within(answers, run[0] - length, run[0]),
        "whole_run": within(answers, *run),
    }
    p99 = {f"{name}_p99_ms": percentile_ms(part, 99) for name, part in parts.items()}
    during, before = p99["window_p99_ms"], p99["before_p99_ms"]
    return {
        "window_seconds": length,
        "num_in_window": len(parts["window"]),
        **p99,
        "window_worst_ms": percentile_ms(parts["window"], 100),
        "ratio": during / before if during is not None and before is not None else None,
        **summary(answers, batch),
    }
