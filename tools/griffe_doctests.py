"""Fence the doctests of docstrings, so that the API pages show them as code.

mkdocstrings loads this extension by its path. Without this extension, the pages would show the
lines of a doctest as quotations.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^(?P<indent> *)>{3} .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Return the text with each doctest in a fence."""
    return _DOCTEST.sub(
        lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text
    )


class FencedDoctests(griffe.Extension):  # type: ignore[misc]  # only the docs environment has it
    """Extension that puts each doctest of a docstring into a code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the text of the docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
