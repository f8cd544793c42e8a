"""PromQL's binary operators: arithmetic, comparisons and set operators, with Prometheus' matching of labels.

How operands came about is `promql`'s.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from components.runtime.errors import ContractError
from k8s.scaling.series import NAME, Labels

Vector = dict[Labels, float]
"""Instant vector: at most one value a series."""


def _divide(a: float, b: float) -> float:
    if b != 0 or math.isnan(a):
        return a / b if b != 0 else math.nan
    return math.nan if a == 0 else math.copysign(math.inf, a) * math.copysign(1, b)


def _remainder(a: float, b: float) -> float:
    return math.nan if b == 0 or math.isinf(a) else math.fmod(a, b)


def _power(a: float, b: float) -> float:
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.copysign(math.inf, a) if b % 2 == 1 else math.inf
    except ValueError:  # a root of what is negative, or 0 to a negative power
        return math.inf if a == 0 else math.nan


ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _remainder,
    "^": _power,
}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
SETS = ("and", "or", "unless")


@dataclass(frozen=True)
class Matching:
    """How series of both sides find each other."""

    on: frozenset[str] | None = None
    """Labels that must agree; None = all but `ignoring`."""
    ignoring: frozenset[str] = frozenset()
    many: str = ""
    """Side of which several series may match one of the other: `left`, `right`; empty = one to one."""
    included: tuple[str, ...] = ()
    """Labels that the result takes from the one side."""
    wants_bool: bool = False

    def signature(self, labels: Labels) -> Labels:
        """What must be equal on both sides."""
        if self.on is not None:
            return tuple(pair for pair in labels if pair[0] in self.on)
        return tuple(pair for pair in labels if pair[0] != NAME and pair[0] not in self.ignoring)


def without_name(labels: Labels) -> Labels:
    """The labels without the metric's name."""
    return tuple(pair for pair in labels if pair[0] != NAME)


def unique(pairs: Iterable[tuple[Labels, float]]) -> Vector:
    """A vector of results.

    Raises:
        ContractError: two results have the same labels.
    """
    vector: Vector = {}
    for labels, value in pairs:
        if labels in vector:
            raise ContractError(f"two results of the query have the labels {dict(labels)}, expected one")
        vector[labels] = value
    return vector


def scalars(op: str, left: float, right: float, *, wants_bool: bool) -> float:
    """Operator between two numbers."""
    if op in ARITHMETIC:
        return ARITHMETIC[op](left, right)
    if not wants_bool:
        raise ContractError(f"operator is {op} between two numbers, expected `{op} bool`")
    return float(COMPARISONS[op](left, right))


def with_scalar(op: str, vector: Vector, number: float, *, is_left: bool, wants_bool: bool) -> Vector:
    """Operator between each value of a vector and a number; `is_left`: the vector stands on the left."""
    results: list[tuple[Labels, float]] = []
    for labels, value in vector.items():
        left, right = (value, number) if is_left else (number, value)
        if op in ARITHMETIC:
            results.append((without_name(labels), ARITHMETIC[op](left, right)))
        elif wants_bool:
            results.append((without_name(labels), float(COMPARISONS[op](left, right))))
        elif COMPARISONS[op](left, right):
            results.append((labels, value))
    return unique(results)


def set_operation(op: str, left: Vector, right: Vector, matching: Matching) -> Vector:
    """`and`, `unless`: the left's series by whether the right has a match; `or`: with the right's that have none."""
    if op == "or":
        known = {matching.signature(labels) for labels in left}
        return {**left, **{ls: v for ls, v in right.items() if matching.signature(ls) not in known}}
    known = {matching.signature(labels) for labels in right}
    return {ls: v for ls, v in left.items() if (matching.signature(ls) in known) == (op == "and")}


def vectors(op: str, left: Vector, right: Vector, matching: Matching) -> Vector:
    """Arithmetic or comparison between the series of two vectors that match.

    Raises:
        ContractError: several series match where one may.
    """
    swapped = matching.many == "right"
    many, one = (right, left) if swapped else (left, right)
    by_signature: dict[Labels, tuple[Labels, float]] = {}
    for labels, value in one.items():
        signature = matching.signature(labels)
        if signature in by_signature:
            raise ContractError(f"several series of one side of {op} have {dict(signature)}, expected one")
        by_signature[signature] = labels, value
    results, seen = [], set()
    for labels, value in many.items():
        signature = matching.signature(labels)
        if signature not in by_signature:
            continue
        other, other_value = by_signature[signature]
        a, b = (other_value, value) if swapped else (value, other_value)
        if op in ARITHMETIC:
            result = ARITHMETIC[op](a, b)
        elif matching.wants_bool:
            result = float(COMPARISONS[op](a, b))
        elif COMPARISONS[op](a, b):
            result = a
        else:
            continue
        if not matching.many and signature in seen:
            raise ContractError(f"several series of one side of {op} have {dict(signature)}, expected one")
        seen.add(signature)
        keeps_name = op in COMPARISONS and not matching.wants_bool
        results.append((_result_labels(labels if keeps_name else without_name(labels), other, matching), result))
    return unique(results)


def _result_labels(many: Labels, one: Labels, matching: Matching) -> Labels:
    if not matching.many:
        if matching.on is not None:
            return tuple(pair for pair in many if pair[0] in matching.on)
        return tuple(pair for pair in many if pair[0] not in matching.ignoring)
    labels, given = dict(many), dict(one)
    for name in matching.included:
        labels.pop(name, None)
        if given.get(name):
            labels[name] = given[name]
    return tuple(sorted(labels.items()))
