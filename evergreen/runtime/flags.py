"""Shared parts of all commands: the parser with its help, the flags of a step, and the user's name.

The user's name is not authenticated.
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
    """Return the lines of examples.txt, each with an example of a command.

    The help text of a command shows the first of these lines that begins with the command.
    """
    return Path(__file__).with_name("examples.txt").read_text().splitlines()


class CommandParser(argparse.ArgumentParser):
    """Argument parser whose help shows defaults and an example, also for subcommands."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{"formatter_class": _WithDefaults, **named})

    @property
    def example(self) -> str:
        """First line of `examples` for this command or one of its subcommands.

        Empty if no line of `examples` contains the command.
        """
        return next((line for line in examples() if f"{self.prog} " in f"{line} "), "")

    def format_help(self) -> str:
        """Return the help text with the example at its end."""
        return super().format_help() + (f"\nexample: {self.example}\n" if self.example else "")


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that appends a flag's default, unless it is empty or the help text mentions it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows_default = action.default not in (None, "", (), []) and action.default is not False
        # `const` is False for a flag that turns something off.
        shows_default = shows_default and action.const is not False
        return (
            super()._get_help_string(action)
            if shows_default and "default" not in (action.help or "")
            else action.help
        )


def add_store_flag(
    parser: argparse.ArgumentParser,
    *,
    default: str | None = None,
    required: bool = True,
    text: str = "folder or URI of the registry",
) -> None:
    """Add the flag `--store`, which names a model registry (`evergreen.registry`).

    Args:
        parser: Parser of the command.
        default: Registry if the flag is not given. The flag is then optional.
        required: Whether the flag must be given if there is no default.
        text: Help text of the flag.
    """
    parser.add_argument(
        "--store",
        default=default,
        required=required and default is None,
        help=text,
    )


def run_flags(**values: object) -> list[str]:
    """Return the command-line flags of a step.

    Each flag has the name of its value, with hyphens instead of underscores.

    >>> run_flags(run="r 1", batch_size=2048)
    ['--run=r 1', '--batch-size=2048']
    """
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def whoami() -> str:
    """Return `user@host` of this process.

    If the user has no name, as in a container, the user's number is returned instead.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
