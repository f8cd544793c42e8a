"""What command lines share: the parser and its help, the flags of a step, who asks.

Joins every command. A command of another room replaces `evergreen`'s process, so no parser
can tell from the process by which name it was typed. Nobody is authenticated by the name of who asks.
"""

import argparse
import functools
import getpass
import os
import socket
from pathlib import Path
from typing import Any


@functools.cache
def examples() -> list[str]:
    """A line for each command, such as a person types; the first that a parser's name begins is that parser's."""
    return Path(__file__).with_name("examples.txt").read_text().splitlines()


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose help tells defaults and ends with an example; subcommands have such parsers too."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{"formatter_class": _WithDefaults, **named})

    @property
    def example(self) -> str:
        """The line of `examples` that shows this command, or one of its subcommands."""
        return next((line for line in examples() if f"{self.prog} " in f"{line} "), "")

    def format_help(self) -> str:
        """See `argparse`."""
        return super().format_help() + (f"\nexample: {self.example}\n" if self.example else "")


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a flag's default to its help, where it has one that says something and the help does not tell it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_telling = action.default not in (None, "", (), []) and action.default is not False
        return super()._get_help_string(action) if is_telling and "default" not in (action.help or "") else action.help


def run_flags(**values: object) -> list[str]:
    """The command line that gives a step these values; each flag is named as its value, with hyphens.

    >>> run_flags(run="r 1", batch_size=2048)
    ['--run=r 1', '--batch-size=2048']
    """
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def whoami() -> str:
    """user@host of this process; the user's number where it has no name, as in a container."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
