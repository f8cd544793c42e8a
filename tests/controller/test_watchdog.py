"""Tests of the watchdog with a real tritonserver: the faults that it repairs and ignores."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from controller import watchdog as module
from controller.__main__ import POLL_SECONDS, ReleaseController, control, main
from controller.baking import Baking
from controller.deployment_target import opened
from controller.inspection import Inspection
from controller.watchdog import (
    BUSY,
    HEALED,
    HEALTHY,
    SKIPPED,
    SUSPECT,
    UNHEALTHY,
    UNREACHABLE,
    Watchdog,
)
from demo.triton import TritonServer, TritonSettings
from evergreen.contracts.manifests import Release
from evergreen.registry.models import release_path
from evergreen.registry.promotion_journal import (
    CANARY,
    INTENT,
    JOURNAL_FILE,
    WITHDRAWN,
    read_entries,
)
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from evergreen.storage.uris import open_objects
from testing.controllers import run_now
from testing.paths import REPOSITORY
from testing.processes import wait_for
from testing.served_names import CANARY_NAME, MODEL_NAME, NAMES
from tests.support.deployments import release, start_canary
from tests.support.model_repository import with_versions
from tests.support.real_servers import RetryingTraffic, kill_stubs, live_version
from tests.support.traffic_plans import make_plan


@pytest.fixture(autouse=True)
def running(triton):
    if not triton.alive():
        triton.start()


@pytest.fixture
def watchdog(settings):
    return Watchdog(target=settings)


def findings(watchdog):
    """Return the findings about the live model on the only server."""
    return [finding for key, finding in watchdog.check().items() if key.endswith(f" {MODEL_NAME}")]


def test_stub_killed_under_load_is_healed_and_requests_succeed_again(
    deploy, client, triton, watchdog, raw_rows
):
    deploy(1)
    assert findings(watchdog) == [HEALTHY]
    with RetryingTraffic(triton.grpc_url, raw_rows(8)) as traffic:
        traffic.more()
        kill_stubs(triton)
        wait_for(lambda: traffic.failures)
        assert client.is_ready(MODEL_NAME, 1), "the server reports a dead model as ready"
        with pytest.raises(PermanentError, match="not healthy"):
            client.infer(MODEL_NAME, *raw_rows(3))
        assert findings(watchdog) == [HEALED]
        traffic.more()
    assert {answer.model_version for answer in traffic.answers} == {1}
    assert findings(watchdog) == [HEALTHY]
    assert watchdog.counts == {HEALTHY: 2, HEALED: 1}


class OutOfTurn(Triton):
    """A real connection to two instances, one of which is dead.

    The server sends the first request to the healthy instance. Afterwards, the dead instance gets
    every second request.
    """

    turns = []

    def infer(self, *arguments, **flags):
        if self.turns and self.turns.pop(0) == "dead":
            raise PermanentError(f"triton {self.url}: Stub process 'live_0_1' is not healthy.")
        return super().infer(*arguments, **flags)

    def unload(self, name):
        self.turns.clear()
        super().unload(name)


def test_dead_stub_that_missed_first_probe_is_found_in_same_round(make_candidate, settings):
    release(
        *make_candidate(settings.store, 1),
        settings=dataclasses.replace(settings, options=ServingOptions(instances=2)),
    )
    OutOfTurn.turns[:] = ["alive", "alive"] + ["dead", "alive"] * 8
    watchdog = Watchdog(target=dataclasses.replace(settings, connect=OutOfTurn))
    assert [findings(watchdog) for _ in range(2)] == [[HEALED], [HEALTHY]]


def test_during_release_nothing_is_reloaded_and_after_it_model_is_healed(
    deploy, client, triton, watchdog, settings, raw_rows
):
    deploy(1)
    kill_stubs(triton)
    with ModelRepository(open_objects(settings.repository), NAMES).locked():
        assert findings(watchdog) == [SKIPPED]
        with pytest.raises(PermanentError, match="not healthy"):
            client.infer(MODEL_NAME, *raw_rows(3))
    assert findings(watchdog) == [HEALED]
    assert live_version(client, raw_rows(3)) == 1


class Counted(Triton):
    """A real connection that records the models of its load requests."""

    loads = []

    def load(self, name):
        self.loads.append(name)
        super().load(name)


def test_wrong_scores_need_two_readings_and_reloads_become_ever_rarer(
    deploy, client, triton, settings
):
    deploy(1), deploy(2)
    # The checksum record changes too, because a graph that does not match its record is never
    # loaded.
    other, live = (triton.repository / MODEL_NAME / version for version in "12")
    right = {
        name: (live / name).read_bytes() for name in ("model.onnx", "model.data", "version.json")
    }
    for name in right:
        (live / name).write_bytes((other / name).read_bytes())
    client.unload(MODEL_NAME)
    client.load(MODEL_NAME)
    watchdog, loads = Watchdog(target=dataclasses.replace(settings, connect=Counted)), []
    for _ in range(7):
        Counted.loads.clear()
        found = findings(watchdog)
        loads.append(len(Counted.loads))
        assert found == [UNHEALTHY if len(loads) > 1 else SUSPECT]
    assert [number for number, count in enumerate(loads, start=1) if count] == [2, 4]
    for name, content in right.items():
        (live / name).write_bytes(content)
    assert [findings(watchdog) for _ in range(2)] == [[HEALED], [HEALTHY]]


class Overloaded(Counted):
    """Test double of a server that rejects every request because its queue is full.

    tests/e2e/test_serving_faults.py checks that a real server rejects requests with the same error.
    """

    def infer(self, *_, **__):
        raise TemporaryError(
            f"triton {self.url}: inference failed: [request id: 1] Exceeds maximum queue size"
        )


def test_overloaded_server_is_busy_and_never_reloaded(deploy, settings, client):
    deploy(1)
    watchdog = Watchdog(target=dataclasses.replace(settings, connect=Overloaded))
    Counted.loads.clear()
    assert [findings(watchdog) for _ in range(5)] == [[BUSY]] * 5
    assert Counted.loads == []


def test_server_with_another_version_gets_live_one_without_failures(
    deploy, client, watchdog, triton, raw_rows
):
    deploy(1), deploy(2)
    config = triton.repository / MODEL_NAME / "config.pbtxt"
    published = config.read_text()
    config.write_text(with_versions(published, [1]))
    client.load(MODEL_NAME)
    config.write_text(published)
    assert live_version(client, raw_rows(3)) == 1
    with RetryingTraffic(triton.grpc_url, raw_rows(8)) as traffic:
        assert [findings(watchdog) for _ in range(2)] == [[SUSPECT], [HEALED]]
        wait_for(lambda: traffic.answers and traffic.answers[-1].model_version == 2)
    assert traffic.failures == []
    assert live_version(client, raw_rows(3)) == 2


def test_change_that_was_killed_is_undone(deploy, client, watchdog, settings, raw_rows):
    deploy(1), deploy(2)
    controller = ReleaseController(
        watchdog=watchdog,
        baking=Baking(target=settings),
        inspection=Inspection(target=settings, start=run_now),
    )
    with opened(settings) as target:
        config = target.repository.read_config()
        line = target.entry(
            INTENT,
            Release.read(release_path(settings.store, 1)),
            reason="a rollback that is killed",
            who="a test",
            request=None,
        )
        target.append(dataclasses.replace(line, config=config))
        target.repository.write_config(with_versions(config, [1]))
        client.load(MODEL_NAME)
        assert live_version(client, raw_rows(3)) == 1
        controller.round()
        assert live_version(client, raw_rows(3)) == 1, "a deployment that holds the lock is running"
    controller.round()
    assert controller.num_recovered == 1
    assert findings(watchdog) == [HEALTHY]
    assert live_version(client, raw_rows(3)) == 2
    assert read_entries(settings.store)[-1].action == WITHDRAWN


def test_canary_is_watched_too(deploy, client, triton, watchdog, settings, raw_rows):
    deploy(1), deploy(2)
    with opened(settings) as target:
        target.repository.place_canary(1, ServingOptions())
        live, canary = (
            Arm(model_name=name, version=version)
            for name, version in ((MODEL_NAME, 2), (CANARY_NAME, 1))
        )
        target.repository.write_plan(
            dataclasses.replace(make_plan(canary=canary, share=0.05), stable=live)
        )
        client.load(CANARY_NAME)
        target.append(
            target.entry(
                CANARY,
                Release.read(release_path(settings.store, 1)),
                reason="try",
                share=0.05,
                who="a test",
                request=None,
            )
        )
    kill_stubs(triton)
    assert watchdog.check() == {
        f"{triton.grpc_url} {name}": HEALED for name in (MODEL_NAME, CANARY_NAME)
    }
    assert client.infer(CANARY_NAME, *raw_rows(3))[1] == 1
    client.unload(CANARY_NAME)
    shutil.rmtree(triton.repository / CANARY_NAME)


def test_absent_server_is_reported_until_it_returns(deploy, client, triton, watchdog, caplog):
    deploy(1)
    triton.kill()
    assert [findings(watchdog) for _ in range(3)] == [[UNREACHABLE]] * 3
    said = [
        r for r in caplog.records if r.levelname == "ERROR" and triton.grpc_url in r.getMessage()
    ]
    assert len(said) == 1, "one report, and not one in every round"
    triton.start()
    assert findings(watchdog) == [HEALTHY]


def test_absent_server_is_probed_once_in_each_round(deployment):
    deployment.release(1)
    start_canary(*deployment.candidate(2), settings=deployment.settings)
    deployment.servers[0].crash()
    probed = []

    def connect(url):
        probed.append(url)
        return deployment.connect(url)

    found = Watchdog(target=dataclasses.replace(deployment.settings, connect=connect)).check()
    gone, up = (server.url for server in deployment.servers)
    assert found == {
        f"{gone} {NAMES.model}": UNREACHABLE,
        f"{gone} {NAMES.canary}": UNREACHABLE,
        f"{up} {NAMES.model}": HEALTHY,
        f"{up} {NAMES.canary}": HEALTHY,
    }
    assert probed == [gone, up, up]


def test_response_cache_cannot_answer_for_dead_stub(make_candidate, settings, tmp_path):
    """Requests that were sent earlier are still answered from the cache.

    Probes with shuffled rows do not hit the cache.
    """
    with TritonServer(
        tmp_path / "cached",
        log=tmp_path / "triton.log",
        settings=TritonSettings(stop_seconds=0.2, cache_bytes=1 << 20),
    ) as server:
        cached = dataclasses.replace(
            settings,
            repository=server.repository.as_uri(),
            triton_urls=(server.grpc_url,),
            options=ServingOptions(response_cache=True),
        )
        release(*make_candidate(settings.store, 1), settings=cached)
        watchdog, client = Watchdog(target=cached), Triton(server.grpc_url)
        golden = ModelRepository(open_objects(cached.repository), NAMES).published.golden_rows(1)
        assert findings(watchdog) == [HEALTHY]
        before, _ = client.infer(MODEL_NAME, golden.dense, golden.categorical)
        kill_stubs(server)
        after, version = client.infer(MODEL_NAME, golden.dense, golden.categorical)
        assert version == 1
        np.testing.assert_array_equal(
            after, before, err_msg="the cache answers although nobody lives"
        )
        assert findings(watchdog) == [HEALED]
        client.close()


def test_before_first_release_no_server_is_probed(watchdog):
    assert watchdog.check() == {}


def test_replicas_behind_name_are_asked_for_at_every_round(deploy, settings, triton, caplog):
    deploy(1)
    target = dataclasses.replace(
        settings, triton_urls=("dns:///triton-headless:8001", triton.grpc_url)
    )
    known = {("triton-headless", 8001): []}
    watchdog = Watchdog(target=dataclasses.replace(target, resolve=lambda *name: known[name]))
    assert watchdog.check() == {f"{triton.grpc_url} {MODEL_NAME}": HEALTHY}
    known["triton-headless", 8001] = [triton.grpc_url, "127.0.0.1:9"]
    assert watchdog.check() == {
        f"{triton.grpc_url} {MODEL_NAME}": HEALTHY,
        f"127.0.0.1:9 {MODEL_NAME}": UNREACHABLE,
    }
    known["triton-headless", 8001] = [triton.grpc_url]
    watchdog.check()
    assert "127.0.0.1:9" not in caplog.text, "a pod that ended with a rolling update is no error"


def test_round_that_fails_is_logged_and_next_one_comes(
    deploy, watchdog, settings, tmp_path, caplog
):
    deploy(1)
    journal = settings.store / JOURNAL_FILE
    whole = journal.read_bytes()
    waits, states = [], []

    def wait(seconds):
        waits.append(seconds)
        states.append(json.loads((tmp_path / "status.json").read_text()))
        journal.write_bytes(b"not a promotion\n" if len(waits) == 1 else whole)
        return len(waits) == 3

    controller = ReleaseController(
        watchdog=watchdog,
        baking=Baking(target=settings),
        inspection=Inspection(target=settings, start=run_now),
        status=tmp_path / "status.json",
    )
    control(controller, POLL_SECONDS, wait)
    assert waits == [POLL_SECONDS] * 3
    assert states[1]["servers"] == {}
    assert str(journal) in states[1]["problem"] or "not a promotion" in states[1]["problem"]
    assert "this round failed" in caplog.text
    assert json.loads((tmp_path / "status.json").read_text()) == {
        "servers": {f"{settings.triton_urls[0]} {MODEL_NAME}": HEALTHY},
        "counts": {**dict.fromkeys(module.FINDINGS, 0), HEALTHY: 2},
        "recovered": 0,
        "baking": {
            **{"action": "none", "reason": "version 1 does not bake", "version": 1, "checks": []}
        },
        "canary": None,
        "healed_files": [],
        "problem": None,
    }


def test_command_heals_servers_until_sigterm(deploy, settings, triton, tmp_path):
    deploy(1)
    status = tmp_path / "status.json"
    flags = [
        "--store",
        settings.store.as_uri(),
        "--repository",
        settings.repository,
        "--interval-seconds",
        "0.1",
    ]
    flags += ["--triton-urls", triton.grpc_url, "--status", str(status)]
    command = [sys.executable, "-m", "controller", *flags]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)

    def count(finding):
        return json.loads(status.read_text())["counts"][finding] if status.exists() else 0

    try:
        wait_for(lambda: count(HEALTHY))
        kill_stubs(triton)
        wait_for(lambda: count(HEALED))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def test_misuse_is_reported(tmp_path, capsys):
    flags = ["--store", str(tmp_path), "--repository", str(tmp_path)]
    assert main([*flags, "--triton-urls", "x:1", "--interval-seconds", "0"]) == 2
    assert "interval is 0.0 s" in capsys.readouterr().err
