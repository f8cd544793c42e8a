"""Reader and writer of YAML files.

The reader returns plain values with line numbers, and expands ranges.

The schema is YAML 1.2's core schema: `on`, `no` and dates are texts, and `1e-7` is a number.
Repeated keys, aliases, tags and a second document are refused. The reader also refuses documents
that would take long to read. Large files, deep nesting and numbers of many digits would take long
to read. The module `form` interprets the values.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import yaml

from evergreen.config.features import MAX_COLUMNS, MAX_NAME
from evergreen.runtime.errors import ContractError, first_line

MAX_BYTES = 1 << 18
"""Maximum size of a file in bytes."""
_MAX_DEPTH = 20
"""Maximum depth of nested lists and mappings. The file of a recommender has a depth of four."""
_MAX_VALUES = 50_000
"""Maximum number of keys and values of one file. The parser takes about 30 microseconds for each
key or value."""
_MAX_DIGITS = 19
"""Maximum number of digits of a whole number. 19 digits are enough for a signed 64-bit number."""
_MAX_PROBLEM = 2000
"""Maximum number of characters of a message. A message may contain a long value."""
_RANGE = re.compile(r"(?P<prefix>.*?)(?P<first>[0-9]{1,9})\.\.(?P=prefix)(?P<last>[0-9]{1,9})")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")
_MIN_RUN = 3
"""Minimum number of names that are written as a range."""


class NameRange(str):
    """Range of names. A file contains the range without quotes: `I1..I13`."""


class Document(NamedTuple):
    """Values of a file, with the line number of each value."""

    source: str
    value: Any
    lines: dict[str, int]
    """Line number of each value, from 1. The keys are the paths of the values, such as
    `training.round_rates[1]`. The line of a mapping's value is the line of its key."""

    def refusal(self, path: str, problem: str) -> ContractError:
        """Return an error about the value at `path`, with a line number.

        If `path` is not in the file, the error has the line of the nearest enclosing path.
        """
        while path not in self.lines:
            path = re.sub(r"(^|\.|\[)[^.\[]*$", "", path)
        return ContractError(f"{self.source}:{self.lines[path]}: {_shortened(problem)}")

    @contextmanager
    def located(self, path: str) -> Iterator[None]:
        """Add a line number to an error that the body of the `with` statement raises.

        If the error message starts with the path of a value, the line number is the line of that
        value. Otherwise, the line number is the line of the value at `path`.
        """
        try:
            yield
        except ContractError as error:
            opens = re.match(r"[\w.\[\]]+", str(error))
            named = opens[0] if opens else ""
            raise self.refusal(
                named if re.split(r"[.\[]", named)[0] in self.lines else path, str(error)
            ) from error


def load_document(text: str, *, source: str) -> Document:
    """Return the values in `text`.

    Args:
        text: The YAML.
        source: Name of the source, for errors.

    Raises:
        ContractError: the text is not YAML, or has something that this module refuses. The error
            message contains the line number.
    """
    try:
        loader: Any = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ContractError(f"{source} is empty, expected a recommender")
        lines = {"": node.start_mark.line + 1}
        return Document(source, _value(loader, node, path="", lines=lines), lines)
    except yaml.MarkedYAMLError as error:
        context = (
            f"{error.context} in line {error.context_mark.line + 1}, " if error.context_mark else ""
        )
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ContractError(
            f"{source}:{line}: {_shortened(context + str(error.problem))}"
        ) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ContractError(
            f"{source}:{line}: character {chr(error.character)!r}, expected printable ones"
        ) from error
    except ContractError:
        raise
    except ValueError as error:  # PyYAML's scanner raises this error for an invalid escape sequence
        raise ContractError(f"{source}:{loader.line + 1}: {first_line(error)}") from error


def _shortened(problem: str) -> str:
    return problem if len(problem) <= _MAX_PROBLEM else f"{problem[:_MAX_PROBLEM]}..."


def dump_document(value: dict[str, Any]) -> str:
    """Convert `value` to YAML text that `load_document` can read.

    Lists of plain values are written on as few lines as possible.
    """
    return str(
        yaml.dump(
            value,
            Dumper=_Dumper,
            default_flow_style=None,
            sort_keys=False,
            allow_unicode=True,
            width=120,
        )
    )


def dump_text(text: str) -> str:
    """Return a text in one line, quoted if a document needs quotes.

    >>> dump_text("price"), dump_text("I1..I3"), dump_text("yes: no")
    ('price', "'I1..I3'", "'yes: no'")
    """
    return (
        str(yaml.dump(text, Dumper=_Dumper, allow_unicode=True, width=float("inf")))
        .removesuffix("...\n")
        .strip()
    )


def expand_range(name: NameRange) -> list[str]:
    """Return all names in a range such as `I9..I11`.

    Raises:
        ContractError: the range is descending or has more than `MAX_COLUMNS` names. The error
            message starts with the range.

    >>> expand_range(NameRange("I9..I11")), expand_range(NameRange("c08..c10"))
    (['I9', 'I10', 'I11'], ['c08', 'c09', 'c10'])
    """
    match = _RANGE.fullmatch(name)
    assert match
    first, last = int(match["first"]), int(match["last"])
    if last < first:
        raise ContractError(f"{name!r}, expected a range that starts with the smaller number")
    if last - first >= MAX_COLUMNS:
        raise ContractError(
            f"{name!r}, a range of {last - first + 1:,} names, expected at most {MAX_COLUMNS:,}"
        )
    width = len(match["first"])
    return [f"{match['prefix']}{number:0{width}}" for number in range(first, last + 1)]


def collapse_names(names: Sequence[str]) -> list[str]:
    """Replace three or more names with consecutive numbers by one range.

    >>> collapse_names(["price", "I1", "I2", "I3", "I5"])
    ['price', 'I1..I3', 'I5']
    """
    found: list[str] = []
    at = 0
    while at < len(names):
        end = at + 1
        if match := _NUMBERED.fullmatch(names[at]):
            prefix, first = match.groups()
            while (
                end < len(names) and names[end] == f"{prefix}{int(first) + end - at:0{len(first)}}"
            ):
                end += 1
        written = f"{names[at]}..{names[end - 1]}"
        if end - at >= _MIN_RUN and _RANGE.fullmatch(written):
            found.append(NameRange(written))
        else:
            end = at + 1
            found.append(names[at])
        at = end
    return found


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses aliases, tags and deep nesting.

    Aliases are refused because a small file could expand to a very large document.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}
    _depth = _count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refused(f"alias *{event.anchor} is refused", event)
        if event.tag is not None:
            raise _refused(f"tag {event.tag} is refused, expected a plain value", event)
        if self._depth >= _MAX_DEPTH:
            raise _refused(f"is nested more than {_MAX_DEPTH} deep, expected a recommender", event)
        self._count += 1
        if self._count > _MAX_VALUES:
            raise _refused(
                f"has more than {_MAX_VALUES:,} keys and values, expected a recommender", event
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def fetch_flow_collection_start(self, token: Any) -> Any:
        # Deep nesting is slow, because the scanner compares each token with the possible keys of
        # every enclosing level.
        if self.flow_level >= _MAX_DEPTH:
            problem = f"is nested more than {_MAX_DEPTH} deep, expected a recommender"
            raise yaml.scanner.ScannerError(problem=problem, problem_mark=self.get_mark())
        return super().fetch_flow_collection_start(token)  # type: ignore[no-untyped-call]


def _refused(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Dumper(yaml.SafeDumper):
    """YAML dumper without aliases.

    The dumper quotes texts that `_Loader` would otherwise read as values of another type.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


_TEXT_TAG, _INT_TAG, _RANGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int", "!range"
for _each in (_Loader, _Dumper):
    for _tag, _pattern in {
        "tag:yaml.org,2002:null": r"(|~|null|Null|NULL)\Z",
        "tag:yaml.org,2002:bool": r"(true|True|TRUE|false|False|FALSE)\Z",
        "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9]*)\Z",
        "tag:yaml.org,2002:float": r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)\Z",  # noqa: E501
        # The length is limited, because a long text of many dots would take quadratic time.
        _RANGE_TAG: rf"(?=.{{4,{MAX_NAME}}}\Z)" + _RANGE.pattern + r"\Z",
    }.items():
        _each.add_implicit_resolver(_tag, re.compile(_pattern), None)
_Loader.add_constructor(_RANGE_TAG, lambda _, node: NameRange(node.value))
# PyYAML 6 writes a next-line character in single quotes, but then reads it as spaces.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        _TEXT_TAG, text, style=None if text.isprintable() else '"'
    ),
)
_Dumper.add_representer(
    NameRange, lambda dumper, name: dumper.represent_scalar(_RANGE_TAG, str(name))
)


def _value(loader: Any, node: Any, *, path: str, lines: dict[str, int]) -> Any:
    """Convert a YAML node to a plain value.

    The line number of each nested value is added to `lines`.
    """
    if isinstance(node, yaml.SequenceNode):
        found = []
        for number, each in enumerate(node.value):
            inner = f"{path}[{number}]"
            lines[inner] = each.start_mark.line + 1
            found.append(_value(loader, each, path=inner, lines=lines))
        return found
    if isinstance(node, yaml.MappingNode):
        return dict(_items(loader, node, path=path, lines=lines))
    if node.tag == _INT_TAG and len(node.value) > _MAX_DIGITS:
        shown = f"{node.value[:_MAX_DIGITS]}..."
        raise _problem(
            f"{path} is {shown}, {len(node.value):,} digits, expected at most {_MAX_DIGITS}", node
        )
    value = loader.construct_object(node)
    if isinstance(value, float) and not math.isfinite(value):
        raise _problem(f"{path} is {node.value}, expected a finite number", node)
    return value


def _items(
    loader: Any, node: Any, *, path: str, lines: dict[str, int]
) -> Iterator[tuple[str, Any]]:
    here: dict[str, int] = {}
    for key, each in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in (_TEXT_TAG, _RANGE_TAG):
            what = (
                repr(key.value[:MAX_NAME])
                if isinstance(key, yaml.ScalarNode)
                else "of several values"
            )
            raise _problem(f"key {what} is not text, expected a name", key)
        name = loader.construct_object(key)
        inner = f"{path}.{name}" if path else str(name)
        if name in here:
            raise _problem(f"{inner} occurs twice, also in line {here[name]}", key)
        here[name] = lines[inner] = key.start_mark.line + 1
        yield name, _value(loader, each, path=inner, lines=lines)


def _problem(text: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
