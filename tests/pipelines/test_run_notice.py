"""Tests of the exit handler: it reports the end of a run once, and never fails a run."""

from types import SimpleNamespace

import pytest

from components.run_outcome import __main__ as outcome_module
from components.run_outcome.__main__ import ADDRESS_VARIABLE, PAUSES_SECONDS, notify
from components.run_outcome.component import run_outcome
from evergreen.registry.runs import RunOutcome, StepNote, find_outcome, read_outcomes, step_note
from tests.support.webhook_server import SECRET, WebhookServer


@pytest.fixture
def server():
    made = WebhookServer()
    yield made
    made.close()


def outcome(**changes) -> RunOutcome:
    values = {
        "run": "evergreen-x1",
        "trigger_id": "",
        "state": "released",
        "step": "deployment",
        "version": 4,
    }
    values |= {"reason": "all traffic", "ended_at": "2026-01-02T03:04:05+00:00"}
    return RunOutcome(**{**values, **changes})


NOTES = [
    StepNote(step="extraction", state="done", started_at="2026-01-02T01:00:00+00:00"),
    StepNote(step="deployment", state="done", started_at="2026-01-02T03:00:00+00:00"),
]


@pytest.fixture
def ended(tmp_path, monkeypatch):
    def end(*, url, trigger_id="") -> str:
        """Run the exit handler with the address in the pod's environment, from the optional secret.

        A parameter would be visible in the UI.
        """
        monkeypatch.setenv(ADDRESS_VARIABLE, url)
        with step_note(tmp_path, "run", "extraction"):
            pass
        with step_note(tmp_path, "run", "evaluation") as note:
            note.state, note.reason = "refused", "auc 0.70 trails 0.75"
        values = {
            "run": "run",
            "run_resource": "x",
            "run_id": "",
            "store": tmp_path.as_uri(),
            "trigger_id": trigger_id,
            "trigger_reason": "",
        }
        return run_outcome.python_func(**values, status=SimpleNamespace(state="COMPLETE"))

    return end


@pytest.mark.parametrize(
    ("changes", "title", "done"),
    [
        ({}, "Version 4 was released", "all traffic"),
        ({"state": "canary"}, "Version 4 runs beside the live version", "all traffic"),
        (
            {"state": "refused", "step": "evaluation", "reason": "auc fell", "version": None},
            "The new model was refused by evaluation: auc fell",
            "the live version does not change",
        ),
        (
            {"state": "failed", "step": "training", "reason": "out of memory", "version": None},
            "A retraining run failed at training: out of memory",
            "the live version does not change",
        ),
    ],
    ids=["released", "canary", "refused", "failed"],
)
def test_message_states_outcome_of_run_deciding_step_and_reason(server, changes, title, done):
    notify(outcome(**changes), NOTES, server.url)
    (message,) = server.messages
    lines = message["text"].split("\n")
    assert lines == [title, "Since: 2026-01-02 01:00:00 UTC", f"Done: {done}", "Run: evergreen-x1"]


def test_run_of_person_or_schedule_is_announced_once_it_is_recorded(server, tmp_path, ended):
    assert ended(url=server.url) == "refused at evaluation: auc 0.70 trails 0.75"
    assert [m["text"].split("\n")[0] for m in server.messages] == [
        "The new model was refused by evaluation: auc 0.70 trails 0.75"
    ]
    assert [each.state for each in read_outcomes(tmp_path)] == ["refused"]


def test_run_of_monitor_is_not_announced_and_no_address_sends_nothing(
    server, tmp_path, ended, caplog
):
    ended(url=server.url, trigger_id="drift-1")
    assert find_outcome(tmp_path, "run").state == "refused"
    ended(url=" \n")
    assert server.num_requests == 0
    assert "not announced" not in caplog.text


def test_message_is_tried_again_with_growing_pauses(server):
    server.answers = [(503, {}), (429, {"Retry-After": "7"}), (500, {})]
    pauses = []
    notify(outcome(), NOTES, server.url, sleep=pauses.append)
    assert pauses == [PAUSES_SECONDS[0], max(7.0, PAUSES_SECONDS[1]), PAUSES_SECONDS[2]]
    assert len(server.messages) == 1


def closed(server):
    server.close()
    return server.url


@pytest.mark.parametrize(
    "address",
    [
        lambda server: server.url.replace(SECRET, "/another"),  # the server responds with 404
        closed,
        lambda server: "not an address" + SECRET,
        lambda server: server.url + "/größe",
    ],
    ids=["refused", "absent", "no address", "not ascii"],
)
def test_webhook_that_fails_changes_nothing_of_run_and_shows_no_secret(
    server, tmp_path, caplog, monkeypatch, ended, address
):
    caplog.set_level("DEBUG")
    monkeypatch.setattr(outcome_module, "PAUSES_SECONDS", ())
    sentence = ended(url=address(server))
    assert sentence == "refused at evaluation: auc 0.70 trails 0.75"
    assert [each.state for each in read_outcomes(tmp_path)] == ["refused"]
    assert server.messages == []
    assert "the run's end was not announced" in caplog.text
    assert SECRET not in caplog.text


def test_report_of_step_is_in_message_and_is_sent_for_monitors_runs_too(server):
    """The monitor reports how its runs end.

    The monitor does not report the findings of the steps.
    """
    facts = {"notify": ["I7 has no value in any of 200 rows", "C3 drifted"]}
    notes = [*NOTES, StepNote(step="validation", state="done", facts=facts)]
    for trigger_id in ("", "monitor-7"):
        notify(outcome(trigger_id=trigger_id), notes, server.url)
        title = server.messages[-1]["text"].split("\n")[0]
        assert (
            title == "Version 4 was released. validation: I7 has no value in any of 200 rows. "
            "validation: C3 drifted"
        )
