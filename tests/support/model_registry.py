"""Test double of Kubeflow's Model Registry.

The test double checks requests and answers by the published OpenAPI file.

`model_registry_api.json` is the part of the OpenAPI file that covers the client's requests. A
request whose path, parameter or body is not in the OpenAPI file counts as a fault. A response that
differs from the OpenAPI file counts as a fault too.
"""

import json
import re
from urllib.parse import parse_qsl, urlparse

from jsonschema import Draft202012Validator

from testing.paths import REPOSITORY
from tests.support.http_double import HttpDouble, Reply

API = json.loads((REPOSITORY / "tests" / "support" / "model_registry_api.json").read_text())
ROOT = "/api/model_registry/v1/"


def _with_conditions(schema):
    """Translate OpenAPI's discriminators to JSON Schema: a property selects the alternative."""
    if isinstance(schema, list):
        return [_with_conditions(each) for each in schema]
    if not isinstance(schema, dict) or "discriminator" not in schema:
        return (
            {key: _with_conditions(value) for key, value in schema.items()}
            if isinstance(schema, dict)
            else schema
        )
    name, kinds = schema["discriminator"]["propertyName"], schema["discriminator"]["mapping"]
    return {
        "oneOf": [
            {"$ref": ref, "required": [name], "properties": {name: {"const": k}}}
            for k, ref in kinds.items()
        ]
    }


COMPONENTS = _with_conditions(API["components"])


def _resolved(node):
    while "$ref" in node:
        reference, node = node["$ref"], API
        for part in reference[2:].split("/"):
            node = node[part]
    return node


def _faults(described, value) -> list[str]:
    """Return the differences between a body and its description in the OpenAPI file."""
    schema = _with_conditions(_resolved(described)["content"]["application/json"]["schema"])
    checker = Draft202012Validator(
        {**schema, "unevaluatedProperties": False, "components": COMPONENTS}
    )
    return [f"{error.json_path}: {error.message[:300]}" for error in checker.iter_errors(value)]


class ModelRegistry(HttpDouble):
    """A running registry. `items` contains the registry's entries by collection."""

    def __init__(self) -> None:
        self.items: dict[str, list[dict]] = {
            "registered_models": [],
            "model_versions": [],
            "artifacts": [],
        }
        self.version_of: dict[str, str] = {}  # maps the id of an artifact to the id of its version
        self.faults: list[str] = []
        self.is_old = False
        """Whether the registry only has the API v1alpha3."""
        super().__init__()

    def answer(self, method, path, body, headers) -> Reply:
        if self.is_old and not path.startswith("/api/model_registry/v1alpha3/"):
            return Reply(
                b"404 page not found\n", 404, {"Content-Type": "text/plain; charset=utf-8"}
            )
        status, found = self._evaluated(method.lower(), urlparse(path), json.loads(body or "null"))
        return Reply(json.dumps(found).encode(), status, {"Content-Type": "application/json"})

    def _evaluated(self, method, url, body) -> tuple[int, dict]:
        """Return status and body, and record every fault of client or server."""
        ways = {
            path: re.fullmatch(re.sub(r"\{\w+\}", "([1-9][0-9]*)", path), url.path)
            for path in API["paths"]
        }
        path = next((path for path, match in ways.items() if match), "")
        operation, query = API["paths"].get(path, {}).get(method), dict(parse_qsl(url.query))
        if operation is None:
            self.faults.append(f"{method} {url.path} is not in the API")
            return 404, {"code": "404", "message": "no such path"}
        known = [*operation.get("parameters", []), *API["paths"][path].get("parameters", [])]
        faults = [
            f"parameter {name}"
            for name in query.keys() - {_resolved(each)["name"] for each in known}
        ]
        faults += _faults(operation["requestBody"], body) if "requestBody" in operation else []
        status, found = self._do(
            method, path.removeprefix(ROOT).split("/"), [*ways[path].groups()], {**query, "": body}
        )
        faults += _faults(operation["responses"][str(status)], found)
        self.faults += [f"{method} {url.path}: {fault}" for fault in faults]
        return status, found

    def _do(self, method, words, ids, query) -> tuple[int, dict]:
        last = {"versions": "model_versions", "model_artifact": "artifacts"}.get(
            words[-1], words[-1]
        )
        if method == "post":
            items = self.items[last]
            items.append({**query[""], "id": str(len(items) + 1)})
            self.version_of |= {items[-1]["id"]: ids[0]} if ids else {}
            return 201, items[-1]
        if method == "patch":
            (found,) = (each for each in self.items[words[0]] if each["id"] == ids[0])
            return 200, found.update(query[""]) or found
        parent = query.get("parentResourceId", *ids)
        items = self.items.get(last) or self.items.get(f"{last}s", [])
        of = {
            each["id"]: each.get("registeredModelId", self.version_of.get(each["id"]))
            for each in items
        }
        found = [
            e
            for e in items
            if e["name"] == query.get("name", e["name"]) and parent in (None, of[e["id"]])
        ]
        if "name" in query:
            return (200, found[0]) if found else (404, {"code": "404", "message": "not found"})
        return 200, {
            "items": found,
            "size": len(found),
            "pageSize": int(query["pageSize"]),
            "nextPageToken": "",
        }
