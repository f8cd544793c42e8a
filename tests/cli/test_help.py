"""Tests of `--help` of every command: it shows name, defaults, and an example that parses."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.commands import COMMANDS, GROUPS, find_command
from evergreen.runtime.flags import CommandParser, examples
from testing.paths import REPOSITORY
from tests.support.command_lines import leaf, parser_of
from tests.support.documents import DOCUMENTS, blocks, inline_code

STEPS = (
    "extraction",
    "validation",
    "preprocessing",
    "training",
    "evaluation",
    "deployment",
    "run_outcome",
)


@pytest.mark.parametrize("line", examples(), ids=lambda line: line[:60])
def test_help_has_typed_name_defaults_and_example_that_parses(line):
    parser, words = parser_of(line)
    parser.parse_args(words)
    named = leaf(parser, words)
    text = " ".join(named.format_help().split())
    assert isinstance(named, CommandParser)
    assert text.startswith(f"usage: {named.prog} ")
    assert f"{named.prog} " in f"{line} ", "the example lacks the command's name"
    assert text.endswith(f"example: {' '.join(named.example.split())}")
    for action in named._actions:
        assert action.help or action.choices, f"{named.prog} {action.dest} has no help"
        expanded = named._get_formatter()._expand_help(action)
        if action.const is False:  # a flag that turns something off
            assert "default" not in expanded, f"{named.prog} {action.dest}"
        elif (
            action.default not in (None, "", (), [], argparse.SUPPRESS)
            and action.default is not False
        ):
            assert str(action.default) in expanded or "default" in expanded, (
                f"{named.prog} {action.dest}"
            )


def test_examples_are_of_every_command_of_command_line_and_of_every_step():
    typed = {find_command(line.split()[1:]) for line in examples() if line.startswith("evergreen ")}
    assert typed == COMMANDS.keys()
    assert [
        line.split(" -m components.")[1].split()[0] for line in examples() if " -m " in line
    ] == list(STEPS)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_and_flag_on_page_exists(page):
    shown = [*inline_code(page), *(command for block in blocks(page) for command in block.commands)]
    for line in {
        re.split(r"[|;&>#`]| -- ", each)[0] for each in shown if re.match(r"evergreen [a-z]", each)
    }:
        words = line.replace("'", "").replace('"', "").replace("...", "").split()
        if words[1] in GROUPS and words[2:] in ([], ["--help"]):
            continue
        assert find_command(words[1:]), line
        parser, words = parser_of(shlex.join(words))
        known = leaf(parser, words)._option_string_actions
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)) <= known.keys(), (
            f"{page.name}: {line}"
        )


NAMED = re.compile(
    r"(?:[`\"'(]|^[\s#]*(?:\$ )?)evergreen ([a-z][a-z-]*)\b(?: ([a-z][a-z-]*)\b)?", re.M
)
"""Pattern of a command `evergreen ...` at the start of a line or after a quotation mark."""


NAMESPACE = REPOSITORY / "tests/cli/test_doctor.py"
"""This file contains kubectl's output, in which `evergreen` is a namespace and not our command."""


def test_every_file_names_existing_commands():
    paths = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    unknown = []
    for path in filter(Path.is_file, (REPOSITORY / name for name in paths if name)):
        if path in (Path(__file__), NAMESPACE) or path.suffix in (".lock", ".svg", ".png"):
            continue
        unknown += [
            f"{path.relative_to(REPOSITORY)}: evergreen {' '.join(filter(None, words))}"
            for words in NAMED.findall(path.read_text(errors="replace"))
            if not find_command(words) and not (words[0] in GROUPS and not words[1])
        ]
    assert unknown == ["tests/k8s/test_runbook.py: evergreen undo"]


def test_first_level_fits_one_screen():
    first = {path[0] for path in COMMANDS}
    assert len(first) <= 20
    assert {path[0] for path in COMMANDS if len(path) > 1} == GROUPS.keys()


@pytest.mark.parametrize("name", ["rollback", "ingest", "live-at"])
def test_command_without_its_group_is_refused_with_its_full_name(name, capsys):
    assert main([name]) == 2
    (path,) = [path for path in COMMANDS if path[-1] == name]
    assert f"`evergreen {' '.join(path)}`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["data"], ["data", "ingst"], ["ingst", "--store", "s"]])
def test_line_without_command_exits_with_code_of_bad_input(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shell_completion_lists_commands_and_their_flags(shell, capsys):
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert {name for path in COMMANDS for name in path if name not in script} == set()
    assert "--last-day" in script


@pytest.mark.parametrize(
    "words", [["data", "records", "examples/shop/recommender.yaml"], ["--help"]]
)
def test_closed_reader_ends_command_quietly(words):
    command = [sys.executable, "-m", "cli", *words]
    line = f"set -o pipefail; sleep 0.1 | {shlex.join(command)} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")
