"""Tests of bad versions under live traffic, with all real programs.

The first version is correct, because clicks are drawn from its reference probabilities. A normal
release makes each bad version live. Bad versions answer the same traffic as the first version. The
bad version must be rolled back within a stated number of rows or rounds, by the default limits. The
test controls the clock of the loop: each round of traffic counts as a minute. Only Triton's
latencies are in real time.
"""

import json
import shutil
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from controller.__main__ import ReleaseController
from controller.baking import BAKES, COUNTERS_FILE, NONE, P99_READINGS, ROLLED_BACK, Baking
from controller.inspection import Inspection
from controller.release import ReleaseSettings
from controller.watchdog import Watchdog
from demo.triton import TritonServer, TritonSettings
from evergreen.contracts.manifests import ModelQuality
from evergreen.registry.models import verdict_paths
from evergreen.registry.promotion_journal import (
    BAKED,
    INTENT,
    RELEASE,
    ROLLBACK,
    blocked_models,
    read_entries,
)
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from evergreen.statistics.metrics import auc_estimate, roc_auc
from inference_client import Outcome
from inference_client.errors import ServerFault, ServerUnavailable, UnusableScores
from inference_client.recommender import SyncRecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import ClientSettings
from inference_client.timing import Timing
from testing.controllers import run_now
from testing.planted_models import expit
from testing.recommenders import SHOP, accept_into, shop_with
from testing.served_names import MODEL_NAME
from tests.support.deployments import release
from tests.support.monitors import WINDOW, Bench
from tests.support.real_servers import FAULT, change_code
from tests.support.stored_models import make_candidate, make_parts, raw_rows  # noqa: F401  fixtures
from tests.support.toy_models import toy_model, toy_workflow

# ruff: noqa: F811  a fixture is imported under the name of the argument

RATE, ROUND_REQUESTS, REQUEST_ROWS, POOL = 0.15, 100, 20, 4_000
ROUND_ROWS = ROUND_REQUESTS * REQUEST_ROWS
ANSWER = "        scores = self._session.run([self._output], batch)[0]\n"
FATAL_PRICE = 4242.0
"""Value of the first column that occurs in exactly one row of each round."""


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    root = tmp_path_factory.mktemp("planted")
    with TritonServer(
        root / "repository", log=root / "triton.log", settings=TritonSettings(stop_seconds=0.2)
    ) as server:
        yield server


class DeploymentTarget:
    """Installation that serves version 1, with traffic in rounds."""

    def __init__(self, triton, folder, rows, make_candidate, limits):
        self.triton, self._make, self.bench = (
            triton,
            make_candidate,
            Bench(folder, recommender=SHOP, **limits),
        )
        self._random, clock = np.random.default_rng(7), self.bench.clock
        workflow, toy = toy_workflow(2), toy_model(toy_workflow(2), 2, scale=0.5)
        self.dense, self.categorical = rows
        probabilities = toy.scores(workflow, self.dense, self.categorical)
        log_odds = np.log(probabilities / (1 - probabilities))
        shift = _shift_to(RATE, log_odds)
        self.workflow, self.toy, self.click_rates = (
            workflow,
            _with_bias(toy, shift),
            expit(log_odds + shift),
        )
        store = self.bench.settings.store
        accept_into(store, shop_with(release=limits))
        self.settings = ReleaseSettings(
            store=store,
            repository=triton.repository.as_uri(),
            triton_urls=(triton.grpc_url,),
            options=ServingOptions(instances=1),
            who="a test",
            clock=clock.moment,
        )
        self.controller = ReleaseController(
            watchdog=Watchdog(target=self.settings),
            baking=Baking(target=self.settings, metrics=(triton.metrics_address,)),
            inspection=Inspection(target=self.settings, start=run_now),
            status=folder / "status.json",
        )
        held_out = np.tile(self.click_rates, 5)
        labels = (self._random.random(len(held_out)) < held_out).astype(np.uint8)
        found = auc_estimate(labels, held_out.astype(np.float32), groups=np.arange(len(held_out)))
        self.quality = ModelQuality(auc=found.auc, auc_low=found.low, auc_high=found.high)
        self.release(1, self.toy)
        self.bench.start()

    def release(self, number, toy):
        candidate = self._make(
            self.settings.store, number, parts=(self.workflow, toy), quality=self.quality
        )
        candidate[1].write(verdict_paths(self.settings.store, f"model-{number}")[0])
        release(*candidate, settings=self.settings)

    def round(self, fill=lambda rows: rows):
        """Send a minute of requests and clicks, then run monitor and controller.

        `fill` simulates a fault of the client that fills the columns. A failed request, or a
        timeout on a busy machine, ends the minute's traffic.

        Returns: Result of the controller's round.
        """
        bench, how = (
            self.bench,
            {"timing": Timing(clock=self.bench.clock), "settings": ClientSettings(max_attempts=1)},
        )
        client = SyncRecommenderClient(self.triton.grpc_url, recommender=SHOP, log=bench.log, **how)
        with client, suppress(ServerFault, ServerUnavailable):
            for number in range(ROUND_REQUESTS):
                name = f"{bench.clock.now} {number}"
                which = self._random.integers(0, POOL, REQUEST_ROWS)
                rows = FeatureRows(dense=self.dense[which], categorical=self.categorical[which])
                clicks = self._random.random(REQUEST_ROWS) < self.click_rates[which]
                rows.dense[0, 0] = FATAL_PRICE if number == 50 else rows.dense[0, 0]
                with suppress(UnusableScores):
                    client.score(fill(rows), request_id=name)
                    for row in np.flatnonzero(clicks).tolist():
                        client.report(Outcome(request_id=name, row=row))
        bench.clock.advance(WINDOW)
        bench.turn(2, 0.0)
        self.controller.round()
        return json.loads(self.controller.status.read_text())["baking"]

    def until_rolled_back(self, most, **how):
        """Return why version 2 was rolled back.

        Assert that the rollback happens within `most` rounds, that version 1 answers again, and
        that model 2 is blocked.
        """
        for _ in range(most):
            if (found := self.round(**how))["action"] != BAKES:
                break
        assert found["action"] == ROLLED_BACK, found
        assert self.lived() == [(RELEASE, 1), (RELEASE, 2), (ROLLBACK, 1)]
        assert list(blocked_models(self.settings.store)) == ["model-2"]
        with closing(Triton(self.triton.grpc_url)) as client:
            assert client.infer(MODEL_NAME, self.dense[:3], self.categorical[:3])[1] == 1
        return found["reason"]

    def lived(self):
        """Return the journal without intents."""
        lines = read_entries(self.settings.store)
        return [(line.action, line.version) for line in lines if line.action != INTENT]


def _with_bias(toy, shift):
    return replace(toy, dense={**toy.dense, "bias": toy.dense["bias"] + np.float32(shift)})


def _shift_to(rate, log_odds):
    """Return the shift of the log-odds that gives the mean probability `rate`."""
    shifts = np.linspace(-8, 8, 1_601)
    return float(np.interp(rate, [expit(log_odds + each).mean() for each in shifts], shifts))


@pytest.fixture
def target(triton, tmp_path, raw_rows, make_candidate):
    """A `DeploymentTarget` after some rounds of traffic to version 1."""
    made = []

    def make(rounds, **limits):
        made.append(DeploymentTarget(triton, tmp_path, raw_rows(POOL, 5), make_candidate, limits))
        for _ in range(rounds):
            assert made[0].round()["action"] == NONE
        return made[0]

    yield make
    for each in made:
        each.bench.close()
    with closing(Triton(triton.grpc_url)) as client:
        client.unload(MODEL_NAME)
    shutil.rmtree(triton.repository)
    triton.repository.mkdir()


@pytest.mark.parametrize(
    ("off", "reason"),
    [(2.0, "less than 1/1.5 of the clicks"), (0.5, "more than 1.5 times the clicks")],
)
def test_calibration_off_by_two_is_rolled_back_within_10_000_rows(target, off, reason):
    deployment = target(3)
    shift = _shift_to(off * RATE, np.log(deployment.click_rates / (1 - deployment.click_rates)))
    deployment.release(2, _with_bias(deployment.toy, shift))
    assert reason in deployment.until_rolled_back(10_000 // ROUND_ROWS)


@pytest.mark.slow
def test_auc_lower_by_0_05_in_live_traffic_rolls_back_within_100_000_rows(target):
    """The client fills two columns with values of the previous row.

    The fault begins after the gate's evaluation, which used correct columns.
    The client fills the numbers with values of the previous row.
    """

    def wrong(rows):
        return replace(rows, dense=np.roll(rows.dense, 1, axis=0))

    deployment = target(8)
    labels = (np.random.default_rng(1).random(POOL) < deployment.click_rates).astype(np.uint8)
    filled = wrong(FeatureRows(dense=deployment.dense, categorical=deployment.categorical))
    lower = roc_auc(
        labels, deployment.toy.scores(deployment.workflow, filled.dense, filled.categorical)
    )
    assert roc_auc(labels, deployment.click_rates) - lower == pytest.approx(0.05, abs=0.005)
    deployment.release(2, deployment.toy)
    assert "the AUC is below" in deployment.until_rolled_back(100_000 // ROUND_ROWS, fill=wrong)


def test_scores_of_slice_that_are_no_numbers_roll_back_within_10_000_rows(target, raw_rows):
    """The affected slice is a category that does not occur in the golden rows.

    The category has a share of 1 to 5 % of the traffic.
    """
    deployment, held_out = target(1), raw_rows(60, 2)[1]
    starts = np.cumsum([0, *(3 + len(each) for each in deployment.workflow.vocabularies)])
    row = next(
        starts[column] + 3 + index
        for column, vocabulary in enumerate(deployment.workflow.vocabularies)
        for index, key in enumerate(vocabulary)
        if 0.01 < (deployment.categorical[:, column] == key).mean() < 0.05
        and key not in held_out[:, column]
    )
    table = deployment.toy.table.copy()
    table[row] = np.nan
    deployment.release(2, replace(deployment.toy, table=table))
    assert "a score that is not a probability" in deployment.until_rolled_back(10_000 // ROUND_ROWS)


def test_five_times_latency_is_rolled_back_after_thousand_requests(target):
    deployment = target(11)
    deployment.release(2, deployment.toy)
    counted = json.loads((deployment.settings.store / "baking" / COUNTERS_FILE).read_text())[
        "counts"
    ]["1"]
    seconds = 4 * counted["infer_us"] / counted["success"] / 1e6
    change_code(
        deployment.triton,
        2,
        ANSWER,
        ANSWER.replace("scores =", f"__import__('time').sleep({seconds}); scores ="),
    )
    assert "failed: latency ratio" in deployment.until_rolled_back(13)


@pytest.mark.slow
def test_one_slow_request_in_sixty_rolls_back_after_twelve_p99_readings(target):
    deployment = target(13, max_latency_ratio=100.0)
    deployment.release(2, deployment.toy)
    slow = (
        "self._asked = getattr(self, '_asked', 0) + 1; __import__('time').sleep(0.25 * "
        "(self._asked % 60 == 0))"
    )
    change_code(deployment.triton, 2, ANSWER, ANSWER.replace("scores =", f"{slow}; scores ="))
    assert "failed: p99 ratio" in deployment.until_rolled_back(P99_READINGS)


def test_stub_that_dies_of_first_malformed_row_is_rolled_back_in_third_round(target):
    deployment = target(1)
    deployment.release(2, deployment.toy)
    dies = f"        if (tensors['dense'] == {FATAL_PRICE}).any():\n            os._exit(1)\n"
    change_code(deployment.triton, 2, FAULT, FAULT + dies)
    assert "failed: reloads 3 (expected at most 2)" in deployment.until_rolled_back(3)


@pytest.mark.slow
def test_equal_version_is_baked_once_and_never_rolled_back(target):
    deployment = target(8, bake_rows=80_000, bake_seconds=1_800.0)
    deployment.release(2, deployment.toy)
    actions = [deployment.round()["action"] for _ in range(42)]
    assert set(actions) == {BAKES, BAKED, NONE}
    assert deployment.lived() == [(RELEASE, 1), (RELEASE, 2), (BAKED, 2)]
