"""Check the docstrings and comments of Python files against the style in CONTRIBUTING.md.

Prints one line per fault, and exits with 1 if a fault was found. There are five kinds of faults: no
verb at the start of a function's docstring, an opening word of a fragment, a semicolon in a first
paragraph, a sentence over 35 words, and a word that the glossary replaces.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from evergreen.runtime.exit_codes import exits_with_code

_VERBS = frozenset((Path(__file__).with_name("verbs.txt")).read_text().split())
"""Imperatives that open a docstring. Add a missing verb to the file."""
_FRAGMENT_STARTS = frozenset(["Of", "In", "By", "Those", "What", "Where", "Whose", "As"])
_MAX_WORDS = 35
GLOSSARY = {
    r"taken back|takes? back|took back": "roll back",
    r"barred": "blocked",
    r"rivals?|contestants?": "baselines",
    r"restraint": "cooldown or rate limit",
    r"sightings?": "frequency",
    r"errands?": "retrain request",
    r"thinn(?:ed|ing)": "negative downsampling",
    r"put off|puts off": "defer",
    r"go(?:es)? back to|went back to": "roll back",
    r"seams?": "interface",
    r"the world": "the simulator",
    r"damaged": "corrupt",
    r"line of models": "lineage",
    r"judg(?:e|es|ed|ing)": "evaluate, compare or decide",
}
"""Patterns of words to avoid, each with the technical term to use instead."""
_IS_EXEMPT = re.compile(r"property|fixture|overload|setter|component|pipeline")


def _faults_of(path: Path) -> Iterator[str]:
    """Yield the faults of one file as `path:line: text`."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            text = node.value.value
            for fault in _faults_of_text(text):
                yield f"{path}:{node.lineno}: {fault}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            docstring := ast.get_docstring(node)
        ):
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            first = docstring.split()[0].rstrip(",.:")
            if (
                first.lower() not in _VERBS
                and not node.name.startswith("test_")
                and not _IS_EXEMPT.search(decorators)
            ):
                yield (
                    f"{path}:{node.lineno}: the docstring of {node.name} begins with {first!r}, "
                    "not with a verb"
                )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from (
                f"{path}:{token.start[0]}: {fault}" for fault in _glossary_faults(token.string)
            )


def _faults_of_text(text: str) -> Iterator[str]:
    """Yield the faults of one docstring."""
    prose = re.split(r"^\s*>>>", text, maxsplit=1, flags=re.M)[0]
    first = prose.strip().split("\n\n")[0]
    if prose.split() and prose.split()[0] in _FRAGMENT_STARTS:
        yield f"begins with {prose.split()[0]!r}, which starts a fragment"
    if ";" in re.sub(r"`[^`]*`", "", first):
        yield "has a semicolon in its first paragraph"
    for sentence in re.split(r"(?<=[.!?:])\s+|\n\n|\n\s*[-*] |\n\s+\w+: ", prose):
        if len(sentence.split()) > _MAX_WORDS:
            yield (
                f"has a sentence of {len(sentence.split())} words: "
                f"{' '.join(sentence.split()[:6])} ..."
            )
    yield from _glossary_faults(prose)


def _glossary_faults(text: str) -> Iterator[str]:
    """Yield the words of one text that the glossary replaces."""
    bare = re.sub(r"`[^`]*`", "", text)
    for pattern, term in GLOSSARY.items():
        if match := re.search(rf"\b(?:{pattern})\b", bare):
            yield f"contains {match[0]!r}; the technical term is: {term}"


@exits_with_code
def main() -> int:
    """Check the tracked Python files, and return the exit code.

    The arguments select folders. Without arguments, all files are checked.
    """
    command = ["git", "ls-files", "--", *sys.argv[1:]]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [Path(name) for name in listed if name.endswith(".py")]
    faults = [fault for path in paths for fault in _faults_of(path)]
    print("\n".join(faults) or f"prose of {len(paths)} files: no fault")
    return 1 if faults or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
