"""The rules about single rows, each over a batch: which rows offend, and why.

A missing value offends no rule but `label_kind`. What becomes of offending rows is left to `quarantine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.contracts import criteo
from components.runtime.errors import ContractError
from components.validation.rules import RuleSet

Offences = Iterator[tuple[int, str]]
"""Position of a row in the batch, and why it offends."""


class RowRule(NamedTuple):
    """One rule, ready to look at batches."""

    name: str
    find: Callable[[pa.RecordBatch], Offences]


class ValueBounds(NamedTuple):
    """What a number may be; NaN and infinity offend if they are disallowed, whatever the bounds."""

    low: float = -math.inf
    high: float = math.inf
    disallow_nan: bool = False
    disallow_inf: bool = False


def make_row_rules(
    rules: RuleSet, schema: Any | None, *, excluded: Container[str] = ()
) -> tuple[list[RowRule], list[str]]:
    """The rules that are on, in the order of `rules.RULES`, and the names of those with nothing to compare with.

    Args:
        rules: Actions and thresholds.
        schema: In force; None in a first run, which is yet to infer it.
        excluded: Features that the run left out.

    Raises:
        ContractError: a named day is not a date.
    """
    ready, idle = [], []
    for name in rules.row_rules():
        if name == "label_kind":
            ready.append(RowRule(name, _find_wrong_labels))
        elif name == "named_rows":
            ready.append(RowRule(name, _make_named_rows(rules.settings.request_ids, rules.settings.days)))
        elif schema is None:
            idle.append(name)
        else:
            ready.append(RowRule(name, _make_domain(schema, excluded)))
    return ready, idle


def _find_wrong_labels(batch: pa.RecordBatch) -> Offences:
    labels = batch.column(criteo.LABEL)
    known = pc.is_in(labels, value_set=pa.array([0, 1], labels.type))  # null is not in it
    for at in _positions(pc.invert(known)):
        yield at, f"label is {labels[at].as_py()!r}, expected 0 or 1"


def _make_named_rows(request_ids: tuple[str, ...], days: tuple[str, ...]) -> Callable[[pa.RecordBatch], Offences]:
    begins = [_first_microsecond(day) for day in days]

    def find(batch: pa.RecordBatch) -> Offences:
        if request_ids:
            ids = batch.column(criteo.REQUEST_ID)
            for at in _positions(pc.is_in(ids, value_set=pa.array(request_ids, pa.string()))):
                yield at, f"request {ids[at].as_py()!r} is named by the rule"
        if begins:
            times = batch.column(criteo.EVENT_TIME).cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
            for day, begin in zip(days, begins):
                for at in np.flatnonzero((times >= begin) & (times < begin + 86_400_000_000)):
                    yield int(at), f"day {day} is named by the rule"

    return find


def _first_microsecond(day: str) -> int:
    try:
        begin = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError as error:
        raise ContractError(f"rule named_rows: day is {day!r}, expected YYYY-MM-DD") from error
    return criteo.microseconds(begin.timestamp())


def _make_domain(schema: Any, excluded: Container[str]) -> Callable[[pa.RecordBatch], Offences]:
    lists = {domain.name: set(domain.value) for domain in schema.string_domain}
    bounds: dict[str, ValueBounds] = {}
    allowed: dict[str, set[str]] = {}
    for feature in schema.feature:
        kind = feature.WhichOneof("domain_info")
        if feature.name in excluded:
            continue
        if kind in ("float_domain", "int_domain") and feature.name not in criteo.CATEGORICAL:
            domain = getattr(feature, kind)
            bounds[feature.name] = ValueBounds(
                low=float(domain.min) if domain.HasField("min") else -math.inf,
                high=float(domain.max) if domain.HasField("max") else math.inf,
                disallow_nan=getattr(domain, "disallow_nan", False),
                disallow_inf=getattr(domain, "disallow_inf", False),
            )
        elif kind in ("string_domain", "domain"):
            named = lists.get(feature.domain, set())
            allowed[feature.name] = set(feature.string_domain.value) if kind == "string_domain" else named

    def find(batch: pa.RecordBatch) -> Offences:
        yield from _find_outside(batch, bounds)
        for name in allowed.keys() & set(batch.schema.names):
            texts = batch.column(name).cast(pa.string())
            known = pc.is_in(texts, value_set=pa.array(sorted(allowed[name]), pa.string()))
            for at in _positions(pc.and_(pc.invert(known), pc.is_valid(texts))):
                yield at, f"{name} is {texts[at].as_py()}, expected one of the schema's {len(allowed[name])} values"

    return find


def _find_outside(batch: pa.RecordBatch, bounds: dict[str, ValueBounds]) -> Offences:
    for name in batch.schema.names:
        if name not in bounds:
            continue
        low, high, disallow_nan, disallow_inf = bounds[name]
        values = batch.column(name).cast(pa.float64())
        numbers: NDArray[np.float64] = values.fill_null(math.nan).to_numpy(zero_copy_only=False)
        wrong = (numbers < low) | (numbers > high)
        if disallow_nan:
            wrong |= np.isnan(numbers) & values.is_valid().to_numpy(zero_copy_only=False)
        if disallow_inf:
            wrong |= np.isinf(numbers)
        for at in np.flatnonzero(wrong):
            yield int(at), f"{name} is {numbers[at]:g}, expected {low:g} to {high:g}"


def _positions(mask: Any) -> list[int]:
    return [int(at) for at in np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))]
