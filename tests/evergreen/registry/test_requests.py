"""Tests of requests in the journal: the order of lines decides, and each request has one result."""

import errno
import itertools
import json
from dataclasses import replace
from datetime import timedelta

import pytest

from evergreen.contracts.requests import (
    ACCEPTED,
    CANARY,
    CANCELLED,
    DONE,
    REFUSED,
    RELEASE,
    ROLLBACK,
)
from evergreen.registry import requests
from evergreen.registry.promotion_journal import JOURNAL_FILE, read_entries, read_lines
from evergreen.registry.requests import (
    answer,
    append_request,
    new_request,
    open_requests,
    read_request,
    submit_request,
    wait_for_result,
)
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from tests.support.clocks import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def append(tmp_path, clock):
    """Appends a request with a deadline of 60 seconds, and returns the request."""
    return lambda: append_request(
        tmp_path,
        new_request(ROLLBACK, who="anna", reason="drill", now=clock.moment(), seconds=60.0),
    )


@pytest.fixture
def append_answer(tmp_path, clock):
    """Appends an answer and returns the state after it."""
    return lambda request, action, **more: answer(
        tmp_path, request.request, action, who="controller", now=clock.moment(), **more
    )


def test_request_is_open_until_it_has_a_result(tmp_path, append, append_answer):
    first, second = append(), append()
    assert [state.id for state in open_requests(tmp_path)] == [first.request, second.request]
    append_answer(first, ACCEPTED)
    assert [state.id for state in open_requests(tmp_path)] == [first.request, second.request]
    assert append_answer(first, DONE, version=3).result.version == 3
    assert [state.id for state in open_requests(tmp_path)] == [second.request]
    assert read_entries(tmp_path) == [], "a request must not look like a promotion"
    assert len(read_lines(tmp_path)) == 4


def test_first_of_acceptance_and_withdrawal_counts(append, append_answer):
    withdrawn, accepted = append(), append()
    append_answer(withdrawn, CANCELLED)
    state = append_answer(withdrawn, ACCEPTED)
    assert (state.accepted, state.result.action) == (None, CANCELLED)
    append_answer(accepted, ACCEPTED)
    state = append_answer(accepted, CANCELLED)
    assert (state.result, state.accepted.action) == (None, ACCEPTED)


@pytest.mark.parametrize("order", list(itertools.permutations((DONE, REFUSED, CANCELLED))))
def test_request_has_one_result_whatever_follows(append, append_answer, order):
    request = append()
    append_answer(request, ACCEPTED)
    states = [append_answer(request, action) for action in order]
    expected = next(action for action in order if action != CANCELLED)
    assert states[-1].result.action == expected


def test_request_without_answer_is_withdrawn_at_its_deadline(tmp_path, append, clock):
    request = append()
    with pytest.raises(TemporaryError, match="no controller answered until .* is withdrawn"):
        wait_for_result(tmp_path, request, clock=clock.moment, sleep=clock.advance)
    assert read_request(tmp_path, request.request).result.action == CANCELLED


def test_controller_that_accepts_at_the_deadline_is_waited_for(
    tmp_path, append, append_answer, clock
):
    request = append()
    waited = []

    def sleep(seconds):
        clock.advance(10.0)
        waited.append(seconds)
        if len(waited) == 3:
            append_answer(request, ACCEPTED)
        if len(waited) == 20:
            append_answer(request, DONE, version=2)

    reported = []
    found = wait_for_result(
        tmp_path, request, clock=clock.moment, sleep=sleep, report=reported.append
    )
    assert (found.version, reported) == (2, ["controller carries it out"])


@pytest.mark.parametrize("kind", [Refused, ContractError, TemporaryError, PermanentError])
def test_refusal_is_raised_as_the_controllers_error(tmp_path, append, append_answer, clock, kind):
    request = append()
    append_answer(request, ACCEPTED)
    append_answer(request, REFUSED, error=kind.__name__, reason="a canary is running")
    with pytest.raises(kind, match="a canary is running"):
        wait_for_result(tmp_path, request, clock=clock.moment, sleep=clock.advance)


def test_interrupted_wait_withdraws_request(tmp_path, clock):
    request = new_request(ROLLBACK, who="a", reason="r", now=clock.moment(), seconds=60.0)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit_request(tmp_path, request, clock=clock.moment, sleep=interrupt)
    assert read_request(tmp_path, request.request).result.action == CANCELLED


def test_deadline_counts_from_the_request(append, clock):
    request = append()
    state = read_request_of(request)
    assert not state.is_expired(clock.moment() + timedelta(seconds=60))
    assert state.is_expired(clock.moment() + timedelta(seconds=61))


def read_request_of(request):
    from evergreen.registry.requests import RequestState

    return RequestState(request=request)


def test_unknown_request_is_named(tmp_path):
    with pytest.raises(ContractError, match="request x is not in the journal"):
        read_request(tmp_path, "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "reload"),
        ("deadline", "soon"),
        ("deadline", None),
        ("request", 7),
        ("request", ""),
        ("request", "../graphs"),
    ],
)
def test_request_that_controller_cannot_read_is_named_with_its_line(
    tmp_path, append, clock, field, value
):
    append()
    append_request(tmp_path, replace(append(), **{field: value}))
    with pytest.raises(ContractError, match="journal.jsonl line 3 is"):
        open_requests(tmp_path)


@pytest.mark.parametrize("field", ["run", "model_id"])
def test_field_that_is_no_string_is_named_with_its_line(tmp_path, append, field):
    append_request(tmp_path, replace(append(), **{field: ["a", "list"]}))
    with pytest.raises(ContractError, match=f"journal.jsonl line 2 has the {field} "):
        open_requests(tmp_path)


def test_lease_that_is_no_number_is_named_with_its_line(tmp_path, append, append_answer):
    request = append()
    with pytest.raises(ContractError, match="journal.jsonl line 2 has the lease 'one'"):
        append_answer(request, ACCEPTED, lease="one")


def test_request_that_cannot_be_appended_fails_by_its_own_error(tmp_path, clock, monkeypatch):
    request = new_request(ROLLBACK, who="a", reason="r", now=clock.moment(), seconds=60.0)

    def full(store, entry):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(requests, "append_entry", full)
    with pytest.raises(OSError, match="No space left"):
        submit_request(tmp_path, request, clock=clock.moment, sleep=clock.advance)


def test_request_that_was_appended_before_an_error_is_withdrawn(tmp_path, clock, monkeypatch):
    request = new_request(ROLLBACK, who="a", reason="r", now=clock.moment(), seconds=60.0)
    written = requests.append_entry

    def lose_answer(store, entry):
        monkeypatch.setattr(requests, "append_entry", written)
        written(store, entry)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(requests, "append_entry", lose_answer)
    with pytest.raises(OSError, match="Input/output"):
        submit_request(tmp_path, request, clock=clock.moment, sleep=clock.advance)
    assert read_request(tmp_path, request.request).result.action == CANCELLED


def test_journal_that_cannot_be_read_for_a_while_is_read_again(
    tmp_path, append, append_answer, clock
):
    request, journal = append(), tmp_path / JOURNAL_FILE
    append_answer(request, ACCEPTED)
    hidden = journal.rename(tmp_path / "hidden")
    journal.mkdir()  # reading a folder is an error of the operating system

    def sleep(seconds):
        clock.advance(seconds)
        if len(clock.slept) == 3:
            journal.rmdir()
            hidden.rename(journal)
            append_answer(request, DONE, version=2)
        clock.slept.append(seconds)

    assert wait_for_result(tmp_path, request, clock=clock.moment, sleep=sleep).version == 2


def test_journal_that_stays_unreadable_is_a_temporary_error(tmp_path, append, clock):
    request = append()
    (tmp_path / JOURNAL_FILE).unlink()
    (tmp_path / JOURNAL_FILE).mkdir()
    with pytest.raises(TemporaryError, match="the result is unknown"):
        wait_for_result(
            tmp_path, request, clock=clock.moment, sleep=lambda seconds: clock.advance(60.0)
        )


def test_order_of_lines_decides_whatever_their_times_are(tmp_path, append, append_answer, clock):
    """Two machines write, and the clock of one of them is an hour ahead."""
    first, second = append(), append()
    clock.advance(3600)
    append_answer(first, ACCEPTED)
    clock.advance(-3600)
    append_answer(first, CANCELLED), append_answer(first, DONE, version=1)
    append_answer(second, CANCELLED)
    clock.advance(3600)
    append_answer(second, ACCEPTED), append_answer(second, DONE, version=2)
    lines = (tmp_path / JOURNAL_FILE).read_text()
    results = [
        state.result.action
        for state in map(lambda r: read_request(tmp_path, r.request), (first, second))
    ]
    assert results == [DONE, CANCELLED]
    for hours in (0, 5):  # the same lines with other times
        other = tmp_path / str(hours)
        other.mkdir()
        for number, line in enumerate(lines.splitlines()):
            record = {
                **json.loads(line),
                "time": f"2026-03-01T{(number * hours) % 24:02}:00:00+00:00",
            }
            del record["crc32"]
            with open(other / JOURNAL_FILE, "a") as file:
                file.write(json.dumps(record) + "\n")
        assert [state.result.action for state in requests.read_requests(other)] == results


def of_run(clock, run, model, kind=RELEASE):
    request = new_request(kind, who=run, reason="r", now=clock.moment(), seconds=60.0)
    return replace(request, run=run, model_id=model)


def test_final_answer_is_that_of_the_runs_first_request_for_the_model(
    tmp_path, clock, append_answer
):
    first, again, other = (
        append_request(tmp_path, of_run(clock, "run-1", model)) for model in ("m", "m", "n")
    )
    assert requests.final_answer(tmp_path, "run-1", "m") is None
    append_answer(first, REFUSED, error="TemporaryError", reason="no server")
    assert requests.final_answer(tmp_path, "run-1", "m") is None, "a retry asks again"
    append_answer(again, DONE, version=2)
    assert requests.final_answer(tmp_path, "run-1", "m").id == again.request
    assert requests.final_answer(tmp_path, "run-1", "n") is None
    third = append_request(tmp_path, of_run(clock, "run-1", "m", CANARY))
    state = read_request(tmp_path, third.request)
    assert (state.first, state.earlier.version) == (first.request, 2)
    assert read_request(tmp_path, other.request).earlier is None
