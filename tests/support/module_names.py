"""Backticked names of the project's modules in prose, and whether they exist."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from testing.paths import REPOSITORY
from tests.support.sources import PACKAGES

_NAME = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\(\))?`")
_ENDINGS = frozenset(
    {
        "csv",
        "env",
        "go",
        "gz",
        "html",
        "j2",
        "json",
        "jsonl",
        "lock",
        "md",
        "npz",
        "onnx",
        "parquet",
        "pb",
        "pbtxt",
        "py",
        "safetensors",
        "sh",
        "sqlite3",
        "toml",
        "tsv",
        "txt",
        "yaml",
    }
)
"""Endings of file names, which look like dotted names."""


def prose_of(path: Path) -> str:
    """Return the docstrings and comments of a Python file, or the text of another file."""
    source = path.read_text()
    if path.suffix != ".py":
        return source
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [
        re.sub(r"^# ?", "", token.string) for token in tokens if token.type == tokenize.COMMENT
    ]
    return "\n".join([*strings, *comments])


@functools.cache
def modules() -> dict[str, str]:
    """Return the source of every module by dotted name.

    A package has the source of its `__init__`.
    """
    found = {}
    for package in (*PACKAGES, "tests", "benchmarks"):
        for path in (REPOSITORY / package).rglob("*.py"):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(
                ".__init__"
            )
            found[name] = path.read_text()
    return found


@functools.cache
def _by_suffix() -> dict[str, list[str]]:
    """Return the modules of the project, keyed by every suffix of their dotted names."""
    found: dict[str, list[str]] = {}
    for name in modules():
        parts = name.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(name)
    return found


@functools.cache
def _packages_and_modules() -> frozenset[str]:
    """Return every part of the modules' dotted names."""
    return frozenset(part for name in modules() for part in name.split("."))


def exists(name: str) -> bool:
    """Return whether a dotted name refers to a module of the project or to a name in such a module.

    The name may omit outer packages, as in `times.to_iso`.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        for module in _by_suffix().get(".".join(parts[:end]), []):
            if all(re.search(rf"\b{part}\b", modules()[module]) for part in parts[end:]):
                return True
    return False


def missing_names(text: str, others: frozenset[str]) -> Iterator[str]:
    """Yield the backticked dotted names of the text that look like our modules but do not exist.

    Args:
        text: Prose, see `prose_of`.
        others: Names that look like modules of the project but are not.
    """
    for name in dict.fromkeys(_NAME.findall(text)):
        first, last = name.split(".")[0], name.rsplit(".", 1)[-1]
        if (
            first in _packages_and_modules()
            and not {name, last} & (others | _ENDINGS)
            and not exists(name)
        ):
            yield name
