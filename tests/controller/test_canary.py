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


class Installation:
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

    def remember(self, copied):
        """Return a function that restores the state at the time of this call."""
        root, now, files = self.store.parent, self.clock.now, self.evidence_files
        shutil.copytree(root, copied)
        counted = {url: copy.deepcopy(server.counted) for url, server in self.servers.items()}

        def go_back():
            shutil.rmtree(root)
            shutil.copytree(copied, root)
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
        true_logits = random.normal(-1, 1.5, num_rows)
        scores = {
            arm: (1 / (1 + np.exp(-true_logits - random.normal(0, noise, num_rows)))).astype(
                np.float32
            )
            for arm, noise in (("stable", stable_noise), ("canary", canary_noise))
        }
        by_canary = random.random(num_rows) < 0.3
        write_shadow_rows(
            self.archive
            / f"day={self.clock.moment().date()}"
            / f"part-{self.evidence_files}.parquet",
            label=(random.random(num_rows) < 1 / (1 + np.exp(-true_logits))).astype(np.int32),
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
        """Check that the servers serve only versions that the journal contains.

        A request without a version gets the newest version that a server has loaded.
        """
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
def installation(tmp_path, make_candidate):
    return Installation(tmp_path, make_candidate)


def assert_clean(installation):
    """Check that no server, plan or folder has a canary, and that the journal reports none."""
    assert canary_at_work(installation.store) is None
    plan = installation.plan()
    assert plan is None or (
        plan.canary is None and plan.stable.version == current(installation.store).version
    )
    assert all(server.loaded(CANARY_NAME) == [] for server in installation.servers.values())
    assert not list((installation.repository / CANARY_NAME).glob("*/version.json"))
    assert all(
        max(s.loaded()) == current(installation.store).version
        for s in installation.servers.values()
    )


def test_salt_stays_while_it_grows_and_changes_with_next_canary(installation):
    installation.start()
    salt = installation.plan().salt
    installation.requests()
    installation.pairs()
    assert installation.step().action == "grown"
    assert installation.plan().salt == salt
    canary.abort(installation.settings(), "for the test")
    installation.until_over()
    installation.start()
    assert installation.plan().salt != salt


def test_worse_canary_is_aborted_and_unloaded_once_clients_have_new_plan(installation):
    done = installation.start()
    installation.requests()
    installation.pairs(canary_noise=3.0)
    found = installation.step()
    assert (found.action, found.wait_seconds) == ("aborted", 5.0)
    assert installation.plan().canary is None
    assert installation.step().action == "draining"
    assert all(done.version in s.loaded(CANARY_NAME) for s in installation.servers.values())
    installation.clock.advance(5)
    assert installation.step().action == "ended"
    last = read_entries(installation.store)[-1]
    assert (last.action, last.version) == ("canary_ended", done.version)
    failed = [check.name for check in found.decision.by_pairs.checks if check.result == "fail"]
    assert "AUC against stable" in failed
    assert last.reason == found.reason
    assert current(installation.store).version == 1
    assert_clean(installation)
    assert installation.step().action == "none"


@pytest.mark.parametrize(
    ("requests", "name", "value"),
    [
        ({"canary_failures": 30}, "failure rate", 0.3),
        ({"canary_ms": 2.0, "canary_requests": 500}, "latency ratio", 2.0),
    ],
    ids=["errors", "latency"],
)
def test_errors_and_latency_of_all_replicas_abort_without_outcomes(
    installation, requests, name, value
):
    installation.start()
    installation.requests(**requests)
    found = canary.step(installation.settings(evidence=(None,)))
    assert found.action == "aborted"
    (check,) = (check for check in found.decision.by_counts.checks if check.result == "fail")
    assert (check.name, check.value) == (name, pytest.approx(value))
    assert installation.plan().canary is None


def test_counts_from_before_stage_do_not_affect_it(installation):
    installation.start()
    version = installation.plan().canary.version
    installation.requests()
    installation.pairs()
    for server in installation.servers.values():
        server.count(CANARY_NAME, version, failure=4)
    assert installation.step().action == "grown"
    installation.requests()
    counts = installation.step().decision.by_counts.counts.canary
    assert counts.failure == 0
    assert counts.success == 200


@pytest.mark.parametrize("change", ["new", "restarted"])
def test_warm_up_of_new_or_restarted_server_does_not_count_against_canary(installation, change):
    """70 slow requests are a small share of the stable arm, but a large share of the canary."""
    for server in installation.servers.values():
        server.count(MODEL_NAME, 1, success=1000, infer_us=1_000_000)
    installation.start()
    installation.requests()
    assert installation.step().decision.by_counts.latency_ratio is not None
    if change == "new":
        installation.servers["c:1"] = installation.server("c:1")
        server, metrics = installation.servers["c:1"], (*URLS, "c:1")
    else:
        server, metrics = installation.servers["b:1"], URLS
    server.start()
    server.load(CANARY_NAME)
    for name, version in ((MODEL_NAME, 1), (CANARY_NAME, 2)):
        server.count(name, version, success=70, infer_us=700_000)
    for _ in range(3):
        step = installation.step(metrics=metrics)
        assert step.action == "held"
        installation.servers["a:1"].count(CANARY_NAME, 2, success=10, infer_us=10_000)
    assert step.decision.by_counts.latency_ratio == pytest.approx(1.0)
    server.count(CANARY_NAME, 2, success=500, infer_us=5_000_000)
    assert installation.step(metrics=metrics).action == "aborted", (
        "the counts of the restarted server must be used again"
    )


def test_canary_waits_while_server_is_unreadable_or_none_is_named(installation):
    installation.start()
    installation.requests()
    installation.pairs()

    def unreadable(address):
        raise TemporaryError(f"metrics of {address} cannot be read")

    def unknown(step):
        (check,) = step.decision.by_counts.checks
        assert check.detail in step.reason
        return check.detail

    held = installation.step(fetch=unreadable)
    assert (held.action, unknown(held)) == (
        "held",
        "errors and latency are unknown: metrics of a:1 cannot be read",
    )
    held = installation.step(metrics=())
    assert (held.action, unknown(held)) == (
        "held",
        "errors and latency are unknown: --metrics-urls is empty",
    )
    assert installation.step().action == "grown"


def test_pairs_of_all_stages_count_and_server_counters_only_of_their_own(installation):
    installation.start(share=0.0)
    installation.requests()
    installation.pairs(700)
    installation.start()
    installation.clock.advance(1)
    installation.requests()
    installation.pairs(600)
    found = installation.step()
    assert (found.action, found.decision.by_pairs.num_pairs) == ("grown", 1300)
    installation.clock.advance(1)
    found = installation.step()
    assert (found.action, found.decision.by_pairs.num_pairs, found.decision.by_pairs.action) == (
        "held",
        1300,
        "grow",
    )
    (few,) = found.decision.by_counts.checks
    assert (few.name, few.limit, few.result) == ("requests of each arm", 50, "inconclusive")
    installation.requests()
    assert installation.step().share == 0.25


def test_status_reports_what_step_would_find_and_changes_nothing(installation):
    installation.start()
    installation.requests()
    installation.pairs()
    before = installation.plan(), installation.actions()
    assert canary.status(installation.settings()).decision.action == "grow"
    assert (installation.plan(), installation.actions()) == before


def test_shadow_answers_no_client_and_grows_only_if_started_again(installation):
    done = installation.start(share=0.0)
    plan = installation.plan()
    assert (plan.canary_share, plan.shadow_share) == (0.0, 1.0)
    assert all(plan.arm_for(f"u{i}") == plan.stable for i in range(2000))
    installation.requests()
    installation.pairs()
    held = installation.step()
    assert held.action == "held"
    assert held.reason.startswith("shadow traffic only; ")
    assert held.decision.by_pairs.action == "grow"
    assert installation.start().version == done.version
    assert installation.plan().canary_share == 0.01
    assert canary_at_work(installation.store).share == 0.01
    sequence = installation.plan().sequence
    assert installation.start().version == done.version, (
        "a retried step must start no second canary"
    )
    assert installation.plan().sequence == sequence


def test_person_may_advance_what_evidence_does_not_decide(installation):
    done = installation.start(share=0.0)
    for share in (0.01, 0.05, 0.25):
        assert canary.advance(installation.settings(), "on my word").share == share
        assert (installation.plan().canary_share, canary_at_work(installation.store).share) == (
            share,
            share,
        )
    assert canary.advance(installation.settings(), "on my word").action == "released"
    assert (current(installation.store).version, current(installation.store).reason) == (
        done.version,
        "on my word",
    )
    assert installation.until_over().action == "ended"
    assert_clean(installation)
    assert canary.advance(installation.settings(), "again").action == "none"


def evaluated(candidate, decision):
    model, verdict, raw = candidate
    return model, dataclasses.replace(verdict, decision=decision, accepted=decision != "fail"), raw


def test_canary_continues_beside_round_that_is_undecided_too(installation, make_candidate):
    done = installation.start()
    other = evaluated(make_candidate(installation.store, 3), "inconclusive")
    with pytest.raises(Refused, match=f"version {done.version} is a canary"):
        start(*other, settings=installation.release_settings())
    with pytest.raises(Refused, match=f"version {done.version} is a running canary"):
        release(*other, settings=installation.release_settings())
    assert (
        canary_at_work(installation.store).version
        == installation.plan().canary.version
        == done.version
    )
    with pytest.raises(Refused, match=f"version {done.version} is a canary"):
        start(*evaluated(other, "pass"), settings=installation.release_settings())


def test_candidate_that_passes_gate_replaces_canary_and_live_version(installation, make_candidate):
    installation.start()
    done = release(
        *evaluated(make_candidate(installation.store, 3), "pass"),
        settings=installation.release_settings(),
    )
    assert current(installation.store).version == installation.plan().stable.version == done.version
    assert installation.plan().canary is None, "clients must leave the canary at once"
    assert installation.until_over().action == "ended"
    assert_clean(installation)


@pytest.mark.parametrize("is_plan_written", [True, False], ids=["plan written", "plan out of date"])
def test_next_canary_unloads_one_before_once_clients_have_left_it(
    installation, make_candidate, monkeypatch, is_plan_written
):
    """The plan can still name a canary that no controller has unloaded."""
    before = installation.start().version
    third, fourth = (evaluated(make_candidate(installation.store, seed), "pass") for seed in (3, 4))

    def unwritable(*_):
        raise TemporaryError("the plan cannot be written")

    with monkeypatch.context() as patched:
        if not is_plan_written:
            patched.setattr(ModelRepository, "write_plan", unwritable)
        done = release(*third, settings=installation.release_settings())
    if not is_plan_written:
        assert installation.plan().canary.version == before, (
            "the release remains, and the plan is out of date"
        )
        installation.clock.advance(60)
    verdict = dataclasses.replace(
        fourth[1], champion_model_id=done.model_id, decision="inconclusive"
    )
    with pytest.raises(TemporaryError, match="clients may still call"):
        start(fourth[0], verdict, fourth[2], settings=installation.release_settings())
    assert installation.plan().canary is None
    assert all(before in s.loaded(CANARY_NAME) for s in installation.servers.values())
    installation.clock.advance(5)
    assert (
        start(fourth[0], verdict, fourth[2], settings=installation.release_settings()).version
        == done.version + 1
    )
    assert all(s.loaded(CANARY_NAME) == [done.version + 1] for s in installation.servers.values())


def test_person_may_try_undecided_model_and_nobody_failed_model(installation):
    undecided = evaluated(installation.candidates[2], "inconclusive")
    refused = dataclasses.replace(undecided[1], accepted=False)
    with pytest.raises(ContractError, match="'inconclusive', expected an accepted verdict"):
        release(undecided[0], refused, undecided[2], settings=installation.release_settings())
    with pytest.raises(ContractError, match="'fail'"):
        start(*evaluated(undecided, "fail"), settings=installation.release_settings())
    start(undecided[0], refused, undecided[2], settings=installation.release_settings())
    assert canary_at_work(installation.store) is not None


def test_one_faulty_server_blocks_no_repair_and_canary_reloads_count_apart(installation):
    def check(server):
        if server.url == "a:1":
            raise PermanentError("no Triton")

    installation.start()
    for name in (MODEL_NAME, CANARY_NAME):
        installation.servers["b:1"].unload(name)
    connect = {
        url: Altered(server, check_live=check) for url, server in installation.servers.items()
    }.get
    watchdog = Watchdog(target=installation.release_settings(connect=connect))
    for _ in range(4):
        watchdog.check()
    assert installation.servers["b:1"].loaded() == [1]
    assert set(+watchdog.reloads) == {1}


def test_canary_needs_live_version(unserved, make_candidate):
    with pytest.raises(ContractError, match="no live version"):
        start(*make_candidate(unserved.store, 1), settings=unserved)


def test_live_model_is_no_canary_and_there_is_nothing_to_abort(installation):
    assert installation.start(1).version == 1
    assert installation.plan() is None
    assert canary.abort(installation.settings(), "why not").action == "none"


def test_rollback_ends_canary_and_next_step_unloads_it(installation, make_candidate):
    release(*make_candidate(installation.store, 3), settings=installation.release_settings())
    installation.candidates[2] = (
        installation.candidates[2][0],
        dataclasses.replace(installation.candidates[2][1], champion_model_id="model-3"),
        installation.candidates[2][2],
    )
    installation.start()
    rollback(installation.release_settings(), to_version=1, reason="for the test")
    assert current(installation.store).version == 1
    assert (installation.plan().canary, installation.plan().stable.version) == (None, 1), (
        "clients must leave the canary at once"
    )
    assert canary_at_work(installation.store) is None
    assert installation.until_over().action == "ended"
    assert_clean(installation)


def test_canary_is_rolled_back_during_outage_and_unloaded_after_it(installation):
    installation.start()
    installation.servers["b:1"].crash()
    assert canary.abort(installation.settings(), "an incident").action == "aborted"
    assert installation.plan().canary is None, "clients must leave before the unload"
    installation.clock.advance(6)
    with pytest.raises(TemporaryError):
        installation.step()
    assert canary_at_work(installation.store) is not None
    installation.servers["b:1"].start()
    assert installation.step().action == "ended"
    assert read_entries(installation.store)[-1].reason == "an incident"
    assert_clean(installation)


def test_server_that_is_down_does_not_prolong_bad_canary(installation):
    installation.start()
    installation.servers["b:1"].crash()
    installation.requests()
    installation.pairs()
    with pytest.raises(TemporaryError):
        installation.step()
    assert installation.plan().canary is not None, "a good canary must wait"
    installation.clock.advance(
        -12
    )  # These pairs are older, so the canary is evaluated on them first.
    installation.pairs(5000, canary_noise=3.0)
    assert installation.step().action == "aborted"
    assert installation.plan().canary is None


def test_without_canary_step_needs_no_server(installation):
    """The command runs every few minutes, even before the first model or without any server."""
    for server in installation.servers.values():
        server.crash()
    assert installation.step().action == "none"


def test_abort_reverts_what_killed_start_had_published(installation):
    installation.checkpoints.clear()
    installation.start()
    installation.crash_at = installation.checkpoints.index("plan written") + 1
    canary.abort(installation.settings(), "to begin anew")
    installation.until_over()
    installation.checkpoints.clear()
    with pytest.raises(Killed):
        _killed_at_crash(installation, installation.start)
    assert canary_at_work(installation.store) is None
    assert installation.plan().canary is not None
    assert canary.abort(installation.settings(), "for the test").action == "aborted"
    assert installation.plan().canary is None


@pytest.mark.parametrize("fault", ["refused", "wrong"])
def test_canary_that_restarted_server_refuses_or_answers_wrongly_aborts(installation, fault):
    installation.start()
    server = installation.servers["a:1"]
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
    found = installation.step(
        connect=lambda url: faulty if url == "a:1" else installation.servers[url]
    )
    assert found.action == "aborted"
    assert (
        "no room" if fault == "refused" else "differs from the training-side score"
    ) in found.reason
    assert installation.until_over().action == "ended"
    assert_clean(installation)


def test_change_during_read_of_evidence_is_not_overridden(installation):
    installation.start()
    installation.requests()
    installation.pairs()

    done = []

    def meanwhile(address):
        done.append(canary.abort(installation.settings(), "a person was faster").action)
        return installation.servers[address].metrics()

    assert installation.step(fetch=meanwhile).action == "changed"
    assert done[0] == "aborted", "an abort must not wait while servers are read"
    assert (installation.plan().canary, installation.plan().reason) == (None, "a person was faster")
    assert current(installation.store).version == 1


def test_start_that_server_refuses_changes_nothing(installation):
    def refuse(real, name):
        if name == CANARY_NAME:
            raise PermanentError("no room")
        real.load(name)

    def connect(url):
        return (
            Altered(installation.servers[url], load=refuse)
            if url == "b:1"
            else installation.servers[url]
        )

    with pytest.raises(PermanentError, match="no room"):
        start(*installation.candidates[2], settings=installation.release_settings(connect=connect))
    assert_clean(installation)
    assert installation.actions()[-1] == "withdrawn"
    installation.start()
    assert installation.plan().canary.version == 3, "a number from the journal must not be reused"


def test_clock_that_was_set_back_cannot_keep_canary_draining_for_ever(installation):
    installation.start()
    canary.abort(installation.settings(), "for the test")
    installation.clock.advance(-3600)
    assert installation.step().wait_seconds == 5.0
    installation.clock.advance(5)
    assert installation.step().action == "ended"
    assert_clean(installation)


def run_to(installation, stage):
    """Bring a fresh installation to the state just before `stage`.

    Return the function that runs the stage.
    """
    if stage == "start":
        return installation.start
    installation.start(**({"share": POLICY.shares[-1]} if stage == "promote" else {}))
    if stage == "abort":

        def abort():
            canary.abort(installation.settings(), "for the test")
            installation.clock.advance(5)
            return installation.step()

        return abort
    installation.requests()
    installation.pairs()
    if stage == "grow":
        return installation.step

    def promote():
        assert installation.step().action == "released"
        installation.clock.advance(5)
        return installation.step()

    return promote


@pytest.mark.parametrize(
    "stage",
    [
        "promote",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("start", "grow", "abort")),
    ],
)
def test_next_step_repairs_kill_at_any_step(tmp_path, make_candidate, stage):
    """The killed process does not clean up, and writes nothing after the kill."""
    number, names = 1, []
    installation = Installation(tmp_path / "installation", make_candidate)
    act = run_to(installation, stage)
    go_back = installation.remember(tmp_path / "before")
    while True:
        go_back()
        installation.checkpoints.clear()
        installation.crash_at = number
        try:
            _killed_at_crash(installation, act)
        except Killed as crash:
            names.append(crash.args[0])
        else:
            break
        installation.crash_at = None
        installation.check_served()
        installation.step()
        plan, at_work = installation.plan(), canary_at_work(installation.store)
        if plan is not None and plan.canary is not None:
            assert (at_work.version, at_work.share) == (plan.canary.version, plan.canary_share)
        assert installation.until_over().action in ("none", "ended")
        installation.check_served()
        assert_clean(installation)
        if stage == "start":
            installation.start()
            installation.check_served()
        expected = {"grow": 2, "promote": 2, "abort": 1}.get(stage)
        if expected:
            assert current(installation.store).version == expected
        number += 1
    assert len(names) >= {"start": 8, "grow": 2, "promote": 5, "abort": 2}[stage], names


def _killed_at_crash(installation, act):
    """Run `act`. After the crash, every further write fails too, as after a kill."""
    from controller import deployment_target as target_module
    from evergreen.registry import requests

    dead = []
    real_checkpoint = installation.checkpoint

    def checkpoint(name):
        if dead:
            raise Killed(name)
        try:
            real_checkpoint(name)
        except Killed:
            dead.append(name)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation, "checkpoint", checkpoint)
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


def test_manually_started_canary_is_served_with_live_versions_options(
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
