"""Tests of the GPU benchmark's order, its time limit and its archive."""

import json
import tarfile

import pytest

from benchmarks import gpu

DOCUMENT = {
    "commit": "abc",
    "is_quick": False,
    "seconds": 1.0,
    "other_work_share": 0.0,
    "figures": [],
    "skipped": [],
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs steps that take `minutes` each and write a document, and returns the exit code."""
    clock = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu.machine, "facts", lambda: {"revision": "abc"})
    ran = []

    def main(minutes_of_step, flags=()):
        def run_step(name, output, *, is_quick, minutes):
            clock[0] += 60 * min(minutes_of_step, minutes)
            if minutes < minutes_of_step:
                return "ended"
            ran.append(name)
            output.write_text(json.dumps(DOCUMENT))
            return "done"

        monkeypatch.setattr(gpu, "run_step", run_step)
        paths = [f"--folder={tmp_path / 'gpu'}", f"--output={tmp_path / 'gpu.json'}"]
        return gpu.main([*paths, *flags])

    main.ran, main.clock = ran, clock
    return main


def test_most_important_steps_come_first_and_graphs_last():
    assert gpu.STEPS[:6] == ("limits", "tests", "equality", "rates-dcn-1.2M", "loading", "memory")
    assert gpu.STEPS[-3:] == ("graphs-dcn", "graphs-deepfm", "graphs-dlrm")
    assert len(set(gpu.STEPS)) == len(gpu.STEPS) == 18


def test_call_ends_within_nine_minutes_and_next_call_resumes(run):
    assert run(2) == gpu.UNFINISHED
    assert run.ran == list(gpu.STEPS[:4])
    assert run.clock[0] <= 9 * 60
    while run(2) == gpu.UNFINISHED:
        pass
    assert run.ran == list(gpu.STEPS)


def test_result_is_one_archive_from_which_another_machine_resumes(run, tmp_path):
    assert run(2) == gpu.UNFINISHED
    with tarfile.open(tmp_path / "gpu.tar.gz") as packed:
        names = packed.getnames()
    assert sorted(names) == sorted(["gpu.json", *(f"{name}.json" for name in gpu.STEPS[:4])])
    for path in (tmp_path / "gpu").iterdir():
        path.unlink()
    (tmp_path / "gpu").rmdir()
    run.ran.clear()
    run(2)
    assert run.ran[0] == gpu.STEPS[4]


def test_document_of_other_commit_is_measured_again(tmp_path):
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(DOCUMENT))
    assert gpu.is_done(path, "abc", is_quick=False)
    assert not gpu.is_done(path, "other", is_quick=False)
    assert not gpu.is_done(path, "abc", is_quick=True)
