"""Define a figure over several rounds, with median, minimum, maximum, peer and target."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Median, minimum and maximum of a figure over rounds."""

    median: float
    least: float
    most: float

    def shown(self, spec: str | None = None) -> str:
        """Return the median, with minimum and maximum if rounds differ.

        By default, numbers are formatted by `short`.

        >>> Spread(1200.0, 1000.0, 1500.0).shown(), Spread(0.5, 0.5, 0.5).shown(".2f")
        ('1,200 (1,000 to 1,500)', '0.50')
        """
        text, least, most = (
            short(value) if spec is None else format(value, spec) for value in self
        )
        return text if self.least == self.most else f"{text} ({least} to {most})"


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum of at least one value.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, least=1.0, most=3.0)
    """
    return Spread(median(values), min(values), max(values))


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for the share `hits` / `count` of independent trials.

    >>> low, high = share_interval(500, 1000)
    >>> round(low, 3), round(high, 3)
    (0.469, 0.531)
    """
    # scipy is imported late, because `benchmarks.gpu` also runs where it is not installed.
    from scipy import stats

    found = stats.binomtest(hits, count).proportion_ci(method="wilson")
    return found.low, found.high


def named(value: Any) -> Any:
    """Convert each spread in `value` to an object, because JSON would write a list."""
    if hasattr(value, "_asdict"):
        return named(value._asdict())
    if isinstance(value, dict):
        return {name: named(each) for name, each in value.items()}
    return [named(each) for each in value] if isinstance(value, list) else value


INTERVAL = "[95 %]"
"""Suffix that marks the unit of a share. For a share, minimum and maximum are the ends of its 95 %
interval."""


class Figure(NamedTuple):
    """A measured figure with its target, for a row of `docs/design/performance.md`."""

    name: str
    value: Spread
    unit: str = "times"
    """Unit of the value. The unit `times` is a ratio to `peer`."""
    peer: str | None = None
    """Peer that was measured in the same run."""
    target: float | None = None
    is_least: bool = False
    """Whether `target` is a minimum. If False, `target` is a maximum."""
    limit: str | None = None
    """Limit of the machine, measured in the same run."""

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target, or None without a target."""
        if self.target is None:
            return None
        return (
            self.value.median >= self.target if self.is_least else self.value.median <= self.target
        )

    def aim(self) -> str:
        """Return the target and whether it was met, or "" without a target.

        >>> Figure("start", spread([0.5]), "s", target=1.0).aim()
        'at most 1: met'
        >>> Figure("alarms", Spread(0.03, 0.014, 0.064), f"of 200 {INTERVAL}", target=0.025).aim()
        'at most 0.025: undecided, too few cases'
        """
        if self.target is None:
            return ""
        verdict = "met" if self.is_met else "**missed**"
        if (
            not self.is_met
            and self.unit.endswith(INTERVAL)
            and self.value.least <= self.target <= self.value.most
        ):
            verdict = "undecided, too few cases"
        return f"{'at least' if self.is_least else 'at most'} {short(self.target)}: {verdict}"

    def print(self) -> None:
        """Print the figure, and whether it meets its target."""
        parts = [
            f"{self.value.shown()} {self.unit}",
            self.peer and f"beside {self.peer}",
            self.aim(),
            self.limit,
        ]
        print(f"  {self.name}: {'; '.join(part for part in parts if part)}", flush=True)


def figure_of(row: dict[str, Any]) -> Figure:
    """Return the figure that a document stores as the dictionary `row`."""
    return Figure(**{**row, "value": Spread(**row["value"])})


def short(value: float) -> str:
    """Return a number as text with three significant digits and separators for thousands.

    >>> short(215_432), short(6.027), short(0.04)
    ('215,000', '6.03', '0.04')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
