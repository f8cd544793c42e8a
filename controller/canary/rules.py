"""Flags for the evidence about a canary, and for the rules of its evaluation."""

import argparse
from dataclasses import fields
from typing import Any

from evergreen.serving.canary_policy import CanaryPolicy
from evergreen.storage.uris import typed_uri

_DEFAULTS: dict[str, Any] = {rule.name: rule.default for rule in fields(CanaryPolicy)}


def add_evidence_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the locations of matured rows and for the canary's rules."""
    parser.add_argument(
        "--archive", type=typed_uri, help="the monitor's archive, folder or its URI"
    )
    parser.add_argument("--lake", type=typed_uri, help="the lake: folder, its URI, or gs://")
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        type=parse_rule,
        metavar="NAME=VALUE",
        help=f"value of a canary's rule, may be repeated; defaults: {_DEFAULTS}",
    )


def policy_of(arguments: argparse.Namespace) -> CanaryPolicy:
    """Return the rules that the flags describe.

    Raises:
        ContractError: a value is outside its range.
    """
    return CanaryPolicy(**dict(arguments.rule))


def parse_rule(text: str) -> tuple[str, Any]:
    """Parse the name and the value of a rule of `CanaryPolicy`.

    >>> parse_rule("shares=0.1,0.5"), parse_rule("min_pairs=500")
    (('shares', (0.1, 0.5)), ('min_pairs', 500))
    """
    name, _, value = text.partition("=")
    if name not in _DEFAULTS:
        raise argparse.ArgumentTypeError(
            f"no rule is named {name!r}, expected one of {', '.join(_DEFAULTS)}"
        )
    if name == "shares":
        return name, tuple(float(part) for part in value.split(","))
    return name, type(_DEFAULTS[name])(value)
