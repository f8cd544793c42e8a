"""Tests of a baking version with simulated server counters: a worse p99, and equal versions."""

from dataclasses import replace

import numpy as np
import pytest

from controller.baking import P99_READINGS, ROLLED_BACK, Baking, VersionCounts, check_counts
from controller.canary.evidence import read_p99
from evergreen.config.release import RolloutSettings
from evergreen.contracts.checks import decide
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.errors import TemporaryError
from tests.support.clocks import Clock
from tests.support.recommenders import accept_into, criteo_with
from tests.support.served_names import MODEL_NAME

ADDRESSES = ("triton-a:8002", "triton-b:8002")


def told(version, requests, p99_ms):
    """Return a server's metrics of requests of 1 ms.

    If `p99_ms` is None, the server exports no quantiles.
    """
    labels = f'model="{MODEL_NAME}",version="{version}"'
    values = [("request_success", requests), ("compute_infer_duration_us", 1000 * requests)]
    lines = [f"nv_inference_{name}{{{labels}}} {value}" for name, value in values]
    lines += [f'nv_inference_compute_infer_summary_us{{{labels},quantile="0.5"}} 900']
    if p99_ms is not None:
        lines.append(
            f'nv_inference_compute_infer_summary_us{{{labels},quantile="0.99"}} {1000 * p99_ms}'
        )
    return "\n".join(lines) + "\n"


def test_p99_is_none_if_server_has_none_or_no_request_for_minute():
    arm = Arm(model_name=MODEL_NAME, version=2)
    found = [read_p99(told(2, 9, p99), arm) for p99 in (1.5, None, float("nan"))]
    assert (found, read_p99(told(1, 9, 1.5), arm)) == ([1500.0, None, None], None)


class Rounds:
    """Control rounds every ten seconds, with 200 requests to each server per round.

    The test sets the p99.
    """

    def __init__(self, world):
        self.world, self.clock, self.requests = world, Clock(), 0
        world.settings = replace(world.settings, clock=self.clock.moment)
        accept_into(
            world.settings.store, criteo_with(release={"bake_seconds": 7200.0, "bake_rows": 0})
        )
        self.baking = Baking(site=world.settings, metrics=ADDRESSES, fetch=self.fetch)

    def fetch(self, address):
        p99 = self.p99[ADDRESSES.index(address)]
        if p99 == "away":
            raise TemporaryError(f"metrics of {address} cannot be read")
        return told(self.version, self.requests, p99)

    def release(self, version):
        self.version, self.requests = version, 0
        self.world.release(version)

    def pass_by(self, number, *p99):
        """Run at most `number` rounds until a version is rolled back.

        Return the number of rounds and the last step.
        """
        self.p99, done = p99, []
        while len(done) < number and (not done or done[-1].action != ROLLED_BACK):
            self.requests += 200
            self.clock.advance(10)
            done.append(self.baking.step({}))
        return len(done), done[-1]


@pytest.fixture
def rounds(world):
    made = Rounds(world)
    made.release(1)
    made.pass_by(5, 90.0, 90.0)  # warm-ups
    made.pass_by(12, 2.0, 4.0)
    made.release(2)
    return made


def test_p99_of_all_requests_must_be_too_high_for_any_split_over_servers(rounds):
    rounds.pass_by(5, 90.0, 90.0)
    assert rounds.pass_by(40, 11.0, 50.0)[1].action != ROLLED_BACK, (
        "all requests but a few may be the first server's"
    )
    number, found = rounds.pass_by(40, 12.2, 12.2)
    assert (number, found.action) == (P99_READINGS // 2 + 1, ROLLED_BACK), found
    (check,) = (check for check in found.checks if check.result == "fail")
    assert (check.name, check.value, check.limit) == ("p99 ratio", pytest.approx(3.05), 3)
    assert found.reason.endswith("failed: p99 ratio 3.05 (at most 3)")


def test_slow_minute_after_release_rolls_nothing_back_and_three_do(rounds):
    assert rounds.pass_by(16, 90.0, 90.0)[1].action != ROLLED_BACK
    assert rounds.pass_by(4, 90.0, 90.0)[0] == 1, "a minute, and twelve readings ten seconds apart"


def test_p99_is_not_evaluated_while_server_does_not_answer(rounds):
    assert rounds.pass_by(40, 90.0, "away")[1].action != ROLLED_BACK


@pytest.mark.slow
def test_of_thousand_equal_versions_counters_roll_back_at_most_ten():
    """Equal versions with an hour of 20 requests a second each, with log-normal times.

    One of 500 requests stalls for 100 ms, and one of 200 fails.
    """
    looks, requests, taken = 360, 200, 0
    for seed in range(1_000):
        random = np.random.default_rng((19, seed))
        us = 1000 * random.lognormal(0.0, 0.5, (2, looks, requests))
        us += 1e5 * (random.random(us.shape) < 1 / 500)
        minutes = np.lib.stride_tricks.sliding_window_view(us, 6, axis=1).swapaxes(2, 3)
        p99 = np.quantile(minutes.reshape(2, looks - 5, -1), 0.99, axis=2)
        times, failed = (
            us.sum(axis=2).cumsum(axis=1),
            random.binomial(requests, 1 / 200, (2, looks)).cumsum(axis=1),
        )

        def counts(which, look, p99=p99, times=times, failed=failed):
            known = [
                [0.0, each, each]
                for each in p99[which, max(look - 16, 0) : max(look - 4, 0)].tolist()
            ]
            success = (look + 1) * requests - failed[which, look]
            return VersionCounts(
                success=success, failure=failed[which, look], infer_us=times[which, look], p99=known
            )

        before = counts(0, looks - 1)
        taken += any(
            decide(check_counts(counts(1, look), before, RolloutSettings())) == "fail"
            for look in range(looks)
        )
    assert taken <= 10
