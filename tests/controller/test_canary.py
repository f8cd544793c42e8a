"""Tests of a whole canary: in folders, in a bucket, by hand, and killed at every named step."""

import copy
import dataclasses
import os
import shutil

import numpy as np
import pytest

from controller.canary import steps as canary
from controller.canary.__main__ import main
from controller.release import ReleaseSettings
from controller.rollback import rollback
from controller.watchdog import Watchdog
from evergreen.registry.models import keep_verdict
from evergreen.registry.promotion_journal import canary_at_work, current, read_entries
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from evergreen.serving.canary_policy import CanaryPolicy
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions, read_options
from evergreen.storage.folder import FolderObjects
from evergreen.storage.uris import open_objects
from testing.served_names import CANARY_NAME, MODEL_NAME, NAMES
from tests.support.canaries import watch
from tests.support.clocks import Clock
from tests.support.crashes import Killed
from tests.support.deployments import release
from tests.support.deployments import start_canary as start
from tests.support.shadow_rows import write_shadow_rows
from tests.support.triton_double import Altered, TritonDouble

POLICY = CanaryPolicy(
    min_pairs=400, max_looks=3, auc_margin=0.05, log_loss_margin=0.05, min_requests=50
)
URLS = ("a:1", "b:1")


class Place:
    """A registry with two models, live version 1, servers, an archive, and canary commands."""

    def __init__(self, root, make_candidate):
        self.store, self.repository, self.archive = (
            root / "store",
            root / "repository",
            root / "archive",
        )
        self.clock = Clock()
        self.servers = {url: self.server(url) for url in URLS}
        self.candidates = {seed: make_candidate(self.store, seed) for seed in (1, 2)}
        self.checkpoints: list[str] = []
        self.crash_at: int | None = None
        self.evidence_files = 0
        release(*self.candidates[1], settings=self.release_settings())

    def server(self, url):
        return TritonDouble(url, repository=self.repository, state=self.store.with_name("servers"))

    def remember(self, place):
        """Return a function that restores the state at the time of this call."""
        root, now, files = self.store.parent, self.clock.now, self.evidence_files
        shutil.copytree(root, place)
        counted = {url: copy.deepcopy(server.counted) for url, server in self.servers.items()}

        def go_back():
            shutil.rmtree(root)
            shutil.copytree(place, root)
            self.clock.now, self.evidence_files = now, files
            for url, server in self.servers.items():
                server.counted = copy.deepcopy(counted[url])

        return go_back

    def connect(self, url):
        return self.servers[url]

    def checkpoint(self, name):
        self.checkpoints.append(name)
        if self.crash_at == len(self.checkpoints):
            raise Killed(name)

    def release_settings(self, **changes):
        return ReleaseSettings(
            store=self.store,
            repository=self.repository.as_uri(),
            triton_urls=URLS,
            clock=self.clock.moment,
            checkpoint=self.checkpoint,
            **{"connect": self.connect, **changes},
        )

    def settings(self, **changes):
        of_target = {name: changes.pop(name) for name in ("connect", "resolve") if name in changes}
        values = {
            "target": self.release_settings(**of_target),
            "evidence": (FolderObjects(self.archive),),
            "metrics": URLS,
            "policy": POLICY,
            "drain_seconds": 5.0,
            "fetch": lambda address: self.servers[address].metrics(),
        }
        return canary.CanarySettings(**{**values, **changes})

    def start(self, seed=2, **other):
        """Start the canary, and start counting its errors and latency."""
        done = start(*self.candidates[seed], settings=self.release_settings(), **other)
        if self.plan() is not None and not self.plan().baseline:
            self.step()
        return done

    def step(self, **changes):
        return canary.step(self.settings(**changes))

    def plan(self):
        return ModelRepository(open_objects(self.repository.as_uri()), NAMES).read_plan()

    def actions(self):
        return [entry.action for entry in read_entries(self.store)]

    def requests(self, *, canary_failures=0, canary_ms=1.0, canary_requests=100):
        """Let every server answer the requests of one stage for both arms."""
        plan = self.plan()
        for server in self.servers.values():
            server.count(MODEL_NAME, plan.stable.version, success=500, infer_us=500_000)
            good = canary_requests - canary_failures
            server.count(
                CANARY_NAME,
                plan.canary.version,
                success=good,
                failure=canary_failures,
                infer_us=good * 1000 * canary_ms,
            )

    def pairs(self, num_rows=1300, *, canary_noise=0.3, stable_noise=0.3):
        """Archive matured rows of the current stage.

        The row may be served by either arm, but both arms scored it.
        """
        self.clock.advance(10)
        plan, random = self.plan(), np.random.default_rng(self.evidence_files)
        truth = random.normal(-1, 1.5, num_rows)
        scores = {
            arm: (1 / (1 + np.exp(-truth - random.normal(0, noise, num_rows)))).astype(np.float32)
            for arm, noise in (("stable", stable_noise), ("canary", canary_noise))
        }
        by_canary = random.random(num_rows) < 0.3
        write_shadow_rows(
            self.archive
            / f"day={self.clock.moment().date()}"
            / f"part-{self.evidence_files}.parquet",
            label=(random.random(num_rows) < 1 / (1 + np.exp(-truth))).astype(np.int32),
            request_id=[f"{self.evidence_files}-{i}" for i in range(num_rows)],
            row=0,
            event_time=self.clock.moment(),
            model_version=np.where(by_canary, plan.canary.version, plan.stable.version),
            score=np.where(by_canary, scores["canary"], scores["stable"]),
            shadow_version=np.where(by_canary, plan.stable.version, plan.canary.version),
            shadow_score=np.where(by_canary, scores["stable"], scores["canary"]),
        )
        self.evidence_files += 1

    def until_over(self, **changes):
        """Run steps like `watch`, with evidence that neither arm is worse, until the canary ends.

        Return the last step.
        """

        def wait(seconds):
            self.clock.advance(seconds)
            if (plan := self.plan()) and plan.canary and plan.baseline:
                self.requests()
                self.pairs()

        return watch(self.settings(**changes), interval_seconds=1.0, sleep=wait)

    def check_served(self):
        """Check that all clients get a version of the journal, even if they name no version."""
        known = {entry.version for entry in read_entries(self.store)}
        plan, live = self.plan(), current(self.store)
        for server in self.servers.values():
            served = max(server.loaded())
            assert served in known
            if plan is not None:
                assert set(server.loaded()) <= known
                if plan.canary is not None:
                    assert plan.canary.version in server.loaded(CANARY_NAME)
        assert live is not None


@pytest.fixture(autouse=True)
def unflushed(monkeypatch):
    """These tests skip fsync, because a killed process loses nothing that it has written."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def place(tmp_path, make_candidate):
    return Place(tmp_path, make_candidate)


def assert_clean(place):
    """Check that no server, plan or folder has a canary, and that the journal reports none."""
    assert canary_at_work(place.store) is None
    plan = place.plan()
    assert plan is None or (
        plan.canary is None and plan.stable.version == current(place.store).version
    )
    assert all(server.loaded(CANARY_NAME) == [] for server in place.servers.values())
    assert not list((place.repository / CANARY_NAME).glob("*/version.json"))
    assert all(max(s.loaded()) == current(place.store).version for s in place.servers.values())


def test_salt_stays_while_it_grows_and_changes_with_next_canary(place):
    place.start()
    salt = place.plan().salt
    place.requests()
    place.pairs()
    assert place.step().action == "grown"
    assert place.plan().salt == salt
    canary.abort(place.settings(), "for the test")
    place.until_over()
    place.start()
    assert place.plan().salt != salt


def test_worse_canary_is_aborted_and_unloaded_only_once_clients_know(place):
    done = place.start()
    place.requests()
    place.pairs(canary_noise=3.0)
    found = place.step()
    assert (found.action, found.wait_seconds) == ("aborted", 5.0)
    assert place.plan().canary is None
    assert place.step().action == "draining"
    assert all(done.version in s.loaded(CANARY_NAME) for s in place.servers.values())
    place.clock.advance(5)
    assert place.step().action == "ended"
    last = read_entries(place.store)[-1]
    assert (last.action, last.version) == ("canary_ended", done.version)
    failed = [check.name for check in found.decision.by_pairs.checks if check.result == "fail"]
    assert "AUC against stable" in failed
    assert last.reason == found.reason
    assert current(place.store).version == 1
    assert_clean(place)
    assert place.step().action == "none"


@pytest.mark.parametrize(
    ("requests", "name", "value"),
    [
        ({"canary_failures": 30}, "failure rate", 0.3),
        ({"canary_ms": 2.0, "canary_requests": 500}, "latency ratio", 2.0),
    ],
    ids=["errors", "latency"],
)
def test_errors_and_latency_of_all_replicas_abort_without_outcomes(place, requests, name, value):
    place.start()
    place.requests(**requests)
    found = canary.step(place.settings(evidence=(None,)))
    assert found.action == "aborted"
    (check,) = (check for check in found.decision.by_counts.checks if check.result == "fail")
    assert (check.name, check.value) == (name, pytest.approx(value))
    assert place.plan().canary is None


def test_what_servers_counted_before_stage_is_not_held_against_it(place):
    place.start()
    version = place.plan().canary.version
    place.requests()
    place.pairs()
    for server in place.servers.values():
        server.count(CANARY_NAME, version, failure=4)
    assert place.step().action == "grown"
    place.requests()
    counts = place.step().decision.by_counts.counts.canary
    assert counts.failure == 0
    assert counts.success == 200


@pytest.mark.parametrize("change", ["new", "restarted"])
def test_warm_up_of_new_or_restarted_server_does_not_count_against_canary(place, change):
    """70 slow requests are a small share of the stable arm, but a large share of the canary."""
    for server in place.servers.values():
        server.count(MODEL_NAME, 1, success=1000, infer_us=1_000_000)
    place.start()
    place.requests()
    assert place.step().decision.by_counts.latency_ratio is not None
    if change == "new":
        place.servers["c:1"] = place.server("c:1")
        server, metrics = place.servers["c:1"], (*URLS, "c:1")
    else:
        server, metrics = place.servers["b:1"], URLS
    server.start()
    server.load(CANARY_NAME)
    for name, version in ((MODEL_NAME, 1), (CANARY_NAME, 2)):
        server.count(name, version, success=70, infer_us=700_000)
    for _ in range(3):
        step = place.step(metrics=metrics)
        assert step.action == "held"
        place.servers["a:1"].count(CANARY_NAME, 2, success=10, infer_us=10_000)
    assert step.decision.by_counts.latency_ratio == pytest.approx(1.0)
    server.count(CANARY_NAME, 2, success=500, infer_us=5_000_000)
    assert place.step(metrics=metrics).action == "aborted", "it is counted from then on"


def test_it_holds_while_server_cannot_be_read_or_none_is_named(place):
    place.start()
    place.requests()
    place.pairs()

    def unreadable(address):
        raise TemporaryError(f"metrics of {address} cannot be read")

    def unknown(step):
        (check,) = step.decision.by_counts.checks
        assert check.detail in step.reason
        return check.detail

    held = place.step(fetch=unreadable)
    assert (held.action, unknown(held)) == (
        "held",
        "errors and latency are unknown: metrics of a:1 cannot be read",
    )
    held = place.step(metrics=())
    assert (held.action, unknown(held)) == (
        "held",
        "errors and latency are unknown: --metrics-urls is empty",
    )
    assert place.step().action == "grown"


def test_pairs_of_all_stages_count_and_server_counters_only_of_their_own(place):
    place.start(share=0.0)
    place.requests()
    place.pairs(700)
    place.start()
    place.clock.advance(1)
    place.requests()
    place.pairs(600)
    found = place.step()
    assert (found.action, found.decision.by_pairs.num_pairs) == ("grown", 1300)
    place.clock.advance(1)
    found = place.step()
    assert (found.action, found.decision.by_pairs.num_pairs, found.decision.by_pairs.action) == (
        "held",
        1300,
        "grow",
    )
    (few,) = found.decision.by_counts.checks
    assert (few.name, few.limit, few.result) == ("requests of each arm", 50, "inconclusive")
    place.requests()
    assert place.step().share == 0.25


def test_status_says_what_step_would_find_and_changes_nothing(place):
    place.start()
    place.requests()
    place.pairs()
    before = place.plan(), place.actions()
    assert canary.status(place.settings()).decision.action == "grow"
    assert (place.plan(), place.actions()) == before


def test_shadow_answers_nobody_and_grows_only_by_being_started_again(place):
    done = place.start(share=0.0)
    plan = place.plan()
    assert (plan.canary_share, plan.shadow_share) == (0.0, 1.0)
    assert all(plan.arm_for(f"u{i}") == plan.stable for i in range(2000))
    place.requests()
    place.pairs()
    held = place.step()
    assert held.action == "held"
    assert held.reason.startswith("shadow traffic only; ")
    assert held.decision.by_pairs.action == "grow"
    assert place.start().version == done.version
    assert place.plan().canary_share == 0.01
    assert canary_at_work(place.store).share == 0.01
    sequence = place.plan().sequence
    assert place.start().version == done.version, "a retried step starts nothing twice"
    assert place.plan().sequence == sequence


def test_person_may_advance_what_evidence_does_not_decide(place):
    done = place.start(share=0.0)
    for share in (0.01, 0.05, 0.25):
        assert canary.advance(place.settings(), "on my word").share == share
        assert (place.plan().canary_share, canary_at_work(place.store).share) == (share, share)
    assert canary.advance(place.settings(), "on my word").action == "released"
    assert (current(place.store).version, current(place.store).reason) == (
        done.version,
        "on my word",
    )
    assert place.until_over().action == "ended"
    assert_clean(place)
    assert canary.advance(place.settings(), "again").action == "none"


def evaluated(candidate, decision):
    model, verdict, raw = candidate
    return model, dataclasses.replace(verdict, decision=decision, accepted=decision != "fail"), raw


def test_canary_goes_on_beside_round_that_is_undecided_too(place, make_candidate):
    done = place.start()
    other = evaluated(make_candidate(place.store, 3), "inconclusive")
    with pytest.raises(Refused, match=f"version {done.version} is a canary"):
        start(*other, settings=place.release_settings())
    with pytest.raises(Refused, match=f"version {done.version} is a running canary"):
        release(*other, settings=place.release_settings())
    assert canary_at_work(place.store).version == place.plan().canary.version == done.version
    with pytest.raises(Refused, match=f"version {done.version} is a canary"):
        start(*evaluated(other, "pass"), settings=place.release_settings())


def test_candidate_that_passes_gate_takes_place_of_canary_and_live_version(place, make_candidate):
    place.start()
    done = release(
        *evaluated(make_candidate(place.store, 3), "pass"), settings=place.release_settings()
    )
    assert current(place.store).version == place.plan().stable.version == done.version
    assert place.plan().canary is None, "clients leave it at once"
    assert place.until_over().action == "ended"
    assert_clean(place)


@pytest.mark.parametrize("is_told", [True, False], ids=["plan written", "plan out of date"])
def test_next_canary_unloads_one_before_once_clients_have_left_it(
    place, make_candidate, monkeypatch, is_told
):
    """The plan can still name a canary that no controller has unloaded."""
    before = place.start().version
    third, fourth = (evaluated(make_candidate(place.store, seed), "pass") for seed in (3, 4))

    def unwritable(*_):
        raise TemporaryError("the plan cannot be written")

    with monkeypatch.context() as patched:
        if not is_told:
            patched.setattr(ModelRepository, "write_plan", unwritable)
        done = release(*third, settings=place.release_settings())
    if not is_told:
        assert place.plan().canary.version == before, (
            "the release stands, and the plan is out of date"
        )
        place.clock.advance(60)
    verdict = dataclasses.replace(
        fourth[1], champion_model_id=done.model_id, decision="inconclusive"
    )
    with pytest.raises(TemporaryError, match="clients may still call"):
        start(fourth[0], verdict, fourth[2], settings=place.release_settings())
    assert place.plan().canary is None
    assert all(before in s.loaded(CANARY_NAME) for s in place.servers.values())
    place.clock.advance(5)
    assert (
        start(fourth[0], verdict, fourth[2], settings=place.release_settings()).version
        == done.version + 1
    )
    assert all(s.loaded(CANARY_NAME) == [done.version + 1] for s in place.servers.values())


def test_person_may_try_what_is_undecided_and_nobody_what_failed(place):
    undecided = evaluated(place.candidates[2], "inconclusive")
    refused = dataclasses.replace(undecided[1], accepted=False)
    with pytest.raises(ContractError, match="'inconclusive', expected an accepted verdict"):
        release(undecided[0], refused, undecided[2], settings=place.release_settings())
    with pytest.raises(ContractError, match="'fail'"):
        start(*evaluated(undecided, "fail"), settings=place.release_settings())
    start(undecided[0], refused, undecided[2], settings=place.release_settings())
    assert canary_at_work(place.store) is not None


def test_one_odd_server_blocks_no_healing_and_canary_reloads_count_apart(place):
    def check(server):
        if server.url == "a:1":
            raise PermanentError("no Triton")

    place.start()
    for name in (MODEL_NAME, CANARY_NAME):
        place.servers["b:1"].unload(name)
    connect = {url: Altered(server, check_live=check) for url, server in place.servers.items()}.get
    watchdog = Watchdog(target=place.release_settings(connect=connect))
    for _ in range(4):
        watchdog.check()
    assert place.servers["b:1"].loaded() == [1]
    assert set(+watchdog.reloads) == {1}


def test_nothing_live_is_no_place_for_canary(unserved, make_candidate):
    with pytest.raises(ContractError, match="no live version"):
        start(*make_candidate(unserved.store, 1), settings=unserved)


def test_live_model_is_no_canary_and_there_is_nothing_to_abort(place):
    assert place.start(1).version == 1
    assert place.plan() is None
    assert canary.abort(place.settings(), "why not").action == "none"


def test_rollback_ends_canary_and_next_step_unloads_it(place, make_candidate):
    release(*make_candidate(place.store, 3), settings=place.release_settings())
    place.candidates[2] = (
        place.candidates[2][0],
        dataclasses.replace(place.candidates[2][1], champion_model_id="model-3"),
        place.candidates[2][2],
    )
    place.start()
    rollback(place.release_settings(), to_version=1, reason="for the test")
    assert current(place.store).version == 1
    assert (place.plan().canary, place.plan().stable.version) == (None, 1), (
        "clients leave it at once"
    )
    assert canary_at_work(place.store) is None
    assert place.until_over().action == "ended"
    assert_clean(place)


def test_canary_is_rolled_back_during_outage_and_unloaded_after_it(place):
    place.start()
    place.servers["b:1"].crash()
    assert canary.abort(place.settings(), "an incident").action == "aborted"
    assert place.plan().canary is None, "clients go first"
    place.clock.advance(6)
    with pytest.raises(TemporaryError):
        place.step()
    assert canary_at_work(place.store) is not None
    place.servers["b:1"].start()
    assert place.step().action == "ended"
    assert read_entries(place.store)[-1].reason == "an incident"
    assert_clean(place)


def test_server_that_is_down_does_not_keep_bad_canary_going(place):
    place.start()
    place.servers["b:1"].crash()
    place.requests()
    place.pairs()
    with pytest.raises(TemporaryError):
        place.step()
    assert place.plan().canary is not None, "a good one waits"
    place.clock.advance(-12)  # These pairs are older, so the canary is evaluated on them first.
    place.pairs(5000, canary_noise=3.0)
    assert place.step().action == "aborted"
    assert place.plan().canary is None


def test_without_canary_step_needs_no_server(place):
    """The command runs every few minutes, even before the first model or without any server."""
    for server in place.servers.values():
        server.crash()
    assert place.step().action == "none"


def test_abort_takes_back_what_killed_start_had_published(place):
    place.checkpoints.clear()
    place.start()
    place.crash_at = place.checkpoints.index("plan written") + 1
    canary.abort(place.settings(), "to begin anew")
    place.until_over()
    place.checkpoints.clear()
    with pytest.raises(Killed):
        _killed_at_crash(place, place.start)
    assert canary_at_work(place.store) is None
    assert place.plan().canary is not None
    assert canary.abort(place.settings(), "for the test").action == "aborted"
    assert place.plan().canary is None


@pytest.mark.parametrize("fault", ["refused", "wrong"])
def test_canary_that_restarted_server_refuses_or_answers_wrongly_aborts(place, fault):
    place.start()
    server = place.servers["a:1"]
    server.start()

    def refuse(real, name):
        if name == CANARY_NAME:
            raise PermanentError("no room")
        real.load(name)

    def answer_wrongly(real, name, *rows, version=None):
        scores, answered = real.infer(name, *rows, version=version)
        return scores + np.float32(0.25 * (name == CANARY_NAME)), answered

    faulty = Altered(
        server, **({"load": refuse} if fault == "refused" else {"infer": answer_wrongly})
    )
    found = place.step(connect=lambda url: faulty if url == "a:1" else place.servers[url])
    assert found.action == "aborted"
    assert (
        "no room" if fault == "refused" else "differs from the training-side score"
    ) in found.reason
    assert place.until_over().action == "ended"
    assert_clean(place)


def test_what_happened_while_evidence_was_read_is_not_overridden(place):
    place.start()
    place.requests()
    place.pairs()

    done = []

    def meanwhile(address):
        done.append(canary.abort(place.settings(), "a person was faster").action)
        return place.servers[address].metrics()

    assert place.step(fetch=meanwhile).action == "changed"
    assert done[0] == "aborted", "nobody is kept waiting while servers are read"
    assert (place.plan().canary, place.plan().reason) == (None, "a person was faster")
    assert current(place.store).version == 1


def test_start_that_server_refuses_changes_nothing(place):
    def refuse(real, name):
        if name == CANARY_NAME:
            raise PermanentError("no room")
        real.load(name)

    def connect(url):
        return Altered(place.servers[url], load=refuse) if url == "b:1" else place.servers[url]

    with pytest.raises(PermanentError, match="no room"):
        start(*place.candidates[2], settings=place.release_settings(connect=connect))
    assert_clean(place)
    assert place.actions()[-1] == "withdrawn"
    place.start()
    assert place.plan().canary.version == 3, "a number that the journal named is never given again"


def test_clock_that_was_set_back_cannot_keep_canary_draining_for_ever(place):
    place.start()
    canary.abort(place.settings(), "for the test")
    place.clock.advance(-3600)
    assert place.step().wait_seconds == 5.0
    place.clock.advance(5)
    assert place.step().action == "ended"
    assert_clean(place)


def run_to(place, stage):
    """Bring a fresh installation to the state just before `stage`.

    Return the function that runs the stage.
    """
    if stage == "start":
        return place.start
    place.start(**({"share": POLICY.shares[-1]} if stage == "promote" else {}))
    if stage == "abort":

        def abort():
            canary.abort(place.settings(), "for the test")
            place.clock.advance(5)
            return place.step()

        return abort
    place.requests()
    place.pairs()
    if stage == "grow":
        return place.step

    def promote():
        assert place.step().action == "released"
        place.clock.advance(5)
        return place.step()

    return promote


@pytest.mark.parametrize(
    "stage",
    [
        "promote",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("start", "grow", "abort")),
    ],
)
def test_kill_at_any_step_is_put_right_by_next_one(tmp_path, make_candidate, stage):
    """The killed process does not clean up, and writes nothing after the kill."""
    number, names = 1, []
    place = Place(tmp_path / "place", make_candidate)
    act = run_to(place, stage)
    go_back = place.remember(tmp_path / "before")
    while True:
        go_back()
        place.checkpoints.clear()
        place.crash_at = number
        try:
            _killed_at_crash(place, act)
        except Killed as crash:
            names.append(crash.args[0])
        else:
            break
        place.crash_at = None
        place.check_served()
        place.step()
        plan, at_work = place.plan(), canary_at_work(place.store)
        if plan is not None and plan.canary is not None:
            assert (at_work.version, at_work.share) == (plan.canary.version, plan.canary_share)
        assert place.until_over().action in ("none", "ended")
        place.check_served()
        assert_clean(place)
        if stage == "start":
            place.start()
            place.check_served()
        expected = {"grow": 2, "promote": 2, "abort": 1}.get(stage)
        if expected:
            assert current(place.store).version == expected
        number += 1
    assert len(names) >= {"start": 8, "grow": 2, "promote": 5, "abort": 2}[stage], names


def _killed_at_crash(place, act):
    """Run `act`. After the crash, every further write fails too, as after a kill."""
    from controller import deployment_target as target_module
    from evergreen.registry import requests

    dead = []
    real_checkpoint = place.checkpoint

    def checkpoint(name):
        if dead:
            raise Killed(name)
        try:
            real_checkpoint(name)
        except Killed:
            dead.append(name)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "checkpoint", checkpoint)
        for owner, name in (
            (target_module, "append_promotion"),
            (requests, "append_entry"),
            (ModelRepository, "write_plan"),
            (ModelRepository, "write_config"),
            (ModelRepository, "remove_canary"),
            (ModelRepository, "withdraw"),
            (ModelRepository, "discard_candidate"),
            (TritonDouble, "unload"),
            (TritonDouble, "load"),
        ):
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, real=real, **k: _die(dead) or real(*a, **k))
        return act()


def _die(dead):
    if dead:
        raise Killed(dead[0])


def test_canary_started_by_hand_is_served_with_live_versions_options(
    tmp_path, make_candidate, capsys
):
    store, repository = tmp_path / "store", tmp_path / "repository"
    settings = ReleaseSettings(
        store=store,
        repository=str(repository),
        options=ServingOptions(instances=3, response_cache=True),
    )
    release(*make_candidate(store, 1), settings=settings)
    _, verdict, raw = make_candidate(store, 2)
    keep_verdict(store, verdict, raw)
    assert main(["start", "--store", str(store), "--model-id", "model-2"]) == 0
    assert "version 2 is the canary" in capsys.readouterr().out
    assert read_options((repository / CANARY_NAME / "config.pbtxt").read_text()) == settings.options
