"""What a dataclass's fields mean, by the docstrings that stand below them: Python itself keeps none.

Joins the classes of settings to the help of commands and the generated documents.
"""

import ast
import functools
import inspect
from typing import Any


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
