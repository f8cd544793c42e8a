"""A figure measured in several rounds: its median, with the least and the most beside it, and its target."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """A figure over rounds."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most of at least one value.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, least=1.0, most=3.0)
    """
    return Spread(median(values), min(values), max(values))


def named(value: Any) -> Any:
    """`value` with each spread as an object, which JSON would otherwise write as a list."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, dict):
        return {name: named(each) for name, each in value.items()}
    return [named(each) for each in value] if isinstance(value, list) else value


def print_target(name: str, value: str, target: str, *, is_met: bool) -> None:
    """Prints one figure beside its target."""
    print(f"  {name}: {value}, target {target}: {'met' if is_met else 'TARGET MISSED'}", flush=True)
