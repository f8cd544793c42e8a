"""HugeCTR's Python interface, generated from `hugectr_api.json`.

The document was extracted from HugeCTR's pybind wrappers of version 25.03. Version 24.06 has the
same training API. The test double has only the names in the document. A missing, unknown or wrongly
typed argument is a TypeError, as in pybind. The test double is stricter in one way: it accepts
neither a bool nor a NumPy number where a Python number is expected.
"""

import enum
import json
import re
from pathlib import Path
from typing import Any

DOCUMENT = json.loads((Path(__file__).parent / "hugectr_api.json").read_text())
ENUMS = {name: enum.Enum(name, members) for name, members in DOCUMENT["enums"].items()}

_ALIASES = {
    "metrics::Type": "MetricsType",
    "DeviceMap::Layout": "DeviceLayout",
    "OptParams": "OptParamsPy",
}
_UNTYPED = {
    ("hugectr.Model.add", "input"): "Input",
    ("hugectr.Model.add", "sparse_embedding"): "SparseEmbedding",
    ("hugectr.Model.add", "dense_layer"): "DenseLayer",
    ("hugectr.Model.add", "ebc_config"): "EmbeddingCollectionConfig",
    ("hugectr.Model.set_learning_rate", "lr"): "float",
    ("hugectr.Model.check_out_tensor", "tensor_name"): "std::string",
    ("hugectr.Model.check_out_tensor", "tensor_type"): "Tensor_t",
    ("hugectr.Core23DataReader64.set_source", "file_name"): "std::string",
    ("hugectr.Core23DataReader32.set_source", "file_name"): "std::string",
}
"""Types from HugeCTR's source code, for arguments without a type in the extracted document."""


class Value:
    """An object of one of HugeCTR's parameter classes, with its arguments as attributes."""

    _type = ""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def overloads(name: str) -> list[list[dict[str, Any]]]:
    """Return the argument lists of the callable `name`."""
    found = DOCUMENT["overloads"].get(name)
    return found if found else [DOCUMENT["callables"][name]]


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the first matching overload, with defaults filled in."""
    reasons = []
    for arguments in overloads(name):
        try:
            return _bind(name, arguments, args, kwargs)
        except TypeError as error:
            reasons.append(str(error))
    raise TypeError(f"{name}(): incompatible function arguments: {'; '.join(reasons)}")


def _bind(
    name: str, arguments: list[dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    names = [argument["name"] for argument in arguments]
    if len(args) > len(names):
        raise TypeError(f"{len(args)} positional arguments, expected at most {len(names)}")
    given = dict(zip(names, args))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"{sorted(twice)} given twice")
    given |= kwargs
    if unknown := given.keys() - set(names):
        raise TypeError(f"unknown arguments {sorted(unknown)}")
    bound = {}
    for argument in arguments:
        key = argument["name"]
        if key not in given:
            if argument["required"]:
                raise TypeError(f"argument {key} is missing")
            bound[key] = _default(argument["default"])
            continue
        kind = argument.get("type") or _UNTYPED.get((name, key))
        if kind is not None and not _is_a(kind, given[key]):
            raise TypeError(f"argument {key} is {given[key]!r}, expected {kind}")
        bound[key] = given[key]
    return bound


def _default(default: Any) -> Any:
    if isinstance(default, dict) and "enum" in default:
        kind, member = default["enum"].split(".")
        return ENUMS[kind][member]
    if isinstance(default, dict) and "cpp" in default:
        return None
    if isinstance(default, dict):
        return {_default({"enum": key}): value for key, value in default.items()}
    return default


def _is_a(kind: str, value: Any) -> bool:
    kind = _ALIASES.get(kind, kind)
    if inner := re.fullmatch(r"std::(?:shared_ptr|optional)<(.+)>", kind):
        return _is_a(inner[1], value)
    if inner := re.fullmatch(r"std::vector<(.+)>", kind):
        return isinstance(value, list | tuple) and all(_is_a(inner[1], item) for item in value)
    if inner := re.fullmatch(r"std::pair<(.+), (.+)>", kind):
        return (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(map(_is_a, inner.groups(), value))
        )
    if inner := re.fullmatch(r"std::map<([\w:]+), ?([\w:]+)>", kind):
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_is_a(inner[1], key) and _is_a(inner[2], item) for key, item in pairs)
    if kind in ("size_t", "unsigned long long"):
        return type(value) is int and value >= 0
    if kind in ("int", "long long", "int64_t"):
        return type(value) is int
    if kind == "float":
        return type(value) in (int, float)
    if kind in ("bool", "std::string"):
        return type(value) is {"bool": bool, "std::string": str}[kind]
    if kind in ENUMS:
        return isinstance(value, ENUMS[kind])
    return getattr(value, "_type", None) == kind


def value_class(name: str, checked: Any = None) -> type:
    """Return the parameter class `hugectr.<name>`. `checked` inspects the bound arguments."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        values = bind(f"hugectr.{name}", args, kwargs)
        if checked is not None:
            checked(values)
        Value.__init__(self, values)

    return type(name, (Value,), {"__init__": init, "_type": name, **_absent_methods(name)})


def _absent_methods(name: str) -> dict[str, Any]:
    """Return the methods of a parameter class, all of which raise NotImplementedError."""
    prefix = f"hugectr.{name}."

    def method(full: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"the double does not support {full}")

        return call

    return {
        full.removeprefix(prefix): method(full)
        for full in DOCUMENT["callables"]
        if full.startswith(prefix)
    }


def method_class(name: str, implementation: type, *, constructible: bool = True) -> type:
    """Return the class `hugectr.<name>`.

    Its methods call `implementation` with validated arguments.
    """
    prefix = f"hugectr.{name}."

    def method(full: str) -> Any:
        short = full.removeprefix(prefix)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = bind(full, args, kwargs)
            if not hasattr(self._inner, short):
                raise NotImplementedError(f"the double does not support {full}")
            return getattr(self._inner, short)(**values)

        return call

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not constructible:
            raise TypeError(f"hugectr.{name}: No constructor defined!")
        self._inner = implementation(**bind(f"hugectr.{name}", args, kwargs))

    methods = {
        full.removeprefix(prefix): method(full)
        for full in DOCUMENT["callables"]
        if full.startswith(prefix)
    }
    return type(name, (), {"__init__": init, "_type": name, **methods})


def wrapped(cls: type, inner: Any) -> Any:
    """Return an object of `cls` that is made without the class's constructor."""
    made = cls.__new__(cls)
    made._inner = inner
    return made
