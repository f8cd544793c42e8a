"""Custom resources judged by compact schemas, one JSON file per kind in `crd_schemas/`, which state their source.

A schema holds the fields that this project uses or may soon use and refuses every other, so that a misspelt field
fails here and not silently in a cluster. What Kubernetes itself defines is left to `kubernetes-validate`.
"""

import json
from pathlib import Path

import jsonschema

from tests.support.rendering import Manifest

FOLDER = Path(__file__).resolve().parent / "crd_schemas"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
"""By kind."""
CRD_KINDS = tuple(SCHEMAS)


def validate_crd(manifest: Manifest) -> None:
    """Raises AssertionError with every fault and where it is, also for a kind or an API version without a schema."""
    kind = manifest.get("kind")
    name = f"{kind} {manifest.get('metadata', {}).get('name')}"
    assert kind in SCHEMAS, f"{name}: no schema of this kind in {FOLDER.name}/; known are {', '.join(CRD_KINDS)}"
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind])
    faults = [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(manifest)]
    assert not faults, f"{name}: " + "; ".join(faults)
