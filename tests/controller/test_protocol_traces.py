"""Compare each move of the real controller with the same move of the protocol's model.

The controller runs over the files of a registry and a repository and over two servers. Hypothesis
chooses requests, withdrawals, deadlines, clocks and faults. Before each move the controller reports
what it sees, and the model must be in the same state. The model then makes the move that the table
names. Fixed scripts trigger every rule of the table that can occur here.
"""

import dataclasses
import shutil
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from controller import deployment_target as target_module
from controller import moves, protocol
from controller.deployment_target import CanaryStages, live_version, opened
from controller.protocol import (
    ANSWER,
    CONFIGURE,
    DISCARD,
    END_BAKING,
    HEAL,
    LOAD_CANARY,
    RECORD,
    RESTORE_CONFIG,
    SERVE,
    SHOW_CANARY,
    TABLE,
    WITHDRAW_INTENT,
)
from controller.reconcile import drive, reconciled
from controller.rollback import rollback_request
from controller.watchdog import Watchdog
from evergreen.contracts.requests import ABORT, ADVANCE, CANARY, CANCELLED, RELEASE, ROLLBACK
from evergreen.registry.promotion_journal import (
    BAKED,
    baking,
    canary_at_work,
    read_entries,
    read_journal,
)
from evergreen.registry.requests import (
    append_request,
    new_id,
    new_request,
    read_requests,
    withdraw,
)
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.prepare import prepare_request
from testing.served_names import CANARY_NAME, MODEL_NAME
from tests.support.clocks import Clock
from tests.support.crashes import Killed
from tests.support.file_deployment import FileDeployment
from tests.support.model_repository import with_versions
from tests.support.protocol_model import Ask, ProtocolModel, Scenario

SEEDS = (2, 3)
SECONDS = 60.0
NEVER = 10**6
SHARES = (0.25, 0.5)
DRAIN_SECONDS = 5.0
STAGES = CanaryStages(shares=SHARES, drain_seconds=DRAIN_SECONDS)

NOT_IN_A_TRACE = {
    "fenced": "needs a second controller: test_reconcile.py and the search of the model have it"
}
"""States of the table that cannot occur here, and the reason."""


class TracedModel(ProtocolModel):
    """Protocol model in which releases are not compared with the live version.

    Before the controller answers that a version is already live, it probes every server.
    """

    def is_stale(self, journal, ask):
        return False

    def is_unconfirmed(self, state):
        """Return whether a server does not serve the live version that a release asks for."""
        at, live = self.chosen(state.journal), state.journal.live
        ask = None if at is None else state.journal.asks[at]
        is_live = ask is not None and ask.kind == RELEASE and ask.recorded is None
        return (
            is_live
            and self.satisfied(state, at) == live
            and any(server.serves != live for server in state.servers)
        )

    def write(self, state, me, rule, *, seen=None):
        if rule.move == ANSWER and self.is_unconfirmed(state):
            return None
        return super().write(state, me, rule, seen=seen)

    def is_refusal_final(self, state):
        return not self.is_unconfirmed(state) and super().is_refusal_final(state)


class Faults:
    """Faults that are injected in one round."""

    def __init__(self, *, kill_before=NEVER, kill_at="", load=NEVER, entry=NEVER):
        self.kill_before, self.kill_at, self.load, self.entry = kill_before, kill_at, load, entry


def traces(deployment, snapshot):
    """Return a state machine that runs the real controller and the model in parallel."""

    class Traces(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            shutil.rmtree(deployment.root)
            shutil.copytree(snapshot, deployment.root)
            self.clock = Clock()
            self.model = TracedModel(Scenario(asks=(), shares=SHARES))
            self.state = self.model.start()
            # The release of version 1 took the first lease.
            first = read_journal(deployment.settings.store)[0].lease
            files = self.state.files._replace(fence=first)
            journal = self.state.journal._replace(lease=first)
            numbers = ((1, "model-1", None),)
            self.state = self.state._replace(files=files, journal=journal._replace(numbers=numbers))
            self.asked, self.pending, self.bakes = [], None, False

        # Moves of people, the pipeline and the monitor.

        @initialize(seed=st.sampled_from(SEEDS))
        def first_release_is_asked(self, seed):
            self.release_is_asked(seed)

        @rule(seed=st.sampled_from(SEEDS), run=st.sampled_from(["", "run-1"]))
        def release_is_asked(self, seed, run=""):
            self._ask_for_version(RELEASE, seed, run=run)

        @rule(
            seed=st.sampled_from(SEEDS),
            run=st.sampled_from(["", "run-1"]),
            share=st.sampled_from([0.0, SHARES[0]]),
        )
        def canary_is_asked(self, seed, share=SHARES[0], run=""):
            self._ask_for_version(CANARY, seed, run=run, share=share)

        def _ask_for_version(self, kind, seed, *, run, share=None):
            prepared, folder = deployment.prepared[seed]
            request = dataclasses.replace(
                prepared, kind=kind, request=new_id(), run=run or None, share=share
            )
            shutil.copytree(folder, deployment.settings.store / "prepared" / request.request)
            self._ask(request, Ask(kind, model=f"model-{seed}", run=run, share=share or 0))

        @rule(of_live=st.booleans())
        def rollback_is_asked(self, of_live=False):
            request = rollback_request(deployment.settings, to_version=None, reason="drill")
            live = read_journal(deployment.settings.store)[-1]
            # The controller demands a rollback only of a version that was released.
            of_live = of_live and live.action != "rollback" and not self.state.journal.intent
            replaces = live.version if of_live else None
            request = dataclasses.replace(request, replaces=replaces)
            self._ask(request, Ask(ROLLBACK, replaces=replaces))

        @rule(has_old_plan=st.booleans())
        def abort_is_asked(self, has_old_plan=False):
            self._ask_about_canary(ABORT, has_old_plan)

        @rule(has_old_plan=st.booleans())
        def next_share_is_asked(self, has_old_plan=False):
            self._ask_about_canary(ADVANCE, has_old_plan)

        def _ask_about_canary(self, kind, has_old_plan):
            moment = self.clock.moment()
            request = new_request(kind, who="anna", reason="drill", now=moment, seconds=SECONDS)
            request = dataclasses.replace(request, plan=10**6 if has_old_plan else None)
            self._ask(request, Ask(kind, has_old_plan=has_old_plan))

        def _ask(self, request, ask):
            now = self.clock.moment()
            deadline = now + timedelta(seconds=SECONDS)
            request = dataclasses.replace(
                request, time=now.isoformat(), deadline=deadline.isoformat()
            )
            append_request(deployment.settings.store, request)
            self.asked.append((request, deadline))
            journal = self.state.journal
            line, asks = journal.intent, journal.asks
            ask = ask._replace(
                live_then=journal.live,
                intent_then=line.version if line else None,
                rollback_then=line is not None and asks[line.request].kind == ROLLBACK,
            )
            self._journal(asks=(*asks, ask))

        def _journal(self, **changes):
            self.state = self.state._replace(journal=self.state.journal._replace(**changes))

        def _files(self, **changes):
            self.state = self.state._replace(files=self.state.files._replace(**changes))

        def _server(self, at, **changes):
            servers = list(self.state.servers)
            servers[at] = servers[at]._replace(**changes)
            self.state = self.state._replace(servers=tuple(servers))

        @rule(at=st.integers(0, 3))
        def request_is_withdrawn(self, at=0):
            if at < len(self.asked):
                request, now = self.asked[at][0], self.clock.moment()
                withdraw(
                    deployment.settings.store, request.request, who="a run", now=now, reason="gone"
                )
                journal = self.model._answered(self.state.journal, at, CANCELLED)
                self.state = self.state._replace(journal=journal)

        @rule(seconds=st.sampled_from([DRAIN_SECONDS, SECONDS + 1, -100.0]))
        def time_passes(self, seconds):
            """Let time pass, or set the clock back."""
            self.clock.advance(seconds)
            now, asks = self.clock.moment(), list(self.state.journal.asks)
            for at, (_, deadline) in enumerate(self.asked):
                asks[at] = asks[at]._replace(is_expired=now > deadline)
            self._journal(asks=tuple(asks))
            if (plan := deployment.repository.read_plan()) is not None:
                age = (now - datetime.fromisoformat(plan.published_at)).total_seconds()
                self._files(is_drained=age >= DRAIN_SECONDS, is_ahead=age < 0)

        @rule(at=st.integers(0, 1))
        def server_restarts(self, at=0):
            server = deployment.servers[at].start()
            if self.state.files.placed is not None:
                server.load(CANARY_NAME)
            self._server(at, serves=self.state.files.config, canary=self.state.files.placed)
            self._server(at, candidate=None)

        @rule(at=st.integers(0, 1), name=st.sampled_from([MODEL_NAME, CANARY_NAME]))
        def server_loses_model(self, at=0, name=MODEL_NAME):
            deployment.servers[at].unload(name)
            self._server(at, **{"serves" if name == MODEL_NAME else "canary": None})

        @rule()
        def configuration_is_edited(self):
            path = deployment.repository.objects.root / MODEL_NAME / "config.pbtxt"
            path.write_text(with_versions(path.read_text(), [1]))
            self._files(config=1)

        # The controller's round.

        @rule()
        def controller_does_all(self):
            self._round(Faults())

        @rule(number=st.integers(0, 14))
        def controller_is_killed(self, number=NEVER, move=""):
            self._round(Faults(kill_before=number, kill_at=move))

        @rule(load=st.integers(0, 3), entry=st.one_of(st.just(NEVER), st.integers(0, 3)))
        def load_fails(self, load, entry=NEVER):
            self._round(Faults(load=load, entry=entry))

        @rule(entry=st.integers(0, 3))
        def answer_of_append_is_lost(self, entry):
            self._round(Faults(entry=entry))

        @rule()
        def baking_may_end(self):
            with self._traced(Faults()) as target, opened(target) as target:
                if (line := baking(deployment.settings.store)) is None:
                    return
                self.bakes = True
                target.baked = line, "the evidence allows it"
                drive(target)
                self._finish(None)
                baked = {
                    each.version for each in read_entries(target.store) if each.action == BAKED
                }
                assert (line.version in baked) == (target.baked is None)
                assert target.baked is None or self.state.journal.live != line.version

        @rule()
        def watchdog_looks(self):
            """Let the watchdog probe the servers and reload the models with wrong scores."""
            held = self.model._with(self.state, 0, lease=self.state.files.fence)
            if self.model.rules(self.model.observe(held, 0)) is not None:
                return  # a change is not finished, so the watchdog reloads nothing
            journal, plan = self.state.journal, self.state.files.plan
            shown = plan[1] if plan else None
            wrong = [
                (at, name)
                for at, server in enumerate(self.state.servers)
                for name, is_right in (
                    ("serves", server.serves == journal.live),
                    ("canary", shown is None or server.canary == shown),
                )
                if not is_right
            ]
            seen = []

            def trace(chosen, desired, observed):
                lease = self.state.files.fence + len(seen) + 1
                expected = self.model.observe(
                    self.model._with(self.state, 0, lease=lease), 0, probed=True
                ).as_protocol()
                assert desired == expected[0]
                assert dataclasses.replace(observed, servers=(), fence=0) == dataclasses.replace(
                    expected[1], servers=(), fence=0
                )
                assert chosen.move == (HEAL if wrong[len(seen)][1] == "serves" else LOAD_CANARY)
                deployment.covered.add(chosen)
                seen.append(chosen)

            target = dataclasses.replace(self._target(), trace=trace)
            watchdog = Watchdog(target=target)
            for _ in range(2):
                watchdog.check()
            assert len(seen) == len(wrong)
            self._files(fence=self.state.files.fence + len(seen))
            for at, name in wrong:
                self._server(at, **{name: journal.live if name == "serves" else journal.canary})

        def _target(self):
            return dataclasses.replace(
                deployment.settings,
                connect=deployment.connect,
                clock=self.clock.moment,
                num_kept=100,
                stages=STAGES,
            )

        @contextmanager
        def _traced(self, faults):
            """Yield the target of one round, and compare the round's moves with the model."""
            self.faults, self.loads, self.entries, self.moves = faults, 0, 0, 0
            self.broken, self.bakes = None, False
            fence = self.state.files.fence + 1
            self._files(fence=fence)
            self.state = self.model._with(self.state, 0, lease=fence)
            real = target_module.append_promotion
            target_module.append_promotion = self._append(real)
            try:
                yield dataclasses.replace(self._target(), connect=self._connect, trace=self._trace)
            except Killed:
                self.pending = None
            except (ContractError, PermanentError, TemporaryError, OSError) as error:
                self._finish(error)
            finally:
                target_module.append_promotion = real
            self.state = self.model._killed(self.state, 0)

        def _round(self, faults):
            with self._traced(faults) as target:
                with reconciled(target):
                    pass
                self._finish(None)
                assert self.model.rules(self.model.observe(self.state, 0)) is None

        def _trace(self, chosen, desired, observed):
            self._finish(None)
            self.state = self.model.superseded(self.state, 0)
            wanted, seen = self.model.observe(self.state, 0).as_protocol()
            wanted = dataclasses.replace(wanted, is_baked=self.bakes and desired.is_baked)
            assert (desired, observed) == (wanted, seen)
            assert protocol.next_rule(wanted, seen) is chosen
            deployment.covered.add(chosen)
            if self.moves == self.faults.kill_before or chosen.move == self.faults.kill_at:
                raise Killed(chosen.move)
            self.moves += 1
            if chosen.move != END_BAKING:
                self.pending, self.loads_before, self.broken = chosen, self.loads, None

        def _finish(self, error):
            """Make the pending move in the model.

            The move has the same outcome as in the controller.
            """
            chosen, self.pending = self.pending, None
            if chosen is None:
                return
            deployment.num_moves += 1
            if self.broken is None:
                self.state = self.model.done(self.state, 0, chosen)
                return
            parts = dict(self.model._parts(self.model.begin(self.state, 0, chosen), 0, chosen))
            self.state = self.model.failed(parts[self.broken], 0, chosen)

        def _append(self, real):
            def append(store, entry):
                written = real(store, entry)
                self.entries += 1
                if self.entries - 1 == self.faults.entry and self.pending is not None:
                    self.broken = "after"
                    raise OSError("the answer of the write is lost")
                return written

            return append

        def _connect(self, url):
            server = deployment.connect(url)
            load = server.load

            def load_or_fail(name):
                forward = (protocol.REHEARSE, protocol.SERVE, protocol.LOAD_CANARY)
                if self.pending is not None and self.pending.move in forward:
                    if self.loads == self.faults.load:
                        at = self.loads - self.loads_before
                        self.broken = f"after server {at - 1}" if at else "before"
                        self.loads += 1
                        raise PermanentError(f"{url} rejects {name}")
                    self.loads += 1
                load(name)

            server.load = load_or_fail
            return server

        # Invariants that must hold after each rule of this state machine.

        @invariant()
        def model_and_servers_agree(self):
            journal, files, store = self.state.journal, self.state.files, deployment.settings.store
            assert read_journal(store)[-1].version == journal.live
            canary = canary_at_work(store)
            assert (canary.version if canary else None) == journal.canary
            found = read_requests(store)
            results = [each.result.action if each.result else None for each in found[1:]]
            assert results == [ask.result for ask in journal.asks]
            assert live_version(deployment.repository.read_config()) == files.config
            assert set(deployment.repository.versions()) == set(files.versions)
            assert next(iter(deployment.repository.canary.whole()), None) == files.placed
            plan = deployment.repository.read_plan()
            shown = plan and (
                plan.stable.version,
                plan.canary.version if plan.canary else None,
                plan.canary_share,
            )
            assert shown == files.plan
            for server, model in zip(deployment.servers, self.state.servers):
                assert max(server.loaded(), default=None) == model.serves
                assert max(server.loaded(CANARY_NAME), default=None) == model.canary

    return Traces


def prepared(deployment, seed, folder):
    """Prepare a release of the model made with `seed`.

    Return the request, and the folder of the prepared files.
    """
    request = prepare_request(
        RELEASE,
        deployment.candidate(seed),
        store=deployment.settings.store,
        options=deployment.settings.options,
        who="a run",
        now=Clock().moment,
        seconds=SECONDS,
    )
    shutil.move(deployment.settings.store / "prepared" / request.request, folder)
    return request, folder


@pytest.fixture
def snapshot(tmp_path, make_candidate):
    deployment = FileDeployment(tmp_path / "deployment", make_candidate)
    deployment.root, deployment.num_moves, deployment.covered = tmp_path / "deployment", 0, set()
    deployment.release(1)
    deployment.prepared = {
        seed: prepared(deployment, seed, tmp_path / f"prepared-{seed}") for seed in SEEDS
    }
    shutil.copytree(deployment.root, tmp_path / "snapshot")
    return deployment, tmp_path / "snapshot"


def run(machine, num_examples, **more):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=10,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


@pytest.mark.parametrize(
    "num_examples",
    [25, pytest.param(150, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))],
    ids=["few", "many"],
)
def test_every_move_of_controller_has_the_effect_of_the_model(snapshot, num_examples):
    deployment, _ = snapshot
    run(traces(*snapshot), num_examples)
    assert deployment.num_moves > num_examples


SCRIPTS = {
    "a canary grows and is released": [
        ("canary_is_asked", {"seed": 2}),
        ("controller_does_all", {}),
        ("next_share_is_asked", {}),
        ("controller_does_all", {}),
        ("next_share_is_asked", {}),
        ("controller_does_all", {}),
        ("time_passes", {"seconds": DRAIN_SECONDS}),
        ("controller_does_all", {}),
        ("baking_may_end", {}),
    ],
    "a shadow canary serves, and is aborted twice": [
        ("canary_is_asked", {"seed": 2, "share": 0.0}),
        ("controller_does_all", {}),
        ("canary_is_asked", {"seed": 2}),
        ("controller_does_all", {}),
        ("abort_is_asked", {"has_old_plan": True}),
        ("controller_does_all", {}),
        ("abort_is_asked", {}),
        ("controller_does_all", {}),
        ("time_passes", {"seconds": -100.0}),
        ("controller_does_all", {}),
        ("time_passes", {"seconds": DRAIN_SECONDS}),
        ("controller_does_all", {}),
    ],
    "a canary starts while the canary before is drained": [
        ("canary_is_asked", {"seed": 2}),
        ("controller_does_all", {}),
        ("rollback_is_asked", {}),
        ("release_is_asked", {"seed": 3}),
        ("controller_does_all", {}),
        ("time_passes", {"seconds": DRAIN_SECONDS}),
        ("canary_is_asked", {"seed": 2}),
        ("controller_does_all", {}),
    ],
    "the start of a canary is killed, and then fails": [
        ("canary_is_asked", {"seed": 2}),
        ("controller_is_killed", {"move": RECORD}),
        ("abort_is_asked", {}),
        ("controller_does_all", {}),
        ("time_passes", {"seconds": DRAIN_SECONDS}),
        ("canary_is_asked", {"seed": 2}),
        ("answer_of_append_is_lost", {"entry": 1}),
        ("controller_does_all", {}),
    ],
    "a release is killed, is late, fails, and its undo fails": [
        ("release_is_asked", {"seed": 2}),
        ("controller_is_killed", {"move": SERVE}),
        ("time_passes", {"seconds": SECONDS + 1}),
        ("controller_does_all", {}),
        ("release_is_asked", {"seed": 2}),
        ("load_fails", {"load": 0}),
        ("release_is_asked", {"seed": 2}),
        ("load_fails", {"load": 2, "entry": 1}),
        ("controller_does_all", {}),
    ],
    "a retry after a rollback": [
        ("release_is_asked", {"seed": 2, "run": "run-1"}),
        ("controller_does_all", {}),
        ("rollback_is_asked", {}),
        ("controller_does_all", {}),
        ("release_is_asked", {"seed": 2, "run": "run-1"}),
        ("controller_does_all", {}),
        ("release_is_asked", {"seed": 3, "run": "run-1"}),
        ("rollback_is_asked", {}),
        ("release_is_asked", {"seed": 3, "run": "run-1"}),
        ("controller_does_all", {}),
    ],
    "a release of the live model, which a server has lost": [
        ("release_is_asked", {"seed": 2}),
        ("controller_does_all", {}),
        ("release_is_asked", {"seed": 2}),
        ("server_loses_model", {"at": 0}),
        ("controller_does_all", {}),
    ],
    "requests that nobody answered in time": [
        ("release_is_asked", {"seed": 2}),
        ("time_passes", {"seconds": SECONDS + 1}),
        ("controller_does_all", {}),
    ],
    "servers, files and the configuration are changed from outside": [
        ("release_is_asked", {"seed": 2}),
        ("canary_is_asked", {"seed": 3}),
        ("controller_does_all", {}),
        ("server_loses_model", {"at": 0}),
        ("server_loses_model", {"at": 1, "name": CANARY_NAME}),
        ("watchdog_looks", {}),
        ("configuration_is_edited", {}),
        ("controller_does_all", {}),
        ("server_restarts", {"at": 1}),
        ("controller_does_all", {}),
    ],
}


def test_every_rule_of_the_table_occurs_in_a_trace(snapshot):
    deployment, _ = snapshot
    for steps in SCRIPTS.values():
        machine = traces(*snapshot)()
        for name, values in steps:
            getattr(machine, name)(**values)
            machine.model_and_servers_agree()
    missing = {rule.state for rule in TABLE if rule not in deployment.covered}
    assert missing == set(NOT_IN_A_TRACE)


def forgetful(body):
    """Return a replacement for the body of a move, which does nothing."""
    return lambda target: None


MUTANTS = {
    "do not write the configuration": (CONFIGURE, forgetful),
    "do not discard staged files": (DISCARD, forgetful),
    "do not restore the configuration": (RESTORE_CONFIG, forgetful),
    "do not load on servers": (SERVE, lambda body: lambda target: moves._know(target, serves=None)),
    "do not withdraw the intent": (WITHDRAW_INTENT, forgetful),
    "do not write the plan with the canary": (SHOW_CANARY, forgetful),
    "do not load the canary": (LOAD_CANARY, forgetful),
    "record without remembering it": (
        RECORD,
        lambda body: lambda target: target.append(target.attempt.line),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if at == 0 else pytest.param(name, marks=pytest.mark.slow)
        for at, name in enumerate(MUTANTS)
    ],
)
def test_traces_find_fault_that_is_built_into_a_move(snapshot, monkeypatch, name):
    move, change = MUTANTS[name]
    monkeypatch.setitem(moves.BODIES, move, change(moves.BODIES[move]))
    with pytest.raises((AssertionError, KeyError)):
        run(traces(*snapshot), 150, phases=[Phase.generate], derandomize=True)
