"""Assertions on the errors that users see: the type, and the thing and values that are named.

A test that asserts a whole sentence breaks if only the wording changes. Exact texts are in
`tests/messages.yaml`.
"""

import re

import pytest


def raises(kind: type[BaseException], *named: object):
    """Expect an error of type `kind` whose text names all of `named`, in this order.

    Args:
        kind: Type of the error.
        named: Things, values and decisive words. Each matches as a whole: 1 is not in "10 rows".
    """
    return pytest.raises(kind, match=naming(*named))


def naming(*named: object) -> str:
    """Return a pattern of texts that name all of `named`, in this order."""
    return "(?s)" + ".*?".join(_whole(str(each)) for each in named)


def _whole(text: str) -> str:
    before = r"(?<![\w])" if re.match(r"\w", text) else ""
    after = r"(?![\w])" if re.search(r"\w$", text) else ""
    return before + re.escape(text) + after
