"""Measure false alarms and delays of the monitor's policies on planted streams.

Run by `make benchmark-policies`. In stationary streams, the AUC is always .80, so every retrain
request is a false alarm. In other streams, the AUC falls to .70. Streams with and without a fall of
the AUC are drawn at three click rates. In another part, several rows of a stream have the same
user. The sequential test then counts either rows or requests as independent. The last part
simulates hours of traffic under continuous retraining, with a release every 0.2, 1 or 5 attribution
windows. `testing.click_streams` and `release_streams` generate the streams, and the policies are
the monitor's own.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.command import benchmark_parser, documented
from benchmarks.spread import INTERVAL, Figure, Spread, share_interval
from evergreen.config.monitor import PolicySettings
from evergreen.statistics.metrics import auc_estimate, roc_auc
from monitoring.policies.policies import SequentialPolicy, ThresholdPolicy
from monitoring.policies.policy import Action, DecisionPoint, MaturedRows, Policy
from testing.click_streams import (
    ClickTraffic,
    Windows,
    draw,
    first_run,
    joined,
    of_partition,
    part,
)
from testing.release_streams import START, Releases, decisions

GOOD, FALLEN = 0.80, 0.70
THRESHOLD = 0.74
"""AUC threshold of each policy that uses the same threshold for all versions."""
WINDOW_ROWS = 20_000
EDGE_ALPHA = 0.05
"""Alpha of tests without a tolerance. Without a tolerance, false alarms are as frequent as the
bound allows. `EDGE_ALPHA` is large enough to count false alarms in 1,000 streams."""
REFERENCE_ROWS = 200
REFERENCE_STRIDE = 10
"""Number of records between two checks of the reference. The reference would check after every
record, but a check of every tenth record is enough to show its false alarms."""


@dataclass(frozen=True)
class PolicyCase:
    """Length of the streams for one click rate."""

    traffic: ClickTraffic
    window_step: int
    """Number of rows between two checks of the window of 20,000 rows. The window changes slowly and
    a check takes milliseconds, so not every row is checked."""
    stationary: int
    """Rows of a stationary stream."""
    before: int
    """Number of rows before the AUC falls."""
    fallen: int
    """Number of simulated rows after the fall of the AUC."""


CASES = {
    "0.1 %": PolicyCase(ClickTraffic(0.001, 5_000), 5_000, 300_000, 100_000, 600_000),
    "3 %": PolicyCase(ClickTraffic(0.03, 500), 2_000, 60_000, 30_000, 40_000),
    "25 %": PolicyCase(ClickTraffic(0.25, 250), 2_000, 40_000, 30_000, 30_000),
}
USERS = {
    "3 %, 10 rows a request": ClickTraffic(0.03, 1_000, rows_per_request=10, user_spread=1.0),
    "25 %, 10 rows a request": ClickTraffic(0.25, 1_000, rows_per_request=10, user_spread=1.0),
}
USER_ROWS = 40_000
RELEASES = Releases(
    every=1800.0, seconds=4 * 3600.0, window=1800.0, decide=120.0, rows_per_second=4.0
)
"""Four hours of traffic with an attribution window of half an hour. The AUC falls from .79 to
.62."""
FALL_AFTER, FALL_DECIDE = 5400.0, 30.0
"""Two durations in seconds. The AUC falls after `FALL_AFTER`, midway between two releases. From
then on, decision points are `FALL_DECIDE` seconds apart."""
RELEASE_WINDOWS = (0.2, 1.0, 5.0)
"""Number of attribution windows between two releases."""
GATE_HALF_WIDTH = 0.005
"""Half-width of the gate's interval for a policy with default settings."""
PARTITIONS = 4
"""Number of partitions of the event log. Only the monitor of the first partition decides. The hash
of a request's id determines its partition, so each partition has a sample of the requests."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study.

    Returns 0 if false alarms are within the bounds, or 1 if there are more.
    """
    parser = benchmark_parser(
        "policies", __doc__, quick="50 streams in place of 1,000, to test that it runs"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of all streams (default: %(default)s)"
    )
    flags = parser.parse_args(argv)
    streams, falls = (50, 20) if flags.quick else (1_000, 200)
    rates, users, releases = {}, {}, {}
    with documented(flags) as document:
        for name, case in CASES.items():
            print(
                f"click rate {name}: {streams} stationary streams of {case.stationary:,} rows, "
                f"{falls} that fall"
            )
            rates[name] = study(case, streams=streams, falls=falls, seed=flags.seed)
        for name, traffic in USERS.items():
            print(f"rows that share their user, {name}: {streams} streams of {USER_ROWS:,} rows")
            users[name] = study_users(traffic, streams=streams, seed=flags.seed)
        name = "3 %, 10 rows a request"
        print(
            f"one partition of {PARTITIONS}, {name}: {streams} streams of "
            f"{PARTITIONS * USER_ROWS:,} rows"
        )
        users[f"{name}, of one partition in {PARTITIONS}"] = study_partition(
            USERS[name], streams=streams, seed=flags.seed
        )
        for windows in RELEASE_WINDOWS:
            print(
                f"releases every {windows:g} attribution windows: {streams} streams without a "
                f"change, {falls} with one"
            )
            releases[f"{windows:g}"] = study_releases(
                windows, streams=streams, falls=falls, seed=flags.seed
            )
        document |= {"rates": rates, "users": users, "releases": releases}
        titled = {f"clicks {rate}": found for rate, found in (*rates.items(), *users.items())}
        titled |= {
            f"a release every {windows} attribution windows": found
            for windows, found in releases.items()
        }
        for title, found in titled.items():
            document["figures"] += [
                Figure(
                    f"{title}, {name}, false alarms",
                    Spread(each["false_alarms"] / each["streams"], each["low"], each["high"]),
                    f"of {each['streams']} streams {INTERVAL}",
                    target=each["bound"],
                )
                for name, each in found.items()
            ]
        print(table(document))
    studies = (*rates.values(), *users.values(), *releases.values())
    return int(not all(figures["holds"] for each in studies for figures in each.values()))


FirstRun = Callable[[MaturedRows, Windows, int], "int | None"]
"""Function that returns the row of the first retrain request. The arguments of the function are a
stream, its windows, and the first row that counts."""


def compared_policies(case: PolicyCase) -> dict[str, tuple[float | None, FirstRun]]:
    """Return each policy by name with its bound on false alarms.

    The bound is None if there is no bound.
    """
    alpha, tolerance = PolicySettings.sequential_alpha, PolicySettings.sequential_tolerance

    def run(policy: Policy) -> FirstRun:
        step = (
            case.traffic.rows_per_decision
            if isinstance(policy, SequentialPolicy)
            else case.window_step
        )
        return lambda stream, windows, after: first_run(
            policy, stream, step=step, windows=windows, gate_auc=GOOD, after=after
        )

    return {
        f"sequential, alpha {alpha:g}, tolerance {tolerance:g}": (
            alpha,
            run(_sequential(alpha, tolerance)),
        ),
        f"sequential at its edge, alpha {EDGE_ALPHA:g}": (
            EDGE_ALPHA,
            run(_sequential(EDGE_ALPHA, 0.0)),
        ),
        "threshold with confidence": (
            None,
            run(ThresholdPolicy(PolicySettings(auc_threshold=THRESHOLD))),
        ),
        "reference, 200 rows": (
            None,
            lambda stream, _, after: reference_first_run(stream, after=after),
        ),
    }


def _sequential(alpha: float, tolerance: float) -> SequentialPolicy:
    return SequentialPolicy(PolicySettings(sequential_alpha=alpha, sequential_tolerance=tolerance))


def reference_first_run(stream: MaturedRows, *, after: int) -> int | None:
    """Return the index of the row after which the reference policy requests a run.

    The reference policy requests a run as soon as the AUC of the last 200 rows is below the
    threshold, even with few clicks.
    """
    ends = np.arange(max(after + 1, REFERENCE_ROWS), len(stream.labels) + 1, REFERENCE_STRIDE)
    for some in np.split(
        ends, range(250, len(ends), 250)
    ):  # check chunk by chunk, because the first chunk often has an alarm
        rows = some[:, None] - REFERENCE_ROWS + np.arange(REFERENCE_ROWS)
        order = np.argsort(stream.scores[rows], axis=1)
        clicks = np.take_along_axis(stream.labels[rows], order, axis=1).astype(np.int64)
        num = clicks.sum(axis=1)
        ranks = (clicks * np.arange(1, REFERENCE_ROWS + 1)).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            aucs = (ranks - num * (num + 1) / 2) / (num * (REFERENCE_ROWS - num))
        if (below := np.flatnonzero(aucs < THRESHOLD)).size:
            return int(some[below[0]])
    return None


def study(case: PolicyCase, *, streams: int, falls: int, seed: int) -> dict[str, Any]:
    """Return false alarms and delays of every policy at one click rate."""
    compared = compared_policies(case)
    alarms: dict[str, list[int | None]] = {name: [] for name in compared}
    delays: dict[str, list[int | None]] = {name: [] for name in compared}
    for number in range(streams):
        stream = draw(
            np.random.default_rng((seed, 0, number)), case.traffic, rows=case.stationary, auc=GOOD
        )
        windows = Windows(stream, WINDOW_ROWS)
        for name, (_, first) in compared.items():
            alarms[name].append(first(stream, windows, 0))
    for number in range(falls):
        random = np.random.default_rng((seed, 1, number))
        before = draw(random, case.traffic, rows=case.before, auc=GOOD)
        stream = joined(before, draw(random, case.traffic, rows=case.fallen, auc=FALLEN))
        windows = Windows(stream, WINDOW_ROWS)
        for name, (_, first) in compared.items():
            delays[name].append(first(stream, windows, case.before))
    return {
        name: {**false_alarms(alarms[name], bound), **delay(delays[name], case.before)}
        for name, (bound, _) in compared.items()
    }


def _pooled_auc(traffic: ClickTraffic, auc: float, *, rows: int = 4_000_000) -> float:
    """Return the AUC over all pairs of rows of `traffic`, as the gate measures it.

    If users do not differ (`user_spread` is 0), this AUC equals `auc`. Otherwise, the AUC is
    estimated from a sample.
    """
    if not traffic.user_spread:
        return auc
    drawn = draw(np.random.default_rng(2**32), traffic, rows=rows, auc=auc)
    measured = roc_auc(drawn.labels, drawn.scores)
    assert measured is not None
    return measured


def study_users(traffic: ClickTraffic, *, streams: int, seed: int) -> dict[str, Any]:
    """Return the false alarms of two tests that differ in their independent units.

    The first test treats requests as independent, and the second test treats rows as independent.
    The tests use `EDGE_ALPHA` and no tolerance, so that their false alarms reach the bound. The
    gate's AUC is computed over all pairs of rows.
    """
    gate = _pooled_auc(traffic, GOOD)
    policy = _sequential(EDGE_ALPHA, 0.0)
    alarms: dict[str, list[int | None]] = {"by request": [], "by row": []}
    for number in range(streams):
        stream = draw(np.random.default_rng((seed, 2, number)), traffic, rows=USER_ROWS, auc=GOOD)
        by_row = replace(stream, groups=np.arange(len(stream.groups)))
        for name, each in (("by request", stream), ("by row", by_row)):
            alarms[name].append(
                first_run(policy, each, step=traffic.rows_per_decision, windows=None, gate_auc=gate)
            )
    bounds = {"by request": EDGE_ALPHA, "by row": None}
    return {
        f"one bet {name}, pooled AUC {gate:.4f}": false_alarms(alarms[name], bounds[name])
        for name in alarms
    }


def study_partition(traffic: ClickTraffic, *, streams: int, seed: int) -> dict[str, Any]:
    """Return false alarms of the test on one partition's requests.

    The result also counts the windows with an interval that does not contain the AUC of all rows.
    """
    gate = _pooled_auc(traffic, GOOD)
    policy = _sequential(EDGE_ALPHA, 0.0)
    alarms: list[int | None] = []
    missed: list[int | None] = []
    for number in range(streams):
        random = np.random.default_rng((seed, 3, number))
        whole = draw(random, traffic, rows=PARTITIONS * USER_ROWS, auc=GOOD)
        stream = of_partition(whole, f"stream {number}", partitions=PARTITIONS)
        alarms.append(
            first_run(policy, stream, step=traffic.rows_per_decision, windows=None, gate_auc=gate)
        )
        window = part(stream, len(stream.labels) - WINDOW_ROWS, len(stream.labels))
        found = auc_estimate(window.labels, window.scores, groups=window.groups)
        assert found is not None
        missed.append(None if found.low <= gate <= found.high else number)
    return {
        f"one bet by request, pooled AUC {gate:.4f}": false_alarms(alarms, EDGE_ALPHA),
        "a window's 95 % interval misses it": false_alarms(missed, EDGE_ALPHA),
    }


def study_releases(windows: float, *, streams: int, falls: int, seed: int) -> dict[str, Any]:
    """Return the false alarms and delays of the sequential test for one release interval.

    The monitor's own code decides. A retrain request before the change is a false alarm. After the
    change, a retrain request is a false alarm if the live version was already trained on rows from
    after the change. All versions of a stream share one alpha. The delay in seconds lasts from the
    change to the event time of the newest row that the alarm used. The change is midway between two
    releases.
    """
    steady = replace(RELEASES, every=windows * RELEASES.window)
    middle = (FALL_AFTER // steady.every + 0.5) * steady.every
    falling = replace(
        steady,
        changed_at=middle,
        seconds=middle + steady.window + 3600.0,
        decide=FALL_DECIDE,
        gate_half_width=GATE_HALF_WIDTH,
    )
    edge = PolicySettings(sequential_alpha=EDGE_ALPHA, sequential_tolerance=0.0)
    randoms = [
        [np.random.default_rng((seed, kind, number)) for number in range(streams)]
        for kind in (4, 5)
    ]
    alarms: dict[str, list[int | None]] = {
        name: [next(_requests(each, releases, settings), None) for each in random]
        for random, (name, releases, settings) in zip(
            randoms,
            (
                (f"sequential at its edge, alpha {EDGE_ALPHA:g}", steady, edge),
                ("sequential", replace(steady, gate_half_width=GATE_HALF_WIDTH), PolicySettings()),
            ),
        )
    }
    bounds = (EDGE_ALPHA, PolicySettings.sequential_alpha)
    found = {name: false_alarms(each, bound) for (name, each), bound in zip(alarms.items(), bounds)}
    late, seconds = [], []
    for number in range(falls):
        points = list(decisions(np.random.default_rng((seed, 6, number)), falling))
        late.append(next((1 for each in points if _is_late_alarm(each, falling)), None))
        seen = [
            each.time - START - middle
            for each in points
            if each.time - START > middle and _shows_a_change(each)
        ]
        seconds.append(min(seen, default=math.inf))
    missed = sum(each == math.inf for each in seconds)
    delays = {
        "falls": falls,
        "missed": missed,
        "median_seconds": None if 2 * missed > falls else median(seconds),
    }
    found["sequential"] |= delays
    found["sequential, for a version that was trained on the change"] = false_alarms(
        late, PolicySettings.sequential_alpha
    )
    return found


def _requests(
    random: np.random.Generator, releases: Releases, settings: PolicySettings
) -> Iterator[int]:
    """Yield the time of each decision point with a retrain request, in seconds from the start."""
    for point in decisions(random, releases, settings):
        if point.decision.action is Action.RETRAIN:
            yield round(point.time - START)


def _shows_a_change(point: DecisionPoint) -> bool:
    """Return whether the decision shows that the policy has detected the change.

    The policy has detected the change if it requests a run, or if its reason mentions training rows
    from after the change.
    """
    return (
        point.decision.action is Action.RETRAIN
        or "rows from after the change" in point.decision.reason
    )


def _is_late_alarm(point: DecisionPoint, releases: Releases) -> bool:
    return point.decision.action is Action.RETRAIN and releases.recovers_from(point.version)


def false_alarms(alarms: Sequence[int | None], bound: float | None) -> dict[str, Any]:
    """Return the number of streams with a false alarm, and whether it is within the bound.

    The result also has the 95 % interval (Wilson) for the share of streams with a false alarm.
    """
    count, total = sum(each is not None for each in alarms), len(alarms)
    low, high = share_interval(count, total)
    holds = bound is None or low <= bound
    return {
        "streams": total,
        "false_alarms": count,
        "low": low,
        "high": high,
        "bound": bound,
        "holds": holds,
    }


def delay(found: Sequence[int | None], before: int) -> dict[str, Any]:
    """Return the median number of rows from the fall of the AUC to the retrain request.

    Requests before the fall are not counted. Returns None if most streams have no request.
    """
    rows = [
        math.inf if each is None else each - before
        for each in found
        if each is None or each > before
    ]
    middle = median(rows) if rows else math.inf
    missed = sum(each == math.inf for each in rows)
    return {
        "falls": len(rows),
        "missed": missed,
        "median_rows": None if middle == math.inf else middle,
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = []
    for rate, found in result["rates"].items():
        columns = f"{'false alarms [95 %]':>28}{'bound':>8}{'rows to find .70':>18}{'missed':>9}"
        lines += ["", f"{'clicks ' + rate:<40}{columns}"]
        for name, figures in found.items():
            rows = "never" if figures["median_rows"] is None else f"{figures['median_rows']:,.0f}"
            missed = f"{figures['missed']}/{figures['falls']}"
            lines.append(f"{name:<40}{_share_cell(figures)}{rows:>18}{missed:>9}")
    for rate, found in result["users"].items():
        lines += ["", f"rows share their user, {rate}, at its edge"]
        lines += [f"{name:<40}{_share_cell(figures)}" for name, figures in found.items()]
    for windows, found in result["releases"].items():
        lines += ["", f"a release every {windows} attribution windows of half an hour"]
        for name, figures in found.items():
            delay = ""
            if "falls" in figures:
                seconds = figures["median_seconds"]
                delay = f"{'never' if seconds is None else f'{seconds / 60:.1f} min':>18}"
                delay += f"{figures['missed']:>5}/{figures['falls']}"
            lines.append(f"{name:<50}{_share_cell(figures)}{delay}")
    return "\n".join(lines)


def _share_cell(figures: dict[str, Any]) -> str:
    bound = (
        "none"
        if figures["bound"] is None
        else f"{figures['bound']:g}{'' if figures['holds'] else ' BROKEN'}"
    )
    share = (
        f"{figures['false_alarms']}/{figures['streams']} [{figures['low']:.3f}, "
        f"{figures['high']:.3f}]"
    )
    return f"{share:>28}{bound:>8}"


if __name__ == "__main__":
    sys.exit(main())
