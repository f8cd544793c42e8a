"""The four policies, their settings, and those that a monitor's settings name.

`threshold` judges one window of rows at a time: its false alarms are bounded for a single look, not over months.
`sequential` is bounded over all time (`monitoring.deciding.betting`). `data_drift` needs no labels, `schedule` watches
the calendar. New versions are judged by `monitoring.deciding.baking`. How soon a run may be
requested again is left to `monitoring.deciding.restraint`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from components.contracts.baking import BakingSettings
from components.runtime.errors import ContractError, expect
from monitoring.deciding.baking import BakingPolicy
from monitoring.deciding.betting import EProcess
from monitoring.deciding.policy import Action, Decision, Evidence, FeatureDrift, Policy, PolicyMemory
from monitoring.measures.window import Kpis

MAX_SEQUENTIAL_VERSIONS = 8
"""Versions whose sequential evidence is remembered: two may alternate during a roll-out."""
NAMED_COLUMNS = 5
"""Columns that a reason names, the worst first."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Which policies decide, and by what; settings of policies that are not named have no effect."""

    policies: str = "sequential"
    """Names by commas, of threshold, sequential, data_drift, schedule: any that says retrain wins,
    and the first of them gives the reason."""
    notify_only: str = ""
    """Policies, by commas, whose confirmed drift starts no run and only notifies people, such as `data_drift`."""
    min_clicks: int = 200
    """Fewest clicks, and fewest rows without one, that a window is judged on."""
    consecutive_breaches: int = 3
    """Breaches in a row, one per decision point, that confirm a drift."""
    min_rows_since_breach: int = 0
    """Rows that must mature after the first breach: the run needs rows from after the change to learn from."""
    auc_threshold: float = 0.0
    """A breach is where the whole 95 % interval of the windowed AUC lies below this; 0 = not given, which policy
    threshold refuses: it depends on the task."""
    sequential_alpha: float = 0.01
    """Largest probability of a false alarm per served version, over all the time that it serves."""
    sequential_tolerance: float = 0.02
    """AUC below the gate's interval that is no drift: serving meets other rows than the gate."""
    drift_buckets: int = 3
    """Drifted buckets in a row that confirm a data drift."""
    drift_columns: int = 1
    """Columns that must have drifted for a bucket to count."""
    max_serving_seconds: float = 7 * 86_400.0
    """Time that a version may serve before the schedule requests its successor."""

    def __post_init__(self) -> None:
        if self.notify_only and not set(split_names(self.notify_only)) <= POLICIES.keys():
            raise ContractError(
                f"notify_only is {self.notify_only!r}, expected some of {', '.join(POLICIES)}, by commas"
            )
        if ThresholdPolicy.name in policy_names(self.policies) and not self.auc_threshold:
            raise ContractError(
                f"policies is {self.policies!r} without auc_threshold, expected the AUC below which policy threshold "
                "shall fire: it depends on the task; policy sequential needs none"
            )
        counts = ("min_clicks", "consecutive_breaches", "drift_buckets", "drift_columns")
        expect(self, "at least 1", lambda value: value >= 1, *counts)
        expect(self, "at least 0", lambda value: value >= 0, "min_rows_since_breach")
        expect(self, "at most 1,000,000,000", lambda value: value <= 10**9, *counts, "min_rows_since_breach")
        expect(self, "inside (0, 1)", lambda value: 0.0 < value < 1.0, "sequential_alpha")
        expect(self, "in [0, 1)", lambda value: 0.0 <= value < 1.0, "auc_threshold")
        expect(self, "in [0, 0.5)", lambda value: 0.0 <= value < 0.5, "sequential_tolerance")
        expect(self, "above 0", lambda value: value > 0, "max_serving_seconds")


class _ConfiguredPolicy:
    name: str

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def _decision(self, shown: Evidence, action: Action, reason: str, /, **numbers: float | None) -> Decision:
        """The decision with the numbers that every decision reports, and those of this policy."""
        common = {**shown.window_numbers(), "threshold": None, "rows_since_breach": 0}
        return Decision(policy=self.name, action=action, reason=reason, numbers={**common, **numbers})


class ThresholdPolicy(_ConfiguredPolicy):
    """The windowed AUC against a fixed threshold, one window at a time, confirmed by several."""

    name = "threshold"

    def decide(self, evidence: Evidence, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """See `Policy`; the memory is that of `confirm`."""
        action, reason = self._judge_window(evidence.kpis)
        action, note, memory = confirm(action, evidence, memory, settings=self._settings)
        breaches = int(memory["breaches"])
        since = evidence.matured_total - int(memory["matured_at_breach"]) if breaches else 0
        numbers = {"threshold": self._settings.auc_threshold, "breaches": breaches, "rows_since_breach": since}
        return self._decision(evidence, action, reason + note, **numbers), memory

    def _judge_window(self, kpis: Kpis) -> tuple[Action, str]:
        """Whether this one window is a breach, and why."""
        least, fewest, others = self._settings.auc_threshold, self._settings.min_clicks, kpis.rows - kpis.clicks
        over = f"over {kpis.rows} rows, {kpis.clicks} clicks, model version {kpis.version}"
        if kpis.auc is None:
            return Action.UNDECIDABLE, f"auc undefined {over}: needs both clicks and rows without one"
        measured = f"auc {kpis.auc:.3f}"
        if kpis.auc_low is not None and kpis.auc_high is not None:
            measured += f" (95 % {kpis.auc_low:.3f}..{kpis.auc_high:.3f})"
        if min(kpis.clicks, others) < fewest:
            lacking = f"too few to judge, {kpis.clicks} clicks and {others} others, needs {fewest} of each"
            return Action.UNDECIDABLE, f"{measured} {over}: {lacking}"
        if kpis.auc >= least:
            return Action.OK, f"{measured} >= {least:.3f} {over}"
        if kpis.auc_high is None:
            return Action.UNDECIDABLE, f"{measured} {over}: clicks of too few requests for an interval"
        if kpis.auc_high >= least:
            return Action.UNDECIDABLE, f"{measured} {over}: the interval straddles {least:.3f}, needs more rows"
        return Action.BREACH, f"{measured} < {least:.3f} {over}"


class SequentialPolicy(_ConfiguredPolicy):
    """A sequential test of "the AUC is at least theta", whose false alarms are bounded over all time.

    For each served version, as long as its AUC is at least theta, the probability that this policy *ever* says
    RETRAIN, however long the version serves and however often it is judged, is at most alpha; `betting` has the proof.
    A fleet that releases k versions has at most k alpha false alarms in expectation. theta is the lower end of the
    gate's 95 % interval less a tolerance; without a gate's AUC there is nothing to hold the version to: undecidable.
    """

    name = "sequential"

    def decide(self, evidence: Evidence, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """See `Policy`; memory: per version, its e-process, and `matured_at_alarm` once the alarm was raised."""
        if evidence.baseline is None:
            reason = f"the gate's auc of model version {evidence.version} is not known"
            return self._decision(evidence, Action.UNDECIDABLE, reason), memory
        version = str(evidence.version)
        known: dict[str, Any] = dict(memory.get("versions", {}))
        state: dict[str, Any] = known.pop(version, {})
        enough = 1.0 / self._settings.sequential_alpha
        theta = min(max(evidence.baseline.low - self._settings.sequential_tolerance, 0.01), 0.99)
        process = EProcess(theta, state)
        alarmed_at: int | None = state.get("matured_at_alarm")
        if alarmed_at is None and process.update(evidence.rows, enough):
            alarmed_at = evidence.matured_total
        known[version] = {**process.memory(), "matured_at_alarm": alarmed_at}
        while len(known) > MAX_SEQUENTIAL_VERSIONS:
            del known[next(iter(known))]
        action, reason = self._judge_capital(evidence, process, alarmed_at)
        decision = self._decision(
            evidence,
            action,
            reason,
            threshold=process.theta,
            evidence=process.value,
            evidence_needed=enough,
            rounds=process.rounds,
            clicks_judged=process.clicks,
            rows_since_breach=0 if alarmed_at is None else evidence.matured_total - alarmed_at,
        )
        return decision, {"versions": known}

    def _judge_capital(self, evidence: Evidence, process: EProcess, alarmed_at: int | None) -> tuple[Action, str]:
        settings = self._settings
        enough = 1.0 / settings.sequential_alpha
        text = f"evidence {process.value:.3g} of {enough:g} that the auc is below {process.theta:.3f}"
        text += f" after {process.clicks} clicks, model version {evidence.version}"
        if alarmed_at is not None:
            since = evidence.matured_total - alarmed_at
            text += f"; a false alarm with a probability of at most {settings.sequential_alpha:g}"
            if since < settings.min_rows_since_breach:
                return Action.BREACH, f"{text}; {since} of {settings.min_rows_since_breach} rows since"
            return Action.RETRAIN, text
        if not process.rounds:
            return Action.UNDECIDABLE, f"{text}: too few clicks to begin"
        return Action.OK, text


class DataDriftPolicy(_ConfiguredPolicy):
    """Feature drift that lasts: several buckets in a row in which enough columns drifted.

    Features may drift without any harm to the AUC, and a concept may drift without any sign in them: use this policy
    beside one that looks at clicks.
    """

    name = "data_drift"

    def decide(self, evidence: Evidence, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """See `Policy`; memory: `version`, drifted `buckets` in a row, the `last` bucket, rows at the first one."""
        is_same = memory.get("version") == evidence.version
        buckets, first = (int(memory["buckets"]), int(memory["matured_at_breach"])) if is_same else (0, 0)
        last: FeatureDrift | None = FeatureDrift(**memory["last"]) if is_same and memory["last"] else None
        for last in evidence.drift:
            is_drifted = len(last.drifted) >= self._settings.drift_columns
            first = evidence.matured_total if is_drifted and not buckets else first
            buckets = buckets + 1 if is_drifted else 0
        action, reason = self._judge_buckets(evidence.version, buckets, last)
        decision = self._decision(
            evidence,
            action,
            reason,
            drifted_buckets=buckets,
            drifted_columns=len(last.drifted) if last else None,
            judged_columns=len(last.distances) if last else None,
            rows_since_breach=evidence.matured_total - first if buckets else 0,
        )
        kept = {
            "version": evidence.version,
            "buckets": buckets,
            "matured_at_breach": first,
            "last": {**asdict(last), "drifted": list(last.drifted)} if last else None,
        }
        return decision, kept

    def _judge_buckets(self, version: int, buckets: int, last: FeatureDrift | None) -> tuple[Action, str]:
        if last is None:
            return Action.UNDECIDABLE, f"no bucket of features of model version {version} has closed yet"
        text = f"{len(last.drifted)} of {len(last.distances)} columns drifted over {last.rows} rows"
        if last.drifted:
            named = (
                f"{column} {last.distances[column]:.3f}" if column in last.distances else column
                for column in last.drifted[:NAMED_COLUMNS]
            )
            text += f" ({', '.join(named)}{', ...' if len(last.drifted) > NAMED_COLUMNS else ''})"
        text += f", model version {version}"
        if buckets >= self._settings.drift_buckets:
            return Action.RETRAIN, f"{text}; {buckets} buckets in a row"
        if buckets:
            return Action.BREACH, f"{text}; bucket {buckets} of {self._settings.drift_buckets} in a row"
        return Action.OK, text


class SchedulePolicy(_ConfiguredPolicy):
    """Retrains by the calendar: once a version has served for long enough, whatever its numbers."""

    name = "schedule"

    def decide(self, evidence: Evidence, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """See `Policy`; needs no memory."""
        served, longest = evidence.time - evidence.serving_since, self._settings.max_serving_seconds
        action = Action.RETRAIN if served >= longest else Action.OK
        reason = f"model version {evidence.version} has served {served:.0f} s of at most {longest:.0f} s"
        return self._decision(evidence, action, reason, serving_seconds=served), {}


POLICIES: dict[str, Callable[[PolicySettings], Policy]] = {
    kind.name: kind for kind in (ThresholdPolicy, SequentialPolicy, DataDriftPolicy, SchedulePolicy)
}
"""The policies by name."""


def make_policies(settings: PolicySettings, baking: BakingSettings | None = None) -> list[Policy]:
    """The policies that the settings name, in their order, and the one that judges new versions by `baking`."""
    judges: list[Policy] = [BakingPolicy(baking)] if baking is not None and baking.bake_rows else []
    return [*(POLICIES[name](settings) for name in policy_names(settings.policies)), *judges]


def policy_names(text: str) -> list[str]:
    """The names in a comma-separated list.

    Raises:
        ContractError: a name is unknown or given twice, or there is none.

    >>> policy_names("threshold, schedule")
    ['threshold', 'schedule']
    """
    names = split_names(text)
    if set(names) - POLICIES.keys() or len(set(names)) < len(names):
        raise ContractError(f"policies is {text!r}, expected some of {', '.join(POLICIES)}, by commas, each once")
    return names


def split_names(text: str) -> list[str]:
    """The names in a comma-separated list, known or not."""
    return [name.strip() for name in text.split(",")]


def confirm(
    action: Action, evidence: Evidence, memory: PolicyMemory, *, settings: PolicySettings
) -> tuple[Action, str, PolicyMemory]:
    """Turns one window's OK, UNDECIDABLE or BREACH into an action, given the windows before it.

    OK clears the count; UNDECIDABLE neither counts nor clears; a BREACH becomes RETRAIN once it is confirmed, and
    stays so until a window is OK or another version serves.

    Returns:
        The action; what to add to its reason; the memory: `version` judged last, `breaches` in a row, and
        `matured_at_breach`, the rows judged before the first of them.
    """
    is_same = memory.get("version") == evidence.version
    breaches = int(memory["breaches"]) if is_same else 0
    first = int(memory["matured_at_breach"]) if is_same else 0
    note = ""
    if action is Action.OK:
        breaches, first = 0, 0
    elif action is Action.BREACH:
        first = evidence.matured_total if breaches == 0 else first
        breaches += 1
        rows = evidence.matured_total - first
        if breaches < settings.consecutive_breaches:
            note = f"; breach {breaches} of {settings.consecutive_breaches}"
        elif rows < settings.min_rows_since_breach:
            note = f"; {rows} of {settings.min_rows_since_breach} rows since the first breach"
        else:
            action = Action.RETRAIN
    return action, note, {"version": evidence.version, "breaches": breaches, "matured_at_breach": first}
