"""Types of command-line flags that several commands share."""

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
