"""Tests of deployments killed at every checkpoint: the next deployment repairs the state.

After each kill, the tests check three invariants. The configuration names at least one version, and
only complete versions. Every running or starting server answers with a version whose graph hash is
in the journal. After the next deployment, every server answers from the live version of the
journal, and no file of the killed deployment is left.
"""

import json
import os
import shutil
import signal
import sys

import pytest

from controller.baking import Baking
from evergreen.contracts.baking import BAD, WELL, Findings
from evergreen.contracts.serving import versions_of
from evergreen.registry.promotion_journal import (
    BAKED,
    INTENT,
    RELEASE,
    ROLLBACK,
    WITHDRAWN,
    read_entries,
    write_findings,
)
from evergreen.runtime.errors import ContractError
from testing.paths import REPOSITORY
from testing.recommenders import accept_into, shop_with
from testing.warm import Warm
from tests.support.killed_deployments import IMPORTS, PROGRAM

RELEASE_PLACES = [
    ("stored", 1),
    ("intent written", 1),
    ("staged", 1),
    ("rehearsed", 1),
    ("folder published", 1),
    ("config written", 1),
    ("loaded", 1),
    ("loaded", 2),
    ("probed", 1),
    ("journal written", 1),
    ("pruned", 1),
]
ROLLBACK_PLACES = [
    ("intent written", 1),
    ("config written", 1),
    ("loaded", 1),
    ("loaded", 2),
    ("probed", 1),
    ("journal written", 1),
]


def named(place):
    return f"{place[0]} {place[1]}"


def mostly_slow(places, quick=("loaded", 1)):
    """Return all kill points as test parameters, and mark all but one as slow."""
    return [
        place if place == quick else pytest.param(place, marks=pytest.mark.slow) for place in places
    ]


KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def kill():
    """Runs a job of `killed_deployments` and returns its exit code."""
    with Warm(sys.executable, IMPORTS) as warm:
        yield lambda **job: warm.run(
            PROGRAM, [json.dumps(job)], variables=dict(os.environ), folder=REPOSITORY
        )[0]


@pytest.mark.parametrize("place", mostly_slow(RELEASE_PLACES), ids=named)
def test_retry_after_killed_release_releases_model(deployment, kill, place):
    deployment.release(1), deployment.release(2)
    assert kill(**deployment.job("release", place, 3)) == KILLED
    deployment.check_served_is_whole_and_known()
    done = deployment.release(3)
    deployment.check_all_is_well(done.version)
    # A version number counts as used only after the journal names it.
    recorded = place[0] in ("journal written", "pruned")
    announced = place[0] != "stored"
    assert (done.model_id, done.version) == ("model-3", 4 if announced and not recorded else 3)
    withdrawn = [
        entry.version
        for entry in read_entries(deployment.settings.store)
        if entry.action == "withdrawn"
    ]
    assert withdrawn == ([3] if announced and not recorded else [])
    assert deployment.release(4).version == done.version + 1
    assert deployment.repository.taken_numbers() == [done.version, done.version + 1], (
        "the killed release left other versions"
    )


@pytest.mark.parametrize("place", mostly_slow(RELEASE_PLACES[1:], ("config written", 1)), ids=named)
def test_rollback_after_killed_release_restores_what_was_live(deployment, kill, place):
    deployment.release(1), deployment.release(2)
    assert kill(**deployment.job("release", place, 3)) == KILLED
    deployment.rollback()
    deployment.check_all_is_well(2)
    deployment.rollback()
    deployment.check_all_is_well(1)


@pytest.mark.parametrize("place", mostly_slow(ROLLBACK_PLACES, ("probed", 1)), ids=named)
def test_killed_rollback_is_finished_by_next(deployment, kill, place):
    deployment.release(1), deployment.release(2)
    assert kill(**deployment.job("rollback", place)) == KILLED
    deployment.check_served_is_whole_and_known()
    if place[0] == "journal written":
        with pytest.raises(ContractError, match="version 1 is live already"):
            deployment.rollback(to_version=1)
    else:
        deployment.rollback(to_version=1)
    deployment.check_all_is_well(1)
    assert deployment.release(3).version == 3


@pytest.fixture
def baking_deployment(deployment):
    """Versions 1 and 2 are released, and version 2 bakes.

    `restore(state)` restores all files, and then writes findings with the state `state`.
    """
    deployment.release(1), deployment.release(2)
    accept_into(
        deployment.settings.store, shop_with(release={"bake_seconds": 0.0, "bake_rows": 1000})
    )
    root = deployment.settings.store.parent
    shutil.copytree(root, kept := root.with_name(f"{root.name} as it was"), symlinks=True)

    def restore(state):
        shutil.rmtree(root)
        shutil.copytree(kept, root, symlinks=True)
        found = Findings(
            version=2, state=state, reason="said by a test", found_at="2026-01-01T00:00:00+00:00"
        )
        write_findings(deployment.settings.store, found)
        return deployment

    return restore


def transitions(deployment):
    return [
        entry.action for entry in deployment.entries() if entry.action not in (INTENT, WITHDRAWN)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("state", "action", "live", "places", "least"),
    [
        (WELL, BAKED, 2, range(999), 10),
        (BAD, ROLLBACK, 1, (*{name for name, _ in ROLLBACK_PLACES}, "none"), 5),
        pytest.param(BAD, ROLLBACK, 1, range(999), 30, marks=pytest.mark.slow),
    ],
    ids=["baked", "taken back", "taken back, each boundary"],
)
def test_controller_that_was_killed_makes_its_transition_once(
    baking_deployment, kill, state, action, live, places, least
):
    """The process is killed at each fsync, rename, unlink and checkpoint, one after another."""
    killed = []
    for place in places:
        deployment = baking_deployment(state)
        code = kill(**deployment.job("bake", (place, 1)))
        deployment.check_served_is_whole_and_known()
        Baking(target=deployment.settings).step({}), Baking(target=deployment.settings).step({})
        assert transitions(deployment) == [RELEASE, RELEASE, action], f"killed at {place}"
        deployment.check_all_is_well(live)
        if code != KILLED:
            break
        killed.append(place)
    assert (code, len(killed) >= least) == (0, True), killed


@pytest.mark.parametrize(("state", "action"), [(BAD, ROLLBACK), (WELL, BAKED)])
def test_two_controllers_at_once_make_transition_once(baking_deployment, kill, state, action):
    for _ in range(3):
        deployment = baking_deployment(state)
        assert kill(**deployment.job("bake", (None, 1)), lives=2) == 0
        assert transitions(deployment) == [RELEASE, RELEASE, action]


def test_recovery_that_server_prevents_is_tried_again_by_next(deployment, kill):
    deployment.release(1), deployment.release(2)
    assert kill(**deployment.job("release", ("loaded", 1), 3)) == KILLED
    deployment.servers[1].crash()
    with pytest.raises(Exception, match="triton-b:8001: connection refused"):
        deployment.rollback()
    assert versions_of(deployment.repository.read_config()) == [2], (
        "a starting server must load the live version"
    )
    assert deployment.servers[0].loaded() == [2], "the other server must be restored at once"
    deployment.servers[1].start()
    deployment.rollback()
    deployment.check_all_is_well(2)


def test_first_release_that_was_killed_leaves_nothing_served(deployment, kill):
    assert kill(**deployment.job("release", ("loaded", 2), 1)) == KILLED
    with pytest.raises(ContractError, match="has no release"):
        deployment.rollback()
    assert [server.loaded() for server in deployment.servers] == [[], []]
    assert deployment.repository.read_config() is None
    assert deployment.release(2).version == 2
