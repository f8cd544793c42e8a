"""The live version while it bakes: what the servers count of it and what the monitor found, and the way back.

From its release on, each version is held to the limits of its recommender (`contracts.baking`). What the servers count
is judged here: failures by a test that stays valid however often it is looked at, time in the model by the ratios of
means and of p99, and how often the watchdog had to reload it. Triton's quantiles are each server's own and cannot be
added up, but that of all requests lies between the servers' lowest and highest: the version's lowest is held against
the highest of the version before, each by its median over time.
What live traffic says is the monitor's to judge; its findings are read from the store. A breach rolls back to the
version before and bars the model: it is released again by a person's word alone. Otherwise the version is `baked` after
its time and its rows.

All that a round knows is in the journal, the findings and `baking/counters.json`, so each round may be lost, and one
that was missed is made up for by the next. Two controllers do no harm: both transitions are made under the deployment's
lock, by whoever finds the version live and baking still.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from controller.canary.evidence import COUNTERS, Fetch, counted, fetch, read_p99
from controller.rollback import rollback
from evergreen.config.release import RolloutSettings
from evergreen.contracts.baking import BAD, UNUSABLE_REQUESTS, WELL, Findings
from evergreen.contracts.manifests import CURRENT
from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import BAKED, Promotion, baking, findings_path, read_findings, seconds_since
from evergreen.registry.recommenders import accepted
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, Refused, TemporaryError, expect
from evergreen.serving.canary_policy import STEADY_MEAN, ArmCounts, CanaryPolicy
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.servers import addresses
from evergreen.serving.site import SiteSettings
from evergreen.statistics.metrics import sequential_binomial

logger = logging.getLogger(__name__)

COUNTERS_FILE = "counters.json"
"""Beside the findings: what the servers counted of the last versions, and of each server what it said last."""
KEPT_VERSIONS = 4
QUANTILE_SECONDS = 60.0
"""Time that Triton's quantiles look back; in the first of a version's they hold its warm-up, which is slow."""
P99_SECONDS = 10.0
"""Between two readings of the p99."""
P99_READINGS = 12
"""Readings that are kept, and that are needed: two minutes."""
NONE, BAKES, TAKEN_BACK = "none", "bakes", "taken_back"
_RETRY_ROUNDS = 128
"""A take-back that fails is tried again after twice as many rounds each time, but after so many at the latest."""
_RULES = CanaryPolicy()
"""Its `min_requests` and `error_alpha` hold here too."""


@dataclass(frozen=True, kw_only=True)
class BakingStep:
    """What one round found or did."""

    action: str
    """`none` (no version bakes), `bakes`, `baked` or `taken_back`."""
    reason: str
    version: int | None = None


@dataclass(kw_only=True)
class Baking:
    """The versions of one site as they bake; one call of `step` is one round."""

    site: SiteSettings
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port; none = what they count is not judged."""
    fetch: Fetch = fetch
    _reloads_seen: Counter[int] = field(default_factory=Counter)
    _tries: Counter[int] = field(default_factory=Counter)
    """How often each version was to be taken back."""

    def step(self, reloads: Mapping[int, int]) -> BakingStep:
        """Counts, judges, and takes the version back or ends its baking.

        Args:
            reloads: How often the watchdog of this process had servers reload each version.

        Raises:
            ContractError: the journal or the recommender is damaged.
            TemporaryError: the version cannot be taken back now; what was live is live, and a later round tries again.
            PermanentError: as `rollback`.
        """
        store = self.site.store
        if (live := promotion_journal.current(store)) is None:
            return BakingStep(action=NONE, reason="nothing is live")
        counts = self._count(live, reloads)
        if (line := baking(store)) is None:
            return BakingStep(action=NONE, reason=f"version {live.version} does not bake", version=live.version)
        limits = accepted(store, CURRENT).section("release", RolloutSettings)
        if not limits.bakes:
            return self._end(line, "versions of this recommender do not bake")
        found = read_findings(store, line.version)
        of_version = counts.get(line.version, VersionCounts())
        doubt = doubted(found, of_version) if self.metrics else None
        bad = f"the monitor: {found.reason}" if found is not None and found.state == BAD and not doubt else None
        bad = bad or judge_counts(of_version, counts.get(line.previous_version or 0), limits)
        if bad is not None:
            return self._take_back(line, bad)
        if doubt:
            logger.error("version %d is not taken back: %s", line.version, doubt)
            return BakingStep(action=BAKES, reason=doubt, version=line.version)
        seconds = seconds_since(line, self.site.clock())
        is_judged = limits.bake_rows == 0 or (found is not None and found.state == WELL)
        if is_judged and not -CLOCK_AHEAD_SECONDS <= seconds < limits.bake_seconds:
            return self._end(line, f"{found.reason if found and limits.bake_rows else 'nothing bad was counted'}")
        waits = f"{seconds:.0f} of {limits.bake_seconds:.0f} s"
        if not is_judged:
            waits += f"; {found.reason if found else 'the monitor has said nothing yet'}"
        return BakingStep(action=BAKES, reason=waits, version=line.version)

    def _take_back(self, line: Promotion, reason: str) -> BakingStep:
        self._tries[line.version] += 1
        tries = self._tries[line.version]
        if tries & (tries - 1) and tries % _RETRY_ROUNDS:  # each try writes to the journal and reloads servers
            raise TemporaryError(f"version {line.version} could not be taken back yet, and waits: {reason}")
        try:
            rollback(self.site, to_version=line.previous_version, reason=reason, of=line)
        except Refused as error:
            return BakingStep(action=NONE, reason=str(error), version=line.version)
        logger.error("version %d was taken back: %s", line.version, reason)
        return BakingStep(action=TAKEN_BACK, reason=reason, version=line.version)

    def _end(self, line: Promotion, reason: str) -> BakingStep:
        repository: ModelRepository = self.site.open_repository()
        with repository.locked():
            if baking(self.site.store) != line or promotion_journal.interrupted(self.site.store):
                return BakingStep(action=NONE, reason="a deployment was at work meanwhile", version=line.version)
            promotion_journal.append_promotion(self.site.store, line.baked(self.site.now(), self.site.who, reason))
        logger.info("version %d is baked: %s", line.version, reason)
        return BakingStep(action=BAKED, reason=reason, version=line.version)

    def _count(self, live: Promotion, reloads: Mapping[int, int]) -> "dict[int, VersionCounts]":
        """What is known of each version, the newest counts of the live one included."""
        version = live.version
        p99: list[float | None] = []
        path = findings_path(self.site.store, 0).with_name(COUNTERS_FILE)
        kept = _read_counters(path)
        counts = dict(kept.counts)
        before = counts.pop(version, VersionCounts())
        seen: dict[str, dict[str, float]] = {}
        growth = dict.fromkeys(COUNTERS, 0.0)
        arm = Arm(model_name=self.site.open_repository().names.model, version=version)
        try:
            for address in addresses(self.metrics, self.site.resolve) if self.metrics else ():
                key = f"{address} {version}"
                text = self.fetch(address)
                seen[key] = counted(text, {"live": arm}, source=address)["live"]
                p99.append(read_p99(text, arm, source=address))
                last = kept.seen.get(key)
                # The first account of a server, and the one after its restart, hold warm-ups, which are slow.
                if last is not None and all(seen[key][name] >= last[name] for name in COUNTERS):
                    growth = {name: growth[name] + seen[key][name] - last[name] for name in COUNTERS}
        except TemporaryError as error:
            logger.warning("%s", error)
            p99 = []  # without a server that answers, the others' are no bounds
        new_reloads = reloads.get(version, 0) - self._reloads_seen[version]
        counts[version] = self._with_p99(before.plus(growth, reloads=new_reloads), p99, live)
        counts = dict(list(counts.items())[-KEPT_VERSIONS:])
        # A server that did not answer this time goes on from what it said last.
        seen = {**{key: last for key, last in kept.seen.items() if key.endswith(f" {version}")}, **seen}
        if (known := _Counters(counts=counts, seen=seen)) != kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(known)) + "\n")
        self._reloads_seen[version] += new_reloads
        return counts

    def _with_p99(self, counts: "VersionCounts", p99: Sequence[float | None], live: Promotion) -> "VersionCounts":
        """With what the servers say now of their slowest requests, where it is time for a reading."""
        told, seconds = [each for each in p99 if each is not None], seconds_since(live, self.site.clock())
        last = counts.p99[-1][0] if counts.p99 else 0.0
        # After a clock was set back, or where the version is live again, the last reading seems to lie ahead.
        if not told or seconds < QUANTILE_SECONDS or 0 <= seconds - last < P99_SECONDS:
            return counts
        return replace(counts, p99=[*counts.p99, [seconds, min(told), max(told)]][-P99_READINGS:])


@dataclass(frozen=True, kw_only=True)
class VersionCounts(ArmCounts):
    """What all servers counted of one version while it was live, their warm-ups left out."""

    reloads: int = 0
    """How often a server had to reload it because it answered wrongly or not at all."""
    p99: list[list[float]] = field(default_factory=list)
    """The last readings: seconds since it became live, lowest and highest p99 of a server in microseconds."""

    def plus(self, growth: Mapping[str, float], *, reloads: int) -> "VersionCounts":
        """With what was counted since."""
        counters = {name: getattr(self, name) + growth[name] for name in COUNTERS}
        return replace(self, **counters, reloads=self.reloads + reloads)

    def p99_ms(self, bound: int) -> float | None:
        """Median of the readings' lowest (`bound` 1) or highest (2) p99; None where there are too few."""
        return median(each[bound] for each in self.p99) / 1000 if len(self.p99) >= P99_READINGS else None


def doubted(found: Findings | None, version: VersionCounts) -> str | None:
    """Return why the servers' counters contradict what the monitor found in the log; None if they do not.

    The log says which requests got no usable score, and whoever may publish to it can make such requests up. The
    servers, which nobody publishes to, must have counted as many requests of the version.

    >>> numbers = {UNUSABLE_REQUESTS: 50.0}
    >>> forged = Findings(version=2, state=BAD, reason="NaN", found_at="", numbers=numbers)
    >>> doubted(forged, VersionCounts(success=7))
    'the log holds 50 requests without a usable score, and the servers counted 7 requests: NaN'
    >>> doubted(forged, VersionCounts(success=700)) is None
    True
    """
    claimed = found.numbers.get(UNUSABLE_REQUESTS) if found is not None else None
    if found is None or claimed is None or version.requests >= claimed:
        return None
    return (
        f"the log holds {claimed:.0f} requests without a usable score, and the servers counted "
        f"{version.requests:.0f} requests: {found.reason}"
    )


def judge_counts(version: VersionCounts, before: VersionCounts | None, limits: RolloutSettings) -> str | None:
    """Why a version must be taken back by what was counted of it and of the version before; None = it need not.

    Where too little is known of the version before, no failures are forgiven beyond the margin, and time is not judged.

    >>> slow = VersionCounts(success=2000, infer_us=9e6)
    >>> judge_counts(slow, VersionCounts(success=2000, infer_us=3e6), RolloutSettings())
    'mean time in the model is 4.5 ms, 3.00 times the 1.5 ms of the version before, expected at most 2 times'
    >>> judge_counts(VersionCounts(success=50, failure=20), None, RolloutSettings(max_reloads=0)) is None
    False
    """
    if version.reloads > limits.max_reloads:
        return f"servers had to reload it {version.reloads} times, expected at most {limits.max_reloads}"
    other = before or VersionCounts()
    usual = other.failure / other.requests if other.requests >= _RULES.min_requests else 0.0
    allowed = min(usual + limits.max_failure_margin, 1.0)
    if sequential_binomial(int(version.failure), int(version.requests), allowed) < _RULES.error_alpha:
        return f"{version.failure:.0f} of {version.requests:.0f} requests failed, expected at most {allowed:.2%}"
    timed = min(version.computed, other.computed)
    if timed >= STEADY_MEAN * _RULES.min_requests and version.mean_ms and other.mean_ms:
        ratio = version.mean_ms / other.mean_ms
        if ratio > limits.max_latency_ratio:
            return (
                f"mean time in the model is {version.mean_ms:.3g} ms, {ratio:.2f} times the {other.mean_ms:.3g} ms of "
                f"the version before, expected at most {limits.max_latency_ratio:g} times"
            )
        p99, p99_was = version.p99_ms(1), other.p99_ms(2)
        if p99 and p99_was and p99 > limits.max_p99_ratio * p99_was:
            return (
                f"p99 of the time in the model is {p99:.3g} ms, {p99 / p99_was:.2f} times the {p99_was:.3g} ms of "
                f"the version before, expected at most {limits.max_p99_ratio:g} times"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """The content of `COUNTERS_FILE`; fields that another release of Evergreen wrote there are passed over."""

    counts: dict[int, VersionCounts] = field(default_factory=dict)
    seen: dict[str, dict[str, float]] = field(default_factory=dict)
    """What each server said last of the live version, by `host:port version`."""

    def __post_init__(self) -> None:
        lacking = [key for key, counters in self.seen.items() if not counters.keys() >= COUNTERS.keys()]
        expect(self, f"{', '.join(COUNTERS)} of each server", lambda _: not lacking, "seen")


def _read_counters(path: Path) -> _Counters:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Counters)
    except FileNotFoundError:
        return _Counters()
    except (OSError, ValueError) as error:
        raise ContractError(f"{path} cannot be read: {error}, expected the controller's counters; remove it") from error
