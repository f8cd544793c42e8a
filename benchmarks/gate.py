"""Measure how often the gate accepts, refuses or stays undecided, for `make benchmark-gate`.

The gate compares candidates with their champion. The AUC of a candidate is lower by a planted
amount (`testing.planted_models`). First, the shipped gate evaluates single hold-outs. In another
part, hourly runs of 20,000 rows are evaluated by the gate alone, and by the gate and a canary.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.command import benchmark_parser, documented
from benchmarks.spread import INTERVAL, Figure, Spread, share_interval
from components.evaluation.gate import SLICE_ALPHA, decide, holm
from evergreen.config.gate import GateSettings
from evergreen.serving.canary_policy import ABORT, GROW, CanaryPolicy, Pairs, check_pairs
from testing.planted_models import (
    PlantedRows,
    draw,
    draw_slices,
    noise_that_costs,
    noise_that_loses,
    shifted,
)

MARGIN = GateSettings.max_auc_loss
MARGIN_ALPHA = 0.025
"""Maximum share of accepted candidates, if all candidates are worse by the margin. A candidate is
accepted by the lower end of a 95 % interval, so the share is 2.5 %."""
LOSSES = {"better": -MARGIN, "equal": 0.0, "at the margin": MARGIN, "worse": 2 * MARGIN}
RATES, REQUEST_ROWS = (0.003, 0.03, 0.25), (1, 10)
REPEATS = {2_000: 200, 20_000: 200, 100_000: 60, 1_000_000: 10}
RUN_ROWS, RUN_RATE, HOLDOUT_FRACTION, DAY_RUNS = 20_000, 0.03, 0.1, 24


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study.

    Returns 1 if bad candidates went live more often than the documentation states, else 0.
    """
    parser = benchmark_parser(
        "gate", __doc__, quick="a twentieth of the repeats, no hold-outs of a million rows"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of all rows (default: %(default)s)"
    )
    flags = parser.parse_args(argv)
    share = 20 if flags.quick else 1
    num_canaries = 200 // share
    with documented(flags) as document:
        repeats = {rows: count // share for rows, count in REPEATS.items() if count > share}
        document["holdouts"] = [
            each for rate in RATES for each in holdouts(rate, repeats, seed=flags.seed)
        ]
        document["rounds"] = rounds(100 // share, seed=flags.seed)
        document["slices"] = slices(RUN_ROWS, RUN_RATE, 1_000 // share, seed=flags.seed)
        document["canaries"] = [
            each for rate in RATES for each in canaries(rate, num_canaries, seed=flags.seed)
        ]
        document["figures"] = figures(document, repeats, num_canaries=num_canaries)
    edge = [case["grown"] for case in document["canaries"] if case["candidate"] == "at the margin"]
    bound = CanaryPolicy.growth_alpha + 3 * (CanaryPolicy.growth_alpha / num_canaries) ** 0.5
    return int(any(found > bound for found in edge))


def figures(
    document: Mapping[str, Any], repeats: Mapping[int, int], *, num_canaries: int
) -> list[Figure]:
    """Return the measured shares with their 95 % intervals, for all stated bounds and all canaries.

    `repeats` maps the number of hold-out rows to the number of repetitions.
    """

    def share(name: str, value: float, *, count: int, target: float | None) -> Figure:
        within = Spread(value, *share_interval(round(value * count), count))
        return Figure(name, within, f"of {count:,} {INTERVAL}", target=target)

    found = []
    for case in (each for each in document["holdouts"] if each["candidate"] == "at the margin"):
        name = f"hold-out of {case['rows']:,} rows, {_traffic(case)}, a loss of the margin passes"
        found.append(share(name, case["pass"], count=repeats[case["rows"]], target=MARGIN_ALPHA))
    for case in document["slices"]:
        target = None if case["harmed"] in HARMED else SLICE_ALPHA
        name = f"{case['harmed']} loses {case['loss']:g}, {_traffic(case)}, refused"
        found.append(share(name, case["refused"], count=case["rounds"], target=target))
    for case in document["canaries"]:
        target = CanaryPolicy.growth_alpha if case["candidate"] == "at the margin" else None
        name = f"canary {case['candidate']}, {_traffic(case)}, grown"
        found.append(share(name, case["grown"], count=num_canaries, target=target))
    return found


def _traffic(case: Mapping[str, Any]) -> str:
    return f"clicks {case['rate']:.1%}, requests of {case['rows_per_request']}"


def holdouts(rate: float, repeats: dict[int, int], *, seed: int) -> list[dict[str, Any]]:
    """Return the shares of the gate's decisions, by hold-out size, request size and candidate."""
    found = []
    for rows, count in repeats.items():
        for rows_per_request in REQUEST_ROWS:
            for name, loss in LOSSES.items():
                decisions: Counter[str] = Counter()
                for number in range(count):
                    random = np.random.default_rng((seed, rows, rows_per_request, number))
                    drawn = draw(
                        random,
                        rows=rows,
                        rate=rate,
                        rows_per_request=rows_per_request,
                        noise=noise_that_loses(rate, loss),
                    )
                    decisions[gate_decision(drawn)] += 1
                case = {
                    "rate": rate,
                    "rows": rows,
                    "rows_per_request": rows_per_request,
                    "candidate": name,
                }
                found.append(
                    case
                    | {each: decisions[each] / count for each in ("pass", "fail", "inconclusive")}
                )
                print(_line(found[-1]), flush=True)
    return found


def gate_decision(rows: PlantedRows) -> str:
    """Return the decision of the shipped gate, with a minimum AUC of 0."""
    settings = GateSettings(min_auc=0.0)
    return decide(
        rows.labels, rows.candidate, rows.champion, groups=rows.requests, settings=settings
    ).decision


def rounds(repeats: int, *, seed: int) -> list[dict[str, Any]]:
    """Simulate lineages of runs, and return how many candidates were released within a day.

    In each lineage, every candidate is worse by the same amount.
    """
    found = []
    for rows_per_request in REQUEST_ROWS:
        for name, loss in LOSSES.items():
            passed = []
            for number in range(repeats):
                random = np.random.default_rng((seed, 7, rows_per_request, number))
                passed.append(first_accepted_run(random, rows_per_request, loss))
            case = {"rate": RUN_RATE, "rows_per_request": rows_per_request, "candidate": name}
            known = [each for each in passed if each is not None]
            figures = {
                "within_a_day": len(known) / repeats,
                "median_round": median(known) if known else None,
            }
            found.append(case | figures)
            print(_line(case | figures), flush=True)
    return found


def first_accepted_run(random: Generator, rows_per_request: int, loss: float) -> int | None:
    """Return the first run of a day that passes the gate.

    Rows of a run without a release are also in the next run's window.
    """
    noise = noise_that_loses(RUN_RATE, loss)
    for number in range(1, DAY_RUNS + 1):
        rows = int(RUN_ROWS * HOLDOUT_FRACTION) * number
        drawn = draw(
            random, rows=rows, rate=RUN_RATE, rows_per_request=rows_per_request, noise=noise
        )
        if gate_decision(drawn) == "pass":
            return number
    return None


def canaries(rate: float, repeats: int, *, seed: int) -> list[dict[str, Any]]:
    """Return the share of canaries that get more traffic, and the number of row pairs until then.

    The shipped policy decides about each canary. The result has one entry for each request size and
    candidate.
    """
    policy, found = CanaryPolicy(), []
    for rows_per_request in REQUEST_ROWS:
        for name, loss in LOSSES.items():
            ends = []
            for number in range(repeats):
                random = np.random.default_rng((seed, 9, rows_per_request, number))
                noise = noise_that_loses(rate, loss)
                rows = draw(
                    random,
                    rows=policy.looks[-1],
                    rate=rate,
                    rows_per_request=rows_per_request,
                    noise=noise,
                )
                ends.append(canary_end(rows, policy))
            grown = [size for action, size in ends if action == GROW]
            day = [size for size in grown if size <= DAY_RUNS * RUN_ROWS]
            case = {"rate": rate, "rows_per_request": rows_per_request, "candidate": name}
            figures = {
                "grown": len(grown) / repeats,
                "within_a_day": len(day) / repeats,
                "median_pairs": median(grown) if grown else None,
                "median_hours": median(grown) / RUN_ROWS if grown else None,
            }
            found.append(case | figures)
            print(_line(case), figures, flush=True)
    return found


def canary_end(rows: PlantedRows, policy: CanaryPolicy) -> tuple[str, int]:
    """Return the first decision to grow or abort the canary, and the number of row pairs."""
    pairs = Pairs(
        labels=rows.labels, stable=rows.champion, canary=rows.candidate, groups=rows.requests
    )
    for size in policy.looks:
        action = check_pairs(pairs.first(size), policy).action
        if action in (GROW, ABORT):
            return action, size
    raise AssertionError("the policy made no decision after its last look")


def slices(rows: int, rate: float, repeats: int, *, seed: int) -> list[dict[str, Any]]:
    """Return how often the gate's check of slices refuses a candidate.

    In one case, no slice is worse. In another case, every slice is worse by the largest allowed
    amount. In the remaining cases, only one slice is worse, by more than the largest allowed
    amount. The slices come from 26 columns with Zipf-distributed categories. Half of these columns
    are constant within a request. Each candidate harms one of two slices: one slice has a twentieth
    of the rows, and the other slice has a quarter. In the rows of a harmed slice, the odds of a
    click are multiplied by a constant factor.
    """
    settings, found = GateSettings(min_auc=0.0, max_auc_loss=1.0), []
    allowed = settings.max_slice_loss
    harms = [
        ("none", 0.0),
        ("all, as allowed", allowed),
        *((name, part) for name in HARMED for part in HARMS),
    ]
    for rows_per_request in REQUEST_ROWS:
        for name, part in harms:
            planted, refused, named = name in HARMED, 0, 0
            noise = noise_that_costs(rate, 0.0 if planted else part)
            count = repeats // 4 if planted else repeats
            for number in range(count):
                random = np.random.default_rng((seed, 11, rows, rows_per_request, number))
                drawn = draw(
                    random, rows=rows, rate=rate, rows_per_request=rows_per_request, noise=noise
                )
                parts = draw_slices(random, drawn.requests)
                candidate = drawn.candidate.copy()
                if planted:
                    candidate[parts[name]] = shifted(drawn.candidate[parts[name]], part)
                decision = decide(
                    drawn.labels,
                    candidate,
                    drawn.champion,
                    groups=drawn.requests,
                    slices=parts,
                    settings=settings,
                )
                harmed = holm(decision.slice_p_values, SLICE_ALPHA)
                refused, named = refused + bool(harmed), named + (name in harmed)
            case = {
                "rate": rate,
                "rows": rows,
                "rows_per_request": rows_per_request,
                "harmed": name,
                "loss": part,
            }
            figures = {"refused": refused / count, "named": named / count, "rounds": count}
            found.append(case | figures)
            print(_line(case | figures), flush=True)
    return found


HARMED = {"column 20: 4": 0.05, "column 20: 0": 0.25}
"""Harmed slices, and their approximate share of the rows."""
HARMS = (0.05, 0.1, 0.2, 0.4)


def _line(case: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in case.items())


if __name__ == "__main__":
    sys.exit(main())
