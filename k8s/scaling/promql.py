"""Evaluates a PromQL query over simulated series: the subset that autoscaling queries use, and a refusal for the rest.

Parsing is promql-parser's. The exam (tests/k8s/scaling/test_promql_exam.py) holds it against a real Prometheus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import promql_parser as syntax

from components.runtime.errors import ContractError, first_line
from k8s.scaling import promql_operators as operators
from k8s.scaling.promql_functions import AGGREGATIONS, OF_VALUES, OVER_RANGE
from k8s.scaling.promql_operators import Matching, Vector, unique, without_name
from k8s.scaling.series import NAME, Labels, SeriesStore

LOOKBACK_MILLISECONDS = 5 * 60 * 1000
"""How long Prometheus takes a series' last sample for its value."""


class Query:
    """A parsed query.

    Args:
        text: PromQL.

    Raises:
        ContractError: the text is no PromQL; what it uses beyond the subset is refused when it is evaluated.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._root = syntax.parse(text)
        except ValueError as error:
            raise ContractError(f"query is {text!r}, expected PromQL: {first_line(error)}") from error

    def at(self, store: SeriesStore, milliseconds: int) -> Vector | float:
        """The query's value at a time.

        Raises:
            ContractError: the query uses what is outside the subset (named), or its operands do not match.
        """
        return _evaluate(self._root, store, milliseconds)


def _evaluate(node: Any, store: SeriesStore, now: int) -> Vector | float:
    evaluate = _EVALUATORS.get(type(node).__name__)
    if evaluate is None:
        raise ContractError(f"query uses {type(node).__name__} ({node.prettify().strip()}), which is not simulated")
    return evaluate(node, store, now)


def _number(node: Any, store: SeriesStore, now: int) -> float:
    return float(node.val)


def _parentheses(node: Any, store: SeriesStore, now: int) -> Vector | float:
    return _evaluate(node.expr, store, now)


def _negated(node: Any, store: SeriesStore, now: int) -> Vector | float:
    value = _evaluate(node.expr, store, now)
    return unique((without_name(ls), -v) for ls, v in value.items()) if isinstance(value, dict) else -value


def _selected(node: Any, store: SeriesStore, now: int) -> Vector:
    now = _shifted(node, now)
    values = ((labels, series.latest(now - LOOKBACK_MILLISECONDS, now)) for labels, series in _matching(node, store))
    return {labels: value for labels, value in values if value is not None}


def _matching(node: Any, store: SeriesStore) -> Any:
    if node.matchers.or_matchers:
        raise ContractError("query uses `or` between matchers of one selector, which is not simulated")
    tests = [_test(m.name, str(m.op), m.value) for m in node.matchers.matchers]
    return ((ls, s) for ls, s in store.named(node.name) if all(test(ls) for test in tests))


@lru_cache(maxsize=256)
def _test(name: str, op: str, value: str) -> Callable[[Labels], bool]:
    kind = op.rpartition(".")[2]
    if kind in ("Equal", "NotEqual"):
        return lambda labels: (dict(labels).get(name, "") == value) == (kind == "Equal")
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise ContractError(f"query matches {name} with {value!r}, which is not simulated: {error}") from error
    return lambda labels: bool(pattern.fullmatch(dict(labels).get(name, ""))) == (kind == "Re")


def _shifted(selector: Any, now: int) -> int:
    if selector.at is not None:
        raise ContractError("query uses `@`, which is not simulated")
    return now if selector.offset is None else now - round(selector.offset.total_seconds() * 1000)


def _called(node: Any, store: SeriesStore, now: int) -> Vector | float:
    name, arguments = node.func.name, node.args
    if name in OVER_RANGE:
        return _over_range(name, arguments[0], store, now)
    if name in OF_VALUES:
        vector, *numbers = [_evaluate(argument, store, now) for argument in arguments]
        assert isinstance(vector, dict)
        return unique((without_name(ls), OF_VALUES[name](v, *numbers)) for ls, v in vector.items())
    if name == "vector":
        number = _evaluate(arguments[0], store, now)
        assert isinstance(number, float)
        return {(): number}
    if name == "scalar":
        vector = _evaluate(arguments[0], store, now)
        assert isinstance(vector, dict)
        return next(iter(vector.values())) if len(vector) == 1 else math.nan
    if name == "time":
        return now / 1000
    known = ", ".join(sorted((*OVER_RANGE, *OF_VALUES, "vector", "scalar", "time")))
    raise ContractError(f"query calls {name}, which is not simulated; expected one of {known}")


def _over_range(name: str, argument: Any, store: SeriesStore, now: int) -> Vector:
    if type(argument).__name__ != "MatrixSelector":
        raise ContractError(f"query calls {name} of a subquery, which is not simulated; expected a range of a metric")
    selector = argument.vector_selector
    last = _shifted(selector, now)
    first = last - round(argument.range.total_seconds() * 1000)
    if store.known_from is not None and first < store.known_from:
        kept = (now - store.known_from) / 1000
        raise ContractError(f"query reaches back {(now - first) / 1000:g} s, expected at most {kept:g} s")
    found = []
    for labels, series in _matching(selector, store):
        value = OVER_RANGE[name](series.between(first, last), first, last)
        if value is not None:
            found.append((labels if name == "last_over_time" else without_name(labels), value))
    return unique(found)


def _aggregated(node: Any, store: SeriesStore, now: int) -> Vector:
    name = str(node.op)
    if name not in AGGREGATIONS or node.param is not None:
        raise ContractError(f"query aggregates by {name}, expected one of {', '.join(sorted(AGGREGATIONS))}")
    vector = _evaluate(node.expr, store, now)
    assert isinstance(vector, dict)
    named = set(node.modifier.labels) if node.modifier else set()
    without = node.modifier is not None and str(node.modifier.type).endswith("Without")
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        if without:
            key = tuple(pair for pair in labels if pair[0] not in named and pair[0] != NAME)
        else:
            key = tuple(pair for pair in labels if pair[0] in named)
        groups.setdefault(key, []).append(value)
    return {key: AGGREGATIONS[name](values) for key, values in groups.items()}


def _combined(node: Any, store: SeriesStore, now: int) -> Vector | float:
    op, matching = str(node.op), _matching_of(node.modifier)
    if op not in operators.ARITHMETIC and op not in operators.COMPARISONS and op not in operators.SETS:
        raise ContractError(f"query uses the operator {op}, which is not simulated")
    left, right = _evaluate(node.lhs, store, now), _evaluate(node.rhs, store, now)
    wants_bool = matching.wants_bool
    if isinstance(left, dict) and isinstance(right, dict):
        if op in operators.SETS:
            return operators.set_operation(op, left, right, matching)
        return operators.vectors(op, left, right, matching)
    if isinstance(left, dict):
        assert isinstance(right, float)
        return operators.with_scalar(op, left, right, is_left=True, wants_bool=wants_bool)
    if isinstance(right, dict):
        return operators.with_scalar(op, right, left, is_left=False, wants_bool=wants_bool)
    return operators.scalars(op, left, right, wants_bool=wants_bool)


def _matching_of(modifier: Any) -> Matching:
    if modifier is None:
        return Matching()
    side = {"ManyToOne": "left", "OneToMany": "right"}.get(str(modifier.card).rpartition(".")[2], "")
    labels = frozenset(modifier.matching.labels) if modifier.matching else frozenset()
    is_on = modifier.matching is not None and str(modifier.matching.type).endswith("Include")
    return Matching(
        on=labels if is_on else None,
        ignoring=frozenset() if is_on else labels,
        many=side,
        included=tuple(modifier.group_labels or ()),
        wants_bool=bool(modifier.return_bool),
    )


_EVALUATORS: dict[str, Callable[[Any, SeriesStore, int], Vector | float]] = {
    "NumberLiteral": _number,
    "ParenExpr": _parentheses,
    "UnaryExpr": _negated,
    "VectorSelector": _selected,
    "Call": _called,
    "AggregateExpr": _aggregated,
    "BinaryExpr": _combined,
}
