"""Tests of `evergreen run` if a step refuses or fails: exit code and outcome."""

import pytest

from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.registry import promotion_journal
from evergreen.registry.runs import find_outcome
from testing.recommenders import accept_into
from tests.support.file_modes import argo_umask, too_open


@pytest.fixture(scope="module")
def small_lake(tmp_path_factory, run_to_end):
    """A folder with a compiled pipeline and a small lake, which has enough rows for the gate."""
    root = tmp_path_factory.mktemp("runs") / "a folder"
    lake = [
        "--lake",
        str(root / "lake"),
        "--rows",
        "12000",
        "--days",
        "2",
        "--last-day",
        "2026-01-02",
        "--seed",
        "5",
    ]
    for words in (
        ["simulate", "lake", *lake, "--simulator", str(root / "simulator.json")],
        ["compile", "--output", str(root / "pipeline.yaml")],
    ):
        ended = run_to_end(words, output=root / "command.log", seconds=120)
        assert ended.code == 0, ended.output
    accept_into(root / "store", CRITEO_RECOMMENDER)
    return root


def test_steps_under_argo_umask_leave_no_file_that_others_may_read(
    small_lake, tmp_path, run_to_end
):
    words = ["run", "--package", str(small_lake / "pipeline.yaml"), "--folder", str(small_lake)]
    words += ["-p", "trigger_id=umask", "-p", "settings=gate.min_auc=0.99"]
    # An administrator creates the folders before the first run.
    for name in ("store", "work"):
        (small_lake / name).mkdir(exist_ok=True)
    with argo_umask():
        assert run_to_end(words, output=tmp_path / "run.log").code == 1
    for name, left in (
        ("store", "runs/umask/training.json"),
        ("store", "runs/umask/outcome.json"),
        ("work", "umask"),
    ):
        assert (small_lake / name / left).exists()
        assert [
            path
            for path in too_open(small_lake / name, 0o640)
            if "umask" in path or "models" in path
        ] == []


@pytest.mark.parametrize(
    ("parameter", "code", "state", "step", "reason", "next_step"),
    [
        (
            *(
                "settings=gate.min_auc=0.99",
                1,
                "refused",
                "evaluation",
                "failed: AUC (expected at least 0.99)",
            ),
            "/a folder' --set gate.min_auc=0.",
        ),
        (
            *("window_start=yesterday", 3, "failed", "extraction", "window_start is 'yesterday'"),
            "correct what the reason names",
        ),
    ],
    ids=["the gate refuses", "a step raises"],
)
def test_run_without_release_records_step_and_reason(
    small_lake, tmp_path, run_to_end, parameter, code, state, step, reason, next_step
):
    words = ["run", "--package", str(small_lake / "pipeline.yaml"), "--folder", str(small_lake)]
    trigger = f"request-{state}"
    ended = run_to_end(
        [*words, "-p", f"trigger_id={trigger}", "-p", parameter], output=tmp_path / "run.log"
    )
    assert ended.code == code, ended.output
    outcome = find_outcome(small_lake / "store", trigger)
    assert (outcome.state, outcome.step) == (state, step)
    assert reason in outcome.reason
    assert f"{state} at {step}: " in ended.output
    next_lines = [line for line in ended.output.splitlines() if line.startswith("next: ")]
    assert next_lines[-1] == ended.output.splitlines()[-1]
    assert next_step in next_lines[-1]
    assert promotion_journal.current(small_lake / "store") is None
    assert ended.left == {}
