"""Error classes for three reactions of the caller: correct the input, retry later, or stop.

A module that calls a library or the network translates the exceptions of its calls into these
errors.
"""

import re
import shlex
from collections.abc import Callable
from typing import Any


class ContractError(ValueError):
    """The input is invalid. The message names the thing, its value and the expected value."""


class UnreadableFile(ContractError):
    """A file exists and cannot be read now. A network share can recover from this error."""


class TemporaryError(Exception):
    """The same call can succeed later. Retry the action after a delay."""


class PermanentError(Exception):
    """A retry cannot help. The caller must stop, or store the message as a dead letter."""


class Refused(Exception):
    """The input is valid, but a gate, a check or a person has decided against it."""


class Preempted(Exception):
    """The step received a request to stop and saved its progress.

    A retry continues from the saved progress.
    """


def first_line(error: BaseException) -> str:
    r"""Return the first line of a library's error message, or its type name if it has no message.

    >>> first_line(OSError("page header failed\n\n")), first_line(OSError())
    ('page header failed', 'OSError')
    """
    return next(iter(str(error).splitlines()), type(error).__name__)


FROM_SCRATCH = "--from-scratch"
"""Flag of `evergreen run` and `submit` that means parent=none and champion=none."""
_RUN_AGAIN = "run it again with"


def run_again(flags: str) -> str:
    """Return advice to run the command again with these flags, for the end of an error message.

    >>> run_again("-p parent=none")
    'run it again with `-p parent=none`'
    """
    return f"{_RUN_AGAIN} `{flags}`"


def flags_to_run_again(reason: str) -> list[str]:
    """Return the flags that `run_again` put into an error message, as a list of arguments.

    The list is empty if the message contains no flags.

    >>> flags_to_run_again(f"it is new; {run_again('-p parent=none')}")
    ['-p', 'parent=none']
    """
    found = re.search(rf"{_RUN_AGAIN} `([^`]+)`", reason)
    return shlex.split(found.group(1)) if found else []


def expect(settings: Any, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Check the values of some fields of a settings dataclass.

    Args:
        settings: The dataclass.
        rule: Expected value in words, for example "at least 1".
        holds: Function that returns whether a value follows the rule. The function must return
            False for NaN.
        names: Names of the fields to check.

    Raises:
        ContractError: a field does not follow the rule. The message names the field and its value.
    """
    for name in names:
        if not holds(value := getattr(settings, name)):
            raise ContractError(f"{name} is {value!r}, expected {rule}")
