"""Read settings from a mapping, flags, environment variables, a URL's query or a command line.

A section is a frozen dataclass. The fields of the dataclass are the settings, their docstrings
describe the settings, and `__post_init__` checks what a type cannot check. A section may contain
other sections. In files, contained sections are nested mappings. In flags, environment variables
and URL options, all settings form one flat list of unique names.

Every error names the setting, its value and what was expected. When settings come from a file, the
error also names the line (`evergreen.recommender_file.document`).
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import msgspec

from evergreen.runtime.errors import ContractError, first_line
from evergreen.runtime.flags import CommandParser

S = TypeVar("S")


class Setting(NamedTuple):
    """Field of a section or of a nested section."""

    type: Any
    default: Any
    """`dataclasses.MISSING` if the setting is required."""
    text: str
    """Docstring of the field in one line, or empty."""


def flat_settings(kind: Any) -> dict[str, Setting]:
    """Return every setting of a section and of the sections that it contains, by name.

    Raises:
        TypeError: Two sections have a setting of the same name.
    """
    hints, texts = typing.get_type_hints(kind), field_docstrings(kind)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            new = flat_settings(hint)
        else:
            new = {field.name: Setting(hint, field.default, texts.get(field.name, ""))}
        if doubled := found.keys() & new.keys():
            raise TypeError(f"{kind.__name__} has two settings named {min(doubled)}")
        found |= new
    return found


def flat_values(settings: Any) -> dict[str, Any]:
    """Return a mapping from names to values for a section and its nested sections.

    `make_settings` accepts this mapping.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        values |= flat_values(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def make_settings(kind: type[S], /, **values: Any) -> S:
    """Build a section of the settings from keyword arguments.

    The values must already have the types of the fields.

    A setting without a value gets its default.

    Raises:
        ContractError: A name is not a setting, or the section refuses a value.
        TypeError: A required setting is missing.
    """
    known = flat_settings(kind)
    if unknown := values.keys() - known.keys():
        raise ContractError(f"{min(unknown)} is not a setting{nearest(min(unknown), list(known))}")
    hints: dict[str, Any] = typing.get_type_hints(kind)
    made: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            own: Any = hint
            made[field.name] = make_settings(
                own, **{n: values[n] for n in values.keys() & flat_settings(own).keys()}
            )
        elif field.name in values:
            made[field.name] = values[field.name]
    return kind(**made)


def read_mapping(kind: type[S], values: Mapping[str, Any], *, path: str) -> S:
    """Build a section of the settings from a YAML or JSON mapping.

    A list becomes a tuple, and an integer becomes a float, if the setting has that type.

    Args:
        kind: The section.
        values: Values by name. The value of a nested section is a mapping.
        path: Source of the values, for errors.

    Raises:
        ContractError: A name is not a setting, a value is of another type, or the section refuses
            it.
    """
    _refuse_unknown(kind, values, path)
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise ContractError(_described(error, values, kind=kind, path=path)) from error


def _refuse_unknown(hint: Any, value: Any, path: str) -> None:
    """Refuse names that are not fields of the dataclass `hint` or of a nested dataclass.

    msgspec itself would ignore unknown names.
    """
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        hints = typing.get_type_hints(hint)
        names = [each.name for each in dataclasses.fields(hint) if each.init]
        for name, each in value.items():
            if name not in names:
                raise ContractError(f"{path}.{name} is not a setting{nearest(name, names)}")
            _refuse_unknown(hints[name], each, f"{path}.{name}")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _refuse_unknown(_inner(hint), each, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            _refuse_unknown(_inner(hint), each, f"{path}[{number}]")


def _inner(hint: Any, key: str = "") -> Any:
    """Return the type of the dataclass field `key`, or the element type of any other type."""
    if dataclasses.is_dataclass(hint):
        return typing.get_type_hints(hint)[key]
    arguments = [each for each in typing.get_args(hint) if each not in (type(None), ...)]
    return arguments[-1] if arguments else None


def _described(
    error: msgspec.ValidationError, values: Mapping[str, Any], *, kind: Any, path: str
) -> str:
    problem, _, at = str(error).partition(" - at `$")
    value: Any = values
    hint: Any = kind
    for step in re.findall(r"\[\.\.\.\]|[^.\[\]`]+", at):
        if step == "[...]":  # msgspec's error does not name the failed value in a mapping
            step = next(name for name, each in value.items() if not _is_valid(each, _inner(hint)))
            path = f"{path}.{step}"
        else:
            path = f"{path}[{step}]" if isinstance(value, (list, tuple)) else f"{path}.{step}"
        value = value[int(step) if isinstance(value, (list, tuple)) else step]
        hint = _inner(hint, step)
    if isinstance(error.__cause__, ContractError):
        message = str(error.__cause__)
        begins = re.match(r"(\w+)(?: (?:is|has|holds|clips) |: )", message)
        names = (
            [each.name for each in dataclasses.fields(hint)]
            if dataclasses.is_dataclass(hint)
            else []
        )
        return f"{path}.{message}" if begins and begins[1] in names else f"{path}: {message}"
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        return f"{path}.{missing[1]} is missing, expected a value"
    if typing.get_origin(hint) is typing.Literal:
        return f"{path} is {value!r}, expected one of {', '.join(map(str, typing.get_args(hint)))}"
    expected = problem.replace("`", "").replace("Expected", "expected").partition(", got")[0]
    return f"{path} is {value!r}, {expected}"


def _is_valid(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def add_flags(
    parser: argparse.ArgumentParser, kind: Any, *, prefix: str = "", variables: str = ""
) -> None:
    """Add one flag for each setting of a section.

    A flag that is not given is absent from the parsed arguments.

    Args:
        parser: The parser.
        kind: The section.
        prefix: Text before the name in each flag, such as `triton_`.
        variables: Prefix of the environment variables with the defaults, for the help text. If
            empty, the help text names no environment variables.
    """
    for name, setting in flat_settings(kind).items():
        default = (
            "required"
            if setting.default is dataclasses.MISSING
            else f"default: {setting.default!r}"
        )
        default = f"default: variable {variables}{name.upper()}" if variables else default
        text = f"{setting.text} ({default})".replace("%", "%%")
        flag = "--" + (prefix + name).replace("_", "-")
        if setting.type is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            shown = _plain_type(setting.type).__name__.upper()
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=shown, help=text)


def build_parser(kind: Any, *, prog: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command whose flags are the settings of a section.

    See `add_flags`.
    """
    parser = CommandParser(prog=prog, description=description, argument_default=argparse.SUPPRESS)
    add_flags(parser, kind)
    return parser


def read_flags(kind: Any, arguments: argparse.Namespace, *, prefix: str = "") -> dict[str, Any]:
    """Read the settings of a section from parsed arguments.

    Returns the values by name, for `make_settings`. An argument that is None or absent is ignored.
    A text is converted, and any other value is used unchanged.

    Raises:
        ContractError: A text cannot be converted.
    """
    found: dict[str, Any] = {}
    for name, setting in flat_settings(kind).items():
        value = getattr(arguments, prefix + name, None)
        if value is not None:
            flag = "--" + (prefix + name).replace("_", "-")
            found[name] = _converted(value, setting.type, flag) if isinstance(value, str) else value
    return found


def read_environment(
    kind: Any, environment: Mapping[str, str], *, prefix: str, is_strict: bool = True
) -> dict[str, Any]:
    """Read the settings of a section from environment variables.

    Returns the values by name, for `make_settings`.

    Args:
        kind: The section.
        environment: The variables. The variable for the setting `tls` is `PREFIXTLS` if the prefix
            is `PREFIX`.
        prefix: Prefix of the variables' names.
        is_strict: Whether to refuse a variable that has the prefix but names no setting.

    Raises:
        ContractError: A variable names no setting, or its text cannot be converted.
    """
    variables = {prefix + name.upper(): name for name in flat_settings(kind)}
    unknown = sorted(
        name for name in environment if name.startswith(prefix) and name not in variables
    )
    if unknown and is_strict:
        near = nearest(unknown[0], list(variables))
        raise ContractError(f"environment variable {unknown[0]} names no setting{near}")
    return {
        name: _converted(environment[variable], flat_settings(kind)[name].type, variable)
        for variable, name in variables.items()
        if variable in environment
    }


def read_query(kind: type[S], options: Mapping[str, str], *, source: str) -> S:
    """Build a section of the settings from the query options of a URL.

    Args:
        kind: The section.
        options: Values of the options as text, by name.
        source: Origin of the URL, for errors.

    Raises:
        ContractError: An option is not a setting, a text cannot be converted, or the section
            refuses a value.
    """
    known = flat_settings(kind)
    if unknown := sorted(options.keys() - known.keys()):
        raise ContractError(
            f"{source}: {unknown[0]} is not a setting{nearest(unknown[0], list(known))}"
        )
    try:
        return make_settings(
            kind,
            **{name: _converted(text, known[name].type, name) for name, text in options.items()},
        )
    except ContractError as error:
        raise ContractError(f"{source}: {error}") from error


def read_settings(
    kind: type[S], arguments: argparse.Namespace, *, environment: Mapping[str, str], prefix: str
) -> S:
    """Build a section of the settings from parsed flags and environment variables.

    A flag takes precedence over the variable of the same setting.

    Raises:
        ContractError: A required setting is missing, a text cannot be converted, or the section
            refuses a value.
    """
    values = {**read_environment(kind, environment, prefix=prefix), **read_flags(kind, arguments)}
    required = [
        name
        for name, setting in flat_settings(kind).items()
        if setting.default is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in values]:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ContractError(
            f"settings are missing: expected {flags} (or {prefix}{missing[0].upper()} and so on)"
        )
    return make_settings(kind, **values)


def parse_settings(text: str) -> dict[str, Any]:
    """Parse the settings in a text for one run, such as `training.seed=7 model.kind=dcn`.

    Returns the values by path. The settings are separated and quoted like words of a shell. A value
    is parsed as JSON. A value that is not JSON is used as text.

    Raises:
        ContractError: A word is not PATH=VALUE, a path occurs twice, or a value is not a finite
            number.

    >>> parse_settings("training.seed=7 model.tower=[64,32] model.kind=dcn")
    {'training.seed': 7, 'model.tower': [64, 32], 'model.kind': 'dcn'}
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ContractError(f"settings are {text!r}: {error}") from error
    found: dict[str, Any] = {}
    for word in words:
        path, separator, value = word.partition("=")
        if not separator or not path:
            raise ContractError(
                f"settings hold {word!r}, expected section.name=value, such as training.seed=7"
            )
        if path in found:
            raise ContractError(f"settings hold {path} twice, expected it once")
        found[path] = _parsed(path, value)
    return found


def _parsed(path: str, text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ContractError(f"{path} is {constant}, expected a finite number")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError:
        return text
    except ContractError:
        raise
    except (ValueError, RecursionError) as error:
        raise ContractError(
            f"{path} is {text[:40]}..., which cannot be read: {first_line(error)}"
        ) from error


def _converted(text: str, hint: Any, name: str) -> Any:
    """Convert a text to the type of the setting that it belongs to.

    Args:
        text: The text.
        hint: Type of the setting.
        name: Name of the flag, variable or option with this text, for error messages.
    """
    kind = _plain_type(hint)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ContractError(f"{name} is {text!r}, expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ContractError(f"{name} is {text!r}, expected {kind.__name__}") from error


def _plain_type(hint: Any) -> type[Any]:
    """Return the type to which a text is converted, such as `Path` for `Path | None`."""
    (kind,) = (each for each in typing.get_args(hint) or (hint,) if each is not type(None))
    return typing.cast("type[Any]", kind)


def nearest(name: object, known: Sequence[str]) -> str:
    """Return the closest known name, or all known names, as the end of an error message.

    >>> nearest("trainin", ["training", "gate"])
    ', expected training'
    """
    near = get_close_matches(str(name), list(known), n=1)
    return f", expected {near[0]}" if near else f", expected one of {', '.join(known)}"


@functools.cache
def field_docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and of its bases, in one line.

    Fields without a docstring are not in the result.
    """
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:]):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts
