"""Evidence against the serving version, from the rows of its lineage.

The input is new rows by version, each version's theta, and the newest training row of each version.
The output is the evidence about the serving version, from which the policy `sequential` decides.

All versions of a lineage share one e-process (`monitoring.policies.betting`). A release does not
reset the e-process. If a row matures after its version was replaced, the row is evidence against
the later versions. An alarm means that the data have changed. `shown_at` of an alarm is the event
time of the newest row that was needed to detect the change. The rows up to `shown_at` therefore
suffice to detect the change. A version that was trained on the rows up to `shown_at` has adapted to
the change:

- A version with training rows up to `shown_at` or later starts a new e-process, shared with the
  later versions that have adapted. The new e-process ignores the rows of other versions, because
  the other versions have not adapted.
- A version that was not trained on the rows up to `shown_at` stays under the alarm.

The rows of a version are evidence in the version's own e-process, and in the e-processes of later
versions of the lineage. If a version is rolled back, its rows therefore never count against the
version that is live again. If the training rows of a version are unknown, only the version's own
rows are evidence.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from monitoring.policies.betting import FRACTIONS, EValue, Rounds, Trail, factors
from monitoring.policies.policy import Evidence, without_oldest


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Alarm about a change in the data.

    Times are event times in seconds since the epoch.
    """

    since: float
    """Time at which the e-value began to grow."""
    shown_at: float
    """Event time of the newest row that was needed to detect the change."""
    matured: int
    """Total number of rows, over all versions, that had matured before the alarm."""
    value: float
    """E-value at the alarm."""
    rounds: int
    clicks: int
    """Number of clicks in the rounds of the e-process."""
    versions: tuple[int, ...]
    """Versions that scored the rows after `since`."""


@dataclass(frozen=True, kw_only=True)
class VersionEvidence:
    """Evidence about one version."""

    alarm: Alarm | None = None
    """Detected change in the data that is not in the version's training rows, or None."""
    adapted: Alarm | None = None
    """Last detected change in the data that is in the version's training rows. The field becomes
    None when rows of this version, or of another adapted version, mature. None otherwise."""
    value: float = 1.0
    """E-value, 1 before the first round."""
    rounds: int = 0
    clicks: int = 0
    """Number of clicks in the rounds of the e-process."""
    versions: tuple[int, ...] = ()
    """Versions whose rows changed the e-value. Empty before any row matured."""


class _RoundResults(NamedTuple):
    """Results of rounds of one version. New rows completed these rounds."""

    payoffs: list[float]
    clicks: list[float]
    lambdas: list[float]


class _Process:
    """E-process over the rows of one version and of its predecessors in the lineage."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.e_value = EValue(state)
        self.trails = [Trail(*each) for each in state.get("trails", [()] * len(FRACTIONS))]
        self.scored: dict[int, float] = {
            int(version): time for version, time in state.get("scored", {}).items()
        }
        """For each version, the last decision point at which its rows changed this e-process.
        Versions whose rows are all older than the trails are left out."""
        self.alarm = _alarm(state.get("alarm"))
        self.change = _alarm(state.get("change"))
        """Newest detected change that the training rows of this e-process's versions include, or
        None."""
        self.trained_until: float | None = state.get("trained_until")
        """Event time of the newest training row of the e-process's last version. None if
        unknown."""

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.e_value.state_dict(),
            "trails": [[each.value, each.since, each.shown_at] for each in self.trails],
            "scored": {str(version): time for version, time in self.scored.items()},
            "alarm": asdict(self.alarm) if self.alarm else None,
            "change": asdict(self.change) if self.change else None,
            "trained_until": self.trained_until,
        }

    def counts(self, trained_until: float | None) -> bool:
        """Return whether the rows of an earlier version count in this e-process."""
        if self.trained_until is None or trained_until is None:
            return False
        return self.change is None or trained_until >= self.change.shown_at

    def evidence(self) -> VersionEvidence:
        return VersionEvidence(
            alarm=self.alarm,
            value=self.e_value.value,
            rounds=self.e_value.rounds,
            clicks=self.e_value.clicks,
            versions=tuple(sorted(self.scored)),
        )


class LineageEvidence:
    """E-processes of the remembered versions."""

    def __init__(self, state: Mapping[str, Any], *, enough: float) -> None:
        """Continue from the state that `state_dict()` returned.

        An alarm is raised when an e-value reaches `enough`.
        """
        self._enough = enough
        self._rounds: dict[str, Any] = dict(state.get("rounds", {}))
        self._processes: dict[str, Any] = dict(state.get("processes", {}))
        self._decided: float | None = state.get("decided")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a successor process as a JSON object."""
        return {"rounds": self._rounds, "processes": self._processes, "decided": self._decided}

    def update(self, evidence: Evidence, thetas: Mapping[int, float]) -> None:
        """Update the e-processes with the new rows of every version that has a theta."""
        # Versions are processed one after the other. The e-value for a later version therefore
        # already includes the results of earlier versions at the same decision point.
        for version, rows in evidence.rows_of.items():
            if version not in thetas:
                continue
            rounds = Rounds(
                thetas[version],
                self._rounds.get(str(version)) or self._plan_for(version, thetas, evidence),
            )
            payoffs, clicks = rounds.add(rows)
            self._rounds[str(version)] = rounds.state_dict()
            if str(version) not in self._processes:
                self._processes[str(version)] = self._new_process(version, evidence).state_dict()
            if payoffs:
                self._update_processes(
                    version, _RoundResults(payoffs, clicks, rounds.lambdas), evidence
                )
        self._decided = evidence.time
        needed = {*evidence.rows_of, evidence.version}
        self._rounds = without_oldest(self._rounds, needed=needed)
        self._processes = without_oldest(self._processes, needed=needed)

    def about(self, evidence: Evidence) -> VersionEvidence:
        """Return the evidence about the serving version."""
        version, trained_until = evidence.version, evidence.trained_until()
        if (newest := self._newest_of(evidence.lineage)) is None:
            return VersionEvidence()
        process = _Process(self._processes[str(newest)])
        if newest == version:
            return process.evidence()
        if trained_until is None:
            return VersionEvidence()
        if process.alarm is not None and trained_until >= process.alarm.shown_at:
            return VersionEvidence(adapted=process.alarm)
        if (
            process.alarm is None
            and process.change is not None
            and trained_until < process.change.shown_at
        ):
            return VersionEvidence(alarm=process.change)
        return process.evidence()

    def _plan_for(
        self, version: int, thetas: Mapping[int, float], evidence: Evidence
    ) -> dict[str, Any]:
        """Return the round sizes of the previous version, as the start for the new version."""
        known = [each for each in evidence.lineage if each < version and str(each) in self._rounds]
        return (
            {"theta": thetas[version], "sums": self._rounds[str(known[-1])]["sums"]}
            if known
            else {}
        )

    def _newest_of(self, line: tuple[int, ...]) -> int | None:
        return max((version for version in line if str(version) in self._processes), default=None)

    def _new_process(self, version: int, evidence: Evidence) -> _Process:
        """Return the e-process of a version whose first row matured.

        The e-process of the previous version is continued if it applies to this version.
        """
        trained_until = evidence.trained_until(version)
        before = self._newest_of(tuple(each for each in evidence.lineage if each < version))
        if before is None or trained_until is None:
            return _Process({"trained_until": trained_until})
        process = _Process(self._processes[str(before)])
        process.trained_until = trained_until
        if (
            process.alarm is None
            and process.change is not None
            and trained_until < process.change.shown_at
        ):
            process.alarm, process.change = process.change, None
        return self._restarted(process)

    def _restarted(self, process: _Process) -> _Process:
        """Return `process`, or a new e-process if its version has adapted to the alarm's change."""
        alarm, trained_until = process.alarm, process.trained_until
        if alarm is None or trained_until is None or trained_until < alarm.shown_at:
            return process
        return _Process({"trained_until": trained_until, "change": asdict(alarm)})

    def _update_processes(self, version: int, results: _RoundResults, evidence: Evidence) -> None:
        """Update each e-process that counts the rows of `version`."""
        trained_until = evidence.trained_until(version)
        multiplied = factors(results.payoffs, results.lambdas)
        for name in [
            name
            for name in self._processes
            if version <= int(name) and int(name) in evidence.lineage
        ]:
            process = _Process(self._processes[name])
            if process.alarm is not None or (
                int(name) != version and not process.counts(trained_until)
            ):
                continue
            has_enough = process.e_value.update(*results, enough=self._enough)
            since = evidence.time if self._decided is None else self._decided
            process.trails = [
                trail.after(factor, since=since, until=evidence.time, enough=self._enough)
                for trail, factor in zip(process.trails, multiplied)
            ]
            began = min(
                (trail.since for trail in process.trails if trail.since is not None), default=since
            )
            scored = {**process.scored, version: evidence.time}
            process.scored = {
                each: time for each, time in scored.items() if time > began or each == version
            }
            if has_enough:
                process.alarm = _raised(process, evidence)
            self._processes[name] = self._restarted(process).state_dict()


def _raised(process: _Process, evidence: Evidence) -> Alarm:
    trail = max(process.trails, key=lambda each: each.value)
    since = evidence.time if trail.since is None else trail.since
    return Alarm(
        since=since,
        # If `shown_at` is None, this trail alone has not reached the threshold of an alarm. The
        # current decision point is then used instead.
        shown_at=evidence.time if trail.shown_at is None else trail.shown_at,
        matured=evidence.matured_total,
        value=process.e_value.value,
        rounds=process.e_value.rounds,
        clicks=process.e_value.clicks,
        versions=tuple(
            sorted(
                each
                for each, time in process.scored.items()
                if time > since or time == evidence.time
            )
        ),
    )


def _alarm(known: Mapping[str, Any] | None) -> Alarm | None:
    return Alarm(**{**known, "versions": tuple(known["versions"])}) if known else None
