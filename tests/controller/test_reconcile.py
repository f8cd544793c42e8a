"""Tests of the controller's loop: requests, deadlines, urgent rollbacks, and two holders."""

import dataclasses
import errno
import shutil
import threading
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import pytest

from controller import inspection
from controller import moves as moves_module
from controller.__main__ import LockHolder, ReleaseController
from controller.baking import Baking
from controller.deployment_target import opened
from controller.inspection import Inspection
from controller.protocol import FAILED, next_rule
from controller.reconcile import _refuse, _withdraw, drive, reconciled
from controller.rollback import main as rollback_command
from controller.rollback import rollback, rollback_request
from controller.watchdog import Watchdog
from demo.triton import models_to_load
from evergreen.contracts.requests import ABORT, ACCEPTED, CANCELLED, DONE, REFUSED, RELEASE
from evergreen.contracts.serving import versions_of
from evergreen.registry import requests as requests_module
from evergreen.registry.models import graph_folder
from evergreen.registry.promotion_journal import (
    append_promotion,
    current,
    interrupted,
    read_entries,
)
from evergreen.registry.requests import (
    answer,
    append_request,
    new_request,
    open_requests,
    read_request,
    read_requests,
    withdraw,
)
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.errors import (
    ContractError,
    PermanentError,
    TemporaryError,
    UnreadableFile,
)
from evergreen.serving.prepare import prepare_request
from evergreen.serving.repository.model_repository import ModelRepository, NotWritable
from evergreen.storage.folder import FolderObjects
from evergreen.storage.uris import open_objects
from testing.controllers import answering, run_now
from testing.processes import wait_for
from testing.served_names import MODEL_NAME, NAMES
from tests.support.clocks import Clock
from tests.support.crashes import Killed
from tests.support.deployments import start_canary
from tests.support.traffic_plans import make_plan
from tests.support.triton_double import TritonDouble


def requested(deployment, seed, *, seconds=60.0, run=None):
    """Append a request to release the model of `seed`."""
    settings = deployment.settings
    request = prepare_request(
        RELEASE,
        deployment.candidate(seed),
        store=settings.store,
        options=settings.options,
        who="a run",
        now=settings.clock,
        seconds=seconds,
        run=run,
    )
    return append_request(settings.store, request)


def state_of(deployment, request):
    return read_request(deployment.settings.store, request.request)


def reconcile(deployment, **changes):
    with reconciled(dataclasses.replace(deployment.settings, **changes)):
        pass


@contextmanager
def fenced(settings):
    """Yield a deployment target whose lock was lost, and the repository that now holds the lock.

    On a network share, a lock can be lost without an error.
    """
    with opened(settings) as stale:
        (open_objects(settings.repository).root / f".{MODEL_NAME}.lock").unlink()
        heir = ModelRepository(open_objects(settings.repository), NAMES, holder="heir")
        with heir.locked():
            yield stale, heir


def test_requests_are_carried_out_in_their_order_and_answered_once(deployment):
    deployment.release(1)
    first, second = requested(deployment, 2), requested(deployment, 3)
    reconcile(deployment)
    reconcile(deployment)
    results = [state_of(deployment, each).result for each in (first, second)]
    assert [(each.action, each.version) for each in results] == [(DONE, 2), (DONE, 3)]
    deployment.check_all_is_well(3)
    assert not list((deployment.settings.store / "prepared").iterdir())


def test_withdrawn_and_expired_requests_are_never_carried_out(deployment):
    deployment.release(1)
    withdrawn, expired = requested(deployment, 2), requested(deployment, 3, seconds=0.0)
    now = deployment.settings.clock()
    withdraw(deployment.settings.store, withdrawn.request, who="a run", now=now, reason="gone")
    later = lambda: now + timedelta(seconds=1)  # noqa: E731
    reconcile(deployment, clock=later)
    assert [state_of(deployment, each).result.action for each in (withdrawn, expired)] == [
        CANCELLED,
        CANCELLED,
    ]
    deployment.check_all_is_well(1)


def test_rollback_supersedes_what_is_requested_before_it(deployment):
    deployment.release(1), deployment.release(2)
    waiting = requested(deployment, 3)
    assert deployment.rollback().version == 1
    assert state_of(deployment, waiting).result.action == REFUSED
    deployment.check_all_is_well(1)


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["expired", "superseded"])
def test_two_similar_requests_are_both_answered_in_one_call(deployment, seconds):
    deployment.release(1), deployment.release(2)
    waiting = [requested(deployment, seed, seconds=seconds) for seed in (3, 4)]
    assert deployment.rollback().version == 1
    assert not any(state_of(deployment, each).is_open for each in waiting)


def test_rollback_during_release_undoes_it_and_waits_for_no_rehearsal(deployment):
    deployment.release(1)
    request = requested(deployment, 2)
    appended = []

    def request_rollback(name):
        if name == "staged" and not appended:
            back = rollback_request(deployment.settings, to_version=None, reason="it is bad")
            appended.append(append_request(deployment.settings.store, back))

    reconcile(deployment, checkpoint=request_rollback)
    assert state_of(deployment, request).result.action == REFUSED
    done = state_of(deployment, appended[0]).result
    assert (done.action, done.version) == (DONE, 1), "the live version must not change"
    actions = [entry.action for entry in read_entries(deployment.settings.store)]
    assert actions == ["intent", "release", "intent", "withdrawn"]
    deployment.check_all_is_well(1)


def test_crash_after_record_answers_without_second_release(deployment):
    deployment.release(1)
    request = requested(deployment, 2)

    def kill(name):
        if name == "journal written":
            raise Killed(name)

    with pytest.raises(Killed):
        reconcile(deployment, checkpoint=kill)
    reconcile(deployment)
    result = state_of(deployment, request).result
    assert (result.action, result.version) == (DONE, 2)
    deployment.check_all_is_well(2)


def test_command_beside_controller_only_appends_and_prints_result(deployment, capsys):
    deployment.release(1), deployment.release(2)
    flags = ["--store", str(deployment.settings.store), "--reason", "drill", "--triton-urls", ""]
    repository = ["--repository", deployment.settings.repository]
    stop = threading.Event()

    def control():
        with opened(deployment.settings) as target:
            held.set()
            while not stop.wait(0.02):
                drive(target)

    held, thread = threading.Event(), threading.Thread(target=control)
    thread.start()
    try:
        assert held.wait(10)
        assert rollback_command([*flags, *repository]) == 0
    finally:
        stop.set()
        thread.join(30)
    said = capsys.readouterr()
    assert "version 1 is live again (was 2)" in said.out
    assert "another controller is at work" in said.err
    deployment.check_all_is_well(1)


def test_command_without_waiting_leaves_request_to_controller(deployment, capsys):
    deployment.release(1), deployment.release(2)
    flags = ["--store", str(deployment.settings.store), "--reason", "drill", "--no-wait"]
    assert rollback_command([*flags, "--triton-urls", ""]) == 0
    assert "is in the journal until" in capsys.readouterr().out
    assert current(deployment.settings.store).version == 2
    reconcile(deployment)
    deployment.check_all_is_well(1)


def test_holder_with_old_lease_writes_no_configuration_plan_or_journal(deployment):
    deployment.release(1)
    with fenced(deployment.settings) as (stale, heir):
        assert heir.lease == stale.repository.lease + 1
        config = stale.repository.read_config()
        lines = len(read_entries(deployment.settings.store))
        request = requested(deployment, 2)
        with pytest.raises(TemporaryError, match=f"was followed by {heir.lease}"):
            drive(stale)
        stale.repository.check_held = lambda: None
        with pytest.raises(TemporaryError, match="another controller changed"):
            stale.repository.write_config(config.replace("instance", "other"))
        assert stale.repository.read_config() == config
        assert len(read_entries(deployment.settings.store)) == lines
        assert state_of(deployment, request).is_open
    reconcile(deployment)
    deployment.check_all_is_well(2)


def test_every_move_of_release_is_move_of_table(deployment):
    moves = []

    def trace(rule, desired, observed):
        assert next_rule(desired, observed) is rule
        moves.append(rule.move)

    deployment.settings = dataclasses.replace(deployment.settings, trace=trace)
    deployment.release(1)
    assert moves == [
        "accept request",
        "announce intent",
        "stage files",
        "rehearse on servers",
        "publish files",
        "write configuration",
        "load on servers",
        "record change",
        "answer request",
    ]
    moves.clear()
    start_canary(*deployment.candidate(2), settings=deployment.settings)
    assert moves == [
        "accept request",
        "announce intent",
        "stage files",
        "rehearse on servers",
        "publish files",
        "place canary's files",
        "load canary on servers",
        "write plan with canary",
        "record change",
        "answer request",
    ]


def test_failed_release_is_undone_by_moves_of_table_before_it_is_refused(deployment):
    deployment.release(1)
    moves, attempts = [], []

    def trace(rule, desired, observed):
        moves.append(rule.move)
        attempts.append(observed.attempt)

    def wrong(server, name, *rows, version=None):
        scores, answered = server.infer(name, *rows, version=version)
        return (scores + 1e-4 if (name, answered) == (MODEL_NAME, 2) else scores), answered

    deployment.settings = dataclasses.replace(deployment.settings, trace=trace)
    with pytest.raises(PermanentError, match="differs from the training-side score"):
        deployment.release(2, infer=wrong)
    assert moves[moves.index("load on servers") + 1 :] == [
        "restore configuration",
        "restore servers",
        "remove version's files",
        "withdraw intent",
        "refuse request",
    ]
    assert attempts[-1] == FAILED
    assert versions_of(deployment.repository.read_config()) == [1]
    assert [each.result.action for each in read_requests(deployment.settings.store)] == [
        DONE,
        REFUSED,
    ]


def test_record_of_fenced_holder_has_no_effect_after_adoption_of_intent(deployment):
    """Pause a holder between its last check and the record of its change.

    The search over all states of the protocol model found this case.
    """
    deployment.release(1)
    request = requested(deployment, 2)

    def pause(rule, desired, observed):
        if rule.move == "record change":
            raise Killed(rule.move)

    with pytest.raises(Killed):
        reconcile(deployment, trace=pause)
    intent = read_entries(deployment.settings.store)[-1]
    withdraw_at_undo = []

    def record_late(rule, desired, observed):
        if rule.move == "remove version's files":
            late = dataclasses.replace(intent, action="release", config=None)
            append_promotion(deployment.settings.store, late)
            withdraw_at_undo.append(current(deployment.settings.store).version)

    reconcile(deployment, trace=record_late)
    assert withdraw_at_undo == [1], "the late record does not count"
    assert state_of(deployment, request).result.version == 3, "the number 2 is not used again"
    deployment.check_all_is_well(3)


def test_lease_numbers_continue_after_repository_was_emptied(deployment):
    deployment.release(1)
    number = read_entries(deployment.settings.store)[-1].lease
    for path in deployment.repository.objects.root.glob("*.fence.json"):
        path.unlink()
    assert deployment.release(2).version == 2
    assert read_entries(deployment.settings.store)[-1].lease > number
    deployment.check_all_is_well(2)


class Unwritable(ModelRepository):
    """Repository that this process may read and not write, like a folder of another user."""

    @contextmanager
    def locked(self):
        raise NotWritable("the model repository is not writable")
        yield


def without_rights(deployment):
    """Return settings of a person who has no rights to the model repository."""
    repository = Unwritable(open_objects(deployment.settings.repository), NAMES)
    return dataclasses.replace(deployment.settings, held=repository)


def ticking(settings, clock):
    timeouts = dataclasses.replace(settings.timeouts, sleep=lambda seconds: clock.advance(1.0))
    return dataclasses.replace(settings, timeouts=timeouts, clock=clock.moment)


def test_rights_to_registry_are_enough_to_wait_for_controller(deployment):
    deployment.release(1), deployment.release(2)
    with answering(deployment.settings):
        assert rollback(without_rights(deployment), reason="drill").version == 1
    deployment.check_all_is_well(1)


def test_without_rights_and_without_controller_request_is_withdrawn(deployment):
    deployment.release(1), deployment.release(2)
    clock = Clock(datetime.now(timezone.utc).timestamp())
    with pytest.raises(TemporaryError, match=r"no controller answered.*is not writable"):
        rollback(ticking(without_rights(deployment), clock), reason="drill")
    assert read_requests(deployment.settings.store)[-1].result.action == CANCELLED
    deployment.check_all_is_well(2)


def test_repository_that_cannot_be_opened_does_not_stop_request(deployment, monkeypatch):
    deployment.release(1), deployment.release(2)

    def refuse(settings):
        raise PermanentError("no credentials for the bucket")

    opens = type(deployment.settings).open_repository
    clock = Clock(datetime.now(timezone.utc).timestamp())

    def advance(seconds):
        clock.advance(1.0)
        with monkeypatch.context() as own:
            own.setattr(type(deployment.settings), "open_repository", opens)
            reconcile(deployment)

    timeouts = dataclasses.replace(deployment.settings.timeouts, sleep=advance)
    monkeypatch.setattr(type(deployment.settings), "open_repository", refuse)
    settings = dataclasses.replace(deployment.settings, timeouts=timeouts, clock=clock.moment)
    assert rollback(settings, reason="drill").version == 1


def test_command_for_unknown_target_leaves_no_request(deployment, tmp_path):
    (tmp_path / "empty").mkdir()
    settings = dataclasses.replace(deployment.settings, store=tmp_path / "empty", recommender=None)
    with pytest.raises(ContractError, match="no release and no recommender"):
        rollback(settings, reason="drill")
    assert read_requests(settings.store) == []


# Retries of a step.


def test_retry_of_answered_step_gets_its_answer_and_releases_nothing(deployment):
    deployment.release(1)
    first = requested(deployment, 2, run="run-7")
    reconcile(deployment)
    deployment.release(3)
    again = requested(deployment, 2, run="run-7")
    reconcile(deployment)
    assert (
        state_of(deployment, again).result.version
        == state_of(deployment, first).result.version
        == 2
    )
    deployment.check_all_is_well(3)


@pytest.mark.parametrize("is_before", [True, False], ids=["before the answer", "after the answer"])
def test_retry_does_not_overrule_persons_rollback(deployment, is_before):
    deployment.release(1), deployment.release(3)
    first = requested(deployment, 2, run="run-7", seconds=0.0 if is_before else 60.0)
    reconcile(deployment, clock=lambda: datetime.now(timezone.utc) + timedelta(seconds=1))
    back = append_request(
        deployment.settings.store,
        rollback_request(deployment.settings, to_version=None, reason="drill"),
    )
    reconcile(deployment)
    live = state_of(deployment, back).result.version
    again = requested(deployment, 2, run="run-7")
    reconcile(deployment)
    result = state_of(deployment, again).result
    if is_before:
        assert state_of(deployment, first).result.action == CANCELLED
        assert (result.action, result.error) == (REFUSED, "Refused")
    else:
        assert (result.action, result.version) == (DONE, 3)
    deployment.check_all_is_well(live)


def test_retry_after_temporary_failure_is_carried_out(deployment):
    deployment.release(1)
    requested(deployment, 2, run="run-7", seconds=0.0)
    reconcile(deployment, clock=lambda: datetime.now(timezone.utc) + timedelta(seconds=1))
    again = requested(deployment, 2, run="run-7")
    reconcile(deployment)
    assert state_of(deployment, again).result.action == DONE
    deployment.check_all_is_well(2)


def test_same_model_of_another_run_or_of_person_is_no_retry(deployment):
    deployment.release(1)
    requested(deployment, 2, run="run-7")
    reconcile(deployment)
    deployment.rollback()
    other = requested(deployment, 2, run="run-8")
    reconcile(deployment)
    assert state_of(deployment, other).result.version == 3
    deployment.check_all_is_well(3)


# Aborts that are requested during another change.


def requested_between(deployment, name, kind, **changes):
    """Return a function for `checkpoint`, and the list of the requests that it makes.

    The function appends a person's request to the journal at the checkpoint `name`.
    """
    appended = []

    def append_at(checkpoint):
        if checkpoint == name and not appended:
            now = deployment.settings.clock()
            request = new_request(kind, who="anna", reason="stop it", now=now, seconds=60.0)
            request = dataclasses.replace(request, **changes)
            appended.append(append_request(deployment.settings.store, request))

    return append_at, appended


@pytest.mark.parametrize("change", ["release", "rollback"])
def test_abort_is_done_between_two_moves_of_another_change(deployment, change):
    deployment.release(1), deployment.release(2)
    start_canary(*deployment.candidate(3), settings=deployment.settings)
    if change == "release":
        request = requested(deployment, 4)
    else:
        back = rollback_request(deployment.settings, to_version=1, reason="drill")
        request = append_request(deployment.settings.store, back)
    append_at, appended = requested_between(deployment, "config written", ABORT)
    moves = []
    trace = lambda rule, *_: moves.append(rule.move)  # noqa: E731
    reconcile(deployment, checkpoint=append_at, trace=trace)
    assert state_of(deployment, appended[0]).result.action == DONE
    assert state_of(deployment, request).result.action == DONE
    after = moves[moves.index("write configuration") + 1 :]
    assert after[:4] == [
        *("accept request", "write plan without canary", "answer request", "load on servers")
    ]
    assert "restore configuration" not in moves, "the other change must continue"
    deployment.check_all_is_well(4 if change == "release" else 1)


def test_abort_that_fails_leaves_other_change_alone(deployment):
    deployment.release(1), deployment.release(2)
    start_canary(*deployment.candidate(3), settings=deployment.settings)
    request = requested(deployment, 4)
    append_at, appended = requested_between(deployment, "staged", ABORT, plan=10**6)
    reconcile(deployment, checkpoint=append_at)
    result = state_of(deployment, appended[0]).result
    assert (result.action, result.reason) == (
        REFUSED,
        "the plan changed while its evidence was read",
    )
    assert state_of(deployment, request).result.action == DONE
    deployment.check_all_is_well(4)


def test_rollback_that_arrives_while_files_are_hashed_is_carried_out_first(deployment, monkeypatch):
    deployment.release(1), deployment.release(2)
    hashing, is_free = threading.Event(), threading.Event()
    find = inspection.find_corrupt

    def slow(*arguments):
        hashing.set()
        assert is_free.wait(60)
        return find(*arguments)

    monkeypatch.setattr(inspection, "find_corrupt", slow)
    path = deployment.repository.objects.root / MODEL_NAME / "2" / "model.onnx"
    right = path.read_bytes()
    path.write_bytes(b"x" * len(right))
    controller = ReleaseController(
        watchdog=Watchdog(target=deployment.settings),
        baking=Baking(target=deployment.settings),
        inspection=Inspection(target=deployment.settings),
    )
    controller.round()
    assert hashing.wait(60)
    back = rollback_request(deployment.settings, to_version=None, reason="drill")
    back = append_request(deployment.settings.store, back)
    controller.answer()
    assert state_of(deployment, back).result.version == 1
    is_free.set()
    wait_for(lambda: controller.round() or path.read_bytes() == right)
    assert controller.inspection.healed == [path.as_uri()]


def rolled_back_at(deployment, monkeypatch, owner, name):
    """Request a rollback when a function is first called.

    Return a list to which the request is appended.
    """
    appended, real = [], getattr(owner, name)

    def request_rollback(*arguments, **more):
        if not appended:
            back = rollback_request(deployment.settings, to_version=None, reason="it is bad")
            appended.append(append_request(deployment.settings.store, back))
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, request_rollback)
    return appended


def test_rollback_interrupts_copy_and_hashing_of_candidate(deployment, monkeypatch):
    deployment.release(1)
    request, written = requested(deployment, 2), []
    back = rolled_back_at(deployment, monkeypatch, moves_module, "check_stored_copy")
    real = FolderObjects.write

    def write(objects, name, *arguments, **more):
        written.append(name)
        return real(objects, name, *arguments, **more)

    monkeypatch.setattr(FolderObjects, "write", write)
    reconcile(deployment)
    assert not [name for name in written if name.startswith(f"{NAMES.candidate}/")]
    assert state_of(deployment, request).result.error == "Refused"
    assert state_of(deployment, back[0]).result.action == DONE
    deployment.check_all_is_well(1)


def test_rollback_interrupts_loading_between_two_servers(deployment):
    deployment.release(1)
    request, appended, loaded = requested(deployment, 2), [], []

    def connect(url):
        server = deployment.connect(url)

        def load(name):
            loaded.append((url, name))
            TritonDouble.load(server, name)
            if name == NAMES.candidate and not appended:
                back = rollback_request(deployment.settings, to_version=None, reason="it is bad")
                appended.append(append_request(deployment.settings.store, back))

        server.load = load
        return server

    reconcile(deployment, connect=connect)
    first = deployment.settings.triton_urls[0]
    assert [url for url, name in loaded if name == NAMES.candidate] == [first]
    assert state_of(deployment, request).result.action == REFUSED
    assert state_of(deployment, appended[0]).result.version == 1
    deployment.check_all_is_well(1)


def test_request_is_carried_out_between_two_parts_of_round(deployment):
    deployment.release(1), deployment.release(2)
    back = []

    class Looking(Watchdog):
        def check(self):
            appended = rollback_request(deployment.settings, to_version=None, reason="drill")
            back.append(append_request(deployment.settings.store, appended))
            return {}

    class Evaluating(Baking):
        def step(self, reloads):
            assert state_of(deployment, back[0]).result.version == 1
            back.append("evaluated")

    controller = ReleaseController(
        watchdog=Looking(target=deployment.settings),
        baking=Evaluating(target=deployment.settings),
        inspection=Inspection(target=deployment.settings, start=run_now),
    )
    controller.round()
    assert back[1] == "evaluated"


def test_fenced_holder_cannot_write_first_configuration(deployment):
    objects = open_objects(deployment.settings.repository)
    settings = dataclasses.replace(deployment.settings, recommender=MODEL_NAME)
    with fenced(settings) as (stale, heir):
        stale.repository.check_held = lambda: None  # paused between its check and its write
        with pytest.raises(TemporaryError, match="another controller changed"):
            stale.repository.write_config("name: 1")
        assert heir.read_config() is None
        assert models_to_load(objects.root) == []
        heir.write_config("name: 2")
    assert deployment.repository.read_config() == "name: 2"


def test_fenced_holder_cannot_write_after_first_configuration_is_withdrawn(deployment):
    settings = dataclasses.replace(deployment.settings, recommender=MODEL_NAME)
    with fenced(settings) as (stale, heir):
        stale.repository.check_held = lambda: None
        heir.write_config("name: 2")
        heir.write_config(None)
        assert heir.read_config() is None
        with pytest.raises(TemporaryError, match="another controller changed"):
            stale.repository.write_config("name: 1")
    assert deployment.repository.read_config() is None


def test_late_first_plan_of_fenced_holder_is_replaced(deployment):
    deployment.release(1)
    with fenced(deployment.settings) as (stale, heir):
        stale.repository.check_held = lambda: None
        late = make_plan(canary=Arm(model_name=NAMES.canary, version=2), share=0.05)
        stale.repository.write_plan(late)
        plan = heir.read_plan()
        assert plan.lease == stale.repository.lease < heir.lease
        stable = dataclasses.replace(plan.stable, version=1)
        heir.write_plan(
            plan.without_canary(stable=stable, published_at=plan.published_at, reason="late")
        )
        assert heir.read_plan().lease == heir.lease
        with pytest.raises(TemporaryError):
            stale.repository.write_plan(heir.read_plan().next())


def test_end_of_canary_names_person_who_ended_it(deployment):
    deployment.release(1)
    start_canary(
        *deployment.candidate(2), settings=dataclasses.replace(deployment.settings, who="bob")
    )
    now = deployment.settings.clock()
    request = new_request(ABORT, who="anna", reason="stop it", now=now, seconds=60.0)
    append_request(deployment.settings.store, request)
    reconcile(deployment)
    reconcile(deployment, clock=lambda: datetime.now(timezone.utc) + timedelta(minutes=1))
    start, end = read_entries(deployment.settings.store)[-2:]
    assert (start.action, start.who) == ("canary", "bob")
    assert (end.action, end.who, end.reason, end.request) == (
        "canary_ended",
        "anna",
        "stop it",
        request.request,
    )


def test_interrupted_command_does_not_wait_for_accepted_request(deployment):
    deployment.release(1), deployment.release(2)
    store, now = deployment.settings.store, deployment.settings.clock

    def sleep(seconds):
        [state] = open_requests(store)
        if state.accepted is None:
            answer(store, state.id, ACCEPTED, who="controller", now=now())
            raise KeyboardInterrupt
        answer(store, state.id, DONE, who="controller", now=now(), version=1)

    deployment.settings = dataclasses.replace(
        deployment.settings, timeouts=dataclasses.replace(deployment.settings.timeouts, sleep=sleep)
    )
    holder = ModelRepository(
        open_objects(deployment.settings.repository), NAMES, holder="controller"
    )
    with holder.locked(), pytest.raises(KeyboardInterrupt):
        deployment.rollback()


@pytest.mark.parametrize("end", [_withdraw, _refuse])
def test_holder_with_old_lease_removes_no_prepared_version(deployment, end):
    deployment.release(1)
    request = requested(deployment, 2)
    store, now = deployment.settings.store, deployment.settings.clock()
    prepared = store / "prepared" / request.request
    with fenced(deployment.settings) as (stale, heir):
        seen = state_of(deployment, request)
        answer(store, request.request, ACCEPTED, who="heir", now=now, lease=heir.lease)
        stale.repository.check_held = lambda: None  # paused between its check and its write
        end(stale, seen)
        assert state_of(deployment, request).is_open
        assert prepared.exists()


def test_configuration_that_was_removed_is_written_again(deployment):
    deployment.release(1), deployment.release(2)
    (deployment.repository.objects.root / MODEL_NAME / "config.pbtxt").unlink()
    reconcile(deployment)
    assert versions_of(deployment.repository.read_config()) == [2]


def test_controller_waits_where_disk_is_full(deployment):
    stop, problems = threading.Event(), []

    @contextmanager
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    class Controller:
        def write_status(self, findings, *, problem=None):
            problems.append(problem)
            stop.set()

    settings = dataclasses.replace(deployment.settings, recommender=MODEL_NAME)
    held = settings.open_repository()
    held.locked = full.__get__(held)
    holder = LockHolder(
        target=dataclasses.replace(settings, held=held),
        make=lambda target: Controller(),
        interval_seconds=0.01,
        stop=stop,
    )
    holder.run()
    assert problems == ["[Errno 28] No space left on device"]


def test_superseded_request_is_refused_for_good_after_its_deadline(deployment):
    deployment.release(1)
    request, appended, passed = requested(deployment, 2), [], [timedelta(0)]
    deployment.settings = dataclasses.replace(
        deployment.settings, clock=lambda: datetime.now(timezone.utc) + passed[0]
    )

    def request_rollback(name):
        if name == "staged" and not appended:
            passed[0] = timedelta(minutes=10)
            back = rollback_request(deployment.settings, to_version=None, reason="it is bad")
            appended.append(append_request(deployment.settings.store, back))

    reconcile(deployment, checkpoint=request_rollback)
    result = state_of(deployment, request).result
    assert (result.action, result.error) == (REFUSED, "Refused"), "a step must not try again"


def test_files_of_canary_that_were_removed_are_placed_again(deployment):
    deployment.release(1)
    start_canary(*deployment.candidate(2), settings=deployment.settings)
    shutil.rmtree(deployment.repository.objects.root / NAMES.canary)
    reconcile(deployment)
    assert deployment.repository.canary.whole() == [2]


def test_change_is_undone_despite_corrupt_golden_rows_of_previous_version(deployment):
    deployment.release(1)
    request = requested(deployment, 2)
    store, root = deployment.settings.store, deployment.repository.objects.root

    def fail(name):
        if name == "config written":
            for folder in (graph_folder(store, 1), root / MODEL_NAME / "1"):
                path = folder / "golden.npz"
                path.write_bytes(b"x" * path.stat().st_size)
            raise TemporaryError("the first error")

    reconcile(deployment, checkpoint=fail)
    assert state_of(deployment, request).result.reason == "the first error"
    assert interrupted(store) is None
    assert [server.loaded() for server in deployment.servers] == [[1], [1]]


def unreadable(times):
    """Return a `read_request` whose first `times` calls fail with a stale file handle."""
    left = [times]
    read = requests_module.read_request

    def reading(store, request):
        if left[0]:
            left[0] -= 1
            raise UnreadableFile("journal.jsonl cannot be read: stale file handle")
        return read(store, request)

    return reading


def test_command_tries_again_while_journal_cannot_be_read(deployment, monkeypatch):
    deployment.release(1), deployment.release(2)
    timeouts = dataclasses.replace(deployment.settings.timeouts, lock_seconds=60.0)
    deployment.settings = dataclasses.replace(deployment.settings, timeouts=timeouts)
    monkeypatch.setattr(requests_module, "read_request", unreadable(1))
    assert deployment.rollback().version == 1


def test_command_whose_controller_hangs_ends_with_temporary_error(deployment):
    deployment.release(1), deployment.release(2)
    store = deployment.settings.store
    clock = Clock(deployment.settings.clock().timestamp())

    def sleep(seconds):
        clock.now += max(seconds, 30.0)
        for state in open_requests(store):
            if state.accepted is None:
                now = datetime.fromtimestamp(clock.now, timezone.utc)
                answer(store, state.id, ACCEPTED, who="controller", now=now)

    timeouts = dataclasses.replace(deployment.settings.timeouts, sleep=sleep, lock_seconds=1.0)
    deployment.settings = dataclasses.replace(
        deployment.settings,
        timeouts=timeouts,
        clock=lambda: datetime.fromtimestamp(clock.now, timezone.utc),
    )
    holder = ModelRepository(
        open_objects(deployment.settings.repository), NAMES, holder="controller"
    )
    with holder.locked(), pytest.raises(TemporaryError, match="has no result yet"):
        deployment.rollback()


def test_recorded_release_is_answered_done_although_its_first_answer_failed(
    deployment, monkeypatch
):
    deployment.release(1)
    request, failed = requested(deployment, 2), []
    write = requests_module.answer

    def fail(store, name, action, **fields):
        if action == DONE and not failed:
            failed.append(name)
            raise TemporaryError("the share is gone for a moment")
        return write(store, name, action, **fields)

    monkeypatch.setattr(requests_module, "answer", fail)
    with pytest.raises(TemporaryError):
        reconcile(deployment)
    reconcile(deployment)
    result = state_of(deployment, request).result
    assert failed == [request.request]
    assert (result.action, result.version) == (DONE, 2)
    deployment.check_all_is_well(2)
