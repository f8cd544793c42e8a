"""Reads a cluster's placement from a file, so that one file describes a cluster and flags only what differs.

YAML (hence also JSON) with the fields of `pipelines.placement.Placement`; what they mean is said there. Unknown fields
and wrong types are refused. `${NAME}` in a text is filled in from `cluster.env` beside the file, which the manifests of
that cluster are rendered from too, so that bucket, registry and tag are said once.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from components.runtime.errors import ContractError
from pipelines.placement import Placement

VALUES_FILE = "cluster.env"
_NAME = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def read_placement(path: Path | None, overrides: Mapping[str, Any]) -> Placement:
    """The placement in `path`, with `overrides` over it.

    Args:
        path: The file; None = the defaults.
        overrides: Fields that were given otherwise, such as on a command line. One of text may be `${NAME}` no longer.

    Raises:
        ContractError: the file cannot be read, is no mapping, has an unknown field or a wrong type, names a value that
            `cluster.env` lacks, or describes a placement that cannot work.
    """
    given = _read(path) if path else {}
    merged = {**given, **overrides}
    if path:
        merged = _filled(merged, path.with_name(VALUES_FILE))
    made: Placement = _made(Placement, merged, str(path))
    return made


def read_values(path: Path) -> dict[str, str]:
    """NAME=VALUE lines, as kustomize reads an env file: `#` opens a comment, quotes are part of the value.

    Raises:
        ContractError: the file cannot be read, or a line has no `=`.
    """
    values: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ContractError(f"{path} is no text, expected NAME=VALUE lines") from error
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator:
            raise ContractError(f"{path}: line {line!r} has no '=', expected NAME=VALUE")
        values[name.strip()] = value.strip()
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ContractError(f"placement {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ContractError(f"placement {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ContractError(f"placement {path} holds {_kind(document)}, expected a mapping of fields")
    return document


def _filled(value: Any, source: Path) -> Any:
    """`value` with its `${NAME}`s replaced, at any depth; the file is read only where there is one."""
    if isinstance(value, dict):
        return {key: _filled(each, source) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, source) for each in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    values = read_values(source)

    def replace(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise ContractError(f"{value!r} names {found[1]}, which {source} lacks")
        return values[found[1]]

    filled = _NAME.sub(replace, value)
    if "$" in filled:
        raise ContractError(f"{value!r} holds a '$' that opens no ${{NAME}}")
    return filled


def _made(wanted: type[Any], given: Any, where: str) -> Any:
    """An instance of the dataclass `wanted` of the mapping `given`."""
    if not isinstance(given, dict):
        raise ContractError(f"{where} is {_kind(given)}, expected a mapping")
    hints = typing.get_type_hints(wanted)
    names = [field.name for field in dataclasses.fields(wanted)]
    if unknown := [str(name) for name in given if name not in names]:
        raise ContractError(f"{where}: {unknown[0]} is unknown, expected some of {', '.join(names)}")
    required = [f.name for f in dataclasses.fields(wanted) if _is_required(f)]
    if missing := [name for name in required if name not in given]:
        raise ContractError(f"{where}: {missing[0]} is missing")
    return wanted(**{name: _converted(hints[name], value, f"{where}: {name}") for name, value in given.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _converted(wanted: Any, value: Any, where: str) -> Any:
    """`value` as a field of the type `wanted` holds it."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):  # int | None
        return None if value is None else _converted(arguments[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ContractError(f"{where} is {_kind(value)}, expected a list")
        return tuple(_converted(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is not None:  # Mapping[str, ...]
        if not isinstance(value, dict):
            raise ContractError(f"{where} is {_kind(value)}, expected a mapping")
        return {str(key): _converted(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return value if isinstance(value, wanted) else _made(wanted, value, where)
    # A bool is an int to Python, and YAML reads `on` as one.
    if wanted is not Any and (not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool)):
        raise ContractError(f"{where} is {_kind(value)} {value!r}, expected {_KINDS.get(wanted, wanted.__name__)}")
    return value


_KINDS = {str: "text", int: "a whole number", dict: "a mapping", list: "a list", bool: "a boolean", float: "a number"}


def _kind(value: Any) -> str:
    return "nothing" if value is None else _KINDS.get(type(value), type(value).__name__)
