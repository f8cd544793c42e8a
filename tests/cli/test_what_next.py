"""Tests of the advice after a run without a release: it names a command if a command helps."""

import shlex
from dataclasses import replace

import pytest

from cli.runs import what_next
from evergreen.registry.models import verdict_paths
from evergreen.registry.runs import RunOutcome, step_note
from evergreen.runtime.errors import run_again
from testing.releases import keep_model, passing_verdict

COMMAND = shlex.split("evergreen run --package 'my build/r.yaml' --folder shop")


def ended(state: str, reason: str = "because", step: str = "extraction") -> RunOutcome:
    return RunOutcome(
        run="r1",
        trigger_id="",
        state=state,
        step=step,
        reason=reason,
        version=None,
        ended_at="2026-01-01T00:00:00Z",
    )


def test_released_run_needs_no_action(tmp_path):
    assert what_next(tmp_path, ended("released"), command=COMMAND) is None


@pytest.mark.parametrize(
    ("given", "flags", "command"),
    [
        ("", "--from-scratch", "--from-scratch"),
        ("-p parent=m1 -p lake=x", "--from-scratch", "-p lake=x --from-scratch"),
        ("--from-scratch", "--set gate.min_auc=0.5", "--from-scratch --set gate.min_auc=0.5"),
        ("--set a.b=1 --set a.c=2 -p trigger_id=t", "--set a.b=3", "--set a.c=2 --set a.b=3"),
        (
            "-p 'settings=gate.min_auc=0.99 training.seed=7'",
            "--set gate.min_auc=0.5",
            "-p settings=training.seed=7 --set gate.min_auc=0.5",
        ),
        ("-p settings=gate.min_auc=0.99", "--set gate.min_auc=0.5", "--set gate.min_auc=0.5"),
        (
            "",
            """--set 'validation.actions={"x":"warn"}'""",
            """--set 'validation.actions={"x":"warn"}'""",
        ),
    ],
)
def test_advised_command_has_flags_from_reason_instead_of_flags_that_they_replace(
    tmp_path, given, flags, command
):
    outcome = ended("failed", f"ContractError: it cannot be; {run_again(flags)}, or stop")
    advice = what_next(tmp_path, outcome, command=[*COMMAND, *shlex.split(given)])
    assert shlex.split(advice) == [*COMMAND, *shlex.split(command)]


def test_advice_for_failure_without_flags_is_to_correct_its_reason(tmp_path):
    assert "correct what the reason names" in what_next(
        tmp_path, ended("failed", "disk is full"), command=COMMAND
    )


@pytest.mark.parametrize(("state", "step"), [("refused", "evaluation"), ("refused", "deployment")])
def test_advice_for_refused_model_is_that_of_gate_with_its_command(tmp_path, state, step):
    keep_model(tmp_path, "m1")
    with step_note(tmp_path, "r1", "training") as note:
        note.facts = {"model": "m1"}
    advice = ["about 900 held-out rows would tell", f"or {run_again('--set gate.min_auc=0.5')}"]
    verdict = passing_verdict("m1", tmp_path / "scores", num_rows=9, accepted=False, advice=advice)
    verdict.write(verdict_paths(tmp_path, "m1")[0])
    parts = what_next(tmp_path, ended(state, step=step), command=COMMAND).split("\nnext: ")
    assert parts[:2] == advice
    assert shlex.split(parts[2]) == [*COMMAND, "--set", "gate.min_auc=0.5"]
    assert f"evergreen release promote --store {tmp_path} --model-id m1 --override" in what_next(
        tmp_path, ended("evaluated"), command=COMMAND
    )


def test_advice_for_experiment_is_comparison_and_then_promotion(tmp_path):
    keep_model(tmp_path, "m2")
    with step_note(tmp_path, "r1", "training") as note:
        note.facts = {"model": "m2"}
    verdict = passing_verdict("m2", tmp_path / "scores", num_rows=9, champion_model_id="m1")
    verdict = replace(verdict, decision="inconclusive", accepted=False)
    verdict.write(verdict_paths(tmp_path, "m2")[0])
    compare, promote = what_next(tmp_path, ended("evaluated"), command=COMMAND).split("\nnext: ")
    assert compare.startswith(f"evergreen audit compare m1 m2 --store {tmp_path} ")
    assert promote.startswith(f"evergreen release promote --store {tmp_path} --model-id m2 ")
    assert promote.endswith("although its verdict is inconclusive")


def test_advice_after_canary_is_to_check_it(tmp_path):
    assert f"evergreen release canary status --store {tmp_path}" in what_next(
        tmp_path, ended("canary"), command=COMMAND
    )
