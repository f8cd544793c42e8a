"""Evaluate the live version while it bakes, and roll it back if it exceeds a limit.

After its release, each version must stay within the limits of its recommender (`contracts.baking`).
The module `baking` evaluates the servers' counters. Failures are tested sequentially, so the test
stays valid however often it is repeated. Two ratios compare the inference time with the previous
version's inference time: the ratio of the means, and the ratio of the p99. The number of reloads by
the watchdog has a limit too. If all servers have histograms, their buckets are summed and give the
p99 of all requests. Without histograms, there is one p99 per server. The p99 of all servers
together cannot be computed from the p99 of each server. The p99 of all servers is between the
lowest and the highest p99 of a single server. The version's lowest p99 is therefore compared with
the highest p99 of the previous version. Each p99 is a median over time.

The monitor evaluates the live traffic, and this module reads its findings from the registry. A
breach rolls back to the previous version and blocks the model. A blocked model is released again
only if a person decides so. A version without a breach becomes `baked` after the required time and
number of rows.

All state of the baking is in the journal, the findings and `baking/counters.json`. If a round is
lost, the next round therefore continues from this state. To roll back, the controller appends a
request to the journal, as a person does. The controller ends the baking only under the repository's
lock, and only if the version is still live and baking.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from controller.canary.evidence import (
    COUNTERS,
    Fetch,
    bucket_quantile,
    counted,
    fetch,
    read_buckets,
    read_p99,
)
from controller.deployment_target import TargetSettings, opened
from controller.reconcile import drive
from controller.rollback import rollback
from evergreen.config.release import RolloutSettings
from evergreen.contracts.baking import BAD, UNUSABLE_REQUESTS, WELL, Findings
from evergreen.contracts.checks import AT_MOST, FAIL, INCONCLUSIVE, PASS, Check, decide, headline
from evergreen.contracts.manifests import CURRENT
from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import (
    BAKED,
    Promotion,
    baking,
    findings_path,
    read_findings,
    seconds_since,
)
from evergreen.registry.recommenders import accepted
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, Refused, TemporaryError, expect
from evergreen.serving.canary_policy import STEADY_MEAN, ArmCounts, CanaryPolicy
from evergreen.serving.servers import addresses
from evergreen.statistics.metrics import sequential_binomial

logger = logging.getLogger(__name__)

COUNTERS_FILE = "counters.json"
"""Name of the counters' file in the folder of the findings. The file contains the servers' counters
for the last versions, and the last reading of each server."""
MAX_VERSIONS = 4
QUANTILE_SECONDS = 60.0
"""Time window of Triton's quantiles in seconds. The first window of a new version includes slow
warm-ups."""
P99_SECONDS = 10.0
"""Seconds between two readings of the p99."""
P99_READINGS = 12
"""Maximum number of stored p99 readings. A comparison needs this number of readings. The readings
span two minutes."""
NONE, BAKES, ROLLED_BACK = "none", "bakes", "rolled_back"
_RETRY_ROUNDS = 128
"""Maximum number of rounds between two attempts of a failing rollback. The number of rounds doubles
after each attempt, up to this maximum."""
_RULES = CanaryPolicy()
"""Default rules, for `min_requests` and `error_alpha`."""


@dataclass(frozen=True, kw_only=True)
class BakingStep:
    """Result of one round."""

    action: str
    """`none` (no version bakes), `bakes` (the baking continues), `baked` or `rolled_back`."""
    reason: str
    version: int | None = None
    checks: tuple[Check, ...] = ()
    """Checks of the servers' counters. The list is empty if the counters were not evaluated."""


@dataclass(kw_only=True)
class Baking:
    """Evaluation of the baking version of one target.

    The controller calls `step` once per round.
    """

    target: TargetSettings
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port. If the list is empty, the
    servers' counters are not evaluated."""
    fetch: Fetch = fetch
    _reloads_seen: Counter[int] = field(default_factory=Counter)
    _tries: Counter[int] = field(default_factory=Counter)
    """Number of rounds in which each version had to be rolled back."""

    def step(self, reloads: Mapping[int, int]) -> BakingStep:
        """Read the counters, evaluate the version, and roll it back or end its baking.

        Args:
            reloads: Number of reloads that the watchdog of this process made, by version.

        Raises:
            ContractError: the journal or the recommender is corrupt.
            TemporaryError: the rollback cannot be done now. The live version is unchanged, and a
                later round tries again.
            PermanentError: as in `rollback`.
        """
        store = self.target.store
        if (live := promotion_journal.current(store)) is None:
            return BakingStep(action=NONE, reason="nothing is live")
        counts = self._count(live, reloads)
        if (line := baking(store)) is None:
            return BakingStep(
                action=NONE, reason=f"version {live.version} does not bake", version=live.version
            )
        limits = accepted(store, CURRENT).section("release", RolloutSettings)
        if not limits.bakes:
            return self._end(line, "versions of this recommender do not bake")
        found = read_findings(store, line.version)
        of_version = counts.get(line.version, VersionCounts())
        contradicted = contradiction(found, of_version) if self.metrics else None
        bad = (
            f"the monitor: {found.reason}"
            if found is not None and found.state == BAD and not contradicted
            else None
        )
        checks = tuple(check_counts(of_version, counts.get(line.previous_version or 0), limits))
        if bad is None and decide(checks) == FAIL:
            bad = headline(checks)
        if bad is not None:
            return replace(self._roll_back(line, bad), checks=checks)
        if contradicted:
            logger.error("version %d is not rolled back: %s", line.version, contradicted)
            return BakingStep(action=BAKES, reason=contradicted, version=line.version)
        seconds = seconds_since(line, self.target.clock())
        is_evaluated = limits.bake_rows == 0 or (found is not None and found.state == WELL)
        if is_evaluated and not -CLOCK_AHEAD_SECONDS <= seconds < limits.bake_seconds:
            return self._end(
                line,
                f"{found.reason if found and limits.bake_rows else 'no counter exceeds its limit'}",
            )
        waits = f"{seconds:.0f} of {limits.bake_seconds:.0f} s"
        if not is_evaluated:
            waits += f"; {found.reason if found else 'the monitor has no findings yet'}"
        return BakingStep(action=BAKES, reason=waits, version=line.version)

    def _roll_back(self, line: Promotion, reason: str) -> BakingStep:
        self._tries[line.version] += 1
        tries = self._tries[line.version]
        if (
            tries & (tries - 1) and tries % _RETRY_ROUNDS
        ):  # each attempt appends to the journal and reloads servers
            raise TemporaryError(
                f"version {line.version} could not be rolled back yet, retrying later: {reason}"
            )
        try:
            rollback(self.target, to_version=line.previous_version, reason=reason, of=line)
        except Refused as error:
            return BakingStep(action=NONE, reason=str(error), version=line.version)
        logger.error("version %d was rolled back: %s", line.version, reason)
        return BakingStep(action=ROLLED_BACK, reason=reason, version=line.version)

    def _end(self, line: Promotion, reason: str) -> BakingStep:
        with opened(self.target) as target:
            target.baked = line, reason
            drive(target)
            if target.baked is not None:
                reason = "another change was made first"
                return BakingStep(action=NONE, reason=reason, version=line.version)
        logger.info("version %d is baked: %s", line.version, reason)
        return BakingStep(action=BAKED, reason=reason, version=line.version)

    def _count(self, live: Promotion, reloads: Mapping[int, int]) -> "dict[int, VersionCounts]":
        """Read the live version's counters, and return the counts of each known version."""
        version = live.version
        p99: list[float | None] = []
        buckets: dict[str, float] | None = {}
        path = findings_path(self.target.store, 0).with_name(COUNTERS_FILE)
        stored = _read_counters(path)
        counts = dict(stored.counts)
        before = counts.pop(version, VersionCounts())
        seen: dict[str, dict[str, float]] = {}
        growth = dict.fromkeys(COUNTERS, 0.0)
        arm = Arm(model_name=self.target.open_repository().names.model, version=version)
        try:
            for address in addresses(self.metrics, self.target.resolve) if self.metrics else ():
                key = f"{address} {version}"
                text = self.fetch(address)
                seen[key] = counted(text, {"live": arm}, source=address)["live"]
                p99.append(read_p99(text, arm, source=address))
                found = read_buckets(text, arm, source=address)
                seen[key] |= {f"{_LE}{bound}": count for bound, count in (found or {}).items()}
                last = stored.seen.get(key)
                # The counters of a new or restarted server begin with slow warm-ups.
                if last is not None and all(seen[key][name] >= last[name] for name in COUNTERS):
                    growth = {
                        name: growth[name] + seen[key][name] - last[name] for name in COUNTERS
                    }
                    if buckets is not None:
                        buckets = _sum(buckets, _bucket_growth(last, seen[key]))
                if found is None:
                    buckets = None  # a sum over only some of the servers would be wrong
        except TemporaryError as error:
            logger.warning("%s", error)
            buckets = None
            p99 = []  # the p99 of a missing server could be the lowest or the highest
        new_reloads = reloads.get(version, 0) - self._reloads_seen[version]
        counts[version] = self._with_p99(
            before.plus(growth, reloads=new_reloads), p99, live, buckets=buckets
        )
        counts = dict(list(counts.items())[-MAX_VERSIONS:])
        # The last reading of a server that did not answer stays.
        seen = {
            **{key: last for key, last in stored.seen.items() if key.endswith(f" {version}")},
            **seen,
        }
        if (known := _Counters(counts=counts, seen=seen)) != stored:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(known)) + "\n")
        self._reloads_seen[version] += new_reloads
        return counts

    def _with_p99(
        self,
        counts: "VersionCounts",
        p99: Sequence[float | None],
        live: Promotion,
        *,
        buckets: Mapping[str, float] | None,
    ) -> "VersionCounts":
        """Append a reading of the servers' p99 if one is due.

        `buckets` is the growth of each bucket, summed over the servers. The value is None if a
        server has no buckets.
        """
        values, seconds = (
            [each for each in p99 if each is not None],
            seconds_since(live, self.target.clock()),
        )
        open_buckets = _sum(counts.open_buckets, buckets or {})
        # The first minute includes slow warm-ups.
        if buckets is None or seconds < QUANTILE_SECONDS:
            open_buckets = {}
        counts = replace(counts, open_buckets=open_buckets)
        readings = [*counts.p99[-1:], *counts.summed_p99[-1:]]
        last = max((reading[0] for reading in readings), default=0.0)
        # If the clock was set back, or if the version was released again, the last reading can be
        # in the future.
        if seconds < QUANTILE_SECONDS or 0 <= seconds - last < P99_SECONDS:
            return counts
        if values:
            bounds = [*counts.p99, [seconds, min(values), max(values)]]
            counts = replace(counts, p99=bounds[-P99_READINGS:])
        if (summed := bucket_quantile(open_buckets, 0.99)) is not None:
            readings = [*counts.summed_p99, [seconds, 1000 * summed]]
            counts = replace(counts, summed_p99=readings[-P99_READINGS:], open_buckets={})
        return counts


_LE = "le "
"""Prefix of the counters of histogram buckets. The upper bound of the bucket follows."""


def _bucket_growth(last: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return how many requests each bucket gained between two readings.

    The keys are upper bounds.
    """
    names = [name for name in now if name.startswith(_LE) and name in last]
    return {name.removeprefix(_LE): now[name] - last[name] for name in names}


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


@dataclass(frozen=True, kw_only=True)
class VersionCounts(ArmCounts):
    """Counters of one version while it was live, summed over all servers.

    Warm-ups are not counted.
    """

    reloads: int = 0
    """Number of reloads of a server because the version answered wrongly or not at all."""
    p99: list[list[float]] = field(default_factory=list)
    """Last readings: seconds since the version went live, and the lowest and highest p99 of the
    servers in microseconds."""
    summed_p99: list[list[float]] = field(default_factory=list)
    """Last readings: seconds since the version went live, and the p99 of all servers' requests in
    microseconds. This time includes the wait in the queue."""
    open_buckets: dict[str, float] = field(default_factory=dict)
    """Number of requests since the last reading, summed over all servers. Each key is an upper
    bound of the latency in milliseconds. The counts are cumulative."""

    def plus(self, growth: Mapping[str, float], *, reloads: int) -> "VersionCounts":
        """Return new counts, which include the growth of the counters and of the reloads."""
        counters = {name: getattr(self, name) + growth[name] for name in COUNTERS}
        return replace(self, **counters, reloads=self.reloads + reloads)

    @property
    def summed_p99_ms(self) -> float | None:
        """Return the median p99 of all servers' requests, or None if there are too few readings."""
        if len(self.summed_p99) < P99_READINGS:
            return None
        return median(each[1] for each in self.summed_p99) / 1000

    def p99_ms(self, bound: int) -> float | None:
        """Return the median of the readings' lowest (or highest) p99, in milliseconds.

        A `bound` of 1 selects the lowest p99 of each reading, and a `bound` of 2 the highest.
        Returns None if there are too few readings.
        """
        return (
            median(each[bound] for each in self.p99) / 1000
            if len(self.p99) >= P99_READINGS
            else None
        )


def contradiction(found: Findings | None, version: VersionCounts) -> str | None:
    """Return how the servers' counters contradict the monitor's findings, or None if they agree.

    The monitor counts the requests without a usable score in the event log. Anyone with access to
    the log can publish forged requests there. The servers' own counters cannot be forged through
    the log. The findings contradict the counters if the findings name more requests than the
    servers counted.

    >>> numbers = {UNUSABLE_REQUESTS: 50.0}
    >>> forged = Findings(version=2, state=BAD, reason="NaN", found_at="", numbers=numbers)
    >>> contradiction(forged, VersionCounts(success=7))
    'the log contains 50 requests without a usable score, and the servers counted 7 requests: NaN'
    >>> contradiction(forged, VersionCounts(success=700)) is None
    True
    """
    claimed = found.numbers.get(UNUSABLE_REQUESTS) if found is not None else None
    if found is None or claimed is None or version.requests >= claimed:
        return None
    return (
        f"the log contains {claimed:.0f} requests without a usable score, and the servers counted "
        f"{version.requests:.0f} requests: {found.reason}"
    )


def check_counts(
    version: VersionCounts, before: VersionCounts | None, limits: RolloutSettings
) -> list[Check]:
    """Check the version's counters against the limits and the previous version's counters.

    If the previous version has too few requests, the failure rate is compared with the margin
    alone. A check of the inference time is inconclusive if either version has too few requests.

    >>> slow = VersionCounts(success=2000, infer_us=9e6)
    >>> checks = check_counts(slow, VersionCounts(success=2000, infer_us=3e6), RolloutSettings())
    >>> [(check.name, check.value, check.result) for check in checks[:3]]
    [('reloads', 0, 'pass'), ('failure rate', 0.0, 'pass'), ('latency ratio', 3.0, 'fail')]
    >>> headline(checks[2:])
    'passed 0 of 2 checks; failed: latency ratio 3 (expected at most 2); inconclusive: p99 ratio (too few requests)'
    """  # noqa: E501
    other = before or VersionCounts()
    usual = other.failure / other.requests if other.requests >= _RULES.min_requests else 0.0
    allowed = min(usual + limits.max_failure_margin, 1.0)
    p_value = sequential_binomial(int(version.failure), int(version.requests), allowed)
    failures = f"{version.failure:.0f} of {version.requests:.0f} requests failed"
    is_timed = min(version.computed, other.computed) >= STEADY_MEAN * _RULES.min_requests
    mean, mean_before = (version.mean_ms, other.mean_ms) if is_timed else (None, None)
    what, p99, p99_before = _comparable_p99(version, other)
    if not (mean and mean_before):
        p99, p99_before = None, None
    return [
        Check(
            name="reloads",
            value=version.reloads,
            limit=limits.max_reloads,
            bound=AT_MOST,
            result=FAIL if version.reloads > limits.max_reloads else PASS,
        ),
        Check(
            name="failure rate",
            value=version.failure / version.requests if version.requests else None,
            limit=allowed,
            bound=AT_MOST,
            result=FAIL if p_value < _RULES.error_alpha else PASS,
            detail=failures,
        ),
        _check_ratio(
            "latency ratio",
            (mean, mean_before),
            limits.max_latency_ratio,
            what="mean inference time",
        ),
        _check_ratio(
            "p99 ratio",
            (p99, p99_before),
            limits.max_p99_ratio,
            what=what,
        ),
    ]


def _comparable_p99(
    version: VersionCounts, other: VersionCounts
) -> tuple[str, float | None, float | None]:
    """Return the name of a p99 that both versions have, and the two values in milliseconds."""
    summed, summed_before = version.summed_p99_ms, other.summed_p99_ms
    if summed is not None and summed_before is not None:
        return "p99 of the time to the response", summed, summed_before
    return "p99 of the inference time", version.p99_ms(1), other.p99_ms(2)


def _check_ratio(
    name: str, milliseconds: tuple[float | None, float | None], limit: float, *, what: str
) -> Check:
    """Check the ratio of the version's time to the previous version's time."""
    now, before = milliseconds
    if not now or not before:
        return Check(name=name, result=INCONCLUSIVE, detail="too few requests")
    result = FAIL if now / before > limit else PASS
    detail = f"{what} is {now:.3g} ms, before {before:.3g} ms"
    return Check(
        name=name, value=now / before, limit=limit, bound=AT_MOST, result=result, detail=detail
    )


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """Content of `COUNTERS_FILE`. Unknown fields of another release of Evergreen are ignored."""

    counts: dict[int, VersionCounts] = field(default_factory=dict)
    seen: dict[str, dict[str, float]] = field(default_factory=dict)
    """Last reading of each server for the live version. The keys are `host:port version`."""

    def __post_init__(self) -> None:
        lacking = [
            key for key, counters in self.seen.items() if not counters.keys() >= COUNTERS.keys()
        ]
        expect(self, f"{', '.join(COUNTERS)} of each server", lambda _: not lacking, "seen")


def _read_counters(path: Path) -> _Counters:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Counters)
    except FileNotFoundError:
        return _Counters()
    except (OSError, ValueError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}, expected the controller's counters; remove it"
        ) from error
