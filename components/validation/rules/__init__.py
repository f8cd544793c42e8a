"""What the step makes of what it measured: findings, each by a named rule with an action, and one decision.

The rules and their defaults are listed in `catalogue`; `structure`, `anomalies`, `values` and `drift` apply those about
columns; those about single rows are `quarantine`'s. Importing this package loads the standard library only.
"""

from components.validation.rules.catalogue import (
    ACTIONS,
    BLOCK,
    DATASET,
    INFO,
    NOTIFY,
    OFF,
    PASS,
    QUARANTINE,
    RULES,
    WARN,
    Finding,
    decide,
)
from components.validation.rules.judging import Judging, read_rules

__all__ = [
    "ACTIONS",
    "BLOCK",
    "DATASET",
    "INFO",
    "NOTIFY",
    "OFF",
    "PASS",
    "QUARANTINE",
    "RULES",
    "WARN",
    "Finding",
    "Judging",
    "decide",
    "read_rules",
]
