"""Command lines as a user types them, and the parser of the program that they start.

Nothing is run.
"""

import argparse
import importlib
import shlex
import sys
from unittest import mock

import pytest

from cli.__main__ import FORWARDED
from evergreen.runtime.flags import CommandParser

OF_VALIDATION = ("tensorflow_metadata", "tensorflow_metadata.proto", "tensorflow_metadata.proto.v0")
"""Modules of the validation environment that parsing does not need."""


class Parsed(BaseException):
    """Raised when the parser is called, with the arguments."""


def parser_of(line: str) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the program's parser and the arguments that the line passes to it."""
    words = shlex.split(line)
    module, words = (words[2], words[3:]) if words[1] == "-m" else ("cli", words[1:])
    if module == "cli" and words[0] in FORWARDED:
        module, first, _ = FORWARDED[words[0]]
        words = [*first, *words[1:]]
    found = []

    def take(parser, *_):
        found.append(parser)
        raise Parsed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", take)
        for name in OF_VALIDATION:
            patched.setitem(sys.modules, name, mock.MagicMock())
        program = importlib.import_module(module)
        program = (
            importlib.import_module(f"{module}.__main__")
            if hasattr(program, "__path__")
            else program
        )
        with pytest.raises(Parsed):
            program.main(words)
    return found[0], words


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
