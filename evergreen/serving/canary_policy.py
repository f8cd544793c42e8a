"""Decide from the evidence alone whether to hold, grow or abort a canary.

The functions in this module are pure. `canary.evidence` reads the evidence. The labels are
evaluated over all pairs since the canary began. Both arms scored every pair, so the result does not
depend on the canary's share. The looks at the pairs are planned: the first look is at `min_pairs`
pairs, and each further look is at twice as many pairs as the look before. Each look uses exactly
its planned number of pairs, beginning with the oldest pair. If a step runs more often, or is
repeated after a crash, the number of looks therefore stays the same.

A degradation is significant if a one-sided p-value is below alpha / (looks * 2). One test is for
the difference of the AUC (paired DeLong), and the other test is for the difference of the mean log
loss. Rows are clustered by user, or by request if there are no users. The Bonferroni correction is
valid for any dependence between looks and metrics. The probability that these tests ever abort a
canary as good as the stable arm is at most `alpha`. O'Brien-Fleming bounds would have more power.
O'Brien-Fleming bounds are not used, because they need independent increments. The labels of a
request or a day arrive together, so the increments may be dependent. Both tests assume that the
means are normally distributed, so at least `MIN_REQUESTS` requests must have clicks, however many
rows there are. If only three requests had clicks, one in thirty canaries as good as the stable arm
would be aborted at the first look.

The canary grows when the tests confirm that both metrics are within their margins. The one-sided
level `growth_alpha` is divided among the looks. Both tests must pass, so no further correction is
needed. The level of each look is proportional to its number of pairs, so that the later and more
reliable looks get most of the level. If the canary is undecided at the last look, it is aborted. If
there are too few pairs for the next look, the canary continues until a person ends it or a later
candidate passes.

Errors are tested at every step by `sequential_binomial`, which is valid for any number of looks.
Latency has no statistical test, because Triton's counters have no medians and no spread. Instead,
the canary's mean latency may be at most `max_latency_ratio` times the stable arm's mean latency.
Latency is the time that the model takes to compute a request. Queue times are not compared, because
they depend on an arm's share. Responses from the cache are not counted, because the cache contains
more requests of the larger arm.

If a number is missing, no decision is made. The canary is held until the last look, and a check
names the missing number.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.checks import (
    AT_LEAST,
    AT_MOST,
    FAIL,
    INCONCLUSIVE,
    PASS,
    Check,
    decide,
    headline,
)
from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import (
    auc_difference,
    group_numbers,
    grouped_deviation,
    row_log_losses,
    sequential_binomial,
)

HOLD, GROW, ABORT = "hold", "grow", "abort"
_ACTIONS = {PASS: GROW, FAIL: ABORT, INCONCLUSIVE: HOLD}
_Z_95 = NormalDist().inv_cdf(0.975)
"""Half width of a 95 % interval in standard errors."""
MIN_REQUESTS = 50
"""Minimum number of requests with a click, and minimum number of requests with a non-click. Fewer
requests give no reliable standard error."""
STEADY_MEAN = 10
"""Latency can abort a canary only if each arm has at least `STEADY_MEAN * min_requests` requests,
because one stall changes the mean of a hundred requests by half. In simulations, one request in 500
took 100 ms, and all other requests took 1 ms. With 100 requests per stage, an equally fast model
was aborted in 18 % of the stages. With 1000 requests per stage, it was aborted in only 2 % of the
stages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Rows that both arms scored, ordered by time, request and position.

    No row appears twice.
    """

    labels: NDArray[np.uint8]
    """[n] label of each row, 0 or 1."""
    stable: NDArray[np.float32]
    """[n] probabilities of the stable version, from served requests or shadow traffic."""
    canary: NDArray[np.float32]
    """[n] probabilities of the canary, from served requests or shadow traffic."""
    groups: NDArray[np.int64]
    """[n] group of each row. The group is the user id, or the number of the request if the row has
    no user. If only some rows have no user, their request numbers are negative, so that they differ
    from user ids."""

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, num_rows: int) -> "Pairs":
        """Return the oldest `num_rows` pairs."""
        return Pairs(**{name: values[:num_rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class ArmCounts:
    """Counters of one arm since the stage began, summed over all replicas."""

    success: float = 0.0
    failure: float = 0.0
    infer_us: float = 0.0
    """Total compute time of the requests in the model, in microseconds."""
    cache_hits: float = 0.0

    @property
    def computed(self) -> float:
        """Return the number of successful requests that were not served from the response cache."""
        return self.success - self.cache_hits

    @property
    def requests(self) -> float:
        """Requests that reached the model, successful or failed."""
        return self.success + self.failure

    @property
    def mean_ms(self) -> float | None:
        """Mean time in milliseconds that the model takes to compute a request.

        None if the model computed no request.
        """
        return self.infer_us / self.computed / 1000 if self.computed > 0 else None


@dataclass(frozen=True)
class BothCounts:
    """Counts of both arms."""

    stable: ArmCounts
    canary: ArmCounts


_BOUNDS = (
    (("min_pairs", "max_looks", "min_requests"), 0, math.inf),
    (("alpha", "growth_alpha", "error_alpha"), 0, 0.5),
    (("auc_margin", "log_loss_margin", "error_margin"), 0, 1),
    (("max_latency_ratio",), 1, math.inf),
)


FIRST_SHARE = 0.01
"""Share of a canary's traffic at its first stage."""


@dataclass(frozen=True, kw_only=True)
class CanaryPolicy:
    """Rules for growing and aborting a canary."""

    shares: tuple[float, ...] = (FIRST_SHARE, 0.05, 0.25)
    """Share of the traffic at each stage, ascending. After the last stage, the canary is
    released."""
    min_pairs: int = 2_000
    """Number of pairs at the first look at the labels. Each further look has twice as many pairs as
    the look before."""
    max_looks: int = 8
    """Number of looks. A canary that is undecided at the last look is aborted."""
    alpha: float = 0.05
    """Maximum probability that the checks of labels abort an equally good model at any look."""
    growth_alpha: float = 0.025
    """Maximum probability that the traffic grows although the model is worse by more than a margin.
    Together with the 2.5 % of the gate, the probability is 5 %."""
    auc_margin: float = 0.002
    """Tolerated decrease of the AUC. The default is the margin of the gate."""
    log_loss_margin: float = 0.005
    """Tolerated increase of the log loss in nats per row."""
    min_requests: int = 100
    """Minimum number of requests that each arm needs at a stage before errors and latency are
    evaluated. With less than ten times this number, excessive latency can hold the canary but not
    abort it."""
    error_margin: float = 0.01
    """Maximum difference between the failure rates of the canary and the stable arm."""
    error_alpha: float = 0.001
    """Maximum probability, at each stage, of aborting a canary whose failure rate is within the
    margin."""
    max_latency_ratio: float = 1.5
    """Maximum ratio of two mean latencies: the canary's divided by the stable arm's."""

    def __post_init__(self) -> None:
        if not self.shares or list(self.shares) != sorted(set(self.shares)) or self.shares[0] <= 0:
            raise ContractError(f"shares are {self.shares}, expected ascending values above 0")
        if self.shares[-1] >= 1:
            raise ContractError(
                f"shares are {self.shares}, expected all below 1: the last step is the release"
            )
        for names, low, high in _BOUNDS:
            for name in names:
                if not low < (value := getattr(self, name)) < high:
                    raise ContractError(
                        f"{name} is {value}, expected more than {low} and less than {high}"
                    )

    @property
    def looks(self) -> tuple[int, ...]:
        """Number of pairs at each planned look.

        >>> CanaryPolicy(min_pairs=1000, max_looks=3).looks
        (1000, 2000, 4000)
        """
        return tuple(self.min_pairs * 2**doublings for doublings in range(self.max_looks))

    @property
    def level(self) -> float:
        """Significance level of each test for a degradation."""
        return self.alpha / (self.max_looks * 2)

    def growth_level(self, look: int) -> float:
        """Return the significance level of the growth tests at a look.

        The first look has the number 1.

        >>> policy = CanaryPolicy(max_looks=2, growth_alpha=0.03)
        >>> policy.growth_level(1), policy.growth_level(2)
        (0.01, 0.02)
        """
        return self.growth_alpha * self.looks[look - 1] / sum(self.looks)


@dataclass(frozen=True)
class ArmDifference:
    """Difference of a metric, canary minus stable version, and its standard error."""

    value: float
    error: float

    def loss_p_value(self, sign: int) -> float:
        """Return the one-sided p-value of the hypothesis that the canary is worse.

        Args:
            sign: 1 if a larger metric is better, -1 if a smaller metric is better.
        """
        if self.error == 0:
            return 1.0 if sign * self.value >= 0 else 0.0
        return NormalDist().cdf(sign * self.value / self.error)


@dataclass(frozen=True, kw_only=True)
class CountsDecision:
    """Decision that follows from the checks of errors and latency. Unknown numbers are None."""

    checks: tuple[Check, ...]
    counts: BothCounts | None = None
    error_p_value: float | None = None
    latency_ratio: float | None = None

    @property
    def action(self) -> str:
        """`GROW` if errors and latency are within bounds, else `HOLD` or `ABORT`."""
        return _ACTIONS[decide(self.checks)]


@dataclass(frozen=True, kw_only=True)
class PairsDecision:
    """Results of the checks of labels. Unknown numbers are None."""

    checks: tuple[Check, ...]
    num_pairs: int
    num_clicks: int
    look: int
    """Number of looks for which enough pairs have arrived."""
    pairs_needed: int | None = None
    """Number of additional pairs until the next look. None after the last look, or if the decision
    is already made."""
    auc: ArmDifference | None = None
    log_loss: ArmDifference | None = None

    @property
    def action(self) -> str:
        """`HOLD`, `GROW` or `ABORT`."""
        return _ACTIONS[decide(self.checks)]


@dataclass(frozen=True, kw_only=True)
class CanaryDecision:
    """Decision about the canary, with the reason and the evidence."""

    action: str
    """`HOLD`, `GROW` or `ABORT`."""
    reason: str
    """Headline of the checks, or the reason that a person gave."""
    by_counts: CountsDecision | None = None
    by_pairs: PairsDecision | None = None

    @classmethod
    def of(
        cls, by_counts: CountsDecision, by_pairs: PairsDecision | None = None
    ) -> "CanaryDecision":
        """Return the decision that follows from all checks.

        The decision follows from the check with the worst result.
        """
        found = cls(action=HOLD, reason="", by_counts=by_counts, by_pairs=by_pairs)
        return replace(found, action=_ACTIONS[decide(found.checks)], reason=headline(found.checks))

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks: first the checks of counters, then the checks of labels.

        Empty = no evidence was evaluated.
        """
        kinds = (self.by_counts, self.by_pairs)
        return tuple(check for kind in kinds if kind is not None for check in kind.checks)


def evaluate(
    pairs: Pairs,
    counts: BothCounts | None,
    policy: CanaryPolicy,
    *,
    unread: str = "a server did not answer",
) -> CanaryDecision:
    """Decide about the canary from pairs and counters.

    Args:
        pairs: Pairs since the canary began.
        counts: Counters of this stage. None = the counters could not be read.
        policy: Rules.
        unread: Reason why the counters could not be read.
    """
    return CanaryDecision.of(
        check_counts(counts, policy, unread=unread), check_pairs(pairs, policy)
    )


def check_counts(
    counts: BothCounts | None, policy: CanaryPolicy, *, unread: str = ""
) -> CountsDecision:
    """Check errors and latency. If there are no counters, the check reports the reason `unread`."""
    if counts is None:
        unknown = Check(
            name="failure rate",
            result=INCONCLUSIVE,
            detail=f"errors and latency are unknown: {unread}",
        )
        return CountsDecision(checks=(unknown,))
    stable, canary = counts.stable, counts.canary
    requests = _check_minimum(
        "requests of each arm", min(canary.requests, stable.requests), policy.min_requests
    )
    if requests.result != PASS:
        return CountsDecision(checks=(requests,), counts=counts)
    allowed = min(stable.failure / stable.requests + policy.error_margin, 1.0)
    p_value = sequential_binomial(int(canary.failure), int(canary.requests), allowed)
    failures = Check(
        name="failure rate",
        value=canary.failure / canary.requests,
        limit=allowed,
        bound=AT_MOST,
        result=FAIL if p_value < policy.error_alpha else PASS,
        detail=f"{canary.failure:.0f} of {canary.requests:.0f} requests failed (p-value "
        f"{p_value:.2g})",
    )
    ratio, latency = _check_latency(counts, policy)
    return CountsDecision(
        checks=(failures, latency), counts=counts, error_p_value=p_value, latency_ratio=ratio
    )


def _check_minimum(name: str, value: float, minimum: float) -> Check:
    result = PASS if value >= minimum else INCONCLUSIVE
    return Check(name=name, value=value, limit=minimum, result=result)


def _check_latency(counts: BothCounts, policy: CanaryPolicy) -> tuple[float | None, Check]:
    """Return the ratio of the two mean latencies, and the check of this ratio.

    With too few requests, the ratio is None, and the check shows how many requests are missing.
    """
    stable, canary = counts.stable, counts.canary
    timed, enough = min(stable.computed, canary.computed), STEADY_MEAN * policy.min_requests
    few = _check_minimum("computed requests of each arm", timed, policy.min_requests)
    if few.result != PASS or not canary.mean_ms or not stable.mean_ms:
        return None, replace(few, result=INCONCLUSIVE)
    ratio = canary.mean_ms / stable.mean_ms
    result, detail = (
        PASS,
        f"mean inference time is {canary.mean_ms:.3g} ms, stable's {stable.mean_ms:.3g} ms",
    )
    if ratio > policy.max_latency_ratio:
        result = FAIL if timed >= enough else INCONCLUSIVE
        detail += f", after {timed:.0f} requests of an arm, of {enough} that can abort"
    limit = policy.max_latency_ratio
    check = Check(
        name="latency ratio", value=ratio, limit=limit, bound=AT_MOST, result=result, detail=detail
    )
    return ratio, check


def check_pairs(pairs: Pairs, policy: CanaryPolicy) -> PairsDecision:
    """Check the labels at the latest look whose number of pairs has been reached."""
    look = sum(size <= len(pairs) for size in policy.looks)
    needed = policy.looks[look] - len(pairs) if look < policy.max_looks else None
    differences = measure_differences(pairs.first(policy.looks[look - 1])) if look else None
    auc, log_loss = differences or (None, None)
    if look == 0:
        checks = [_check_minimum("pairs", len(pairs), policy.looks[0])]
    else:
        checks = _check_differences(auc, log_loss, policy, look=look)
    undecided = decide(checks) == INCONCLUSIVE
    if undecided and look == policy.max_looks:
        name, detail = "looks without a decision", "that was the last look"
        checks.append(
            Check(name=name, value=look, limit=look - 1, bound=AT_MOST, result=FAIL, detail=detail)
        )
        undecided = False
    return PairsDecision(
        checks=tuple(checks),
        num_pairs=len(pairs),
        num_clicks=int(pairs.labels.sum()),
        look=look,
        pairs_needed=needed if undecided else None,
        auc=auc,
        log_loss=log_loss,
    )


def _check_differences(
    auc: ArmDifference | None, log_loss: ArmDifference | None, policy: CanaryPolicy, *, look: int
) -> list[Check]:
    """Check the AUC and the log loss at a look.

    A check fails if the degradation is significant. The check passes if the test rules out a
    degradation beyond the margin.
    """
    z = NormalDist().inv_cdf(1 - policy.growth_level(look))
    table = (
        ("AUC against stable", auc, 1, -policy.auc_margin),
        ("log loss against stable", log_loss, -1, policy.log_loss_margin),
    )
    checks = []
    for name, found, sign, limit in table:
        check = Check(
            name=name,
            limit=limit,
            bound=AT_LEAST if sign == 1 else AT_MOST,
            is_difference=True,
            result=INCONCLUSIVE,
            detail=f"look {look} of {policy.max_looks}",
        )
        if found is None:
            few = f"fewer than {MIN_REQUESTS} requests with clicks or without"
            checks.append(replace(check, detail=f"{check.detail} has {few}"))
            continue
        p_value, width = found.loss_p_value(sign), _Z_95 * found.error
        if p_value < policy.level:
            result, detail = (
                FAIL,
                f"{check.detail} (p-value {p_value:.2g}, level {policy.level:.2g})",
            )
        else:
            is_within = sign * found.value - z * found.error > sign * limit
            result, detail = PASS if is_within else INCONCLUSIVE, check.detail
        low, high = found.value - width, found.value + width
        checks.append(
            replace(check, value=found.value, low=low, high=high, result=result, detail=detail)
        )
    return checks


def measure_differences(pairs: Pairs) -> tuple[ArmDifference, ArmDifference] | None:
    """Return the differences of AUC and mean log loss, canary minus stable.

    Returns None if there are too few requests for a reliable standard error.
    """
    clicked = pairs.labels == 1
    if min(len(np.unique(pairs.groups[which])) for which in (clicked, ~clicked)) < MIN_REQUESTS:
        return None
    auc = auc_difference(pairs.labels, pairs.canary, pairs.stable, groups=pairs.groups)
    more = row_log_losses(pairs.labels, pairs.canary) - row_log_losses(pairs.labels, pairs.stable)
    deviation = grouped_deviation((more, group_numbers(pairs.groups, len(pairs))))
    if auc is None or deviation is None:
        return None
    return ArmDifference(auc.auc, auc.standard_error), ArmDifference(
        float(more.mean()), deviation.standard_error
    )
