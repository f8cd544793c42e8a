"""From pairs of latencies, without and with the cache, to the hit rate from which the cache pays; arithmetic only.

Both of a pair asked for the same rows, one right after the other, so a slow moment of the machine meets both.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.spread import Spread, spread


class Pair(NamedTuple):
    """One request, asked of both; seconds."""

    is_hit: bool
    """Whether it had been asked before."""
    plain: float
    cached: float


def of_rate(rounds: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """The figures of one hit rate: milliseconds of a typical request without and with the cache, and the time saved.

    Typical: the medians of hits and of misses, weighted by their shares; a mean would be that of the worst moments.

    Args:
        rounds: At least one round of at least one pair.
    """
    plain = [_typical(pairs, [pair.plain for pair in pairs]) for pairs in rounds]
    cached = [_typical(pairs, [pair.cached for pair in pairs]) for pairs in rounds]
    return {
        "plain_ms": spread(plain),
        "cached_ms": spread(cached),
        "saved": spread([1 - mine / without for mine, without in zip(cached, plain)]),
        "pairs": sum(len(pairs) for pairs in rounds),
    }


def _typical(pairs: Sequence[Pair], seconds: Sequence[float]) -> float:
    kinds = [[1e3 * s for pair, s in zip(pairs, seconds) if pair.is_hit == is_hit] for is_hit in (False, True)]
    return sum(len(kind) * median(kind) for kind in kinds if kind) / len(pairs)


def difference(rounds: Sequence[Sequence[Pair]], *, of_hits: bool) -> Spread | None:
    """Milliseconds that the cache adds (negative: saves) to a hit or to a miss; None where there was none.

    The median over a round's pairs, then over the rounds.
    """
    chosen = [[1e3 * (p.cached - p.plain) for p in pairs if p.is_hit == of_hits] for pairs in rounds]
    return spread([median(values) for values in chosen if values]) if any(chosen) else None


def break_even(miss_cost: float, hit_saving: float) -> float | None:
    """The hit rate at which what misses cost is what hits save; 0 where misses cost nothing, None where it never pays.

    >>> break_even(0.1, 0.3), break_even(-0.02, 0.3), break_even(0.1, -0.2)
    (0.25, 0.0, None)
    """
    if hit_saving <= 0:
        return None
    return max(0.0, miss_cost) / (max(0.0, miss_cost) + hit_saving)


def per_event(before: dict[str, float], after: dict[str, float], duration: str, count: str) -> float | None:
    """Microseconds per event by two of the server's counters; None where nothing was counted."""
    events = after.get(count, 0.0) - before.get(count, 0.0)
    return (after[duration] - before.get(duration, 0.0)) / events if events else None


def verdict(cases: dict[str, dict[str, Any]], repeating_share: float) -> str:
    """One sentence over all cases: from which hit rate the cache pays, by what a request costs the model.

    Args:
        cases: Results, each with its `compute_us`, `break_even` and `rates`.
        repeating_share: The hit rate that the demo's traffic would have.
    """
    parts = []
    for case in sorted(cases.values(), key=lambda case: case["compute_us"] or 0.0):
        rate, cost = case["break_even"], case["compute_us"] or 0.0
        pays = "never" if rate is None else f"from {rate:.1%} hits" if rate > 0 else "from the first hit"
        parts.append(f"{pays} at {cost / 1e3:.2f} ms of compute ({case['case']})")
    worst = max(case["miss_cost_ms"].median / case["rates"]["0"]["plain_ms"].median for case in cases.values())
    return (
        f"The local cache pays {', '.join(parts)}; a miss costs up to {max(0.0, worst):.0%} of a request, and of the "
        f"demo's traffic {repeating_share:.2%} of single rows repeat."
    )
