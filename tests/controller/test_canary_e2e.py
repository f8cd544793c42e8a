"""Tests of a canary on the real tritonserver with the real client: no request fails."""

import json
import time
from datetime import datetime, timezone

import numpy as np
import pytest

from controller.canary import steps as canary
from controller.canary.__main__ import main
from controller.canary.evidence import counted, fetch
from evergreen.registry.models import keep_verdict
from evergreen.registry.promotion_journal import current, read_entries
from evergreen.registry.traffic_plan import Arm
from evergreen.serving.canary_policy import CanaryPolicy
from evergreen.storage.folder import FolderObjects
from evergreen.storage.uris import open_objects
from inference_client.routing import PlanFollower, PlannedClient
from inference_client.scoring import shadow_of
from testing.processes import wait_for
from testing.served_names import CANARY_NAME, MODEL_NAME
from tests.support.canaries import watch
from tests.support.deployments import start_canary as start
from tests.support.real_servers import BackgroundTraffic, under_load
from tests.support.shadow_rows import write_shadow_rows

# The two cores also run everything else, so outcomes are asserted but latency is not.
POLICY = CanaryPolicy(
    min_pairs=150,
    max_looks=3,
    auc_margin=0.3,
    log_loss_margin=0.5,
    min_requests=5,
    max_latency_ratio=1000.0,
)
ROWS = 10
PATIENCE_SECONDS = 100.0


class Load(BackgroundTraffic):
    """Clients in the background that send requests without pause, routed by the traffic plan.

    Rows that both arms scored are archived. The labels of these rows are drawn from the scores of
    one version, `true_version`.
    """

    def __init__(self, url, objects, archive, raw_rows, *, true_version):
        super().__init__()
        self._url, self._objects, self._archive, self._true_version = (
            url,
            objects,
            archive,
            true_version,
        )
        self._rows = raw_rows(200)
        self.answered = self.files = 0
        self.versions, self.failures, self.fallbacks = [], [], {}

    async def _ask(self):
        follower = PlanFollower(self._objects, MODEL_NAME, interval_seconds=0.1)
        async with PlannedClient(self._url, follower) as client:
            number, pairs = 0, []
            while not self._stop.is_set():
                number += 1
                at = np.random.default_rng(number).integers(0, 200, ROWS)
                try:
                    found = await client.score(
                        self._rows[0][at],
                        self._rows[1][at],
                        request_id=f"r{number}",
                        key=f"user-{number}",
                    )
                except Exception as error:
                    self.failures.append(error)
                    continue
                self.answered += 1
                self.versions.append(found.model_version)
                if (shadow := await shadow_of(found, 30.0)) is not None:
                    pairs.append((f"r{number}", found, shadow))
                if len(pairs) == 20:
                    self._write(pairs)
                    pairs = []
            self.fallbacks = dict(client.fallbacks)

    def _write(self, pairs):
        """Write one archive file atomically."""
        random, now = np.random.default_rng(self.files), datetime.now(timezone.utc)
        served = np.concatenate([found.scores for _, found, _ in pairs])
        shadow = np.concatenate([other.scores for _, _, other in pairs])
        by = np.repeat([found.model_version for _, found, _ in pairs], ROWS)
        other = np.repeat([answer.model_version for _, _, answer in pairs], ROWS)
        probabilities = np.where(by == self._true_version, served, shadow)
        write_shadow_rows(
            self._archive / f"day={now.date()}" / f"part-{self.files}.parquet",
            label=(random.random(len(by)) < probabilities).astype(np.int32),
            request_id=np.repeat([name for name, _, _ in pairs], ROWS),
            row=np.tile(np.arange(ROWS), len(pairs)),
            event_time=now,
            model_version=by,
            score=served,
            shadow_version=other,
            shadow_score=shadow,
        )
        self.files += 1


@pytest.fixture
def beside(deploy, settings, make_candidate, triton, client, tmp_path):
    """The server serves version 1.

    Starts version 2 as a canary and returns the canary's settings.
    """
    deploy(1)
    metrics = triton.metrics_url.removeprefix("http://").removesuffix("/metrics")

    def begin(**other):
        start(*make_candidate(settings.store, 2), settings=settings, **other)
        return canary.CanarySettings(
            target=settings,
            evidence=(FolderObjects(tmp_path / "archive"),),
            metrics=(metrics,),
            policy=POLICY,
            drain_seconds=1.0,
        )

    yield begin
    client.unload(CANARY_NAME)


def watched(settings, report_step):
    """Watch the canary with a deadline and short polling."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def sleep(seconds):
        assert time.monotonic() < deadline, "the canary did not end in time"
        time.sleep(max(0.0, min(seconds, 0.1)))

    return watch(settings, interval_seconds=0.1, sleep=sleep, report=report_step)


def test_better_canary_grows_from_one_percent_to_all_without_failed_request(
    beside, triton, client, raw_rows, tmp_path, settings
):
    steps, before_release = [], []

    def report_step(step):
        if step.action not in ("held", "draining"):
            steps.append((step.action, step.share))
        if step.action in ("held", "grown"):
            before_release[:] = [len(by_name.answers[0])]

    canary_settings = beside()
    load = Load(
        triton.grpc_url,
        open_objects(settings.repository),
        tmp_path / "archive",
        raw_rows,
        true_version=2,
    )
    with load, under_load([triton.grpc_url], raw_rows(3)) as by_name:
        watched(canary_settings, report_step)
    assert steps == [("grown", 0.05), ("grown", 0.25), ("released", 1.0), ("ended", None)]
    assert (load.failures, load.fallbacks, by_name.failures) == ([], {}, [])
    (unversioned,) = by_name.answers
    assert set(unversioned[: before_release[0]]) == {1}, (
        "clients that name no version must not reach the canary"
    )
    assert unversioned == sorted(unversioned)
    assert {1, 2} == set(load.versions)
    assert current(settings.store).version == 2
    assert not client.is_ready(CANARY_NAME, 2)
    assert client.infer(MODEL_NAME, *raw_rows(3))[1] == 2


def test_command_line_needs_only_store_and_prints_result_as_json(
    deploy, settings, make_candidate, triton, client, capsys
):
    deploy(1)
    model, verdict, raw = make_candidate(settings.store, 2)
    keep_verdict(settings.store, verdict, raw)
    metrics = triton.metrics_url.removeprefix("http://").removesuffix("/metrics")
    store = ["--store", settings.store.as_uri()]
    assert main(["start", *store, "--model-id", model.model_id, "--who", "ann"]) == 0
    assert read_entries(settings.store)[-1].who == "ann"
    capsys.readouterr()
    store += ["--metrics-urls", metrics, "--rule", "shares=0.005"]
    for command, action in (
        ("status", "held"),
        ("advance", "released"),
        ("status", "none"),
    ):
        more = ["--reason", "seen enough"] if command == "advance" else []
        assert main([command, *store, *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["action"] == action
        if action == "held":
            assert main([command, *store, *more]) == 0
            headline, header, *checks = capsys.readouterr().out.splitlines()
            assert headline.startswith("version 2: held, 1% of the traffic: ")
            assert header.split() == ["check", "value", "limit", "result"]
            assert checks
    assert current(settings.store).reason == "seen enough"
    with pytest.raises(SystemExit, match="2"):
        main(["abort", *store, "--reason", " "])
    assert main(["status", *store, "--rule", "shares=0.5,0.1"]) == 2
    assert "error: shares are" in capsys.readouterr().err
    client.unload(CANARY_NAME)


def test_servers_counters_are_those_of_each_arm_by_version(beside, triton, client, raw_rows):
    """Compare the counters with the requests that the test sent.

    The policy depends on Triton's names, labels and units.
    """
    beside()
    address = triton.metrics_url.removeprefix("http://").removesuffix("/metrics")
    arms = {
        "stable": Arm(model_name=MODEL_NAME, version=1),
        "canary": Arm(model_name=CANARY_NAME, version=2),
    }
    before = counted(fetch(address), arms)
    started = time.perf_counter()
    for name, times in ((MODEL_NAME, 3), (CANARY_NAME, 5)):
        for _ in range(times):
            client.infer(name, *raw_rows(4))
    elapsed_us = (time.perf_counter() - started) * 1e6

    def counted_since():
        after = counted(fetch(address), arms)
        return {
            arm: {name: after[arm][name] - before[arm][name] for name in after[arm]} for arm in arms
        }

    # The server counts a request after it has answered it.
    wait_for(
        lambda: all(
            counted_since()[arm]["success"] == times
            for arm, times in (("stable", 3), ("canary", 5))
        )
    )
    deltas = counted_since()
    assert deltas["stable"]["failure"] == deltas["canary"]["failure"] == 0
    assert all(delta["infer_us"] > 0 for delta in deltas.values())
    assert sum(delta["infer_us"] for delta in deltas.values()) < elapsed_us
    assert before["canary"]["success"] > 0, "warm-up and probe must be counted before the baseline"
