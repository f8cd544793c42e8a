"""Checks custom resources by compact schemas in `crd_schemas/`, one file per kind.

A schema lists the fields that this project uses or may soon use, and refuses all other fields. The
schemas find misspelt fields, which a cluster would silently ignore. `kubernetes-validate` checks
Kubernetes' own kinds.
"""

import json
from pathlib import Path

import jsonschema

from tests.support.rendering import Manifest

FOLDER = Path(__file__).resolve().parent / "crd_schemas"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
"""Schemas by kind."""
CRD_KINDS = tuple(SCHEMAS)


def validate_crd(manifest: Manifest) -> None:
    """Raise AssertionError with every fault and its path.

    A kind or API version without a schema is a fault.
    """
    kind = manifest.get("kind")
    name = f"{kind} {manifest.get('metadata', {}).get('name')}"
    assert kind in SCHEMAS, (
        f"{name}: no schema of this kind in {FOLDER.name}/; known are {', '.join(CRD_KINDS)}"
    )
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind])
    faults = [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(manifest)]
    assert not faults, f"{name}: " + "; ".join(faults)
