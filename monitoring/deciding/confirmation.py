"""When breaches count as a drift: enough of them in a row, and enough rows since the first to learn from.

Shared by the policies that judge one window at a time. What a breach is, each of them says.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.runtime.errors import ContractError
from monitoring.deciding.decision import Action
from monitoring.deciding.evidence import Evidence, Memory
from monitoring.measures.kpis import Kpis


@dataclass(frozen=True, kw_only=True)
class ConfirmationSettings:
    """What makes a window worth judging and a breach a drift."""

    min_clicks: int = 200
    """Fewest clicks, and fewest rows without one, that a window is judged on."""
    consecutive_breaches: int = 3
    """Breaches in a row, one per decision point, that confirm a drift."""
    min_rows_since_breach: int = 0
    """Rows that must mature after the first breach: the run needs rows of the changed world to learn from."""

    def __post_init__(self) -> None:
        """Refuses settings that confirm nothing."""
        for name in ("min_clicks", "consecutive_breaches"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.min_rows_since_breach < 0:
            raise ContractError(f"min_rows_since_breach is {self.min_rows_since_breach}, expected at least 0")


def confirm(
    action: Action, evidence: Evidence, memory: Memory, settings: ConfirmationSettings
) -> tuple[Action, str, Memory]:
    """One window's OK, UNDECIDABLE or BREACH in the light of those before: action, what to add to its reason, memory.

    OK clears the count; UNDECIDABLE neither counts nor clears; a BREACH becomes RETRAIN once it is confirmed, and
    stays so until a window is OK or another version serves. Memory: `version` judged last, `breaches` in a row,
    `matured_at_breach`.
    """
    of_version = memory.get("version") == evidence.version
    breaches = int(memory["breaches"]) if of_version else 0
    first = int(memory["matured_at_breach"]) if of_version else 0
    note = ""
    if action is Action.OK:
        breaches, first = 0, 0
    elif action is Action.BREACH:
        first = evidence.matured_total if breaches == 0 else first
        breaches += 1
        action, note = _confirmed(breaches, evidence.matured_total - first, settings)
    return action, note, {"version": evidence.version, "breaches": breaches, "matured_at_breach": first}


def confirmation_numbers(evidence: Evidence, memory: Memory) -> dict[str, float | None]:
    """`breaches` and `rows_since_breach` after `confirm` gave `memory`."""
    breaches = int(memory["breaches"])
    since = evidence.matured_total - int(memory["matured_at_breach"]) if breaches else 0
    return {"breaches": breaches, "rows_since_breach": since}


def too_few(kpis: Kpis, min_clicks: int) -> str:
    """What the window lacks to be judged at all, or an empty text."""
    others = kpis.rows - kpis.clicks
    if min(kpis.clicks, others) >= min_clicks:
        return ""
    return f"too few to judge, {kpis.clicks} clicks and {others} others, needs {min_clicks} of each"


def _confirmed(breaches: int, rows_since_breach: int, settings: ConfirmationSettings) -> tuple[Action, str]:
    """Whether the breaches so far confirm a drift, and what is missing otherwise."""
    if breaches < settings.consecutive_breaches:
        return Action.BREACH, f"; breach {breaches} of {settings.consecutive_breaches}"
    if rows_since_breach < settings.min_rows_since_breach:
        return Action.BREACH, f"; {rows_since_breach} of {settings.min_rows_since_breach} rows since the first breach"
    return Action.RETRAIN, ""
