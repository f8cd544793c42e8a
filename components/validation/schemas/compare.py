"""Two schemas rule by rule: where the new one lets pass what the old one refused, and where not.

A difference is `stricter` only where that is certain: whatever the old schema refuses, the new one refuses too. It is
`looser` where more may pass, and `other` where nothing is known about it (another type, another kind of domain, a field
that this module does not understand); both ask for somebody's word. `note` is for what TFDV does not judge by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorflow_metadata.proto.v0 import schema_pb2

from components.validation.schemas.files import with_environments

LOOSER, STRICTER, OTHER, NOTE = "looser", "stricter", "other", "note"

_UNDERSTOOD = {
    *("name", "type", "presence", "in_environment", "not_in_environment", "distribution_constraints", "domain"),
    *("int_domain", "float_domain", "string_domain"),
}
"""Fields of a feature that have their own comparison."""
_REMARKS = {"annotation"}


class Difference(NamedTuple):
    """One rule of one feature that the schemas say differently."""

    feature: str
    rule: str
    kind: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """What `--loosen` calls it."""
        return f"{self.feature}.{self.rule}"


def compare(old: Any, new: Any) -> list[Difference]:
    """Every difference, by feature in the old schema's order, new features last."""
    old, new = with_environments(old), with_environments(new)
    features_old, features_new = ({f.name: f for f in schema.feature} for schema in (old, new))
    found = list(_schema_differences(old, new))
    for name in [*features_old, *(name for name in features_new if name not in features_old)]:
        before, after = features_old.get(name), features_new.get(name)
        if before is None:
            found.append(Difference(name, "column", LOOSER, "unknown, so refused", "known"))
        elif after is None:
            # Rows without the column pass now, where it was required; those with it do not.
            found.append(Difference(name, "column", LOOSER, "known", "unknown, so its rules are gone"))
        else:
            found += _feature_differences(before, after, old, new)
    return found


def _schema_differences(old: Any, new: Any) -> Iterator[Difference]:
    before, after = set(old.default_environment), set(new.default_environment)
    if before != after:
        kind = LOOSER if before - after else OTHER
        yield Difference("schema", "environments", kind, _listed(before), _listed(after))
    for field in schema_pb2.Schema.DESCRIPTOR.fields:
        if field.name in ("feature", "default_environment", "string_domain"):
            continue
        if getattr(old, field.name) != getattr(new, field.name):
            kind = NOTE if field.name in _REMARKS else OTHER
            yield Difference(
                "schema", field.name, kind, _short(getattr(old, field.name)), _short(getattr(new, field.name))
            )


def _feature_differences(old: Any, new: Any, old_schema: Any, new_schema: Any) -> Iterator[Difference]:
    name = old.name
    if old.type != new.type:
        kinds = [schema_pb2.FeatureType.Name(each.type) for each in (old, new)]
        yield Difference(name, "type", OTHER, *kinds)
    yield from _ordered(name, "min_fraction", old.presence.min_fraction, new.presence.min_fraction)
    yield from _ordered(name, "min_count", old.presence.min_count, new.presence.min_count)
    yield from _environments(old, new, old_schema, new_schema)
    yield from _domains(old, new, old_schema, new_schema)
    yield from _ordered(name, "min_domain_mass", _mass(old), _mass(new))
    for field in schema_pb2.Feature.DESCRIPTOR.fields:
        if field.name in _UNDERSTOOD:
            continue
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after or _has(old, field.name) != _has(new, field.name):
            yield Difference(name, field.name, NOTE if field.name in _REMARKS else OTHER, _short(before), _short(after))


def _has(feature: Any, name: str) -> bool:
    field = schema_pb2.Feature.DESCRIPTOR.fields_by_name[name]
    return bool(getattr(feature, name)) if field.label == field.LABEL_REPEATED else bool(feature.HasField(name))


def _ordered(feature: str, rule: str, old: float, new: float, *, more_is_stricter: bool = True) -> Iterator[Difference]:
    if old != new:
        kind = STRICTER if (new > old) == more_is_stricter else LOOSER
        yield Difference(feature, rule, kind, _number(old), _number(new))


def _environments(old: Any, new: Any, old_schema: Any, new_schema: Any) -> Iterator[Difference]:
    before, after = _asked_in(old, old_schema), _asked_in(new, new_schema)
    if before != after:
        # Where it is asked for, rows without it are refused; where it is not, TFDV refuses rows with it.
        yield Difference(old.name, "environments", LOOSER, _listed(before), _listed(after))


def _asked_in(feature: Any, schema: Any) -> set[str]:
    """The environments in which the feature must be there."""
    return {*schema.default_environment, *feature.in_environment} - set(feature.not_in_environment)


def _mass(feature: Any) -> float:
    constraints = feature.distribution_constraints
    return float(constraints.min_domain_mass)  # 1 where it is not said


def _domains(old: Any, new: Any, old_schema: Any, new_schema: Any) -> Iterator[Difference]:
    before, after = _domain(old, old_schema), _domain(new, new_schema)
    if before is None:
        if after is not None:
            yield Difference(new.name, "domain", _of_added(new), "none", after[0])
    elif after is None:
        yield Difference(old.name, "domain", LOOSER, before[0], "none")
    elif before[0] != after[0]:
        yield Difference(old.name, "domain", OTHER, before[0], after[0])
    elif before[0] == "values":
        yield from _value_lists(old.name, before[1], after[1])
    elif before[0] in ("int_domain", "float_domain"):
        yield from _numbers(old.name, before[1], after[1])
    elif before[1] != after[1]:
        yield Difference(old.name, "domain", OTHER, _short(before[1]), _short(after[1]))


def _domain(feature: Any, schema: Any) -> tuple[str, Any] | None:
    kind = feature.WhichOneof("domain_info")
    if kind is None:
        return None
    if kind == "domain":
        named = {domain.name: domain for domain in schema.string_domain}
        return ("values", named[feature.domain]) if feature.domain in named else (f"domain {feature.domain!r}", None)
    return ("values" if kind == "string_domain" else kind, getattr(feature, kind))


def _of_added(feature: Any) -> str:
    """A domain only adds to what is refused where it is one of the feature's type; else TFDV drops other checks."""
    fitting = {("INT", "int_domain"), ("FLOAT", "float_domain"), ("BYTES", "string_domain"), ("BYTES", "domain")}
    kind = (schema_pb2.FeatureType.Name(feature.type), feature.WhichOneof("domain_info"))
    return STRICTER if kind in fitting else OTHER


def _value_lists(name: str, old: Any, new: Any) -> Iterator[Difference]:
    before, after = set(old.value), set(new.value)
    if before != after:
        kind = LOOSER if after - before else STRICTER
        yield Difference(
            name, "values", kind, f"without {_listed(after - before)}", f"without {_listed(before - after)}"
        )
    if old.is_categorical != new.is_categorical:
        yield Difference(name, "is_categorical", OTHER, str(old.is_categorical), str(new.is_categorical))


def _numbers(name: str, old: Any, new: Any) -> Iterator[Difference]:
    low = [each.min if each.HasField("min") else -math.inf for each in (old, new)]
    high = [each.max if each.HasField("max") else math.inf for each in (old, new)]
    yield from _ordered(name, "min", low[0], low[1])
    yield from _ordered(name, "max", high[0], high[1], more_is_stricter=False)
    for field in old.DESCRIPTOR.fields:
        if field.name in ("name", "min", "max"):
            continue
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name.startswith("disallow_"):
            yield from _ordered(name, field.name, before, after)
        elif before != after:
            yield Difference(name, field.name, OTHER, _short(before), _short(after))


def _number(value: float) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.6g}"


def _listed(values: set[str]) -> str:
    shown = sorted(values)[:5]
    return ", ".join(shown) + (f" and {len(values) - 5} more" if len(values) > 5 else "") if values else "none"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return (text[:60] + "...") if len(text) > 60 else text or "unset"
