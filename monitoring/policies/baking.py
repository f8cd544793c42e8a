"""Test until the end of baking whether a new version is as good as the gate promised.

The input is the matured rows of the serving version, the gate's metrics of that version, and
earlier metrics of its predecessor. The output is a decision, which is `ROLLBACK` if the version
must be rolled back. Five tests share `bake_alpha` equally. Four of the five tests use outcomes:

- AUC: the e-process of `monitoring.policies.betting` compares the AUC with a limit. The limit is
  computed from two 95 % intervals: the gate's interval of this version, and the interval of the
  predecessor's last window. The smaller of their lower ends, minus `max_auc_loss`, is the limit.
  The predecessor is included because a rollback to an equally bad version would not help. For
  example, a change of user behaviour lowers the AUC of both versions.
- Calibration: the first test detects too many clicks, and the second test detects too few clicks.
- Click rate: the test detects a click rate below a limit.

Each test of calibration or click rate adds one term per request to a sum. The term is the excess
over the limit. For too many clicks, the term is the clicks minus the limit times the predicted
clicks. `mixture_evidence` evaluates the sum, and its result is valid under any number of looks.

The fifth test needs no labels: it counts scores that are not probabilities
(`monitoring.retraining.new_versions`). A version that gives every row the same score is rolled back
without a test.

`controller.baking` rolls the version back and decides when its baking ends. Feature drift does not
cause a rollback, because it is not evidence about the version's quality.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from evergreen.config.release import BakingSettings
from evergreen.contracts.baking import BAD, BAKES, WELL
from evergreen.contracts.checks import BELOW, FAIL, INCONCLUSIVE, PASS, Check, decide, headline
from monitoring.policies.betting import EProcess
from monitoring.policies.policy import (
    Action,
    Decision,
    Evidence,
    MaturedRows,
    PolicyState,
    without_oldest,
)

BAKING = "baking"
"""Name of the policy."""
NUM_TESTS = 5
"""Number of tests that share `bake_alpha`: four on outcomes and one on scores."""
_MIN_CLICKED_REQUESTS = 50
"""Minimum number of requests with an observed or expected click before a sum is tested. With fewer
requests, the distribution of the sum is far from normal."""
_STUCK_ROWS = 1_000
"""Minimum number of rows for the check of equal scores. If all scores are equal, the model ignores
its input."""
_SUSPICION = 3.0
"""A version becomes suspect when its evidence reaches this value. The baking of a suspect version
continues. Baking can end when the evidence falls below this value, or is enough for a rollback. For
a version within its limits, the evidence begins at 1 and falls."""
_TUNED_SQUARES = 50.0
"""The most sensitive range of `mixture_evidence` is around this sum of squares. In the test of too
many clicks, the sum of squares is about the number of clicks."""
_NOTHING: Mapping[str, Any] = {"state": BAKES, "rows": 0, "evidence": None, "least_auc": None}
"""State of a version before its first row."""
_NO_WINDOW = {
    "auc": None,
    "auc_low": None,
    "auc_high": None,
    "rows": 0,
    "clicks": 0,
    "window_version": None,
}
"""Numbers in a decision about a version that has no row in the window."""
_OF_TESTS = ("auc", "sums", "low", "high")
"""Keys of a version's state that are used by the statistical tests only."""
_UNDER, _OVER, _RATE = (
    "more clicks than predicted",
    "fewer clicks than predicted",
    "a lower click rate",
)


def mixture_evidence(total: float, squares: float) -> float:
    """Return the evidence that the terms of a sum have a mean above 0.

    The evidence is 1 if there are no terms.

    If the mean is at most 0, the probability that the evidence ever reaches 1 / alpha is about
    alpha, under any number of looks. The evidence is a mixture of exp(l * total - l^2 * squares /
    2) over half-normal l (Robbins 1970). It is valid for many independent terms (asymptotic:
    Waudby-Smith et al. 2021).

    Args:
        total: Sum of the terms.
        squares: Sum of the squares of the terms.

    >>> mixture_evidence(0.0, 0.0)
    1.0
    >>> mixture_evidence(60.0, 100.0) > 1e5 > 1 > mixture_evidence(-60.0, 100.0)
    True
    """
    width = _TUNED_SQUARES + squares
    z = total / math.sqrt(width)
    if z > 30:
        return math.inf
    if z < -30:  # avoid the overflow of exp and the underflow of cdf in the next formula
        return 2.0 * math.sqrt(_TUNED_SQUARES / width) / (-z * math.sqrt(2.0 * math.pi))
    return 2.0 * math.sqrt(_TUNED_SQUARES / width) * math.exp(z * z / 2.0) * NormalDist().cdf(z)


class BakingPolicy:
    """Policy that tests each new version once, after it replaced another version."""

    name = BAKING

    def __init__(self, settings: BakingSettings) -> None:
        self._settings = settings

    def decide(self, evidence: Evidence, state: PolicyState) -> tuple[Decision, PolicyState]:
        """See `Policy`.

        For each version, `state` contains its state, its limits and the sums of its tests.
        """
        known: dict[str, Any] = dict(state.get("versions", {}))
        version, has_rows = str(evidence.version), len(evidence.rows.labels) > 0
        if version not in known and not has_rows:
            # Use only the version's own rows. Compute the limits from the last rows of the
            # predecessor.
            reason = f"no row of model version {evidence.version} has matured yet"
            return self._decision(evidence, {**_NOTHING, "reason": reason}), state
        version_state = known.get(version) or self._begin(evidence)
        if version_state["state"] == BAKES and has_rows:
            version_state = self._evaluate(evidence, version_state)
        if version_state["state"] != BAKES:
            # Every decision line contains the complete state. Fields that only the statistical
            # tests use are therefore dropped.
            version_state = {
                name: value for name, value in version_state.items() if name not in _OF_TESTS
            }
        known = without_oldest({**known, version: version_state}, needed=[evidence.version])
        return self._decision(evidence, version_state), {"versions": known}

    def _begin(self, evidence: Evidence) -> dict[str, Any]:
        gate, before = evidence.baseline, evidence.predecessor
        has_predecessor = before is not None or (
            gate is not None and gate.previous_version is not None
        )
        is_evaluated = has_predecessor and self._settings.bake_rows > 0
        state: dict[str, Any] = {
            "state": BAKES if is_evaluated else WELL,
            "rows": 0,
            "sums": {},
            "evidence": None,
        }
        state["reason"] = (
            "" if is_evaluated else "no earlier version is known, or live traffic is not evaluated"
        )
        state["since"] = _since(evidence)
        promised = gate.low if gate else None
        lows = [each for each in (promised, before.auc_low if before else None) if each is not None]
        state["least_auc"] = (
            max(min(lows) - self._settings.max_auc_loss, 0.01) if promised is not None else None
        )
        rate = before.click_rate if before else None
        state["least_rate"] = self._settings.min_click_rate_ratio * rate if rate else None
        return state

    def _evaluate(self, evidence: Evidence, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new state, updated with the rows of this decision point."""
        settings, rows = self._settings, evidence.rows
        enough = NUM_TESTS / settings.bake_alpha
        state = {**state, "rows": state["rows"] + len(rows.labels)}
        found = {}
        if (least := state["least_auc"]) is not None:
            process = EProcess(least, state.get("auc", {}))
            process.update(rows, enough)
            state["auc"] = process.state_dict()
            found[f"evidence that the AUC is below {least:.3f}"] = process.value
        state["sums"] = self._add_terms(rows, state)
        names = {
            _UNDER: f"evidence of more than {settings.max_calibration_ratio:g} times the clicks "
            "that are predicted",
            _OVER: f"evidence of less than 1/{settings.max_calibration_ratio:g} of the clicks that "
            "are predicted",
            _RATE: f"evidence of a click rate below {state['least_rate'] or 0.0:.4g}",
        }
        for name, (total, squares, expected) in state["sums"].items():
            if name in names and expected >= _MIN_CLICKED_REQUESTS:
                found[names[name]] = mixture_evidence(total, squares)
        checks = [_check(name, min(value, 1e9), enough) for name, value in found.items()]
        state["evidence"] = max((min(value, 1e9) for value in found.values()), default=None)
        low, high = (
            min(state.get("low", 1.0), float(rows.scores.min())),
            max(state.get("high", 0.0), rows.scores.max()),
        )
        state["low"], state["high"] = low, float(high)
        text = f"model version {evidence.version}, {state['rows']} matured rows since its release"
        if low == high and state["rows"] >= _STUCK_ROWS:
            checks.append(
                Check(
                    name="rows of one score",
                    value=state["rows"],
                    limit=_STUCK_ROWS,
                    bound=BELOW,
                    result=FAIL,
                )
            )
        reason = f"{headline(checks)}: {text}"
        if decide(checks) == FAIL:
            kpis = evidence.kpis
            if kpis.version == evidence.version and kpis.auc is not None:
                reason += f", AUC {kpis.auc:.4f} on the last {kpis.rows} rows"
            return {**state, "state": BAD, "reason": reason}
        served = evidence.time - min(state.get("since", evidence.time), _since(evidence))
        if (
            state["rows"] >= settings.bake_rows
            and served >= settings.bake_seconds
            and decide(checks) == PASS
        ):
            return {**state, "state": WELL, "reason": f"{reason}, {served:.0f} s"}
        return {**state, "reason": f"{reason} of {settings.bake_rows}, {served:.0f} s"}

    def _add_terms(self, rows: MaturedRows, state: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return the sums of the tests, updated with `rows`.

        Each test has three sums: the excess over its limit, the squared excess, and the clicks or
        expected clicks.
        """
        ratio, least_rate = self._settings.max_calibration_ratio, state["least_rate"]
        clicks = np.bincount(rows.groups, rows.labels)
        predicted = np.bincount(rows.groups, rows.scores.astype(np.float64))
        # Use the number of clicks expected at the limit. Otherwise, a model without any click would
        # never be tested.
        terms = {
            _UNDER: (clicks - ratio * predicted, float((clicks > 0).sum())),
            _OVER: (predicted / ratio - clicks, float(np.minimum(predicted / ratio, 1.0).sum())),
        }
        if least_rate is not None:
            expected = least_rate * np.bincount(rows.groups)
            terms[_RATE] = (expected - clicks, float(np.minimum(expected, 1.0).sum()))
        added = {}
        for name, (excess, weight) in terms.items():
            total, squares, number = state["sums"].get(name, (0.0, 0.0, 0.0))
            added[name] = [
                total + float(excess.sum()),
                squares + float((excess**2).sum()),
                number + weight,
            ]
        return added

    def _decision(self, evidence: Evidence, state: Mapping[str, Any]) -> Decision:
        actions = {BAKES: Action.UNDECIDABLE, WELL: Action.OK, BAD: Action.ROLLBACK}
        numbers = {
            **evidence.window_numbers(),
            **({} if evidence.kpis.version == evidence.version else _NO_WINDOW),
            "threshold": state["least_auc"],
            "rows_since_breach": 0,
            "rows_baked": state["rows"],
            "evidence": state["evidence"],
        }
        return Decision(
            policy=self.name,
            action=actions[state["state"]],
            reason=state["reason"],
            numbers=numbers,
        )


def _check(name: str, evidence: float, enough: float) -> Check:
    """Return the check of one test. The check fails if the evidence reaches `enough`."""
    result = FAIL if evidence >= enough else INCONCLUSIVE if evidence >= _SUSPICION else PASS
    return Check(name=name, value=evidence, limit=enough, bound=BELOW, result=result)


def _since(evidence: Evidence) -> float:
    """Return the time since which all rows come from the serving version.

    If the version was a canary before, or is live again, its rows can be older than its last
    promotion.
    """
    return min(evidence.serving_since, evidence.time)


def state_of(decision: Decision) -> str:
    """Return the version's state from a decision.

    The state is one of `evergreen.contracts.baking.STATES`.
    """
    return {Action.ROLLBACK: BAD, Action.OK: WELL}.get(decision.action, BAKES)
