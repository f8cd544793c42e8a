"""Failures, sorted by what the caller must do next: correct the input, retry later, or stop.

Joins every room: whoever touches a library or the network translates its exceptions into one of these, once.
"""

import re
import shlex
from collections.abc import Callable
from typing import Any


class ContractError(ValueError):
    """The input breaks an agreement; the message names the thing, its value and what was expected."""


class TemporaryError(Exception):
    """The same call may succeed later; retry it after a delay."""


class PermanentError(Exception):
    """Retrying is useless; stop, or set the offending message aside."""


class Refused(Exception):
    """The input is sound, and the answer is no: a gate, a check or a person's earlier word stands against it."""


class Preempted(Exception):
    """The step was asked to end before it was done, and saved what it had; a retry goes on from there."""


def first_line(error: BaseException) -> str:
    r"""The first line of a foreign error's message, the name of its type where it has none: ours take one line.

    >>> first_line(OSError("page header failed\n\n")), first_line(OSError())
    ('page header failed', 'OSError')
    """
    return next(iter(str(error).splitlines()), type(error).__name__)


FROM_SCRATCH = "--from-scratch"
"""Flag of `evergreen run` and `submit`: parent=none and champion=none."""
_RUN_AGAIN = "run it again with"


def run_again(flags: str) -> str:
    """Return how an error says by which flags the same `evergreen run` would go on.

    >>> run_again("-p parent=none")
    'run it again with `-p parent=none`'
    """
    return f"{_RUN_AGAIN} `{flags}`"


def flags_to_run_again(reason: str) -> list[str]:
    """Return the flags that `run_again` put into an error, as words of a command; empty if there are none.

    >>> flags_to_run_again(f"it is new; {run_again('-p parent=none')}")
    ['-p', 'parent=none']
    """
    found = re.search(rf"{_RUN_AGAIN} `([^`]+)`", reason)
    return shlex.split(found.group(1)) if found else []


def expect(settings: Any, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Checks fields of a settings dataclass.

    Args:
        settings: The dataclass.
        rule: What is expected, as in "at least 1".
        holds: Whether a value follows the rule; NaN never should.
        names: The fields that must follow it.

    Raises:
        ContractError: a field does not; its message names it and its value.
    """
    for name in names:
        if not holds(value := getattr(settings, name)):
            raise ContractError(f"{name} is {value!r}, expected {rule}")
