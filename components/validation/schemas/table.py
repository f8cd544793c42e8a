"""A schema as lines for people: one per feature."""

from __future__ import annotations

from typing import Any

from tensorflow_metadata.proto.v0 import schema_pb2

from components.validation.schemas.files import with_environments


def describe(schema: Any) -> str:
    """One line per feature: type, share of the rows that must have a value, what values may be, where it is asked."""
    schema = with_environments(schema)
    lines = [f"{'feature':<12}{'type':<8}{'present':<12}{'values':<34}asked in"]
    for feature in schema.feature:
        kind = schema_pb2.FeatureType.Name(feature.type)
        places = [name for name in schema.default_environment if name not in feature.not_in_environment]
        values = _values(feature, schema)
        lines.append(f"{feature.name:<12}{kind:<8}{_presence(feature):<12}{values:<34}{', '.join(places)}".rstrip())
    return "\n".join(lines)


def _presence(feature: Any) -> str:
    if feature.presence.min_fraction:
        return f">= {feature.presence.min_fraction:.2%}"
    return f">= {feature.presence.min_count} rows" if feature.presence.min_count else "optional"


def _values(feature: Any, schema: Any) -> str:
    kind = feature.WhichOneof("domain_info")
    if kind in ("int_domain", "float_domain"):
        domain = getattr(feature, kind)
        low = f"{domain.min:g}" if domain.HasField("min") else "any"
        high = f"{domain.max:g}" if domain.HasField("max") else "any"
        banned = [word for word in ("nan", "inf") if getattr(domain, f"disallow_{word}", False)]
        return f"{low} to {high}" + (f", no {' or '.join(banned)}" if banned else "")
    if kind == "string_domain":
        return f"{len(feature.string_domain.value)} values"
    if kind == "domain":
        return f"{sum(len(each.value) for each in schema.string_domain if each.name == feature.domain)} values"
    return kind or "any"
