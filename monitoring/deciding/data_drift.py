"""Feature drift that lasts: several buckets in a row in which enough columns drifted.

In: the closed buckets that `monitoring.drift` judged, with its control over many columns. Out: a breach per drifted
bucket, RETRAIN once it lasts. Features may drift without any harm to the AUC, and a concept may without any sign in
them: name it beside a policy that looks at clicks.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.runtime.errors import ContractError
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, FeatureDrift, Memory

NAMED_COLUMNS = 5
"""Columns that a reason names, the worst first."""


@dataclass(frozen=True, kw_only=True)
class DataDriftSettings:
    """What counts as lasting."""

    drift_buckets: int = 3
    """Drifted buckets in a row that confirm a data drift."""
    drift_columns: int = 1
    """Columns that must have drifted for a bucket to count."""

    def __post_init__(self) -> None:
        """Refuses counts below one."""
        for name in ("drift_buckets", "drift_columns"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")


class DataDriftPolicy:
    """See `evidence.Policy`."""

    name = "data_drift"

    def __init__(self, settings: DataDriftSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; memory: `version`, `buckets` in a row, what was last seen, rows at the first."""
        same = memory.get("version") == evidence.version
        buckets, first = (int(memory["buckets"]), int(memory["matured_at_breach"])) if same else (0, 0)
        last: FeatureDrift | None = FeatureDrift(**memory["last"]) if same and memory["last"] else None
        for last in evidence.drift:
            is_drifted = len(last.drifted) >= self._settings.drift_columns
            first = evidence.matured_total if is_drifted and not buckets else first
            buckets = buckets + 1 if is_drifted else 0
        action, reason = self._judge(evidence.version, buckets, last)
        numbers: dict[str, float | None] = {
            **evidence.window_numbers(),
            "threshold": None,
            "drifted_buckets": buckets,
            "drifted_columns": len(last.drifted) if last else None,
            "judged_columns": len(last.distances) if last else None,
            "rows_since_breach": evidence.matured_total - first if buckets else 0,
        }
        kept = {
            "version": evidence.version,
            "buckets": buckets,
            "matured_at_breach": first,
            "last": None if last is None else _document(last),
        }
        return Decision(policy=self.name, action=action, reason=reason, numbers=numbers), kept

    def _judge(self, version: int, buckets: int, last: FeatureDrift | None) -> tuple[Action, str]:
        if last is None:
            return Action.UNDECIDABLE, f"no bucket of features of model version {version} has closed yet"
        said = f"{len(last.drifted)} of {len(last.distances)} columns drifted over {last.rows} rows"
        if last.drifted:
            named = (
                f"{column} {last.distances[column]:.3f}" if column in last.distances else column
                for column in last.drifted[:NAMED_COLUMNS]
            )
            said += f" ({', '.join(named)}{', ...' if len(last.drifted) > NAMED_COLUMNS else ''})"
        said += f", model version {version}"
        if buckets >= self._settings.drift_buckets:
            return Action.RETRAIN, f"{said}; {buckets} buckets in a row"
        if buckets:
            return Action.BREACH, f"{said}; bucket {buckets} of {self._settings.drift_buckets} in a row"
        return Action.OK, said


def _document(drift: FeatureDrift) -> dict[str, object]:
    return {
        "bucket_end": drift.bucket_end,
        "version": drift.version,
        "rows": drift.rows,
        "drifted": list(drift.drifted),
        "distances": dict(drift.distances),
    }
