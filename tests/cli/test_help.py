"""Tests of `--help` of every command: it shows name, defaults, and an example that parses."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest

from cli.__main__ import FORWARDED, build_parser
from evergreen.runtime.flags import CommandParser, examples
from tests.support.command_lines import leaf, parser_of
from tests.support.documents import DOCUMENTS, blocks, inline_code
from tests.support.paths import REPOSITORY

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
    assert f"{named.prog} " in f"{line} ", "the name that a person types"
    assert text.endswith(f"example: {' '.join(named.example.split())}")
    for action in named._actions:
        assert action.help or action.choices, f"{named.prog} {action.dest} has no help"
        if (
            action.default not in (None, "", (), [], argparse.SUPPRESS)
            and action.default is not False
        ):
            expanded = named._get_formatter()._expand_help(action)
            assert str(action.default) in expanded or "default" in expanded, (
                f"{named.prog} {action.dest}"
            )


def test_examples_are_of_every_command_of_command_line_and_of_every_step():
    typed = {line.split()[1] for line in examples() if line.startswith("evergreen ")}
    assert typed == build_parser()._subparsers._group_actions[0].choices.keys() >= FORWARDED.keys()
    assert [
        line.split(" -m components.")[1].split()[0] for line in examples() if " -m " in line
    ] == list(STEPS)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_and_flag_that_page_names_exists(page):
    shown = [*inline_code(page), *(command for block in blocks(page) for command in block.commands)]
    for line in {
        re.split(r"[|;&>#`]| -- ", each)[0] for each in shown if re.match(r"evergreen [a-z]", each)
    }:
        words = line.replace("'", "").replace('"', "").replace("...", "").split()
        assert (
            words[1] in FORWARDED
            or words[1] in build_parser()._subparsers._group_actions[0].choices
        ), line
        parser, words = parser_of(shlex.join(words))
        known = leaf(parser, words)._option_string_actions
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)) <= known.keys(), (
            f"{page.name}: {line}"
        )


@pytest.mark.parametrize(
    "words", [["recommender", "records", "examples/shop/recommender.yaml"], ["--help"]]
)
def test_reader_that_goes_away_ends_command_quietly(words):
    command = [sys.executable, "-m", "cli", *words]
    line = f"set -o pipefail; sleep 0.1 | {shlex.join(command)} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")
