"""Command-line flags: what several commands and components share."""

from __future__ import annotations

import argparse


def parse_bool(text: str) -> bool:
    """The value of a flag that a KFP component passes as text, in whatever case.

    >>> parse_bool("True")
    True
    """
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def run_flags(**values: object) -> list[str]:
    """The command line that gives a step these values; each flag is named as its value, with hyphens.

    >>> run_flags(run="r 1", batch_size=2048)
    ['--run=r 1', '--batch-size=2048']
    """
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
