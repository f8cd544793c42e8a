"""JSON Schema of a recommender's file, for editors: docs/reference/recommender.schema.json.

The command `make golden` writes the schema. The schema has keys, types, defaults and descriptions.
With the schema alone, an editor cannot detect wrong ranges, repeated columns, or settings of
another network. `evergreen data check` detects these errors.
"""

import json
from typing import Any, get_type_hints

import msgspec

from evergreen.config.data import ColumnNames
from evergreen.config.reader import field_docstrings
from evergreen.config.sections import section_classes
from evergreen.config.spec import SECTIONS
from evergreen.recommender_file.form import FORMAT, KINDS, OPTIONS, REQUIRED
from evergreen.recommender_file.reference import OF_FEATURES


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a recommender's file."""
    properties: dict[str, Any] = {
        "format": {"const": FORMAT},
        "name": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9_]{0,62}$",
            "description": "Name of the served model.",
        },
        "data": _object([ColumnNames]),
        "features": {**_closed({kind: _columns(kind) for kind in KINDS}), "minProperties": 1},
        **{name: _object(section_classes(name)) for name in SECTIONS},
    }
    networks = [each.network for each in section_classes("model")]
    properties["model"]["properties"]["kind"] = {
        "enum": networks,
        "description": "Name of the network.",
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recommender"}
    return {**head, **_closed(properties), "required": list(REQUIRED)}


def _columns(kind: str) -> dict[str, Any]:
    """Return the schema of one kind of columns.

    The columns are a list of names, or a mapping of names to options.
    """
    options = _object([OPTIONS[kind]])
    names = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
    return {
        "anyOf": [
            names,
            {"type": "object", "additionalProperties": {"anyOf": [options, {"type": "null"}]}},
        ]
    }


def _object(kinds: list[type[Any]]) -> dict[str, Any]:
    """Return one schema that covers the fields of several dataclasses.

    The schema describes a mapping with optional keys.
    """
    found: dict[str, Any] = {}
    for kind in kinds:
        _, components = msgspec.json.schema_components([kind], ref_template="{name}")
        texts, hints = field_docstrings(kind), get_type_hints(kind)  # type: ignore[arg-type]
        for name, schema in components[kind.__name__]["properties"].items():
            if name in OF_FEATURES:
                continue
            if schema.get("$ref") in components:
                schema = _object([hints[name]])
            found.setdefault(name, {**schema, "description": texts.get(name, "")})
    return _closed(found)


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
