"""Assertions on errors that users see: the error's type, and the names and values in its text.

A test that asserts a whole sentence breaks if only the wording changes. Exact texts are in
`tests/messages.yaml`, and one test asserts each exact text.
"""

import re
from functools import cache

import pytest

from testing.paths import REPOSITORY


def raises(kind: type[BaseException], *named: object):
    """Expect an error of type `kind` whose text contains all of `named`, in this order.

    Args:
        kind: Type of the error.
        named: Words and numbers in the error's text. Only whole words and numbers match, so 1 does
            not match "10 rows".
    """
    return pytest.raises(kind, match=naming(*named))


def naming(*named: object) -> str:
    """Return a pattern that matches a text with all of `named`, in the order of the arguments."""
    return "(?s)" + ".*?".join(_whole(str(each)) for each in named)


def _whole(text: str) -> str:
    before = r"(?<![\w])" if re.match(r"\w", text) else ""
    after = r"(?![\w])" if re.search(r"\w$", text) else ""
    return before + re.escape(text) + after


def raises_text(kind: type[BaseException], message: str, **values: object):
    """Expect an error whose whole text is the entry `message` of `tests/messages.yaml`.

    Args:
        kind: Expected type of the error.
        message: Key of the entry.
        values: Values of the entry's fields.
    """
    text = messages()[message].format(**values)
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


@cache
def messages() -> dict[str, str]:
    """Return the texts of `tests/messages.yaml` by key."""
    import yaml

    return yaml.safe_load((REPOSITORY / "tests" / "messages.yaml").read_text())
