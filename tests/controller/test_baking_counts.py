"""Tests of baking with simulated counters: a version with a worse p99, and equal versions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from controller.baking import P99_READINGS, ROLLED_BACK, Baking, VersionCounts, check_counts
from controller.canary.evidence import HISTOGRAM, bucket_quantile, read_buckets, read_p99
from evergreen.config.release import RolloutSettings
from evergreen.contracts.checks import decide
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.errors import TemporaryError
from testing.recommenders import accept_into, shop_with
from testing.served_names import MODEL_NAME
from tests.support.clocks import Clock

ADDRESSES = ("triton-a:8002", "triton-b:8002")


def metrics_page(version, requests, p99_ms):
    """Return a server's metrics after `requests` requests of 1 ms each.

    None for `p99_ms` means that the server exports no quantiles.
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
    found = [read_p99(metrics_page(2, 9, p99), arm) for p99 in (1.5, None, float("nan"))]
    assert (found, read_p99(metrics_page(1, 9, 1.5), arm)) == ([1500.0, None, None], None)


BOUNDS = [0.5, *range(1, 16), *(2**step for step in range(4, 11))]


def histogram(version, milliseconds):
    """Return a server's histogram of these latencies in the form of Triton 26.01 and later.

    Triton's core divides nanoseconds by a million as integers before it counts a request.
    """
    milliseconds = np.floor(milliseconds)
    labels = f'model="{MODEL_NAME}",version="{version}"'
    counts = [(f"{bound}", int((milliseconds <= bound).sum())) for bound in BOUNDS]
    lines = [f"# TYPE {HISTOGRAM} histogram", f"{HISTOGRAM}_count{{{labels}}} {len(milliseconds)}"]
    lines += [f"{HISTOGRAM}_sum{{{labels}}} {milliseconds.sum()}"]
    for bound, count in (*counts, ("+Inf", len(milliseconds))):
        lines.append(f'{HISTOGRAM}_bucket{{{labels},le="{bound}"}} {count}')
    return "\n".join(lines) + "\n"


def test_p99_of_summed_buckets_is_that_of_all_requests_within_their_bucket():
    random, arm = np.random.default_rng(3), Arm(model_name=MODEL_NAME, version=2)
    slow, fast = random.lognormal(2.0, 0.5, 500), random.lognormal(0.0, 0.5, 9_500)
    parts = [read_buckets(histogram(2, part), arm) for part in (slow, fast)]
    summed = {bound: sum(part[bound] for part in parts) for bound in parts[0]}
    expected = np.percentile(np.concatenate([slow, fast]), 99)
    assert bucket_quantile(summed, 0.99) == pytest.approx(expected, rel=0.2)
    assert np.percentile(slow, 99) != pytest.approx(expected, rel=0.2), "no server has this version"
    assert np.percentile(fast, 99) != pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("low", [0.1, 1.1, 1.9, 6.3])
def test_p99_of_fast_requests_is_not_below_them_by_whole_millisecond(low):
    random, arm = np.random.default_rng(4), Arm(model_name=MODEL_NAME, version=2)
    latencies = random.uniform(low, low + 0.05, 1_000)
    p99 = bucket_quantile(read_buckets(histogram(2, latencies), arm), 0.99)
    assert latencies.max() <= p99 + 0.05
    assert p99 <= np.floor(low) + 1


def test_server_without_histogram_has_no_buckets():
    arm = Arm(model_name=MODEL_NAME, version=2)
    assert read_buckets(metrics_page(2, 9, 1.5), arm) is None
    assert read_buckets(histogram(1, np.ones(9)), arm) is None, "the counts are of another version"


class Rounds:
    """Rounds of a controller every ten seconds, with 200 requests to each server per round.

    The test sets the p99.
    """

    def __init__(self, deployment):
        self.deployment, self.clock, self.requests = deployment, Clock(), 0
        deployment.settings = replace(deployment.settings, clock=self.clock.moment)
        accept_into(
            deployment.settings.store, shop_with(release={"bake_seconds": 7200.0, "bake_rows": 0})
        )
        self.latencies = None
        """For each server, the latencies of all requests since the release. None if the servers
        have no histograms."""
        self.baking = Baking(target=deployment.settings, metrics=ADDRESSES, fetch=self.fetch)

    def fetch(self, address):
        p99 = self.p99[ADDRESSES.index(address)]
        if p99 == "away":
            raise TemporaryError(f"metrics of {address} cannot be read")
        text = metrics_page(self.version, self.requests, p99)
        if self.latencies is not None:
            text += histogram(self.version, np.concatenate(self.latencies[address]))
        return text

    def release(self, version):
        self.version, self.requests = version, 0
        if self.latencies is not None:
            self.latencies = {address: [] for address in ADDRESSES}
        self.deployment.release(version)

    def pass_by(self, number, *p99):
        """Run at most `number` rounds, and stop when a version is rolled back.

        Return the number of rounds that ran, and the last step.
        """
        self.p99, done = p99, []
        while len(done) < number and (not done or done[-1].action != ROLLED_BACK):
            self.requests += 200
            for address, times in (self.latencies or {}).items():
                times.append(self.draw(address))
            self.clock.advance(10)
            done.append(self.baking.step({}))
        return len(done), done[-1]


def test_summed_buckets_find_slow_tail_that_bounds_of_servers_cannot(deployment):
    """After the first minute, one of the two servers answers 4 % of the requests slowly."""
    rounds, random = Rounds(deployment), np.random.default_rng(5)
    rounds.latencies = {}

    def draw(tail):
        usual = random.lognormal(0.0, 0.3, 200)
        usual[:8] *= tail
        return usual

    rounds.draw = lambda address: draw(1.0)
    rounds.release(1)
    rounds.pass_by(20, 2.0, 2.0)
    rounds.draw = lambda address: draw(10.0 if address == ADDRESSES[0] else 1.0)
    rounds.release(2)
    number, found = rounds.pass_by(60, 20.0, 2.0)
    assert found.action == ROLLED_BACK
    (check,) = (check for check in found.checks if check.result == "fail")
    assert check.name == "p99 ratio"
    assert number >= P99_READINGS


def test_one_server_without_histogram_leaves_bounds_of_quantiles(deployment):
    rounds = Rounds(deployment)
    rounds.latencies = {ADDRESSES[0]: []}
    rounds.draw = lambda address: np.full(200, 1.0)
    whole = rounds.fetch
    rounds.baking.fetch = lambda address: (
        whole(address)
        if address == ADDRESSES[0]
        else metrics_page(rounds.version, rounds.requests, 2.0)
    )
    rounds.release(1)
    rounds.pass_by(20, 2.0, 2.0)
    counts = VersionCounts(**counters_of(deployment)["1"])
    assert (counts.summed_p99, len(counts.p99)) == ([], P99_READINGS)


def counters_of(deployment):
    return json.loads((deployment.settings.store / "baking" / "counters.json").read_text())[
        "counts"
    ]


@pytest.fixture
def rounds(deployment):
    made = Rounds(deployment)
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
    assert found.reason.endswith("failed: p99 ratio 3.05 (expected at most 3)")


def test_slow_minute_after_release_rolls_nothing_back_and_three_do(rounds):
    assert rounds.pass_by(16, 90.0, 90.0)[1].action != ROLLED_BACK
    assert rounds.pass_by(4, 90.0, 90.0)[0] == 1, "one minute, and twelve readings 10 s apart"


def test_p99_is_not_evaluated_while_server_does_not_answer(rounds):
    assert rounds.pass_by(40, 90.0, "away")[1].action != ROLLED_BACK


@pytest.mark.slow
def test_counters_roll_back_at_most_ten_of_thousand_equal_versions():
    """For an hour, each version gets 20 requests a second. The response times are log-normal.

    One request in 500 stalls for 100 ms, and one in 200 fails. The versions are equal.
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
