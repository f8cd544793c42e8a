"""Compare each move of the real controller with the same move of the protocol's model.

The controller runs over the files of a registry and a repository and over two servers. Hypothesis
chooses requests, withdrawals, deadlines and faults. Before each move the controller reports what it
sees, and the model must be in the same state. The model then makes the move that the table names.
"""

import dataclasses
import shutil
from datetime import timedelta

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

from controller import moves, protocol
from controller import site as site_module
from controller.protocol import (
    CONFIGURE,
    DISCARD,
    RECORD,
    RESTORE_CONFIG,
    SERVE,
    WITHDRAW_INTENT,
)
from controller.reconcile import reconciled
from controller.rollback import rollback_request
from controller.site import live_version
from evergreen.contracts.requests import CANCELLED, RELEASE, ROLLBACK
from evergreen.registry.promotion_journal import read_journal
from evergreen.registry.requests import append_request, new_id, read_requests, withdraw
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.prepare import prepare_request
from tests.support.clocks import Clock
from tests.support.crashes import Killed
from tests.support.file_world import World
from tests.support.protocol_model import Ask, ProtocolModel, Scenario, Server

SEEDS = (2, 3)
SECONDS = 60.0
NEVER = 10**6


class TracedModel(ProtocolModel):
    """Protocol model in which releases are not compared with the live version."""

    def is_stale(self, journal, ask):
        return False


class Faults:
    """Faults that are injected in one round."""

    def __init__(self, *, kill_before=NEVER, load=NEVER, entry=NEVER):
        self.kill_before, self.load, self.entry = kill_before, load, entry


def traces(world, snapshot):
    """Return a state machine that runs the real controller and the model in parallel."""

    class Traces(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            shutil.rmtree(world.root)
            shutil.copytree(snapshot, world.root)
            self.clock = Clock()
            self.model = TracedModel(Scenario(asks=()))
            self.state = self.model.start()
            # The release of version 1 took the first lease.
            first = read_journal(world.settings.store)[0].lease
            files = self.state.files._replace(fence=first)
            journal = self.state.journal._replace(lease=first)
            numbers = ((1, "model-1", None),)
            self.state = self.state._replace(files=files, journal=journal._replace(numbers=numbers))
            self.asked, self.pending = [], None

        # What others do.

        @initialize(seed=st.sampled_from(SEEDS))
        def first_release_is_asked(self, seed):
            self.release_is_asked(seed)

        @rule(seed=st.sampled_from(SEEDS))
        def release_is_asked(self, seed):
            prepared, folder = world.prepared[seed]
            now = self.clock.moment()
            request = dataclasses.replace(
                prepared,
                request=new_id(),
                time=now.isoformat(),
                deadline=(now + timedelta(seconds=SECONDS)).isoformat(),
            )
            shutil.copytree(folder, world.settings.store / "prepared" / request.request)
            self._ask(request, Ask(RELEASE, model=f"model-{seed}"))

        @rule()
        def rollback_is_asked(self):
            now = dataclasses.replace(world.settings, clock=self.clock.moment)
            request = rollback_request(now, to_version=None, reason="drill")
            deadline = self.clock.moment() + timedelta(seconds=SECONDS)
            request = dataclasses.replace(request, deadline=deadline.isoformat())
            self._ask(request, Ask(ROLLBACK))

        def _ask(self, request, ask):
            append_request(world.settings.store, request)
            self.asked.append((request, self.clock.moment() + timedelta(seconds=SECONDS)))
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

        @rule(at=st.integers(0, 3))
        def request_is_withdrawn(self, at):
            if at < len(self.asked):
                request, now = self.asked[at][0], self.clock.moment()
                withdraw(world.settings.store, request.request, who="a run", now=now, reason="gone")
                journal = self.model._answered(self.state.journal, at, CANCELLED)
                self.state = self.state._replace(journal=journal)

        @rule()
        def deadlines_pass(self):
            self.clock.advance(SECONDS + 1)
            now, asks = self.clock.moment(), list(self.state.journal.asks)
            for at, (_, deadline) in enumerate(self.asked):
                asks[at] = asks[at]._replace(is_expired=now > deadline)
            self._journal(asks=tuple(asks))

        @rule(at=st.integers(0, 1))
        def server_restarts(self, at):
            world.servers[at].start()
            servers = list(self.state.servers)
            servers[at] = Server(serves=self.state.files.config)
            self.state = self.state._replace(servers=tuple(servers))

        # The controller's round.

        @rule()
        def controller_does_all(self):
            self._round(Faults())

        @rule(number=st.integers(0, 14))
        def controller_is_killed(self, number):
            self._round(Faults(kill_before=number))

        @rule(number=st.integers(0, 3))
        def load_fails(self, number):
            self._round(Faults(load=number))

        @rule(number=st.integers(0, 3))
        def answer_of_append_is_lost(self, number):
            self._round(Faults(entry=number))

        def _round(self, faults):
            self.faults, self.loads, self.entries, self.moves = faults, 0, 0, 0
            fence = self.state.files.fence + 1
            self.state = self.state._replace(files=self.state.files._replace(fence=fence))
            self.state = self.model._with(self.state, 0, lease=fence)
            real = site_module.append_promotion
            changes = {
                "connect": self._connect,
                "trace": self._trace,
                "clock": self.clock.moment,
                "num_kept": 100,
            }
            site_module.append_promotion = self._append(real)
            try:
                with reconciled(dataclasses.replace(world.settings, **changes)):
                    pass
                self._finish(None)
                assert self.model.rules(self.model.observe(self.state, 0)) is None
            except Killed:
                self.pending = None
            except (ContractError, PermanentError, TemporaryError, OSError) as error:
                self._finish(error)
            finally:
                site_module.append_promotion = real
            self.state = self.model._killed(self.state, 0)

        def _trace(self, chosen, desired, observed):
            self._finish(None)
            self.state = self.model.superseded(self.state, 0)
            expected = self.model.observe(self.state, 0).as_protocol()
            assert (desired, observed) == expected
            at = self.model.rules(self.model.observe(self.state, 0))
            assert self.model.table[at] is chosen
            if self.moves == self.faults.kill_before:
                raise Killed(chosen.move)
            self.pending, self.loads_before, self.broken = chosen, self.loads, None
            self.moves += 1

        def _finish(self, error):
            """Make the pending move in the model, with its outcome in the controller."""
            chosen, self.pending = self.pending, None
            if chosen is None:
                return
            world.num_moves += 1
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
            server = world.connect(url)
            load = server.load

            def load_or_fail(name):
                forward = (protocol.REHEARSE, protocol.SERVE)
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
        def model_and_world_agree(self):
            journal, files = self.state.journal, self.state.files
            assert read_journal(world.settings.store)[-1].version == journal.live
            found = read_requests(world.settings.store)
            results = [each.result.action if each.result else None for each in found[1:]]
            assert results == [ask.result for ask in journal.asks]
            assert live_version(world.repository.read_config()) == files.config
            assert set(world.repository.versions()) == set(files.versions)
            for server, model in zip(world.servers, self.state.servers):
                assert max(server.loaded(), default=None) == model.serves
            self.model.check(self.state)

    return Traces


def prepared(world, seed, folder):
    """Return a request to release the model of `seed`, and a copy of its prepared version."""
    request = prepare_request(
        RELEASE,
        world.candidate(seed),
        store=world.settings.store,
        options=world.settings.options,
        who="a run",
        now=Clock().moment,
        seconds=SECONDS,
    )
    shutil.move(world.settings.store / "prepared" / request.request, folder)
    return request, folder


@pytest.fixture
def snapshot(tmp_path, make_candidate):
    world = World(tmp_path / "world", make_candidate)
    world.root, world.num_moves = tmp_path / "world", 0
    world.release(1)
    world.prepared = {seed: prepared(world, seed, tmp_path / f"prepared-{seed}") for seed in SEEDS}
    shutil.copytree(world.root, tmp_path / "snapshot")
    return world, tmp_path / "snapshot"


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
    world, _ = snapshot
    run(traces(*snapshot), num_examples)
    assert world.num_moves > num_examples


def forgetful(body):
    """Return a replacement for the body of a move, which does nothing."""
    return lambda site: None


MUTANTS = {
    "do not write the configuration": (CONFIGURE, forgetful),
    "do not discard staged files": (DISCARD, forgetful),
    "do not restore the configuration": (RESTORE_CONFIG, forgetful),
    "do not load on servers": (SERVE, lambda body: lambda site: moves._know(site, serves=None)),
    "do not withdraw the intent": (WITHDRAW_INTENT, forgetful),
    "record without remembering it": (
        RECORD,
        lambda body: lambda site: site.append(site.attempt.line),
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
