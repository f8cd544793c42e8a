"""How many rows come, against what was usual: too few to be judged by, or so many that somebody should look.

In: rows of each decision span. Out: UNDECIDABLE far below the usual rate, BREACH far above it, never RETRAIN: a model
is not to blame for its traffic. A span without any row has no decision point; its silence counts when the next row
comes. That nothing comes at all is the log's and the health page's to tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from components.runtime.errors import ContractError
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, Memory

MIN_SPANS = 12
"""Spans before any of them is usual."""
MIN_EXPECTED_ROWS = 30.0
"""Fewer expected rows vary too much by chance: a fifth of 30 has a probability below 1e-7 (Poisson)."""


@dataclass(frozen=True, kw_only=True)
class VolumeSettings:
    """What is far from usual."""

    volume_factor: float = 5.0
    """Times the usual rate of rows, or as small a part of it, that is told."""
    volume_spans: int = 360
    """Newest decision spans whose median rate is the usual one: an hour of ten seconds each."""

    def __post_init__(self) -> None:
        """Refuses what is never or always usual."""
        if not self.volume_factor > 1:
            raise ContractError(f"volume_factor is {self.volume_factor}, expected above 1")
        if self.volume_spans < MIN_SPANS:
            raise ContractError(f"volume_spans is {self.volume_spans}, expected at least {MIN_SPANS}")


class VolumePolicy:
    """See `evidence.Policy`."""

    name = "volume"

    def __init__(self, settings: VolumeSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; memory: the last decision point, rows until then, and the rates of the last spans."""
        rates = [float(rate) for rate in memory.get("rates", ())]
        seconds = evidence.time - float(memory["time"]) if memory else None
        rows = evidence.matured_total - int(memory["matured_total"]) if memory else None
        usual = median(rates) if len(rates) >= MIN_SPANS else None
        action, reason = self._judge(rows, seconds, usual)
        numbers: dict[str, float | None] = {
            **evidence.window_numbers(),
            "threshold": None,
            "rows_since_breach": 0,
            "span_rows": rows,
            "span_seconds": seconds,
            "usual_rows_per_second": usual,
        }
        if rows is not None and seconds:
            rates = [*rates, rows / seconds][-self._settings.volume_spans :]
        kept = {"time": evidence.time, "matured_total": evidence.matured_total, "rates": rates}
        return Decision(policy=self.name, action=action, reason=reason, numbers=numbers), kept

    def _judge(self, rows: int | None, seconds: float | None, usual: float | None) -> tuple[Action, str]:
        factor = self._settings.volume_factor
        if rows is None or seconds is None or usual is None:
            return Action.OK, f"what is usual is not known before {MIN_SPANS} decision spans"
        expected = usual * seconds
        said = f"{rows} rows in {seconds:g} s, usual {expected:.0f}"
        if rows > factor * max(expected, MIN_EXPECTED_ROWS):
            return Action.BREACH, f"{said}: more than {factor:g} times as many"
        if expected >= MIN_EXPECTED_ROWS and rows * factor < expected:
            return Action.UNDECIDABLE, f"{said}: less than a {factor:g}th"
        return Action.OK, said
