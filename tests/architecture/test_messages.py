"""Tests that exactly one test asserts each text of `tests/messages.yaml`."""

import ast
from collections import Counter

from testing.paths import REPOSITORY
from tests.support.errors import messages


def test_each_exact_text_is_asserted_by_one_test():
    asserted: Counter[str] = Counter()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "raises_text":
                asserted[call.args[1].value] += 1
    assert asserted == Counter(dict.fromkeys(messages(), 1))
