"""A figure measured in several rounds: its median, with the least and the most beside it, and its target."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """A figure over rounds."""

    median: float
    least: float
    most: float

    def shown(self, spec: str = ".3g") -> str:
        """The median with the least and the most beside it, where rounds differ.

        >>> Spread(1200.0, 1000.0, 1500.0).shown(",.0f"), Spread(0.5, 0.5, 0.5).shown()
        ('1,200 (1,000 to 1,500)', '0.5')
        """
        text = format(self.median, spec)
        return text if self.least == self.most else f"{text} ({self.least:{spec}} to {self.most:{spec}})"


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


class Target(NamedTuple):
    """A figure beside what it should be."""

    name: str
    value: Spread
    bound: float
    is_least: bool = False
    """Whether `bound` is the least that meets the target; otherwise it is the most."""

    @property
    def is_met(self) -> bool:
        """Whether the median does."""
        return self.value.median >= self.bound if self.is_least else self.value.median <= self.bound

    def print(self, spec: str = ".3g") -> None:
        """Prints the figure, its numbers in the format `spec`, and whether it meets the target."""
        word, verdict = "at least" if self.is_least else "at most", "met" if self.is_met else "TARGET MISSED"
        print(f"  {self.name}: {self.value.shown(spec)}, target {word} {self.bound:,g}: {verdict}", flush=True)
