"""Settings as flags and environment variables: one flag and one variable for each field of a settings dataclass.

A settings dataclass may hold others, one for each concern; to users all settings are one flat list of unique names.
Read once, by each command's `main`; nothing else looks at the environment. What a setting means is documented under
its field, which is the flag's help. The commands' log lines are set up here too: text for people, or one JSON object a
line, with the field names that Google Cloud Logging and most collectors know.
"""

import argparse
import dataclasses
import json
import logging
import typing
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeVar

from components.runtime.errors import ContractError
from components.runtime.flags import CommandParser, field_docstrings
from components.runtime.plain_text import TIMED, LineFormatter

S = TypeVar("S")


class Setting(NamedTuple):
    """One field of a settings dataclass, or of one of the parts that it holds."""

    type: type[Any]
    default: Any
    """`dataclasses.MISSING` where the setting is required."""
    text: str


def settings_of(kind: Any) -> dict[str, Setting]:
    """Every setting of the dataclass `kind` and of its parts, by name.

    Raises:
        TypeError: two parts have a setting of the same name.
    """
    hints, texts = typing.get_type_hints(kind), field_docstrings(kind)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            new = settings_of(hint)
        else:
            new = {field.name: Setting(hint, field.default, texts[field.name])}
        if doubled := found.keys() & new.keys():
            raise TypeError(f"{kind.__name__} has two settings named {min(doubled)}")
        found |= new
    return found


def make_settings(kind: type[S], /, **values: Any) -> S:
    """An instance of the settings dataclass `kind` from flat values; those left out have their defaults.

    Raises:
        ContractError: a name is no setting, or a value is out of range.
        TypeError: a required setting is missing.
    """
    if unknown := values.keys() - settings_of(kind).keys():
        raise ContractError(f"{min(unknown)} is no setting")
    hints: dict[str, Any] = typing.get_type_hints(kind)
    made: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        own = settings_of(hint) if dataclasses.is_dataclass(hint) else None
        if own is not None:
            made[field.name] = make_settings(hint, **{name: values[name] for name in values.keys() & own.keys()})
        elif field.name in values:
            made[field.name] = values[field.name]
    return kind(**made)


def flat_values(settings: Any) -> dict[str, Any]:
    """The values of a settings dataclass and of its parts, by name: what `make_settings` takes."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        values |= flat_values(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def build_parser(kind: Any, *, prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with one flag for each setting of `kind`; flags that are not given are absent from its result."""
    parser = CommandParser(prog=prog, description=description, argument_default=argparse.SUPPRESS)
    for name, setting in settings_of(kind).items():
        default = "required" if setting.default is dataclasses.MISSING else f"default: {setting.default!r}"
        text = f"{setting.text} ({default})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if setting.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, type=setting.type, metavar=setting.type.__name__.upper(), help=text)
    return parser


def read_settings(
    kind: type[S],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    environment: Mapping[str, str],
    prefix: str,
) -> S:
    """The settings from the flags in `argv`, else from the variables in `environment` under `prefix`.

    Raises:
        ContractError: a value is missing, unreadable or out of range.
    """
    values = {**_from_environment(kind, environment, prefix), **vars(parser.parse_args(argv))}
    required = [name for name, setting in settings_of(kind).items() if setting.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ContractError(f"settings are missing: expected {flags} (or {prefix}{missing[0].upper()} and so on)")
    return make_settings(kind, **values)


def _from_environment(kind: Any, environment: Mapping[str, str], prefix: str) -> dict[str, Any]:
    settings = settings_of(kind)
    variables = {prefix + name.upper(): name for name in settings}
    if unknown := sorted(name for name in environment if name.startswith(prefix) and name not in variables):
        raise ContractError(f"environment variable {unknown[0]} names no setting")
    return {
        name: _parse_variable(variable, environment[variable], settings[name].type)
        for variable, name in variables.items()
        if variable in environment
    }


def _parse_variable(variable: str, text: str, kind: type[Any]) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ContractError(f"{variable} is {text!r}, expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ContractError(f"{variable} is {text!r}, expected {kind.__name__}") from error


TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)


class JsonFormatter(logging.Formatter):
    """One JSON object a record: `time` (ISO 8601 UTC), `severity`, `logger`, `message`, `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(style: str) -> None:
    """Sends everything from INFO up to standard error in `style`, one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == JSON else LineFormatter(TIMED))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
