"""The monitor's four policies, and their construction from settings.

- `threshold` evaluates one window of rows at a time. The probability of a false alarm is bounded
  for each window, but not over many windows.
- `sequential` bounds the probability of a false alarm over all time and all versions
  (`monitoring.policies.betting`).
- `data_drift` needs no labels.
- `schedule` follows the calendar.

`monitoring.policies.baking` evaluates new versions. `monitoring.policies.rate_limit` applies
cooldowns and the daily budget.

A release does not reset the evidence. Breaches, drifted buckets and e-values stay valid for the new
version, unless it was trained on rows from after the change.
"""

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone

from evergreen.config.monitor import PolicySettings, policy_names
from evergreen.config.release import BakingSettings
from monitoring.metrics.window import Kpis
from monitoring.policies.baking import BakingPolicy
from monitoring.policies.lineage_evidence import Alarm, LineageEvidence, VersionEvidence
from monitoring.policies.policy import (
    Action,
    Decision,
    Evidence,
    FeatureDrift,
    Policy,
    PolicyState,
    named,
)

_NAMED_COLUMNS = 5
"""Maximum number of columns that a reason names, worst first."""


class _ConfiguredPolicy:
    name: str

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def _decision(
        self, shown: Evidence, action: Action, reason: str, /, **numbers: float | None
    ) -> Decision:
        """Return a decision with the common numbers and the numbers of this policy."""
        common = {**shown.window_numbers(), "threshold": None, "rows_since_breach": 0}
        return Decision(
            policy=self.name, action=action, reason=reason, numbers={**common, **numbers}
        )


class ThresholdPolicy(_ConfiguredPolicy):
    """Compares the AUC of a window with a fixed threshold, and requires several breaches."""

    name = "threshold"

    def decide(self, evidence: Evidence, state: PolicyState) -> tuple[Decision, PolicyState]:
        """See `Policy`. `confirm` defines the state."""
        action, reason = self._evaluate_window(evidence.kpis)
        action, note, state = confirm(action, evidence, state, settings=self._settings)
        if evidence.kpis.version != evidence.version:
            action, more = self._evaluate_successor(action, evidence, state)
            note += f"; {more}"
        breaches = int(state["breaches"])
        since = evidence.matured_total - int(state["matured_at_breach"]) if breaches else 0
        numbers = {
            "threshold": self._settings.auc_threshold,
            "breaches": breaches,
            "rows_since_breach": since,
        }
        return self._decision(evidence, action, reason + note, **numbers), state

    def _evaluate_successor(
        self, action: Action, evidence: Evidence, state: PolicyState
    ) -> tuple[Action, str]:
        """Evaluate a serving version that has no matured rows yet.

        The window is that of an earlier version.
        """
        text = f"no row of model version {evidence.version} has matured yet"
        trained_until, since = evidence.trained_until(), state["since"]
        if trained_until is None:
            return Action.UNDECIDABLE, f"{text}, and its training rows are unknown"
        if since is not None and trained_until >= since:
            return (
                Action.UNDECIDABLE,
                f"{text}; it was trained on rows from after the first breach, at {_moment(since)}",
            )
        return action, f"{text}; it was trained on rows up to {_moment(trained_until)}"

    def _evaluate_window(self, kpis: Kpis) -> tuple[Action, str]:
        """Return whether this window is a breach, and why."""
        least, fewest, others = (
            self._settings.auc_threshold,
            self._settings.min_clicks,
            kpis.rows - kpis.clicks,
        )
        over = f"over {kpis.rows} rows, {kpis.clicks} clicks, model version {kpis.version}"
        if kpis.auc is None:
            return (
                Action.UNDECIDABLE,
                f"auc undefined {over}: needs both clicks and rows without one",
            )
        measured = f"auc {kpis.auc:.3f}"
        if kpis.auc_low is not None and kpis.auc_high is not None:
            measured += f" (95 % {kpis.auc_low:.3f}..{kpis.auc_high:.3f})"
        if min(kpis.clicks, others) < fewest:
            lacking = (
                f"too few to evaluate, {kpis.clicks} clicks and {others} others, needs "
                f"{fewest} of each"
            )
            return Action.UNDECIDABLE, f"{measured} {over}: {lacking}"
        if kpis.auc >= least:
            return Action.OK, f"{measured} >= {least:.3f} {over}"
        if kpis.auc_high is None:
            return (
                Action.UNDECIDABLE,
                f"{measured} {over}: clicks of too few requests for an interval",
            )
        if kpis.auc_high >= least:
            return (
                Action.UNDECIDABLE,
                f"{measured} {over}: the interval straddles {least:.3f}, needs more rows",
            )
        return Action.BREACH, f"{measured} < {least:.3f} {over}"


class SequentialPolicy(_ConfiguredPolicy):
    """Sequential test of the claim "the AUC is at least theta".

    The test bounds false alarms over all time. Each row is compared with the theta of the version
    that scored it, and all versions of a lineage share one e-process. While each version's AUC is
    at least its theta, the probability that this policy *ever* returns RETRAIN is at most alpha.
    The bound holds for any number of looks and releases. The module `betting` has the proof, and
    `lineage_evidence` selects the rows that are evidence. A new e-process with its own alpha begins
    after a detected change, after a rollback, and for a version with unknown training rows.

    theta is the lower end of the gate's 95 % interval, minus a tolerance. If a version has no gate
    AUC, its rows are not used.
    """

    name = "sequential"

    def decide(self, evidence: Evidence, state: PolicyState) -> tuple[Decision, PolicyState]:
        """See `Policy`. `LineageEvidence` defines the state."""
        settings, enough = self._settings, 1.0 / self._settings.sequential_alpha
        thetas = {
            version: min(max(gate.low - settings.sequential_tolerance, 0.01), 0.99)
            for version, gate in evidence.baselines.items()
            if gate.low is not None
        }
        of_lineage = LineageEvidence(state, enough=enough)
        of_lineage.update(evidence, thetas)
        found, theta = of_lineage.about(evidence), thetas.get(evidence.version)
        action, reason, since = self._evaluate_lineage(evidence, found, theta)
        is_decided = bool(found.versions or found.alarm)
        shown = found.alarm or found
        decision = self._decision(
            evidence,
            action,
            reason,
            threshold=theta,
            evidence=shown.value if is_decided else None,
            evidence_needed=enough,
            rounds=shown.rounds,
            evaluated_clicks=shown.clicks,
            rows_since_breach=since,
        )
        return decision, of_lineage.state_dict()

    def _evaluate_lineage(
        self, evidence: Evidence, found: VersionEvidence, theta: float | None
    ) -> tuple[Action, str, int]:
        """Return the action, its reason, and the number of rows that matured after the alarm."""
        settings, version = self._settings, f"model version {evidence.version}"
        trained_until = evidence.trained_until()
        if (alarm := found.alarm) is not None:
            since = evidence.matured_total - alarm.matured
            text = self._evidence_text(evidence, alarm, theta)
            text += f"; a false alarm with a probability of at most {settings.sequential_alpha:g}"
            if since < settings.min_rows_since_breach:
                return (
                    Action.BREACH,
                    f"{text}; {since} of {settings.min_rows_since_breach} rows since",
                    since,
                )
            return Action.RETRAIN, text, since
        if (known := found.adapted) is not None:
            rows = f"rows of {named(known.versions)} showed from {_moment(known.since)} on"
            text = f"it was trained on rows from after the change that {rows}"
            return Action.UNDECIDABLE, f"no row of {version} has matured yet; {text}", 0
        if not found.versions:
            return Action.UNDECIDABLE, self._nothing_text(evidence, theta, trained_until), 0
        return Action.OK, self._evidence_text(evidence, found, theta), 0

    def _evidence_text(
        self, evidence: Evidence, shown: Alarm | VersionEvidence, theta: float | None
    ) -> str:
        """Describe the evidence, and name the versions that scored its rows."""
        version, others = (
            evidence.version,
            [each for each in shown.versions if each != evidence.version],
        )
        text = (
            f"evidence {shown.value:.3g} of {1.0 / self._settings.sequential_alpha:g} that "
            "the auc is below"
        )
        if not others and theta is not None:
            return f"{text} {theta:.3f} after {shown.clicks} clicks, model version {version}"
        text += f" what the gate measured after {shown.clicks} clicks, "
        if isinstance(shown, Alarm):
            text += f"shown by rows of model {named(shown.versions)} from {_moment(shown.since)} on"
        else:
            text += f"the newest on rows of model {named(shown.versions)}"
        trained_until = evidence.trained_until()
        until = (
            ""
            if trained_until is None
            else f", which was trained on rows up to {_moment(trained_until)}"
        )
        return f"{text}; model version {version} serves{until}"

    def _nothing_text(
        self, evidence: Evidence, theta: float | None, trained_until: float | None
    ) -> str:
        if theta is None:
            return f"the gate's auc of model version {evidence.version} is unknown"
        if not len(evidence.rows.labels) and trained_until is None:
            text = (
                f"no row of model version {evidence.version} has matured yet, and its "
                "training rows are unknown"
            )
            return f"{text}: rows of earlier versions are not evidence"
        return f"too few clicks to begin, model version {evidence.version}"


class DataDriftPolicy(_ConfiguredPolicy):
    """Requires several consecutive buckets in which enough columns drifted.

    Features can drift without harm to the AUC, and a concept can drift without any sign in the
    features. Use this policy together with a policy that evaluates clicks.
    """

    name = "data_drift"

    def decide(self, evidence: Evidence, state: PolicyState) -> tuple[Decision, PolicyState]:
        """See `Policy`.

        The state contains the version, the number of consecutive drifted buckets, and the last
        bucket. For the first drifted bucket, the state also contains its time and the number of
        rows that had matured by then.
        """
        is_held = _still_holds(state, evidence, evidence.version)
        buckets, first, since = 0, 0, None
        last: FeatureDrift | None = None
        if is_held:
            buckets, first, since = (
                int(state["buckets"]),
                int(state["matured_at_breach"]),
                state.get("since"),
            )
            last = FeatureDrift(**state["last"]) if state["last"] else None
        for last in evidence.drift:
            is_drifted = len(last.drifted) >= self._settings.drift_columns
            if is_drifted and not buckets:
                first, since = evidence.matured_total, last.bucket_end
            buckets = buckets + 1 if is_drifted else 0
        action, reason = self._evaluate_buckets(evidence.version, buckets, last)
        decision = self._decision(
            evidence,
            action,
            reason,
            drifted_buckets=buckets,
            drifted_columns=len(last.drifted) if last else None,
            compared_columns=len(last.distances) if last else None,
            rows_since_breach=evidence.matured_total - first if buckets else 0,
        )
        next_state = {
            "version": evidence.version,
            "buckets": buckets,
            "matured_at_breach": first,
            "since": since if buckets else None,
            "last": {**asdict(last), "drifted": list(last.drifted)} if last else None,
        }
        return decision, next_state

    def _evaluate_buckets(
        self, version: int, buckets: int, last: FeatureDrift | None
    ) -> tuple[Action, str]:
        if last is None:
            return (
                Action.UNDECIDABLE,
                f"no bucket of features of model version {version} has closed yet",
            )
        text = f"{len(last.drifted)} of {len(last.distances)} columns drifted over {last.rows} rows"
        if last.drifted:
            worst = (
                f"{column} {last.distances[column]:.3f}" if column in last.distances else column
                for column in last.drifted[:_NAMED_COLUMNS]
            )
            text += f" ({', '.join(worst)}{', ...' if len(last.drifted) > _NAMED_COLUMNS else ''})"
        text += f", model version {last.version}" + (
            "" if last.version == version else f"; version {version} serves"
        )
        if buckets >= self._settings.drift_buckets:
            return Action.RETRAIN, f"{text}; {buckets} buckets in a row"
        if buckets:
            return (
                Action.BREACH,
                f"{text}; bucket {buckets} of {self._settings.drift_buckets} in a row",
            )
        return Action.OK, text


class SchedulePolicy(_ConfiguredPolicy):
    """Policy that requests a retraining when a version has served for long enough."""

    name = "schedule"

    def decide(self, evidence: Evidence, state: PolicyState) -> tuple[Decision, PolicyState]:
        """See `Policy`. This policy has no state."""
        served, longest = (
            evidence.seen_until - evidence.serving_since,
            self._settings.max_serving_seconds,
        )
        action = Action.RETRAIN if served >= longest else Action.OK
        reason = (
            f"model version {evidence.version} has served {served:.0f} s of at most {longest:.0f} s"
        )
        return self._decision(evidence, action, reason, serving_seconds=served), {}


POLICIES: dict[str, Callable[[PolicySettings], Policy]] = {
    kind.name: kind for kind in (ThresholdPolicy, SequentialPolicy, DataDriftPolicy, SchedulePolicy)
}
"""The policies by name."""


def make_policies(settings: PolicySettings, baking: BakingSettings | None = None) -> list[Policy]:
    """Create the policies that the settings name, in order, and the baking policy."""
    for_new_versions: list[Policy] = (
        [BakingPolicy(baking)] if baking is not None and baking.bake_rows else []
    )
    return [
        *(POLICIES[name](settings) for name in policy_names(settings.policies)),
        *for_new_versions,
    ]


def confirm(
    action: Action, evidence: Evidence, state: PolicyState, *, settings: PolicySettings
) -> tuple[Action, str, PolicyState]:
    """Turn the result of one window into an action, given the windows before it.

    A window with the result OK resets the count of breaches. UNDECIDABLE does not change the count.
    When enough windows are breaches, the action BREACH becomes RETRAIN. The action stays RETRAIN
    until a window is OK. RETRAIN also ends when the serving version was trained on rows after the
    first breach.

    Returns:
        The action, a text to add to the reason, and the new state. The state contains the last
        window's `version`, and the number of consecutive `breaches`. For the first breach, the
        state contains its time (`since`), and the number of rows that had matured by then
        (`matured_at_breach`).
    """
    version = evidence.kpis.version
    is_held = _still_holds(state, evidence, version)
    breaches = int(state["breaches"]) if is_held else 0
    first = int(state["matured_at_breach"]) if is_held else 0
    since = state.get("since") if is_held else None
    note = ""
    if action is Action.OK:
        breaches, first, since = 0, 0, None
    elif action is Action.BREACH:
        if breaches == 0:
            first, since = evidence.matured_total, evidence.time
        breaches += 1
        rows = evidence.matured_total - first
        if breaches < settings.consecutive_breaches:
            note = f"; breach {breaches} of {settings.consecutive_breaches}"
        elif rows < settings.min_rows_since_breach:
            note = f"; {rows} of {settings.min_rows_since_breach} rows since the first breach"
        else:
            action = Action.RETRAIN
    return (
        action,
        note,
        {"version": version, "breaches": breaches, "since": since, "matured_at_breach": first},
    )


def _still_holds(state: PolicyState, evidence: Evidence, version: int) -> bool:
    """Return whether the saved evidence also applies to this version.

    The evidence began at the time `since`. If another version was trained on rows of this time or
    later, the evidence does not apply to that version.
    """
    before, since, trained_until = (
        state.get("version"),
        state.get("since"),
        evidence.trained_until(version),
    )
    if before is None or before == version:
        return before is not None
    if since is None or trained_until is None:
        return False
    return before in evidence.lineage and bool(before < version and trained_until < since)


def _moment(time: float) -> str:
    """Format an event time for people."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
