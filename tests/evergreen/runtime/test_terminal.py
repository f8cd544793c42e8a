"""Tests of how commands print tables, local times and progress bars."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from evergreen.runtime.terminal import TableColumn, local_time, print_table
from testing.paths import REPOSITORY

COLUMNS = (
    TableColumn(name="version", is_number=True),
    TableColumn(name="run", is_flexible=True),
    TableColumn(name="state"),
    TableColumn(name="reason", is_flexible=True),
    TableColumn(name="hash", is_wide_only=True),
)
ROWS = [
    ("1", "first", "released", "AUC 0.7831 [0.7685, 0.7970]; passed 2 of 2 checks", "a" * 64),
    ("12", "drift-20261129T151918Z-v1", "refused", "木" * 40, "b" * 64),
    ("3", None, "failed", "", "c" * 64),
]


@pytest.fixture(autouse=True)
def no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def printed(capsys, **options) -> list[str]:
    print_table(COLUMNS, ROWS, **options)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_is_cut_to_terminal_and_only_in_flexible_columns(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    head, *lines = printed(capsys)
    cells = [sum(2 if each == "木" else 1 for each in line) for line in (head, *lines)]
    assert max(cells) <= width
    assert head.split() == ["version", "run", "state", "reason"]
    assert [line.split()[0] for line in lines] == ["1", "12", "3"]
    states = ("released", "refused", "failed")
    assert all(f" {state} " in f"{line} " for state, line in zip(states, lines))
    assert "…" in lines[1]
    assert not any("a" * 10 in line for line in lines)


def test_wide_table_and_output_without_terminal_are_complete(monkeypatch, capsys):
    whole = printed(capsys)
    assert "a" * 64 in whole[1]
    assert "木" * 40 in whole[2]
    assert re.search(r"3 +- +failed +- +c{64}$", whole[3])
    monkeypatch.setenv("COLUMNS", "80")
    assert printed(capsys, wide=True) == whole


def test_table_that_fits_has_all_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    assert "b" * 64 in printed(capsys)[2]


def test_table_without_rows_has_header(capsys):
    print_table(COLUMNS, [])
    assert capsys.readouterr().out.split() == ["version", "run", "state", "reason", "hash"]


@pytest.mark.parametrize(
    ("zone", "expected"),
    [("UTC", "2026-03-01 11:00:05 UTC"), ("CET-1", "2026-03-01 12:00:05 CET")],
)
def test_times_are_local_with_zone(zone, expected, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for text in (
            "2026-03-01T11:00:05Z",
            "2026-03-01T11:00:05",
            "2026-03-01T12:00:05.500+01:00",
        ):
            assert local_time(text) == expected
        assert local_time(1772362805.0) == expected
        assert local_time(None) is None
    finally:
        monkeypatch.undo()
        time.tzset()


def on_terminal(code: str, **variables: str) -> str:
    """Return what a program writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=theirs,
        stderr=theirs,
        cwd=REPOSITORY,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "80", **variables},
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65_536):
            written += chunk
    except OSError:  # the terminal's other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


TABLE = """
from evergreen.runtime.terminal import TableColumn, print_table
print_table([TableColumn(name="version")], [["1"]])
"""
PROGRESS = """
from evergreen.runtime.terminal import progress
with progress("copying", total=3) as advance:
    for _ in range(3):
        advance()
print("done")
"""


def test_terminal_gets_styles_and_no_color_is_honoured():
    styles = re.compile(r"\x1b\[([0-9;]+)m")
    assert styles.search(on_terminal(TABLE))
    colors = {"3", "4", "9"}
    for codes in styles.findall(on_terminal(TABLE, NO_COLOR="1")):
        assert not [code for code in codes.split(";") if len(code) > 1 and code[0] in colors]


def test_progress_is_shown_only_on_terminal():
    shown = on_terminal(PROGRESS)
    assert "copying" in shown
    assert "3 of 3" in shown
    assert "done" in shown
    piped = subprocess.run(
        [sys.executable, "-c", PROGRESS], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert (piped.stdout, piped.stderr) == ("done\n", "")
