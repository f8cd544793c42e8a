"""Tests of baking with counters of real servers.

Each bad version is rolled back once, and each good version is confirmed once.
"""

import dataclasses
import json
from datetime import timedelta
from unittest.mock import Mock

import pytest

from controller.__main__ import ReleaseController
from controller.baking import BAKES as STILL
from controller.baking import COUNTERS_FILE, NONE, ROLLED_BACK, Baking
from controller.inspection import Inspection
from controller.watchdog import Watchdog
from evergreen.contracts.baking import BAD, BAKES, WELL, Findings
from evergreen.registry.promotion_journal import (
    BAKED,
    INTENT,
    PROMOTE,
    RELEASE,
    ROLLBACK,
    blocked_models,
    read_entries,
    write_findings,
)
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from testing.controllers import run_now
from testing.recommenders import accept_into, shop_with
from testing.served_names import MODEL_NAME
from tests.support.deployments import release
from tests.support.real_servers import FAULT, change_code


def limited(settings):
    """Accept a recommender with its own limits in the registry, and return the settings."""
    accept_into(settings.store, shop_with(release={"bake_seconds": 60.0, "bake_rows": 1000}))
    return settings


@pytest.fixture
def bakes(deployment):
    """Return `make(later)`, which creates a controller whose clock is `later` seconds ahead.

    The servers' pages of metrics are empty.
    """
    settings = limited(deployment.settings)

    def make(later=0.0):
        target = dataclasses.replace(
            settings, clock=lambda: settings.clock() + timedelta(seconds=later)
        )
        return Baking(target=target, metrics=("triton-a:8002",), fetch=lambda address: "")

    return make


def write_state(settings, state, *, version=2, reason="said by a test"):
    found = Findings(
        version=version, state=state, reason=reason, found_at="2026-01-01T00:00:00+00:00", rows=9
    )
    write_findings(settings.store, found)


def journal_actions(settings):
    """Return the journal's entries without intents."""
    return [
        (line.action, line.version)
        for line in read_entries(settings.store)
        if line.action != INTENT
    ]


def test_good_version_is_baked_once_after_its_time_and_its_rows(deployment, bakes):
    deployment.release(1)
    assert bakes().step({}).action == NONE, "no version precedes the first version"
    deployment.release(2)
    assert bakes(later=61).step({}).action == STILL, "the monitor has no finding"
    write_state(deployment.settings, BAKES)
    assert bakes(later=61).step({}).action == STILL
    write_state(deployment.settings, WELL)
    assert bakes(later=59).step({}).action == STILL
    assert [bakes(later=61).step({}).action for _ in range(2)] == [BAKED, NONE]
    assert journal_actions(deployment.settings) == [(RELEASE, 1), (RELEASE, 2), (BAKED, 2)]
    write_state(deployment.settings, BAD)
    assert bakes(later=62).step({}).action == NONE, "it is baked"


def test_monitors_finding_rolls_back_and_blocks_model_until_override(deployment, bakes):
    store = deployment.settings.store
    deployment.release(1), deployment.release(2)
    write_state(deployment.settings, BAD, reason="evidence 503 of 500 of an AUC below 0.738")
    # A controller that was stopped for a while still reacts to earlier events. A second controller
    # has nothing left to do.
    assert [bakes(later=9_999).step({}).action for _ in range(2)] == [ROLLED_BACK, NONE]
    deployment.check_all_is_well(1)
    assert journal_actions(deployment.settings) == [(RELEASE, 1), (RELEASE, 2), (ROLLBACK, 1)]
    line = blocked_models(store)["model-2"]
    assert "an AUC below 0.738" in line.reason
    with pytest.raises(
        Refused, match=r"model-2 was rolled back at .* expected another model, or a promotion"
    ):
        deployment.release(2)
    deployment.release(3)
    deployment.check_all_is_well(3)
    promoted = release(
        *deployment.candidate(2), settings=deployment.settings, override="the clients were at fault"
    )
    assert (journal_actions(deployment.settings)[-1], blocked_models(store)) == (
        (PROMOTE, promoted.version),
        {},
    )


def test_rows_without_score_that_no_server_counted_take_nothing_back(
    deployment, bakes, monkeypatch
):
    deployment.release(1), deployment.release(2)
    numbers = {"unusable_rows": 400.0, "scored_rows": 400.0, "unusable_requests": 50.0}
    reason = "400 of 400 rows have a score that is not a probability"
    found = Findings(
        version=2,
        state=BAD,
        reason=reason,
        found_at="2026-01-01T00:00:00+00:00",
        rows=9,
        numbers=numbers,
    )
    write_findings(deployment.settings.store, found)
    step = bakes(later=9_999).step({})
    assert step.action == STILL
    assert "the servers counted 0 requests" in step.reason
    assert journal_actions(deployment.settings) == [(RELEASE, 1), (RELEASE, 2)]
    # Without the servers' metrics, nothing contradicts the monitor's findings.
    assert dataclasses.replace(bakes(later=9_999), metrics=()).step({}).action == ROLLED_BACK


def test_failing_rollback_is_retried_less_and_less_often(deployment, bakes, monkeypatch):
    deployment.release(1), deployment.release(2)
    write_state(deployment.settings, BAD)
    monkeypatch.setattr(
        "controller.baking.rollback", tried := Mock(side_effect=TemporaryError("too large"))
    )
    controller, counts = bakes(), []
    for _ in range(300):
        with pytest.raises(TemporaryError):
            controller.step({})
        counts.append(tried.call_count)
    assert [1 + counts.index(number) for number in range(1, 10)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
    ]


@pytest.fixture
def controller(settings, triton, tmp_path):
    if not triton.alive():
        triton.start()
    baking = Baking(target=limited(settings), metrics=(triton.metrics_address,))
    return ReleaseController(
        watchdog=Watchdog(target=settings),
        baking=baking,
        inspection=Inspection(target=settings, start=run_now),
        status=tmp_path / "status.json",
    )


def test_version_that_fails_requests_is_rolled_back(deploy, controller, triton, client, raw_rows):
    deploy(1), deploy(2)
    controller.round()  # a later inspection would restore the code of version 2
    change_code(
        triton,
        2,
        FAULT,
        FAULT + "        if (tensors['dense'] == 4242.0).any():\n            raise OSError\n",
    )
    controller.round()
    dense, categorical = raw_rows(3)
    dense[0, 0] = 4242.0
    for _ in range(40):
        with pytest.raises(PermanentError):
            client.infer(MODEL_NAME, dense, categorical)
    controller.round()
    found = json.loads(controller.status.read_text())["baking"]
    assert found["action"] == ROLLED_BACK, found
    failed = [check for check in found["checks"] if check["result"] == "fail"]
    assert [check["name"] for check in failed] == ["failure rate"], found
    assert failed[0]["detail"].startswith("40 of ")


def test_corrupt_counters_end_run_with_their_name_and_nothing_else(deploy, settings, controller):
    deploy(1), deploy(2)
    controller.round()
    (settings.store / "baking" / COUNTERS_FILE).write_text("{")
    controller.round()
    status = json.loads(controller.status.read_text())
    assert COUNTERS_FILE in status["problem"]
    assert status["servers"], "the watchdog must probe nevertheless"


def test_counters_with_fields_of_another_release_are_read_without_them(deployment, bakes):
    deployment.release(1), deployment.release(2)
    bakes().step({2: 1})
    path = deployment.settings.store / "baking" / COUNTERS_FILE
    document = json.loads(path.read_text())
    document["since"] = "2026"
    document["counts"]["2"] |= {"queue_us": 7.0, "notes": ["x"]}
    path.write_text(json.dumps(document))
    assert bakes().step({2: 1}).action == STILL
    assert json.loads(path.read_text())["counts"]["2"]["reloads"] == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("counts", {"2": {"success": "many"}}),
        ("counts", {"two": {}}),
        ("counts", [2]),
        ("seen", {"a 2": {}}),
    ],
)
def test_counters_that_are_none_are_named(deployment, bakes, key, value):
    deployment.release(1), deployment.release(2)
    bakes().step({2: 1})
    path = deployment.settings.store / "baking" / COUNTERS_FILE
    path.write_text(json.dumps({"counts": {}, "seen": {}, key: value}))
    with pytest.raises(ContractError, match=rf"{COUNTERS_FILE} cannot be read: .*; remove it"):
        bakes().step({})
