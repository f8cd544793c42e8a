"""Tests of a run's outcome: the notes of the steps determine it, however the run ends."""

from dataclasses import replace

import pytest

from cli.runs import print_runs, read_runs
from components.run_outcome.__main__ import record
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.registry.runs import Stopped, find_outcome, read_outcomes, step_note
from evergreen.runtime.errors import ContractError, Preempted, Refused
from testing.releases import keep_model
from tests.support.errors import raises


def promotion(action, *, version):
    return Promotion(
        time="2026-03-01T00:00:00+00:00",
        action=action,
        version=version,
        previous_version=2,
        model_id=f"m{version}",
        model_uri="file:///m",
        release_uri="file:///r",
        trigger_id=None,
        reason="undecided",
    )


def _end(store, run="run", kfp_state="SUCCEEDED"):
    record(
        run=run,
        store=store.as_uri(),
        trigger_id=f"request-{run}",
        trigger_reason="",
        kfp_state=kfp_state,
    )
    return find_outcome(store, run)


@pytest.mark.parametrize(
    ("step", "recorded_as", "facts", "found"),
    [
        ("deployment", "done", {"version": 3, "rollout": "full"}, ("released", 3)),
        # A canary serves beside the live version, so the run released no version.
        ("deployment", "done", {"version": 3, "rollout": "canary"}, ("canary", 3)),
        ("deployment", "done", {"version": 3, "rollout": "shadow"}, ("canary", 3)),
        # The rollout `none` only stores the model. The run did what was requested, so its state is
        # `evaluated`.
        ("deployment", "refused", {"rollout": "none"}, ("evaluated", None)),
        ("evaluation", "refused", {}, ("refused", None)),
    ],
)
def test_last_note_determines_outcome_of_run(tmp_path, step, recorded_as, facts, found):
    with step_note(tmp_path, "run", step) as note:
        note.facts, note.state, note.reason = facts, recorded_as, "auc 0.70 trails 0.75"
    outcome = _end(tmp_path)
    assert (outcome.state, outcome.version) == found
    assert (outcome.step, outcome.reason) == (step, "auc 0.70 trails 0.75")


@pytest.mark.parametrize("kfp_state", ["COMPLETE", "CACHED"])
def test_release_counts_whatever_backend_reports_as_success(tmp_path, kfp_state):
    with step_note(tmp_path, "run", "deployment") as note:
        note.facts = {"version": 3, "rollout": "full"}
    assert _end(tmp_path, kfp_state=kfp_state).state == "released"


@pytest.mark.parametrize(("ended", "state"), [(False, "canary"), (True, "refused")])
def test_run_that_yields_to_canary_has_its_outcome_and_others_are_refused(tmp_path, ended, state):
    for action in ("canary", *(["canary_ended"] if ended else [])):
        append_promotion(tmp_path, promotion(action, version=3))
    with pytest.raises(Refused), step_note(tmp_path, "run", "deployment"):
        raise Refused("version 3 is a running canary")
    outcome = _end(tmp_path)
    assert (outcome.state, outcome.step, outcome.version) == (
        state,
        "deployment",
        None if ended else 3,
    )
    assert outcome.reason == "version 3 is a running canary"


def test_killed_step_is_failure_of_that_step(tmp_path):
    context = step_note(tmp_path, "run", "training")
    context.__enter__()  # the step is killed before it writes its note
    outcome = _end(tmp_path, kfp_state="FAILED")
    assert (outcome.state, outcome.step) == ("failed", "training")
    assert "without a note" in outcome.reason


def test_preempted_step_without_retry_fails_run_with_reason(tmp_path):
    with pytest.raises(Preempted), step_note(tmp_path, "run", "training"):
        raise Preempted("saved at epoch 2")
    outcome = _end(tmp_path, kfp_state="FAILED")
    assert (outcome.state, outcome.step) == ("failed", "training")
    assert "(terminated, or preempted without a retry): saved at epoch 2" in outcome.reason


def test_run_that_stopped_between_steps_failed(tmp_path):
    with step_note(tmp_path, "run", "training"):
        pass
    outcome = _end(tmp_path, kfp_state="CANCELED")
    assert outcome.state == "failed"
    assert outcome.reason == "a person terminated the run in Kubeflow at training"


@pytest.mark.parametrize("kfp_state", ["RUNNING", "COMPLETE", "SUCCEEDED"])
def test_refusal_is_recorded_whatever_state_exit_handler_gets(tmp_path, kfp_state):
    """After a refusal, a real backend reports RUNNING, because a group of tasks was skipped."""
    with step_note(tmp_path, "run", "evaluation") as note:
        note.state, note.reason = "refused", "auc 0.70 trails 0.75"
    outcome = _end(tmp_path, kfp_state=kfp_state)
    assert (outcome.state, outcome.step, outcome.reason) == (
        "refused",
        "evaluation",
        "auc 0.70 trails 0.75",
    )


def test_run_that_person_terminated_differs_from_preempted_one(tmp_path):
    with pytest.raises(Preempted), step_note(tmp_path, "run", "training"):
        raise Preempted("saved at epoch 2")
    assert _end(tmp_path, kfp_state="CANCELED").reason == (
        "a person terminated the run in Kubeflow at training: saved at epoch 2"
    )


def failing(store, step):
    with pytest.raises(OSError), step_note(store, "run", step):
        raise OSError("no space left")


def test_run_that_was_retried_in_kubeflow_ends_as_its_second_pass(tmp_path):
    """Kubeflow runs the exit handler once.

    If a person selects Retry in the UI, the failed step and the later steps run again.
    """
    for step in ("extraction", "validation"):
        with step_note(tmp_path, "run", step):
            pass
    failing(tmp_path, "preprocessing")
    assert (_end(tmp_path, kfp_state="FAILED").state, read_runs(tmp_path)[0].state) == (
        "failed",
        "failed",
    )
    for step in ("preprocessing", "training", "evaluation"):
        with step_note(tmp_path, "run", step):
            assert find_outcome(tmp_path, "run") is None
            assert read_runs(tmp_path)[0].state == "running"
    with step_note(tmp_path, "run", "deployment") as note:
        note.facts, note.reason = {"version": 7, "rollout": "canary"}, "version 7 is a canary"
    outcome = find_outcome(tmp_path, "run")
    assert (outcome.state, outcome.version, outcome.step) == ("canary", 7, "deployment")
    assert (outcome.trigger_id, outcome.reason) == ("request-run", "version 7 is a canary")
    assert read_outcomes(tmp_path) == [outcome]
    (line,) = read_runs(tmp_path)
    assert (line.state, line.version) == ("canary", 7)
    assert 0 <= line.seconds < 60


def test_table_of_runs_on_narrow_terminal_distinguishes_trials(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    model = "20261129T161234Z-abcdef01"
    keep_model(tmp_path, model)
    names = ["search-20261129T161234567890Z", "search-20261129T161633123456Z"]
    for name in names:
        with step_note(tmp_path, name, "training") as note:
            note.facts = {"model": model, "train_rows": 24_000}
        with step_note(tmp_path, name, "deployment") as note:
            note.facts, note.state = {"rollout": "none"}, "refused"
        _end(tmp_path, name)
    print_runs(tmp_path)
    head, first, second = capsys.readouterr().out.splitlines()
    assert max(len(head), len(first), len(second)) <= 80
    assert head.split() == ["run", "state", "AUC", "version", "model"]
    assert first.split()[0] != second.split()[0]
    assert first.split()[0].startswith("search-")
    assert first.split()[0].endswith("567890Z")
    assert [first.split()[-1], second.split()[-1]] == [model, model]


def test_second_failed_pass_names_its_step(tmp_path):
    failing(tmp_path, "extraction")
    _end(tmp_path, kfp_state="FAILED")
    with step_note(tmp_path, "run", "extraction"):
        pass
    failing(tmp_path, "validation")
    outcome = find_outcome(tmp_path, "run")
    assert (outcome.state, outcome.step, outcome.reason) == (
        "failed",
        "validation",
        "OSError: no space left",
    )


@pytest.mark.parametrize(("action", "state"), [("release", "released"), ("canary", "canary")])
@pytest.mark.parametrize("passes", [1, 2])
def test_release_whose_step_was_stopped_before_its_note_is_in_journal(
    tmp_path, action, state, passes
):
    failing(tmp_path, "extraction")
    if passes == 2:
        _end(tmp_path, kfp_state="FAILED")
    append_promotion(tmp_path, replace(promotion(action, version=3), who="run"))
    with pytest.raises(SystemExit), step_note(tmp_path, "run", "deployment"):
        raise Stopped(143)
    outcome = find_outcome(tmp_path, "run") if passes == 2 else _end(tmp_path, kfp_state="FAILED")
    assert (outcome.state, outcome.version) == (state, 3)
    assert "stopped from outside while it worked" in outcome.reason


def test_release_of_another_run_does_not_count(tmp_path):
    append_promotion(tmp_path, replace(promotion("release", version=3), who="another"))
    failing(tmp_path, "deployment")
    assert _end(tmp_path, kfp_state="FAILED").state == "failed"


def test_outcome_whose_time_is_corrupt_is_named(tmp_path):
    _end(tmp_path, kfp_state="FAILED")
    path = tmp_path / "runs" / "run" / "outcome.json"
    path.write_text(path.read_text().replace('"ended_at": "2', '"ended_at": "noon 2'))
    with raises(ContractError, "run run", "time"):
        find_outcome(tmp_path, "run")


def test_outcome_of_another_request_is_not_mistaken(tmp_path):
    _end(tmp_path, run="one", kfp_state="FAILED")
    assert find_outcome(tmp_path, "two") is None


def test_newest_runs_are_listed_without_reading_files_of_older_runs(tmp_path, capsys):
    for run in ("last-by-name", "b", "a"):
        if run != "a":  # no step of run a has started
            with step_note(tmp_path, run, "extraction"):
                pass
        _end(tmp_path, run)
    (tmp_path / "runs" / "last-by-name" / "outcome.json").write_text("{")
    assert [line.run for line in read_runs(tmp_path, newest=2)] == ["b", "a"]
    print_runs(tmp_path, newest=2)
    assert "these are the newest 2 runs, --newest 0 lists all" in capsys.readouterr().out
