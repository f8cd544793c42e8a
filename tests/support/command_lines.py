"""Parse command lines as a user types them, with the parser of the program that each line starts.

The command lines are not run.
"""

import argparse
import importlib
import shlex
import sys
from unittest import mock

import pytest

from cli import commands
from cli.commands import build_parser, find_command
from evergreen.runtime.flags import CommandParser

OF_VALIDATION = ("tensorflow_metadata", "tensorflow_metadata.proto", "tensorflow_metadata.proto.v0")
"""Modules of the validation environment that are not needed to parse its command lines."""


def parser_of(line: str) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser of the command or program, and the arguments that the line passes to it."""
    words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patched:
        for name in OF_VALIDATION:
            patched.setitem(sys.modules, name, mock.MagicMock())
        if words[1] == "-m" and words[2] != "cli":
            program = importlib.import_module(words[2])
            if hasattr(program, "__path__"):
                program = importlib.import_module(f"{words[2]}.__main__")
            return program.build_parser(), words[3:]
        words = words[3:] if words[1] == "-m" else words[1:]
        if (path := find_command(words)) is None:
            return build_parser(), words
        return commands.parser_of(path), words[len(path) :]


def leaf(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the subcommand that the arguments name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = (
                (each, words[at + 1 :])
                for at, name in enumerate(words)
                if (each := action.choices.get(name))
            )
            return leaf(*next(found, (CommandParser(), words)))
    return parser
