"""What command lines share: the flags of a step, who asks, and the help that settings' docstrings give.

Joins every command, and the generated documents. Nobody is authenticated by the name of who asks.
"""

import ast
import functools
import getpass
import inspect
import os
import socket
from typing import Any


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


@functools.cache
def field_docstrings(kind: type[Any]) -> dict[str, str]:
    """The text below each field of the dataclass `kind` and of its bases, in one line; absent where there is none."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts
