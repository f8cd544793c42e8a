"""Tests of a failing or interrupted demo: last line, exit code, and the end of all processes."""

import os
import signal

import pytest

ROWS = ["--rows", "8000"]


def _pid_of(command, word):
    return next(pid for pid, line in command.running().items() if word in line)


@pytest.mark.slow
def test_triton_killed_under_traffic_ends_demo_with_clear_message(tmp_path, started):
    folder = tmp_path / "a demo"
    with started(
        ["demo", *ROWS, "--folder", str(folder)], output=tmp_path / "screen.log"
    ) as command:
        traffic = folder / "traffic.jsonl"
        command.wait_for(lambda: traffic.exists() and traffic.stat().st_size > 0)
        os.kill(_pid_of(command, "/bin/tritonserver"), signal.SIGKILL)
        assert command.end(seconds=120) == 3
        assert "triton ended with code -9" in command.output.splitlines()[-1]
        assert "Traceback" not in command.output
        assert command.running() == {}
        assert not list(_shared_memory(command))


def test_ctrl_c_in_middle_of_step_leaves_nothing(tmp_path, started):
    folder = tmp_path / "a demo"
    old = folder / "store" / "of an earlier demo"
    old.mkdir(parents=True)
    (folder / ".evergreen-demo").touch()
    with started(
        ["demo", *ROWS, "--folder", str(folder)], output=tmp_path / "screen.log"
    ) as command:
        command.wait_for(lambda: "extraction done" in command.output)
        assert not old.exists()
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGINT)  # an impatient user presses Ctrl-C a second time
        assert command.end(seconds=120) == 130
        assert "stopped; nothing is left running" in command.output
        assert "Traceback" not in command.output
        assert command.running() == {}
        assert not list(_shared_memory(command))


def _shared_memory(command):
    """List the shared memory files of the demo's Triton by the process id in their names."""
    shared = "/dev/shm"
    return [
        name for name in os.listdir(shared) if name.startswith(f"evergreen_{command.process.pid}_")
    ]
