"""What to do with a canary: hold, grow or abort, from evidence alone. Pure; gathering evidence is left to others.

Outcomes. Each stage is judged by its own pairs (`canary.evidence`), at planned looks only: after `min_pairs` pairs and
each time they have doubled, always on the oldest so many, so that asking often, or again after a crash, is not looking
often. A loss is a significant one if the one-sided test of the AUC difference (paired DeLong, rows of one request
together) or of the mean log loss difference is below alpha / (stages * looks * 2): Bonferroni, which holds however
looks and metrics hang together, so an equal model is aborted with probability `alpha` at most over the canary's whole
life; a shadow before it and a first share of its own are stages too. (O'Brien and Fleming's bounds would cost less
power, but need independent increments, which rows that mature by request and day are not sure to have.) Both tests take
means as normal, so clicks of `MIN_REQUESTS` requests must be there, however many rows are: by three clicks, one equal
model in thirty would be aborted at its first look. It grows when both losses are shown to be within their margins, each
at `growth_alpha` / looks one-sided; both must hold, so they need no further correction.

Errors are tested at every step: the test of `sequential_binomial` stays valid under any number of looks. Latency is a
bound on the ratio of means and no test: Triton's counters have no medians and no spread. Where the response cache
answers, it is the time in the model of what was computed.

Nothing is decided on a number that does not exist: then it holds, and says what is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from components.contracts.metrics import auc_difference, grouped_error, row_log_losses
from components.deployment.canary.evidence import Pairs
from components.deployment.canary.metrics import ArmCounts
from components.runtime.errors import ContractError

HOLD, GROW, ABORT = "hold", "grow", "abort"
MIN_REQUESTS = 50
"""Requests with a click, and requests with a row without one, below which a standard error is not to be trusted."""
STEADY_MEAN = 10
"""Latency aborts after so many times `min_requests`: one stall moves the mean of a hundred requests by half. Simulated
with a stall of 100 ms in 500 requests of 1 ms, an equal model is aborted in 18 % of stages after 100, in 2 % after
1000."""


@dataclass(frozen=True, kw_only=True)
class CanaryPolicy:
    """When a canary grows and when it ends."""

    shares: tuple[float, ...] = (0.01, 0.05, 0.25)
    """Its share at each stage; after the last it is released to all."""
    min_pairs: int = 2_000
    """Pairs of a stage at its first look; each further look has twice the pairs of the one before."""
    max_looks: int = 8
    """Looks at one stage; after the last it holds until a person decides."""
    alpha: float = 0.05
    """Most probability of ever aborting a model that is as good, by outcomes."""
    growth_alpha: float = 0.05
    """Most probability, per stage, of growing a model whose loss is a margin or more."""
    auc_margin: float = 0.005
    """Loss of AUC that is put up with."""
    log_loss_margin: float = 0.005
    """Loss in nats per row that is put up with."""
    min_requests: int = 100
    """Requests that each arm must have been asked at a stage before errors and latency say something; latency beyond
    its bound only holds until they are ten times as many."""
    error_margin: float = 0.01
    """Rate of failures beyond the stable arm's that is put up with."""
    error_alpha: float = 0.001
    """Most probability of aborting at a stage by errors a model that fails no more than that."""
    max_latency_ratio: float = 1.5
    """Most mean latency, as a multiple of the stable arm's."""

    def __post_init__(self) -> None:
        """Refuses rules that could not work."""
        if not self.shares or list(self.shares) != sorted(set(self.shares)) or self.shares[0] <= 0:
            raise ContractError(f"shares are {self.shares}, expected growing ones above 0")
        if self.shares[-1] >= 1:
            raise ContractError(f"shares are {self.shares}, expected all below 1: the last step is the release")
        for name in ("min_pairs", "max_looks", "min_requests"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("alpha", "growth_alpha", "error_alpha"):
            if not 0 < getattr(self, name) < 0.5:
                raise ContractError(f"{name} is {getattr(self, name)}, expected more than 0 and less than 0.5")
        for name in ("auc_margin", "log_loss_margin", "error_margin"):
            if not 0 < getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected more than 0 and less than 1")
        if self.max_latency_ratio <= 1:
            raise ContractError(f"max_latency_ratio is {self.max_latency_ratio}, expected more than 1")

    @property
    def looks(self) -> tuple[int, ...]:
        """Pairs of a stage at each look."""
        return tuple(self.min_pairs * 2**doublings for doublings in range(self.max_looks))

    @property
    def level(self) -> float:
        """Of each test for a loss."""
        # Two more than `shares`: a shadow before them, and a first share that is none of them.
        return self.alpha / ((len(self.shares) + 2) * self.max_looks * 2)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What to do, and why."""

    action: str
    """`HOLD`, `GROW` or `ABORT`."""
    reason: str
    pairs_needed: int | None = None
    """Further pairs until the next look; None where none would help or none are missing."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was seen; a number that does not exist is None."""


class Difference(NamedTuple):
    """Canary minus stable, and its standard error."""

    value: float
    error: float

    def loss_p_value(self, sign: int) -> float:
        """One-sided p-value of a loss; `sign` is 1 where more is better and -1 where less is."""
        if self.error == 0:
            return 1.0 if sign * self.value >= 0 else 0.0
        return NormalDist().cdf(sign * self.value / self.error)


def judge(
    pairs: Pairs, counts: dict[str, ArmCounts] | None, policy: CanaryPolicy, *, unread: str = "a server did not answer"
) -> Judgement:
    """What to do after `pairs` and `counts` of the current stage.

    Args:
        pairs: All pairs of this stage, oldest first.
        counts: Of `stable` and `canary`; None where the servers could not be read.
        policy: The rules.
        unread: Why there are no counts.
    """
    numbers: dict[str, Any] = {"pairs": len(pairs), "clicks": int(pairs.labels.sum())}
    guard = judge_counts(counts, policy, numbers, unread=unread)
    if guard.action == ABORT:
        return guard
    outcome = judge_pairs(pairs, policy, numbers)
    if outcome.action == GROW and guard.action == HOLD:
        return guard
    return outcome


def judge_counts(
    counts: dict[str, ArmCounts] | None, policy: CanaryPolicy, numbers: dict[str, Any], *, unread: str = ""
) -> Judgement:
    """`GROW` where errors and latency stand in no way; adds what was seen to `numbers`."""
    if counts is None:
        return Judgement(action=HOLD, reason=f"errors and latency are not known: {unread}", numbers=numbers)
    stable, canary = counts["stable"], counts["canary"]
    for arm, seen in counts.items():
        numbers[arm] = {**seen._asdict(), "mean_ms": seen.mean_ms}
    if canary.requests < policy.min_requests or stable.requests < policy.min_requests:
        few = f"canary {canary.requests:.0f} and stable {stable.requests:.0f} requests, expected {policy.min_requests}"
        return Judgement(action=HOLD, reason=f"too few requests to judge errors and latency: {few}", numbers=numbers)
    allowed = min(stable.failure / stable.requests + policy.error_margin, 1.0)
    p_value = numbers["error_p_value"] = sequential_binomial(int(canary.failure), int(canary.requests), allowed)
    if p_value < policy.error_alpha:
        reason = (
            f"{canary.failure:.0f} of {canary.requests:.0f} requests failed, expected at most {allowed:.2%} "
            f"(stable's rate and a margin; p-value {p_value:.2g})"
        )
        return Judgement(action=ABORT, reason=reason, numbers=numbers)
    return _judge_latency(stable, canary, policy, numbers)


def _judge_latency(stable: ArmCounts, canary: ArmCounts, policy: CanaryPolicy, numbers: dict[str, Any]) -> Judgement:
    told, times = "mean latency", (canary.mean_ms, stable.mean_ms)
    if stable.cache_hits or canary.cache_hits:
        # A cache knows more of the larger arm's requests, which says nothing of the models.
        told, times = "mean time in the model", (canary.infer_ms, stable.infer_ms)
        if (fewest := min(stable.computed, canary.computed)) < policy.min_requests:
            few = f"{fewest:.0f} requests of an arm came past the response cache, expected {policy.min_requests}"
            return Judgement(action=HOLD, reason=f"too few requests to judge latency: {few}", numbers=numbers)
    mine, its = times
    if mine is None or not its:
        return Judgement(action=HOLD, reason="an arm has no successful request to time", numbers=numbers)
    ratio = numbers["latency_ratio"] = mine / its
    if ratio > policy.max_latency_ratio:
        reason = (
            f"{told} is {mine:.3g} ms, {ratio:.2f} times stable's {its:.3g} ms, "
            f"expected at most {policy.max_latency_ratio} times"
        )
        timed, enough = min(stable.computed, canary.computed), STEADY_MEAN * policy.min_requests
        if timed < enough:
            reason = f"{reason}, after {timed:.0f} requests of an arm, expected {enough} to abort by it"
            return Judgement(action=HOLD, reason=reason, numbers=numbers)
        return Judgement(action=ABORT, reason=reason, numbers=numbers)
    return Judgement(action=GROW, reason="errors and latency are within bounds", numbers=numbers)


def judge_pairs(pairs: Pairs, policy: CanaryPolicy, numbers: dict[str, Any]) -> Judgement:
    """What outcomes say at the newest look that is due; adds what was seen to `numbers`."""
    look = sum(size <= len(pairs) for size in policy.looks)
    numbers |= {"look": look, "auc_difference": None, "log_loss_difference": None}
    needed = policy.looks[look] - len(pairs) if look < policy.max_looks else None
    if look == 0:
        reason = f"{len(pairs)} pairs, {needed} more until the first look"
        return Judgement(action=HOLD, reason=reason, pairs_needed=needed, numbers=numbers)
    seen = differences(pairs.first(policy.looks[look - 1]))
    if seen is None:
        reason = f"pairs up to look {look} hold clicks of fewer than {MIN_REQUESTS} requests, or others of fewer"
        reason += "; advance or abort it" if needed is None else f"; {needed} more pairs until the next"
        return Judgement(action=HOLD, reason=reason, pairs_needed=needed, numbers=numbers)
    auc, log_loss = seen
    numbers |= {"auc_difference": auc._asdict(), "log_loss_difference": log_loss._asdict()}
    said = f"AUC {auc.value:+.4f} +- {auc.error:.4f}, log loss {log_loss.value:+.4f} +- {log_loss.error:.4f}"
    worst = min(auc.loss_p_value(1), log_loss.loss_p_value(-1))
    if worst < policy.level:
        reason = f"significantly worse at look {look}: {said} (p-value {worst:.2g}, level {policy.level:.2g})"
        return Judgement(action=ABORT, reason=reason, numbers=numbers)
    z = NormalDist().inv_cdf(1 - policy.growth_alpha / policy.max_looks)
    if auc.value - z * auc.error > -policy.auc_margin and log_loss.value + z * log_loss.error < policy.log_loss_margin:
        return Judgement(action=GROW, reason=f"no loss beyond the margins at look {look}: {said}", numbers=numbers)
    if needed is None:
        reason = f"undecided after the last of {look} looks: {said}; advance or abort it"
    else:
        reason = f"undecided at look {look}: {said}; {needed} more pairs until the next"
    return Judgement(action=HOLD, reason=reason, pairs_needed=needed, numbers=numbers)


def differences(pairs: Pairs) -> tuple[Difference, Difference] | None:
    """AUC and mean log loss, canary minus stable; None where either has no standard error worth the name."""
    clicked = pairs.labels == 1
    if min(len(np.unique(pairs.requests[which])) for which in (clicked, ~clicked)) < MIN_REQUESTS:
        return None
    auc = auc_difference(pairs.labels, pairs.canary, pairs.stable, groups=pairs.requests)
    more = row_log_losses(pairs.labels, pairs.canary) - row_log_losses(pairs.labels, pairs.stable)
    error = grouped_error((more - more.mean()) / len(more), pairs.requests)
    if auc is None or error is None:
        return None
    return Difference(auc.auc, auc.standard_error), Difference(float(more.mean()), error)


def sequential_binomial(failures: int, requests: int, allowed: float) -> float:
    """A p-value of `failures` among `requests` against a rate of at most `allowed`, valid at every look.

    The mean of likelihood ratios of higher rates is, under the rate allowed, a nonnegative martingale, so it ever
    exceeds 1 / p with probability p at most (Ville 1939). The rate allowed is taken as known.

    >>> sequential_binomial(0, 1000, 0.01), sequential_binomial(1000, 1000, 1.0)
    (1.0, 1.0)
    >>> sequential_binomial(50, 1000, 0.01) < 1e-6 < 0.05 < sequential_binomial(15, 1000, 0.01)
    True
    """
    if allowed >= 1:
        return 1.0
    logs = []
    for halvings in range(11):
        # From just above the rate allowed to nearly all.
        rate = min(allowed + (1 - allowed) * 0.5**halvings, 0.999)
        logs.append(failures * math.log(rate / allowed) + (requests - failures) * math.log((1 - rate) / (1 - allowed)))
    largest = max(logs)
    log_mean = largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))
    return math.exp(min(-log_mean, 0.0))
