"""What to do with a canary: hold, grow or abort, from evidence alone. Pure; gathering evidence is `canary.evidence`'s.

Outcomes are judged by all pairs since the canary began: both arms scored them, whatever its share was. Looks are
planned: after `min_pairs` pairs and each time they have doubled, always on the oldest so many, so that asking often, or
again after a crash, is not looking often. A loss is a significant one if the one-sided test of the AUC difference
(paired DeLong) or of the mean log loss difference, rows of one user (else of one request) together, is below alpha /
(looks * 2): Bonferroni, which holds however looks and metrics depend on each other, so an equal model is aborted with
probability `alpha` at most over the canary's whole life. (O'Brien and Fleming's bounds would cost less power, but need
independent increments, which rows that mature by request and day are not sure to have.) Both tests take means as
normal, so clicks of `MIN_REQUESTS` requests must be there, however many rows are: by three clicks, one equal model in
thirty would be aborted at its first look. It grows when both losses are shown to be within their margins, each at a
part of `growth_alpha` one-sided, which over all looks add up to it; both must hold, so they need no further correction.
A look has its part in proportion to its pairs, because the late looks decide. What is undecided at the last look is
taken back. A canary whose requests make too few pairs for its looks waits for a person, or for a later candidate that
passes.

Errors are tested at every step: the test of `sequential_binomial` stays valid under any number of looks. Latency is a
bound on the ratio of means and no test: Triton's counters have no medians and no spread. It is the time in the model of
the requests that it computed: waiting in the queue depends on an arm's share, and a response cache holds more of the
larger arm's requests.

Nothing is decided on a number that does not exist: the canary is held until the last look, and the reason names what
is missing.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import (
    auc_difference,
    group_numbers,
    grouped_deviation,
    row_log_losses,
    sequential_binomial,
)

HOLD, GROW, ABORT = "hold", "grow", "abort"
MIN_REQUESTS = 50
"""Requests with a click, and requests with a row without one, below which a standard error is not to be trusted."""
STEADY_MEAN = 10
"""Latency aborts after so many times `min_requests`: one stall moves the mean of a hundred requests by half. Simulated
with a stall of 100 ms in 500 requests of 1 ms, an equal model is aborted in 18 % of stages after 100, in 2 % after
1000."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Rows that both arms scored, in the order of their time, request and position in it; each row once."""

    labels: NDArray[np.uint8]
    """[n] 0 or 1."""
    stable: NDArray[np.float32]
    """[n] probabilities by the stable version, whether served or in the shadow."""
    canary: NDArray[np.float32]
    """[n] probabilities by the canary."""
    groups: NDArray[np.int64]
    """[n] category of the user that a row belongs to, or a number of the request, below 0 where there are users."""

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, num_rows: int) -> "Pairs":
        """The oldest `num_rows` of them."""
        return Pairs(**{name: values[:num_rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class ArmCounts:
    """What the servers counted for one arm since the stage began, summed over all replicas."""

    success: float = 0.0
    failure: float = 0.0
    infer_us: float = 0.0
    """Time in the model of the requests that it computed."""
    cache_hits: float = 0.0

    @property
    def computed(self) -> float:
        """Successful requests that the model computed, instead of the response cache."""
        return self.success - self.cache_hits

    @property
    def requests(self) -> float:
        """Requests that a model answered or failed."""
        return self.success + self.failure

    @property
    def mean_ms(self) -> float | None:
        """Mean time in the model of a request that it computed; None without one."""
        return self.infer_us / self.computed / 1000 if self.computed > 0 else None


@dataclass(frozen=True)
class BothCounts:
    """The counts of both arms."""

    stable: ArmCounts
    canary: ArmCounts


_BOUNDS = (
    (("min_pairs", "max_looks", "min_requests"), 0, math.inf),
    (("alpha", "growth_alpha", "error_alpha"), 0, 0.5),
    (("auc_margin", "log_loss_margin", "error_margin"), 0, 1),
    (("max_latency_ratio",), 1, math.inf),
)


@dataclass(frozen=True, kw_only=True)
class CanaryPolicy:
    """When a canary grows and when it ends."""

    shares: tuple[float, ...] = (0.01, 0.05, 0.25)
    """Its share at each stage; after the last it is released to all."""
    min_pairs: int = 2_000
    """Pairs at the first look; each further look has twice the pairs of the one before."""
    max_looks: int = 8
    """Looks at the pairs; a canary that is undecided at the last is taken back."""
    alpha: float = 0.05
    """Highest probability of ever aborting a model that is as good, by outcomes."""
    growth_alpha: float = 0.025
    """Highest probability of ever growing a model whose loss is a margin or more; with the gate's own 2.5 %, 5 %."""
    auc_margin: float = 0.002
    """Loss of AUC that is tolerated; the gate's default."""
    log_loss_margin: float = 0.005
    """Loss in nats per row that is tolerated."""
    min_requests: int = 100
    """Requests that each arm must have had at a stage before errors and latency are judged; latency beyond its bound
    only holds until they are ten times as many."""
    error_margin: float = 0.01
    """Rate of failures beyond the stable arm's that is tolerated."""
    error_alpha: float = 0.001
    """Highest probability of aborting at a stage by errors a model that fails no more than that."""
    max_latency_ratio: float = 1.5
    """Highest mean time in the model, as a multiple of the stable arm's."""

    def __post_init__(self) -> None:
        if not self.shares or list(self.shares) != sorted(set(self.shares)) or self.shares[0] <= 0:
            raise ContractError(f"shares are {self.shares}, expected growing ones above 0")
        if self.shares[-1] >= 1:
            raise ContractError(f"shares are {self.shares}, expected all below 1: the last step is the release")
        for names, low, high in _BOUNDS:
            for name in names:
                if not low < (value := getattr(self, name)) < high:
                    raise ContractError(f"{name} is {value}, expected more than {low} and less than {high}")

    @property
    def looks(self) -> tuple[int, ...]:
        """Pairs at each look.

        >>> CanaryPolicy(min_pairs=1000, max_looks=3).looks
        (1000, 2000, 4000)
        """
        return tuple(self.min_pairs * 2**doublings for doublings in range(self.max_looks))

    @property
    def level(self) -> float:
        """Significance level of each test for a loss."""
        return self.alpha / (self.max_looks * 2)

    def growth_level(self, look: int) -> float:
        """Significance level of the tests for no loss at a look, counted from 1.

        >>> policy = CanaryPolicy(max_looks=2, growth_alpha=0.03)
        >>> policy.growth_level(1), policy.growth_level(2)
        (0.01, 0.02)
        """
        return self.growth_alpha * self.looks[look - 1] / sum(self.looks)


@dataclass(frozen=True)
class ArmDifference:
    """Canary minus stable, and its standard error."""

    value: float
    error: float

    def loss_p_value(self, sign: int) -> float:
        """One-sided p-value of a loss; `sign` is 1 where more is better and -1 where less is."""
        if self.error == 0:
            return 1.0 if sign * self.value >= 0 else 0.0
        return NormalDist().cdf(sign * self.value / self.error)


@dataclass(frozen=True, kw_only=True)
class CountsJudgement:
    """What errors and latency say; `GROW` where they are within bounds. A number that does not exist is None."""

    action: str
    reason: str
    counts: BothCounts | None = None
    error_p_value: float | None = None
    latency_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class PairsJudgement:
    """What outcomes say; a number that does not exist is None."""

    action: str
    reason: str
    num_pairs: int
    num_clicks: int
    look: int
    """Looks that were due so far."""
    pairs_needed: int | None = None
    """Further pairs until the next look; None where none would help or none are missing."""
    auc: ArmDifference | None = None
    log_loss: ArmDifference | None = None


@dataclass(frozen=True, kw_only=True)
class CanaryJudgement:
    """What to do, and why; the evidence that it rests on, where there is any."""

    action: str
    """`HOLD`, `GROW` or `ABORT`."""
    reason: str
    by_counts: CountsJudgement | None = None
    by_pairs: PairsJudgement | None = None


def judge(
    pairs: Pairs, counts: BothCounts | None, policy: CanaryPolicy, *, unread: str = "a server did not answer"
) -> CanaryJudgement:
    """What to do after `pairs` and `counts`.

    `counts` are what the servers counted at this stage; None where they could not be read, for the reason `unread`.
    """
    by_counts = judge_counts(counts, policy, unread=unread)
    by_pairs = judge_pairs(pairs, policy)
    decides: CountsJudgement | PairsJudgement = by_pairs
    if by_counts.action == ABORT or (by_pairs.action == GROW and by_counts.action == HOLD):
        decides = by_counts
    return CanaryJudgement(action=decides.action, reason=decides.reason, by_counts=by_counts, by_pairs=by_pairs)


def judge_counts(counts: BothCounts | None, policy: CanaryPolicy, *, unread: str = "") -> CountsJudgement:
    """What errors and latency say; `unread` is why there are no counts."""
    if counts is None:
        return CountsJudgement(action=HOLD, reason=f"errors and latency are not known: {unread}")
    stable, canary = counts.stable, counts.canary
    if canary.requests < policy.min_requests or stable.requests < policy.min_requests:
        few = f"canary {canary.requests:.0f} and stable {stable.requests:.0f} requests, expected {policy.min_requests}"
        reason = f"too few requests to judge errors and latency: {few}"
        return CountsJudgement(action=HOLD, reason=reason, counts=counts)
    judged = _judge_latency(counts, policy)
    allowed = min(stable.failure / stable.requests + policy.error_margin, 1.0)
    p_value = sequential_binomial(int(canary.failure), int(canary.requests), allowed)
    if p_value < policy.error_alpha:
        reason = (
            f"{canary.failure:.0f} of {canary.requests:.0f} requests failed, expected at most {allowed:.2%} "
            f"(stable's rate and a margin; p-value {p_value:.2g})"
        )
        judged = replace(judged, action=ABORT, reason=reason)
    return replace(judged, error_p_value=p_value)


def _judge_latency(counts: BothCounts, policy: CanaryPolicy) -> CountsJudgement:
    stable, canary = counts.stable, counts.canary
    timed, enough = min(stable.computed, canary.computed), STEADY_MEAN * policy.min_requests
    if timed < policy.min_requests or not canary.mean_ms or not stable.mean_ms:
        few = f"the model computed {timed:.0f} requests of an arm, expected {policy.min_requests}"
        return CountsJudgement(action=HOLD, reason=f"too few requests to judge latency: {few}", counts=counts)
    ratio = canary.mean_ms / stable.mean_ms
    action, reason = GROW, "errors and latency are within bounds"
    if ratio > policy.max_latency_ratio:
        action = ABORT
        reason = (
            f"mean time in the model is {canary.mean_ms:.3g} ms, {ratio:.2f} times stable's {stable.mean_ms:.3g} ms, "
            f"expected at most {policy.max_latency_ratio} times"
        )
        if timed < enough:
            action = HOLD
            reason += f", after {timed:.0f} requests of an arm, expected {enough} to abort by it"
    return CountsJudgement(action=action, reason=reason, counts=counts, latency_ratio=ratio)


def judge_pairs(pairs: Pairs, policy: CanaryPolicy) -> PairsJudgement:
    """What outcomes say at the newest look that is due."""
    look = sum(size <= len(pairs) for size in policy.looks)
    needed = policy.looks[look] - len(pairs) if look < policy.max_looks else None
    differences = measure_differences(pairs.first(policy.looks[look - 1])) if look else None
    auc, log_loss = differences or (None, None)
    if look == 0:
        action, reason = HOLD, f"{len(pairs)} pairs, {needed} more until the first look"
    elif auc is None or log_loss is None:
        action = HOLD
        reason = f"pairs up to look {look} hold clicks of fewer than {MIN_REQUESTS} requests, or others of fewer"
    else:
        action, reason = _judge_differences(auc, log_loss, policy, look=look)
    if action == HOLD and look == policy.max_looks:
        action = ABORT
        reason += "; that was the last look, so the canary is taken back"
    elif action == HOLD and look:
        reason += f"; {needed} more pairs until the next"
    return PairsJudgement(
        action=action,
        reason=reason,
        num_pairs=len(pairs),
        num_clicks=int(pairs.labels.sum()),
        look=look,
        pairs_needed=needed if action == HOLD else None,
        auc=auc,
        log_loss=log_loss,
    )


def _judge_differences(
    auc: ArmDifference, log_loss: ArmDifference, policy: CanaryPolicy, *, look: int
) -> tuple[str, str]:
    seen = f"AUC {auc.value:+.4f} +- {auc.error:.4f}, log loss {log_loss.value:+.4f} +- {log_loss.error:.4f}"
    worst = min(auc.loss_p_value(1), log_loss.loss_p_value(-1))
    if worst < policy.level:
        return ABORT, f"significantly worse at look {look}: {seen} (p-value {worst:.2g}, level {policy.level:.2g})"
    z = NormalDist().inv_cdf(1 - policy.growth_level(look))
    if auc.value - z * auc.error > -policy.auc_margin and log_loss.value + z * log_loss.error < policy.log_loss_margin:
        return GROW, f"no loss beyond the margins at look {look}: {seen}"
    return HOLD, f"undecided at look {look} of {policy.max_looks}: {seen}"


def measure_differences(pairs: Pairs) -> tuple[ArmDifference, ArmDifference] | None:
    """AUC and mean log loss, canary minus stable; None where either has no standard error to be trusted."""
    clicked = pairs.labels == 1
    if min(len(np.unique(pairs.groups[which])) for which in (clicked, ~clicked)) < MIN_REQUESTS:
        return None
    auc = auc_difference(pairs.labels, pairs.canary, pairs.stable, groups=pairs.groups)
    more = row_log_losses(pairs.labels, pairs.canary) - row_log_losses(pairs.labels, pairs.stable)
    deviation = grouped_deviation((more, group_numbers(pairs.groups, len(pairs))))
    if auc is None or deviation is None:
        return None
    return ArmDifference(auc.auc, auc.standard_error), ArmDifference(float(more.mean()), deviation.standard_error)
