"""A schema as a text file, and what every reader of one relies on. Needs protobuf only, not TFDV.

Each schema tells what holds in training and in serving (`TRAINING`, `SERVING`); one from before that distinction is
read as if every feature were in both, and the label in training alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from components.contracts import criteo
from components.runtime.errors import ContractError, first_line

TRAINING, SERVING = "TRAINING", "SERVING"


def read_schema(path: Path) -> Any:
    """The schema in the text file `path`.

    Raises:
        ContractError: the file is absent or not a schema.
    """
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), schema_pb2.Schema())
    except (OSError, ValueError, text_format.ParseError) as error:
        raise ContractError(f"schema {path} cannot be read: {first_line(error)}") from error


def format_schema(schema: Any) -> str:
    """The schema as text, one file's content."""
    return str(text_format.MessageToString(schema))


def with_environments(schema: Any) -> Any:
    """`schema`, or a copy that knows training and serving where it names no environment of its own."""
    if schema.default_environment:
        return schema
    known = schema_pb2.Schema()
    known.CopyFrom(schema)
    known.default_environment.extend([TRAINING, SERVING])
    for feature in known.feature:
        if feature.name == criteo.LABEL and SERVING not in feature.in_environment:
            feature.not_in_environment.append(SERVING)
    return known


def expect_sound(schema: Any, source: str) -> None:
    """Refuses a schema by which nothing could be judged.

    Raises:
        ContractError: a feature has no name, no type, or is there twice; a bound is NaN or crosses the other one; a
            share is none; a list of values is asked for and absent; or the environments do not include training.
    """
    names = [feature.name for feature in schema.feature]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"{source} has {', '.join(twins)} twice, expected each feature once")
    for feature in schema.feature:
        if not feature.name or not feature.type:
            raise ContractError(f"{source} has a feature named {feature.name!r} without name or type")
        domain = feature.WhichOneof("domain_info")
        if domain in ("int_domain", "float_domain"):
            _expect_bounds(getattr(feature, domain), f"{source}: {feature.name}")
        if feature.HasField("distribution_constraints") and domain not in ("string_domain", "domain"):
            raise ContractError(f"{source}: {feature.name} has distribution_constraints without a list of values")
        if domain == "domain" and feature.domain not in {named.name for named in schema.string_domain}:
            raise ContractError(f"{source}: {feature.name} has domain {feature.domain!r}, which is not in the schema")
        for name, share in _shares(feature):
            if not 0 <= share <= 1:
                raise ContractError(f"{source}: {feature.name} has {name} {share}, expected 0 to 1")
    if schema.default_environment and TRAINING not in schema.default_environment:
        raise ContractError(f"{source} has default_environment {list(schema.default_environment)}, without {TRAINING}")


def _expect_bounds(domain: Any, source: str) -> None:
    low = domain.min if domain.HasField("min") else -math.inf
    high = domain.max if domain.HasField("max") else math.inf
    if not low <= high:
        raise ContractError(f"{source} has bounds {low} to {high}, expected the lower one first, and no NaN")


def _shares(feature: Any) -> list[tuple[str, float]]:
    shares = []
    if feature.HasField("presence"):
        shares.append(("min_fraction", feature.presence.min_fraction))
    if feature.HasField("distribution_constraints"):
        shares.append(("min_domain_mass", feature.distribution_constraints.min_domain_mass))
    return shares
