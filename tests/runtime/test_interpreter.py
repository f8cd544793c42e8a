"""Imports and the end of a process are spared the collector's walks, and nothing else changes."""

import gc
import subprocess
import sys

import pytest

from components.runtime.interpreter import importing

ENDING = """
import atexit, gc, sys
from components.runtime.interpreter import end_quickly
class Loud:
    def __del__(self):
        print("finalised")
{prepare}
cycle = Loud()
cycle.itself = cycle
file = open(sys.argv[1], "w")
atexit.register(file.close)
file.write("whole")
atexit.register(print, "handler")
sys.stdout.write("told without a line's end ")
{end}
"""


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collector_is_held_while_the_body_imports_and_then_as_it_was(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    seen = []
    with pytest.raises(ImportError):
        _import_what_is_not_there(seen)
    assert seen == [False]
    assert gc.isenabled() is was_enabled


def _import_what_is_not_there(seen):
    with importing():
        seen.append(gc.isenabled())
        import no_such_module  # noqa: F401


def test_what_was_imported_is_not_walked_again():
    frozen = gc.get_freeze_count()
    with importing():
        held = [[i] for i in range(100_000)]
    assert gc.get_freeze_count() >= frozen + len(held)


def run(tmp_path, prepare="", end=""):
    code = ENDING.format(prepare=prepare, end=end)
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(2)", 2), ("raise ValueError('no')", 1)])
def test_process_ends_with_its_own_code_its_handlers_and_its_files_whole(tmp_path, end, code):
    done = run(tmp_path, "end_quickly(); end_quickly()", end)
    assert done.returncode == code
    assert "told without a line's end handler" in done.stdout
    assert (tmp_path / "file").read_text() == "whole"
    assert "finalised" not in done.stdout


def test_without_it_the_end_walks_through_all(tmp_path):
    assert "finalised" in run(tmp_path).stdout
