"""Tests that a reader never sees a partial file or folder, however the writer ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from evergreen.runtime import durable
from evergreen.runtime.errors import TemporaryError
from tests.support.errors import raises

KILLED_IN_FSYNC = """
import os, signal, sys
from pathlib import Path
from evergreen.runtime import durable
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
path = Path(sys.argv[1])
if sys.argv[2] == "file":
    durable.write_whole(path, b"new" * 1000)
else:
    with durable.whole_directory(path) as aside:
        (aside / "part").write_bytes(b"new")
"""

APPEND_MANY = """
import sys
from pathlib import Path
from evergreen.runtime.durable import append_line
for i in range(50):
    append_line(Path(sys.argv[1]), f"{sys.argv[2]} {i}")
"""


def killed(path, what):
    command = [sys.executable, "-c", KILLED_IN_FSYNC, str(path), what]
    assert subprocess.run(command, timeout=60).returncode == -9


def visible(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def test_file_is_written_completely_with_its_folders(tmp_path):
    path = tmp_path / "new folder" / "deep" / "file"
    durable.write_whole(path, "täxt")
    assert path.read_bytes() == "täxt".encode()
    durable.write_whole(path, b"replaced")
    assert path.read_bytes() == b"replaced"


def test_file_written_in_parts_appears_at_end_and_error_keeps_old_file(tmp_path):
    path = tmp_path / "file"
    with durable.whole_file(path) as file:
        file.write(b"one ")
        file.flush()
        assert not path.exists()
        file.write(b"two")
    assert path.read_bytes() == b"one two"

    def fail_half_way():
        with durable.whole_file(path) as file:
            file.write(b"three")
            raise ValueError("half way")

    with raises(ValueError, "half way"):
        fail_half_way()
    assert path.read_bytes() == b"one two"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_failed_write_leaves_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    durable.write_whole(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with raises(OSError, "No space"):
        durable.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_writer_killed_midway_leaves_old_file(tmp_path):
    path = tmp_path / "file"
    durable.write_whole(path, b"old")
    killed(path, "file")
    assert path.read_bytes() == b"old"
    assert visible(tmp_path) == ["file"]


def test_folder_appears_complete(tmp_path):
    final = tmp_path / "a" / "final"
    with durable.whole_directory(final) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "part").write_text("x")
        assert not final.exists()
    assert (final / "sub" / "part").read_text() == "x"
    assert [p.name for p in final.parent.iterdir()] == ["final"]


def test_folder_is_absent_after_sigkill(tmp_path):
    killed(tmp_path / "final", "folder")
    assert visible(tmp_path) == []
    with durable.whole_directory(tmp_path / "final") as aside:
        (aside / "part").write_text("retried")
    assert visible(tmp_path) == ["final"]


def test_retried_folder_replaces_what_earlier_tries_left_and_nothing_else(tmp_path):
    for name in ("fi[n]al", "fi[n]al-2", ".fi[n]al.notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "fi[n]al" / "old").write_text("x")
    killed(tmp_path / "fi[n]al 3", "folder")
    for name in ("fi[n]al", "fi[n]al 3"):
        with durable.whole_directory(tmp_path / name, replace=True) as aside:
            (aside / "part").write_text("retried")
    assert [p.name for p in (tmp_path / "fi[n]al").iterdir()] == ["part"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".fi[n]al.notes",
        "fi[n]al",
        "fi[n]al 3",
        "fi[n]al-2",
    ]


def test_published_folder_is_never_changed(tmp_path):
    (tmp_path / "final").mkdir()
    with (
        raises(FileExistsError, "expected a new folder"),
        durable.whole_directory(tmp_path / "final"),
    ):
        pass


LOST = "another process also created .*final"


def test_process_that_lost_folder_to_another_gets_temporary_error(tmp_path):
    final = tmp_path / "final"
    with (  # noqa: PT012
        pytest.raises(TemporaryError, match=LOST),
        durable.whole_directory(final, replace=True) as first,
    ):
        with durable.whole_directory(final, replace=True) as second:
            (second / "part").write_text("second")
        (first / "part").write_text("first")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert (final / "part").read_text() == "second"


@pytest.mark.parametrize(
    "whole", [b"", b"one\n", b"x" * 5000 + b"\n"], ids=["first", "short", "long"]
)
@pytest.mark.parametrize("torn", [b"t", b"torn" * 3000], ids=["one byte", "12 kB"])
def test_torn_line_damages_neither_earlier_nor_later_lines(tmp_path, whole, torn):
    path = tmp_path / "lines"
    path.write_bytes(whole + torn)
    durable.append_line(path, "two")
    assert path.read_bytes() == whole + b"two\n"


def test_two_processes_append_without_losing_line(tmp_path):
    path = tmp_path / "lines"
    writers = [
        subprocess.Popen([sys.executable, "-c", APPEND_MANY, str(path), name]) for name in "ab"
    ]
    assert [w.wait(timeout=60) for w in writers] == [0, 0]
    assert sorted(path.read_text().splitlines()) == sorted(
        f"{name} {i}" for name in "ab" for i in range(50)
    )


def test_hash_of_tree_depends_on_names_and_contents_but_not_on_path(tmp_path):
    def tree(root: str, files: dict[str, str]) -> Path:
        for name, content in files.items():
            durable.write_whole(tmp_path / root / name, content)
        return tmp_path / root

    reference = durable.sha256_tree(tree("a", {"x": "1", "d/y": "2"}))
    assert durable.sha256_tree(tree("b", {"d/y": "2", "x": "1"})) == reference
    assert durable.sha256_tree(tree("c", {"x": "1", "y": "2"})) != reference
    assert durable.sha256_tree(tree("d", {"x": "2", "d/y": "1"})) != reference
