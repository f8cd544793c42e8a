"""Who leads, and that a stale leader can ask for nothing: two replicas with a clock of the test's own."""

from __future__ import annotations

import json

import pytest

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.folder import FolderObjects
from monitoring.acting.leadership import Leadership, LeadershipSettings, NotLeading, replica_name
from monitoring.acting.ledger import LEDGER_FILE, Ledger, last_term
from monitoring.acting.standby import open_leadership
from monitoring.memory.store import Store
from monitoring.monitor import Monitor
from monitoring.uploader import Uploader
from tests.components.storage.test_lease import Clocks
from tests.monitoring.acting.test_retraining import DRIFT, traffic
from tests.monitoring.conftest import Bench, FakeTrigger


@pytest.fixture
def objects(tmp_path):
    return FolderObjects(tmp_path / "leases")


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def make(objects, clocks):
    def leadership(replica):
        clock = {"clock": lambda: clocks.wall, "monotonic": lambda: clocks.steady}
        return Leadership(objects, replica=replica, seconds=30.0, **clock)

    return leadership


def test_the_second_replica_leads_only_after_the_first_ones_lease_has_ended(make, clocks):
    first, second = make("a"), make("b")
    first.take()
    with pytest.raises(TemporaryError, match="is held by a until"):
        second.take()
    clocks.pass_(30.0)
    assert not first.leads
    second.take()
    assert (second.leads, first.term, second.term) == (True, 1, 2)
    with pytest.raises(NotLeading):
        first.check()
    second.check()


def test_a_leader_that_was_taken_over_while_its_clock_stood_still_learns_it_at_the_check(make, objects, clocks):
    """A frozen virtual machine: its own monotonic clock has not moved."""
    first, other = make("a"), Clocks(wall=clocks.wall + 60.0)
    first.take()
    assert first.leads
    clock = {"clock": lambda: other.wall, "monotonic": lambda: other.steady}
    Leadership(objects, replica="b", seconds=30.0, **clock).take()
    with pytest.raises(NotLeading):
        first.check()
    assert not first.leads


def test_a_replica_that_restarts_over_its_state_folder_leads_at_once_with_a_higher_term(make, tmp_path):
    name = replica_name(tmp_path / "state")
    assert replica_name(tmp_path / "state") == name
    assert replica_name(tmp_path / "other") != name
    make(name).take()
    again = make(name)
    again.take()
    assert again.term == 2


@pytest.fixture
def store(tmp_path):
    made = []

    def make(name):
        made.append(Store(tmp_path / name / "monitor.db"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_successor_reads_what_its_predecessor_kept_although_their_folders_differ(objects, store):
    first = Ledger(store("a"), objects, term=1)
    first.write_documents({"restraint": {"failures": 3}}, {"request_failed": 1})
    assert Ledger(store("b"), objects, term=2).read_document("restraint") == {"failures": 3}


def test_a_stale_holder_keeps_nothing_and_is_told(objects, store):
    stale = Ledger(store("a"), objects, term=1)
    stale.write_documents({"retraining": {"phase": "idle"}})
    leader = Ledger(store("b"), objects, term=2)
    with pytest.raises(NotLeading):
        stale.write_documents({"retraining": {"phase": "decided"}})
    leader.write_documents({"retraining": {"phase": "running"}})
    with pytest.raises(NotLeading):
        stale.write_documents({"retraining": {"phase": "decided"}})
    with pytest.raises(NotLeading, match="is of term 2, this is 1"):
        Ledger(store("c"), objects, term=1)
    assert Ledger(store("d"), objects, term=3).read_document("retraining") == {"phase": "running"}


def test_a_write_whose_answer_was_lost_is_no_takeover(objects, store, monkeypatch):
    ledger, write = Ledger(store("a"), objects, term=1), objects.write

    def lose_the_answer(name, content, **conditions):
        monkeypatch.setattr(objects, "write", write)
        write(name, content, **conditions)
        raise TemporaryError("cut off")

    monkeypatch.setattr(objects, "write", lose_the_answer)
    with pytest.raises(TemporaryError, match="cut off"):
        ledger.write_documents({"a": {"n": 1}})
    ledger.write_documents({"a": {"n": 1}})
    ledger.write_documents({"a": {"n": 2}})
    assert Ledger(store("b"), objects, term=2).read_document("a") == {"n": 2}


def test_a_step_that_could_not_be_kept_is_in_no_later_write(objects, store, monkeypatch):
    ledger, write = Ledger(store("a"), objects, term=1), objects.write
    ledger.write_documents({"retraining": {"phase": "idle"}})

    def fail(*_, **__):
        monkeypatch.setattr(objects, "write", write)
        raise TemporaryError("away")

    monkeypatch.setattr(objects, "write", fail)
    with pytest.raises(TemporaryError, match="away"):
        ledger.write_documents({"retraining": {"phase": "decided"}})
    ledger.write_documents({"told": {"action": "breach"}})
    assert Ledger(store("b"), objects, term=2).read_document("retraining") == {"phase": "idle"}


def test_a_crash_between_the_shared_write_and_the_local_one_counts_the_shared_one(objects, store, tmp_path):
    local = store("a")
    ledger = Ledger(local, objects, term=1)
    ledger.write_documents({"a": {"n": 1}})
    local.write_documents = None  # the process dies in between
    with pytest.raises(TypeError):
        ledger.write_documents({"a": {"n": 2}})
    local.close()
    assert Ledger(store("a"), objects, term=2).read_document("a") == {"n": 2}


def test_a_ledger_that_cannot_be_read_names_its_object(objects, store):
    objects.write(LEDGER_FILE, b"{torn")
    with pytest.raises(PermanentError, match="acting.json is no ledger"):
        Ledger(store("a"), objects, term=1)


def test_without_a_lease_the_state_folder_is_the_ledger(store):
    ledger = Ledger(store("a"))
    ledger.write_documents({"a": {"n": 1}})
    assert ledger.read_document("a") == {"n": 1}


def test_a_lease_that_ends_before_it_is_renewed_is_refused():
    with pytest.raises(ContractError, match="lease_seconds is 0.5"):
        LeadershipSettings(lease_seconds=0.5)


def test_a_leader_that_cannot_renew_leads_until_its_lease_ends_and_again_when_the_storage_is_back(
    make, objects, clocks, monkeypatch
):
    leader = make("a")
    leader.take()

    def away(*_args, **_conditions):
        raise TemporaryError("no answer")

    with monkeypatch.context() as cut_off:
        cut_off.setattr(objects, "write", away)
        cut_off.setattr(objects, "read", away)
        clocks.pass_(29.0)
        with pytest.raises(TemporaryError, match="no answer") as error:
            leader.check()
        assert not isinstance(error.value, NotLeading)
        assert leader.leads
        clocks.pass_(1.0)
        assert not leader.leads
        with pytest.raises(NotLeading):
            leader.check()
        with pytest.raises(TemporaryError, match="no answer"):
            leader.take()
    leader.take()
    assert (leader.leads, leader.term) == (True, 2)


def test_terms_go_on_rising_although_somebody_removed_the_lease(objects, store, make):
    for _ in range(3):
        make("a").take()
    Ledger(store("a"), objects, term=3)
    objects.delete("monitor.lease")
    again = make("b")
    again.take(after=last_term(objects))
    assert again.term == 4
    Ledger(store("b"), objects, term=again.term)


class Replica:
    """A monitor with a state folder of its own and the lease that all share."""

    def __init__(self, folder, name, leadership, runner, **changes):
        (folder / name).mkdir()
        self.bench = Bench(folder / name, **{**DRIFT, **changes})
        self.bench.trigger, self.leadership = runner, leadership

    def start(self):
        b = self.bench
        b.kill()
        b.store = Store(b.settings.state / "monitor.db")
        self.leadership.take()
        b.monitor = Monitor(
            b.settings,
            subscriber=b.log,
            store=b.store,
            trigger=b.trigger,
            ledger=Ledger(b.store, self.leadership.objects, term=self.leadership.term),
            guard=self.leadership.check,
            clock=b.clock,
        )
        return b.monitor


@pytest.fixture
def replicas(tmp_path, make):
    made, trigger = [], FakeTrigger()

    def start(name, **changes):
        made.append(Replica(tmp_path, name, make(name), trigger, **changes))
        return made[-1]

    yield start
    for each in made:
        each.bench.kill()
        each.bench.log.close()


def test_a_successor_follows_its_predecessors_run_and_keeps_its_budget_and_rest(replicas, clocks):
    first, second = replicas("a"), replicas("b")
    monitor = first.start()
    traffic(first.bench, "bad", auc="bad")
    monitor.tick()
    (request,) = first.bench.trigger.requests
    assert request.fence == 1
    assert "term 1" in request.reason
    clocks.pass_(30.0)  # the first is gone for good
    successor = second.start()
    second.bench.clock.time = first.bench.clock.time
    assert successor.retraining.progress.phase == "running"
    assert successor.retraining.progress.request["request_id"] == request.request_id
    first.bench.trigger.end("released", version=2)
    successor.tick()
    assert successor.retraining.progress.phase == "idle"
    assert len(successor.retraining.memory.requested_at) == 1
    traffic(second.bench, "bad", auc="bad")
    successor.tick()
    assert second.bench.kinds()[-1] == "held"


def test_a_stale_leader_that_wakes_up_before_its_request_asks_for_nothing(replicas, clocks):
    """It had decided, and slept through its lease's end before it asked."""
    stale, leader = replicas("a", upload_wait_seconds=50.0), replicas("b")
    monitor = stale.start()
    traffic(stale.bench, "bad", auc="bad")
    monitor.tick()
    assert monitor.retraining.progress.phase == "uploading"
    Uploader(stale.bench.settings.archive, stale.bench.folder / "lake").run_once()
    clocks.pass_(30.0)
    leader.start()
    with pytest.raises(NotLeading):
        monitor.tick()
    assert stale.bench.trigger.requests == []


def test_two_replicas_that_saw_the_same_rows_ask_for_a_run_of_the_same_name(replicas, clocks):
    names = []
    for name in ("a", "b"):
        replica = replicas(name)
        replica.bench.trigger = FakeTrigger()
        clocks.pass_(1000.0)
        monitor = replica.start()
        if name == "b":
            replica.bench.monitor = monitor = _forgetful(replica)
        traffic(replica.bench, "bad", auc="bad")
        replica.bench.clock.time += {"a": 0.25, "b": 3.5}[name]  # their clocks differ
        monitor.tick()
        names += [request.request_id for request in replica.bench.trigger.requests]
    assert len(names) == 2
    assert names[0] == names[1]


def _forgetful(replica):
    """The replica without its predecessor's ledger, as where two leases were set by mistake."""
    replica.leadership.objects.delete(LEDGER_FILE)
    return replica.start()


def test_the_ledger_is_readable_by_people(objects, store):
    Ledger(store("a"), objects, term=7).write_documents({"restraint": {"failures": 1}})
    document = json.loads(objects.read(LEDGER_FILE).content)
    assert document == {"term": 7, "number": 1, "documents": {"restraint": {"failures": 1}}}


@pytest.mark.parametrize("is_read_only", [False, True])
def test_without_a_lease_of_its_own_a_monitor_takes_one_wherever_it_may_write(tmp_path, caplog, is_read_only):
    state, model_store = tmp_path / "state", tmp_path / "file" / "store"
    if is_read_only:
        (tmp_path / "file").write_text("")  # nobody can write below it, root neither
    leadership = open_leadership(LeadershipSettings(), state=state, model_store=model_store)
    leadership.take()
    assert leadership.leads
    assert leadership.objects.uri == ((state if is_read_only else model_store) / "leases").as_uri()
    assert ("replicas that share the state folder" in caplog.text) == is_read_only
