"""The rules of one run: the catalogue's defaults, and over them what the run was given.

`--rules` is a JSON object, or the URI of a file or a bucket's object with one: rule -> action, or rule -> object with
`action` and what the catalogue lists for the rule, such as
`{"missing_share": "block", "outlier": {"action": "quarantine", "factor": 100}}`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from components.runtime.errors import ContractError
from components.storage.locations import read_object
from components.storage.uris import is_bucket_uri, local_path
from components.validation.rules.catalogue import ACTIONS, INFO, OFF, QUARANTINE, RULES, SEVERITIES, Finding
from components.validation.settings import ValidationSettings


def _default_actions() -> dict[str, str]:
    return {name: rule.action for name, rule in RULES.items()}


def _default_parameters() -> dict[str, dict[str, Any]]:
    return {name: {key: each.default for key, each in rule.parameters.items()} for name, rule in RULES.items()}


@dataclass(frozen=True, kw_only=True)
class Judging:
    """By what a run judges its rows."""

    settings: ValidationSettings = field(default_factory=ValidationSettings)
    actions: Mapping[str, str] = field(default_factory=_default_actions)
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=_default_parameters)

    def find(
        self, feature: str, kind: str, rule: str, description: str, *, at_most: str | None = None
    ) -> list[Finding]:
        """The finding of one rule, alone in a list; none where the rule is off.

        Args:
            feature: Column, or `DATASET`.
            kind: `anomaly`, `drift`, `skew` or `rule`.
            rule: Name in the catalogue.
            description: One sentence.
            at_most: `info` where the rule looked and there is nothing to act on.
        """
        action = self.actions[rule]
        if action == OFF:
            return []
        action = INFO if at_most == INFO else action
        return [
            {
                "feature": feature,
                "kind": kind,
                "rule": rule,
                "action": action,
                "severity": SEVERITIES[action],
                "description": description,
            }
        ]

    def row_rules(self) -> list[str]:
        """The rules about single rows that are not off, in the catalogue's order."""
        return [name for name, rule in RULES.items() if rule.of_rows and self.actions[name] != OFF]


def read_rules(text: str, settings: ValidationSettings) -> Judging:
    """What `text`, the value of `--rules`, makes of the defaults and of `settings`.

    Raises:
        ContractError: it is no JSON object; or it names an unknown rule, action or parameter, or a value out of range.
        TemporaryError, PermanentError: the bucket that it names cannot be read.
    """
    judging = Judging(settings=settings)
    actions, parameters = dict(judging.actions), {name: dict(each) for name, each in judging.parameters.items()}
    thresholds: dict[str, float] = {}
    for name, given in _parse(text).items():
        if name not in RULES:
            raise ContractError(f"rule {name!r} is unknown, expected one of {', '.join(RULES)}")
        changes = {"action": given} if isinstance(given, str) else given
        if not isinstance(changes, dict):
            raise ContractError(f"rule {name} is {given!r}, expected an action or an object with one")
        for key, value in changes.items():
            if key == "action":
                actions[name] = _action(name, value)
            elif key in RULES[name].settings:
                thresholds[key] = _threshold(f"rule {name}: {key}", value)
            elif key in RULES[name].parameters:
                parameters[name][key] = RULES[name].parameters[key].check(f"rule {name}: {key}", value)
            else:
                known = ("action", *RULES[name].settings, *RULES[name].parameters)
                raise ContractError(f"rule {name} has no {key!r}, expected one of {', '.join(known)}")
    return Judging(settings=dataclasses.replace(settings, **thresholds), actions=actions, parameters=parameters)


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    source = "rules"
    if not text.lstrip().startswith("{"):
        uri = text.strip()
        source = f"rules {uri if is_bucket_uri(uri) else local_path(uri)}"
        text = _read(uri, source)
    try:
        document = json.loads(text, object_pairs_hook=_without_twins)
    except ValueError as error:
        raise ContractError(f"{source}: {error}") from error
    if not isinstance(document, dict):
        raise ContractError(f"{source} hold a {type(document).__name__}, expected a JSON object")
    return document


def _read(uri: str, source: str) -> str:
    """The text of the file or object."""
    try:
        content = read_object(uri) if is_bucket_uri(uri) else local_path(uri).read_bytes()
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{source} cannot be read: {error}") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two values of one name Python would take the last without a word."""
    names = [name for name, _ in pairs]
    if twins := {name for name in names if names.count(name) > 1}:
        raise ContractError(f"{', '.join(sorted(twins))} is there twice, expected once")
    return dict(pairs)


def _action(rule: str, value: Any) -> str:
    if value not in ACTIONS:
        raise ContractError(f"rule {rule} has action {value!r}, expected one of {', '.join(ACTIONS)}")
    if value == QUARANTINE and not RULES[rule].of_rows:
        of_rows = ", ".join(name for name, each in RULES.items() if each.of_rows)
        raise ContractError(f"rule {rule} is not about single rows and cannot quarantine; these can: {of_rows}")
    return str(value)


def _threshold(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ContractError(f"{name} is {value!r}, expected a number")
    return float(value)
